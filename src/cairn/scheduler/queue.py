"""Requests in order: first come, first served among those of one priority, and preempted ones in their old place."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from cairn.scheduler.request import Request
from cairn.scheduler.sessions import SessionService


class RequestQueue:
    """Requests in order of turns. `version` changes with every change."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._slots: NDArray[np.intp] | None = None
        self.version = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def slots(self) -> NDArray[np.intp]:
        """The slot of each, which it has for as long as it is here; not to be written to."""
        if self._slots is None:
            self._slots = np.array([request.slot for request in self._requests], np.intp)
        return self._slots

    @property
    def head(self) -> Request | None:
        """Whose turn it is."""
        return self._requests[0] if self._requests else None

    def after(self, request: Request | None) -> Request | None:
        """Whose turn it is when all up to `request`, which need not be here, have been passed over."""
        if request is None:
            return self.head
        place = bisect_right(self._requests, request.sort_key, key=_sort_key)
        return self._requests[place] if place < len(self._requests) else None

    def all_after(self, request: Request) -> list[Request]:
        """Those whose turn comes after that of `request`."""
        return self._requests[bisect_right(self._requests, request.sort_key, key=_sort_key) :]

    def before(self, request: Request) -> Iterator[Request]:
        """Those whose turn comes before that of `request`."""
        return takewhile(lambda other: other.sort_key < request.sort_key, self._requests)

    def put(self, request: Request) -> None:
        """To where its turn puts it, also when it has been out of the queue before."""
        insort(self._requests, request, key=_sort_key)
        self._slots, self.version = None, self.version + 1

    def remove(self, request: Request) -> None:
        place = bisect_left(self._requests, request.sort_key, key=_sort_key)
        assert self._requests[place] is request, f"{request.id} is not here"
        del self._requests[place]
        self._slots, self.version = None, self.version + 1


@dataclass(slots=True)
class QueueMarks:
    """Versions of a queue: the one whose hits the cache knows (`awaited`), one that had nobody in it but a request that
    was going to be admitted at once (`seen`), and the one whose order was looked at last (`chosen`)."""

    awaited: int = 0
    seen: int = 0
    chosen: int = -1


class WaitingQueue:
    """At most `limit` requests that have not been admitted; preempted ones come back whatever the limit.

    Nobody in `plain` waits for those in the other two: `fetches` wait for room for what they lack and may get from
    elsewhere, `kv_exports` until what is leased to them leaves room for a prompt more. `sessions`: how much has been
    served to those of the requests that were admitted from here.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.plain = RequestQueue()
        self.fetches = RequestQueue()
        self.kv_exports = RequestQueue()
        self.marks = QueueMarks()
        self.sessions = SessionService()

    def __len__(self) -> int:
        return len(self.plain) + len(self.fetches) + len(self.kv_exports)

    def __iter__(self) -> Iterator[Request]:
        """All in order of turns."""
        return merge(self.plain, self.fetches, self.kv_exports, key=_sort_key)

    @property
    def version(self) -> int:
        """Changes with every change."""
        return self.plain.version + self.fetches.version + self.kv_exports.version

    def put(self, request: Request) -> None:
        """To its place in the queue that it belongs to."""
        self._queue_of(request).put(request)

    def remove(self, request: Request) -> None:
        self._queue_of(request).remove(request)

    def compute(self, request: Request) -> None:
        """A request of `fetches` is going to be computed here, in its turn."""
        self.remove(request)
        request.transfer.sources = ()
        self.put(request)

    def set_no_lease_room(self, request: Request, since: float | None) -> None:
        """Since when `request` has found no room among the leases; None: it has."""
        self.remove(request)
        request.transfer.no_lease_room_since = since
        self.put(request)

    def _queue_of(self, request: Request) -> RequestQueue:
        if request.transfer.sources:
            return self.fetches
        return self.plain if request.transfer.no_lease_room_since is None else self.kv_exports


def _sort_key(request: Request) -> tuple[int, int]:
    return request.sort_key
