"""A discrete-event simulation on the trace's own time: processes that say when they go on, and a queue for room."""

import heapq
import math
from collections.abc import Callable, Iterator

Process = Iterator[float]
"""One request's simulation: each value is the time, in seconds, at which it goes on."""

WAIT_FOR_ROOM = math.inf
"""The time of a process that goes on when pages have been freed."""


class EventQueue:
    """Runs processes by time, and of two at the same time the one with the lower number first.

    `now`: the trace's time in seconds; `advance` is called with each new one. `room_freed`: set it when pages have been
    freed, then those that wait for room are tried in the order of their numbers until one has to wait again.
    """

    def __init__(self, advance: Callable[[float], None]) -> None:
        self.now = -math.inf
        self.room_freed = False
        self._advance = advance
        self._events: list[tuple[float, int, Process]] = []
        self._waiting: list[tuple[int, Process]] = []

    def has_waiting_before(self, number: int) -> bool:
        """Whether a process with a lower number waits for room."""
        return bool(self._waiting) and self._waiting[0][0] < number

    def start(self, number: int, process: Process) -> None:
        """Start a process now, and run it until it has to wait."""
        self._run(number, process)
        self._retry_waiting()

    def run_until(self, seconds: float) -> None:
        """Run all events up to this time, included."""
        while self._events and self._events[0][0] <= seconds:
            when, number, process = heapq.heappop(self._events)
            self._set_time(when)
            self._run(number, process)
            self._retry_waiting()
        self._set_time(seconds)

    def run_to_end(self) -> None:
        """Run all processes to their ends."""
        self.run_until(math.inf)
        assert not self._waiting, f"{len(self._waiting)} requests wait for room that nobody can free"

    def _set_time(self, seconds: float) -> None:
        if self.now < seconds < math.inf:
            self.now = seconds
            self._advance(seconds)

    def _retry_waiting(self) -> None:
        while self.room_freed and self._waiting:
            self.room_freed = False
            for _ in range(len(self._waiting)):
                number, process = heapq.heappop(self._waiting)
                if not self._run(number, process):
                    break

    def _run(self, number: int, process: Process) -> bool:
        """False if it waits for room."""
        for when in process:
            if when == WAIT_FOR_ROOM:
                heapq.heappush(self._waiting, (number, process))
                return False
            if when > self.now:
                heapq.heappush(self._events, (when, number, process))
                break
        return True
