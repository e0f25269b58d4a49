"""The waiting requests: first come, first served among those of one priority, and preempted ones in their old place."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from cairn.scheduler.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """At most `limit` requests that have not been admitted; preempted ones come back whatever the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def full(self) -> bool:
        return len(self._requests) >= self.limit

    @property
    def head(self) -> Request | None:
        """Whose turn it is."""
        return self._requests[0] if self._requests else None

    def at(self, place: int) -> Request | None:
        """Whose turn it is when `place` others have been passed over."""
        return self._requests[place] if place < len(self._requests) else None

    def put(self, request: Request) -> None:
        """To where its turn puts it, also when it has been out of the queue before."""
        insort(self._requests, request, key=_turn)

    def remove(self, request: Request) -> None:
        place = bisect_left(self._requests, request.turn, key=_turn)
        assert self._requests[place] is request, f"{request.id} does not wait"
        del self._requests[place]


def _turn(request: Request) -> tuple[int, int]:
    return request.turn
