"""Responses that clients may come back to: bounded, in memory, the least recently used go first."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from cairn.errors import NotFound

Owner: TypeAlias = tuple[str, str]
"""A digest of the API key that a response was made with, and its `cache_salt`; empty without."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the items of its input, as JSON. `previous`: the id of the response that it goes on from."""

    response: bytes
    items: bytes
    previous: str | None

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)

    def decode_items(self) -> list[dict[str, Any]]:
        """Of its input."""
        return msgspec.json.decode(self.items, type=list[dict[str, Any]])

    def has_ended(self) -> bool:
        """False while it is made in the background."""
        status: str = msgspec.json.decode(self.response)["status"]
        return status not in ("queued", "in_progress")

    def decode_output(self) -> list[dict[str, Any]]:
        """The items of its answer."""
        output: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return output


class ResponseStore:
    """Responses by owner and id. Nobody finds those of another owner.

    `max_responses`: kept at most; `max_bytes`: of their JSON together, which has `num_bytes`.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[Owner, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def can_hold(self, num_bytes: int) -> bool:
        """Whether a response of so many bytes can be kept, all others gone."""
        return self._max_responses > 0 and num_bytes <= self._max_bytes

    def put(self, owner: Owner, response_id: str, stored: StoredResponse) -> None:
        """Keep a response; one that is larger than all may be together is not kept."""
        if not self.can_hold(stored.num_bytes):
            return
        replaced = self._stored.pop((owner, response_id), None)
        self._stored[owner, response_id] = stored
        self.num_bytes += stored.num_bytes - (0 if replaced is None else replaced.num_bytes)
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            _, dropped = self._stored.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def get(self, owner: Owner, response_id: str, param: str = "response_id") -> StoredResponse:
        """Raises NotFound for what is not kept, or belongs to somebody else. `param`: the field that names it."""
        stored = self._stored.get((owner, response_id))
        if stored is None:
            shown = response_id[:128]
            text = f"{param}: Response with id {shown!r} not found: not stored here, no longer kept, or not yours"
            raise NotFound(text, param)
        self._stored.move_to_end((owner, response_id))
        return stored

    def get_chain(self, owner: Owner, response_id: str, param: str) -> list[StoredResponse]:
        """A response and those that it goes on from, the oldest first. Raises NotFound, also for one of those."""
        chain = [self.get(owner, response_id, param)]
        while (previous := chain[-1].previous) is not None:
            # The older ones are touched last, so that a response goes before those that it needs.
            chain.append(self.get(owner, previous, param))
        return chain[::-1]

    def delete(self, owner: Owner, response_id: str) -> None:
        """Raises NotFound."""
        self.num_bytes -= self.get(owner, response_id).num_bytes
        del self._stored[owner, response_id]
