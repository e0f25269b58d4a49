"""Where the pages of earlier answers can be claimed, under digests of the prompts that led to them."""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from cairn.proxy.affinity import message_bytes, prompt_bytes
from cairn.proxy.protocol import Body, text_field
from cairn.proxy.stream_inspector import AnswerSummary
from cairn.types import Clock

_UNITS_PER_MARK = 64
_MAX_MARKS = 16384


class Hints:
    """Second-turn hints by the digest at which prompt and answer ended: bounded, forgetful, and allowed to be wrong.
    The least recently used goes first."""

    def __init__(self, max_hints: int, seconds: float, clock: Clock) -> None:
        self._max_hints = max_hints
        self._seconds = seconds
        self._clock = clock
        self._hints: OrderedDict[bytes, tuple[float, msgspec.Raw]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hints)

    def remember(self, mark: bytes, hint: msgspec.Raw) -> None:
        self._hints[mark] = (self._clock.now() + self._seconds, hint)
        self._hints.move_to_end(mark)
        while len(self._hints) > self._max_hints:
            self._hints.popitem(last=False)

    def find(self, marks: Sequence[bytes]) -> msgspec.Raw | None:
        """The hint at the deepest of these marks that has one, and is not too old."""
        for mark in reversed(marks) if self._hints else ():
            found = self._hints.get(mark)
            if found is None:
                continue
            if found[0] > self._clock.now():
                self._hints.move_to_end(mark)
                return found[1]
            del self._hints[mark]
        return None

    def forget(self, hint: msgspec.Raw, marks: Sequence[bytes]) -> None:
        """A server has refused this hint, found at one of these marks."""
        for mark in marks:
            if self._hints.get(mark, (0.0, None))[1] is hint:
                del self._hints[mark]


class PrefixDigests:
    """The way a prompt takes, as digests that a longer prompt with the same beginning passes too: one after every
    `_UNITS_PER_MARK` characters or tokens, or (`unit_bytes` 0) after every message."""

    def __init__(self, seed: bytes, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.marks: list[bytes] = []
        self._hasher = hashlib.blake2b(seed, digest_size=16)
        self._rest = b""

    def add_message(self, message: dict[str, Any]) -> None:
        data = message_bytes(message)
        self._hasher.update(struct.pack("<Q", len(data)))
        self._mark(data)

    def add_units(self, data: bytes) -> None:
        data = self._rest + data
        step = _UNITS_PER_MARK * self.unit_bytes
        whole = len(data) - len(data) % step
        for start in range(0, whole, step):
            self._mark(data[start : start + step])
        self._rest = data[whole:]

    def end(self, found: AnswerSummary) -> bytes | None:
        """The deepest mark once the answer has been added; nothing more may be added then.

        An answer that is not known, or not in the prompt's own units, is left out: the mark is then the prompt's.
        """
        if self.unit_bytes == 0 and found.text is not None:
            self.add_message({"role": "assistant", "content": found.text})
        elif self.unit_bytes == 1 and found.text is not None:
            self.add_units(found.text.encode(errors="surrogatepass"))
        elif self.unit_bytes == 8 and found.token_ids is not None:
            self.add_units(struct.pack(f"<{len(found.token_ids)}q", *found.token_ids))
        return self.marks[-1] if self.marks else None

    def _mark(self, data: bytes) -> None:
        if len(self.marks) < _MAX_MARKS:
            self._hasher.update(data)
            self.marks.append(self._hasher.digest())


def prefix_digests(body: Body) -> PrefixDigests | None:
    """The digests of a request's prompt; None when it is of a kind that the proxy does not know."""
    kind = "chat" if "messages" in body else "text"
    seed = msgspec.json.encode([kind, text_field(body, "model"), text_field(body, "cache_salt")])
    try:
        if "messages" in body:
            digests = PrefixDigests(seed, 0)
            for message in msgspec.json.decode(body["messages"], type=list[dict[str, Any]]):
                digests.add_message(message)
        else:
            data, unit_bytes = prompt_bytes(body)
            digests = PrefixDigests(seed + bytes([unit_bytes]), unit_bytes)
            digests.add_units(data)
    except (ValueError, RecursionError):
        return None
    return digests
