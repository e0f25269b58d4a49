"""The waiting requests: first come, first served, and preempted ones before all others."""

from collections import OrderedDict
from collections.abc import Iterator

from cairn.scheduler.request import Request
from cairn.types import RequestId

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """At most `limit` requests that have not been admitted; preempted ones come back whatever the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def full(self) -> bool:
        return len(self._requests) >= self.limit

    @property
    def head(self) -> Request | None:
        """Whose turn it is."""
        return next(iter(self._requests.values()), None)

    def append(self, request: Request) -> None:
        self._requests[request.id] = request

    def put_back(self, request: Request) -> None:
        """A request that has been out of the queue, to where its arrival puts it: before all that came later."""
        self._requests[request.id] = request
        for other in [other for other in self._requests.values() if other.arrival > request.arrival]:
            self._requests.move_to_end(other.id)

    def remove(self, request: Request) -> None:
        del self._requests[request.id]
