"""The cache's door with a journal beside it: what is called is noted, so that it can be called again in that order."""

from collections.abc import Iterable
from typing import Protocol

from cairn.cache.checkpoint import Kind
from cairn.cache.events import TreeObserver
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Hold, Lease, Namespace
from cairn.cache.placement import Wanted
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.reasons import Reason
from cairn.step import PageCopy
from cairn.types import Boundary, Clock, Keys, Pages

__all__ = ["DoorNotes", "LoggedCache"]


class DoorNotes(Protocol):
    """Takes the calls down, in order: `cairn.engine.request_log.RequestJournal`."""

    def note(self, code: str, who: str | int, *more: int | str | None) -> None:
        """A call for one request, or for what `named` has given a number. Anything else is left out."""
        ...

    def named(self, name: str) -> int:
        """The number of a request, or of another lease, which is given one below 0 until it is released."""
        ...

    def room(self, num_pages: int) -> None:
        """`make_room` was called for nobody in particular."""
        ...

    def applied(self, step: int) -> None: ...

    def tick(self) -> None:
        """What is noted next depends on the time."""
        ...


class LoggedCache(PrefixCache):
    """The same cache; every call that changes something is noted before or after it is made.

    Left out is what placement decides (`want` within a plan), because a replay decides that itself, and pages that are
    held for other servers (of `hold` and `let_go` only the states of running requests are noted).
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        policy: CachePolicy,
        notes: DoorNotes,
        observer: TreeObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(layout, num_pages, policy, observer, clock)
        self._notes = notes
        self._states: dict[int, tuple[Hold, int]] = {}

    def lookup(
        self,
        namespace: Namespace,
        keys: Keys,
        request_id: str,
        resumed_from: int | None = None,
        passed_by: bool = False,
    ) -> Lease:
        self._note("l", request_id, len(keys), int(resumed_from is not None), int(passed_by))
        return super().lookup(namespace, keys, request_id, resumed_from, passed_by)

    def admitted(self, lease: Lease, resumed: bool = False) -> None:
        self._note("a", lease.request_id, int(resumed))
        super().admitted(lease, resumed)

    def hold_breakpoints(self, lease: Lease, boundaries: Iterable[Boundary]) -> None:
        boundaries = tuple(boundaries)
        if any(boundary.hold_seconds for boundary in boundaries):
            self._notes.tick()
        self._note("h", lease.request_id)
        super().hold_breakpoints(lease, boundaries)

    def extend(self, lease: Lease, num_tokens: int) -> list[PageCopy] | None:
        # the first decoded token is noted always: to another cache it may be the first that it has to write
        nothing_new = lease.copied and lease.missing_pages(num_tokens) == 0 and num_tokens != lease.decode_from + 1
        self._time()
        copies = super().extend(lease, num_tokens)
        if not nothing_new:
            self._note("x", lease.request_id, num_tokens, int(copies is not None))
        return copies

    def want(self, lease: Lease, wanted: Wanted) -> Pages | None:
        self._time()
        pages = super().want(lease, wanted)
        if wanted.kind in (Kind.ANSWER_END, Kind.PREEMPTION):
            self._note("w", lease.request_id, wanted.position, wanted.kind.value, int(pages is not None))
        return pages

    def want_always(self, lease: Lease, position: int) -> Pages | None:
        self._time()
        pages = super().want_always(lease, position)
        self._note("f", lease.request_id, position, int(pages is not None))
        return pages

    def received(self, lease: Lease, num_tokens: int, wanted: int, position: int) -> None:
        # the commit that this ends in is noted behind it, and finds nothing left to do
        self._note("v", lease.request_id, num_tokens, wanted, position)
        super().received(lease, num_tokens, wanted, position)

    def commit(self, lease: Lease, num_tokens: int, kept: Iterable[int] = ()) -> None:
        kept = tuple(kept)
        # with the cache off, a lease has let go of its file already, and nothing is held
        if self.enabled and any(lease.files[position].hold_seconds for position in kept):
            self._notes.tick()
        self._note("c", lease.request_id, num_tokens, int(bool(kept)))
        super().commit(lease, num_tokens, kept)

    def release(self, lease: Lease, loss: Reason | None = None) -> None:
        self._note("r", lease.request_id, None if loss is None else loss.value)
        super().release(lease, loss)

    def hold(self, purpose: str, pages: Pages, for_requests: bool = False) -> Hold:
        hold = super().hold(purpose, pages, for_requests)
        for lease in self.leases.values():
            if lease.restore is pages or any(file.pages is pages for file in lease.files.values()):
                self._note("k", lease.request_id)
                self._states[id(hold)] = hold, self._notes.named(lease.request_id)
                break
        return hold

    def let_go(self, hold: Hold) -> None:
        _, number = self._states.pop(id(hold), (hold, None))
        if number is not None:
            self._note("g", number)
        super().let_go(hold)

    def branch(self, lease: Lease, state: Pages, request_id: str) -> Lease:
        for hold, number in self._states.values():
            if hold.pages is state:
                self._note("b", self._notes.named(request_id), self._notes.named(lease.request_id), number)
                break
        return super().branch(lease, state, request_id)

    def make_room(self, num_pages: int) -> bool:
        self._time()
        self._notes.room(num_pages)
        return super().make_room(num_pages)

    def step_applied(self, step: int) -> None:
        self._notes.applied(step)
        super().step_applied(step)

    def _note(self, code: str, who: str | int, *more: int | str | None) -> None:
        self._time()
        self._notes.note(code, who, *more)

    def _time(self) -> None:
        if self.residents.held:
            self._notes.tick()  # any call may let go what has been held for long enough
