"""Whose turn it is in a replay, by the trace's own time."""

import heapq
import math
from collections.abc import Callable, Iterator

__all__ = ["WAITS", "Turns", "Way"]

Way = Iterator[float]
"""A request's way: goes on when its time has come, and until then says when that is, in seconds."""

WAITS = math.inf
"""The time of one that goes on when room has been freed."""


class Turns:
    """Ways by number: of two whose time it is the lower one goes first. `now`: the trace's time, which `show` is told
    of; `freed`: there is room for one that waits."""

    def __init__(self, show: Callable[[float], None]) -> None:
        self.now = -math.inf
        self.freed = False
        self._show = show
        self._events: list[tuple[float, int, Way]] = []
        self._waiting: list[tuple[int, Way]] = []

    def has_waiting_before(self, number: int) -> bool:
        """Whether one that waits comes first."""
        return bool(self._waiting) and self._waiting[0][0] < number

    def begin(self, number: int, way: Way) -> None:
        """A way begins now; it is gone as far as time and room let it."""
        self._go(number, way)
        self._look_for_room()

    def go_on_until(self, seconds: float) -> None:
        """Whatever happens until then."""
        while self._events and self._events[0][0] <= seconds:
            when, number, way = heapq.heappop(self._events)
            self._come_to(when)
            self._go(number, way)
            self._look_for_room()
        self._come_to(seconds)

    def end(self) -> None:
        """All go to their ends."""
        self.go_on_until(math.inf)
        assert not self._waiting, f"{len(self._waiting)} requests wait for room, and nobody has any"

    def _come_to(self, seconds: float) -> None:
        if self.now < seconds < math.inf:
            self.now = seconds
            self._show(seconds)

    def _look_for_room(self) -> None:
        while self.freed and self._waiting:
            self.freed = False
            for _ in range(len(self._waiting)):
                number, way = heapq.heappop(self._waiting)
                if not self._go(number, way):
                    break

    def _go(self, number: int, way: Way) -> bool:
        """False if it waits."""
        for when in way:
            if when == WAITS:
                heapq.heappush(self._waiting, (number, way))
                return False
            if when > self.now:
                heapq.heappush(self._events, (when, number, way))
                break
        return True
