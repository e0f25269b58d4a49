"""Requests that came together, while grammars are compiled that their answers are held to: they go on together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cairn.engine.constraint import GrammarConstraint
from cairn.engine.contract import GenerateRequest
from cairn.engine.grammars import Grammars
from cairn.errors import InvalidRequest, RequestError

Forms: TypeAlias = dict[str, GrammarConstraint]
"""A request's id -> what holds its answer to a form."""


@dataclass(slots=True, eq=False)
class _Party:
    """What came together. `missing`: requests whose grammar is not there yet; `refusal`: why one never will be."""

    requests: dict[str, GenerateRequest]
    forms: Forms = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    refusal: RequestError | None = None


class Forming:
    """Asks `grammars` for the forms of requests that came together, and waits until all of them are there: a request
    that went on alone would have begun when another one is refused."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._parties: dict[str, _Party] = {}

    def take(self, requests: Sequence[GenerateRequest], structured: Sequence[GenerateRequest]) -> Forms | None:
        """The forms of `structured`, those of `requests` that need one; None: `poll` will name them. Raises
        InvalidRequest, and then none of them waits."""
        for request in requests:
            if request.request_id in self._parties:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        party = _Party({request.request_id: request for request in requests})
        try:
            for request in structured:
                self._ask(party, request)
        except RequestError:
            self._forget_missing(party)
            raise
        if not party.missing:
            return party.forms
        self._parties.update(dict.fromkeys(party.requests, party))
        return None

    def forget(self, request_id: str) -> None:
        """A request that waits no more; unknown ids are ignored."""
        self._grammars.forget(request_id)
        party = self._parties.pop(request_id, None)
        if party is not None:
            del party.requests[request_id]
            party.missing.discard(request_id)

    def poll(self) -> list[tuple[list[GenerateRequest], Forms | RequestError]]:
        """The requests that wait no more, as they came together: with their forms, or with why they are refused."""
        for request, result in self._grammars.poll():
            party = self._parties[request.request_id]
            party.missing.discard(request.request_id)
            if isinstance(result, RequestError):
                party.refusal = result
            else:
                party.forms[request.request_id] = result
        parties = dict.fromkeys(self._parties.values())
        ready = [party for party in parties if party.refusal is not None or not party.missing]
        for party in ready:
            self._forget_missing(party)
            for request_id in party.requests:
                del self._parties[request_id]
        return [(list(party.requests.values()), party.refusal or party.forms) for party in ready]

    def _ask(self, party: _Party, request: GenerateRequest) -> None:
        form = self._grammars.take(request)
        if form is None:
            party.missing.add(request.request_id)
        else:
            party.forms[request.request_id] = form

    def _forget_missing(self, party: _Party) -> None:
        for request_id in party.missing:
            self._grammars.forget(request_id)
