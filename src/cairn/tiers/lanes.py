"""The threads in which tiers work: names are made, and bytes moved, beside the thread that plans steps."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

Result = TypeVar("Result")

LOW_PRIORITY = 10
"""Niceness of what nobody waits for."""

LITTLE_SECONDS = 0.0002
"""Of the processor: less than this a thread that rests does at a time, as far as the calls of `rest` allow."""

MOST_TURNS = 4
"""Of the rests that its work alone would ask for, how many a thread takes at most for the sake of others."""

logger = logging.getLogger(__name__)


class Lane(Protocol):
    """Carries tasks out, in the order in which they come. `rests`: see `pace`."""

    rests: float

    def submit(self, task: Callable[[], Result]) -> "Future[Result]":
        """Have a task carried out some time later. Never waits. Whoever submits bounds how many there are."""

    def pace(self, rests: float) -> None:
        """From now on rest so many times as long as it works: see `rest`."""

    def close(self) -> None:
        """Begin no further task."""


class RestTurns:
    """Threads that share it rest one after the other, so that all of them together take no more of the cores than one
    would: a step meets one of them at work, not each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends_at = 0.0

    def rest_seconds(self, seconds: float, takes_turns: bool) -> float:
        """How long a thread rests whose work asks for a rest of `seconds`: until the rests that others have begun and
        its own are over, MOST_TURNS times `seconds` at most. One that does not take turns, because a request waits for
        what it does, rests for `seconds`, and those that do rest after it."""
        now = time.perf_counter()
        with self._lock:
            self._ends_at = max(self._ends_at, now) + seconds
            return min(self._ends_at - now, MOST_TURNS * seconds) if takes_turns else seconds


class ThreadLane:
    """A `Lane` of `num_threads` threads, which ends with the process whatever they are doing: a disk may never answer.
    `wake` is called after each task. `nice`: the niceness of its threads; above 0 their rests take `turns`."""

    def __init__(
        self, name: str, wake: Callable[[], None], turns: RestTurns, num_threads: int = 1, nice: int = 0
    ) -> None:
        self.rests = 0.0
        self._turns = turns
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake = wake
        self._nice = nice
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], Result]) -> "Future[Result]":
        future: Future[Result] = Future()

        def run() -> None:
            if self._closed:
                future.cancel()
                return
            try:
                future.set_result(task())
            except BaseException as error:
                logger.exception("a task of %s has failed", threading.current_thread().name)
                future.set_exception(error)
            self._wake()

        self._tasks.put(run)
        return future

    def pace(self, rests: float) -> None:
        self.rests = rests

    def rest_seconds(self, seconds: float) -> float:
        """See `RestTurns`."""
        return self._turns.rest_seconds(seconds, takes_turns=self._nice > 0)

    def close(self) -> None:
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            # what it writes is whole or not there, also if it never ends
            thread.join(1.0)

    def _run(self) -> None:
        if self._nice:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        _worker.lane = self
        while (task := self._tasks.get()) is not None:
            task()


def give_way() -> None:
    """Let a thread that waits for the interpreter have it: without a moment's sleep this one would be first again."""
    time.sleep(1e-5)


class _Worker(threading.local):
    """Each thread's own: its `lane`, None of threads that are no lane's; `most`: see `resting_at_most`; the seconds
    that it has `rested`, and its processor's time when it did so last."""

    lane: ThreadLane | None = None
    most: float = inf
    rested: float = 0.0
    worked: float = 0.0


_worker = _Worker()


def current_rests() -> float:
    """How many times as long as it works this thread is to rest."""
    return 0.0 if _worker.lane is None else min(_worker.lane.rests, _worker.most)


def rest() -> None:
    """Called between the parts of work that may take long. Where steps compute with all cores, a thread of a lane with
    `rests` above 0 sleeps now so many times as long as it has worked, and longer where others rest: what is done at
    once delays one step, as a whole, and little by little it goes unnoticed."""
    rests, lane = current_rests(), _worker.lane
    if not rests or lane is None:
        _worker.worked = time.thread_time()
        return
    seconds = time.thread_time() - _worker.worked
    if seconds < LITTLE_SECONDS:
        return
    began = time.perf_counter()
    time.sleep(lane.rest_seconds(rests * seconds))
    _worker.rested += time.perf_counter() - began
    _worker.worked = time.thread_time()


@contextmanager
def resting_at_most(rests: float) -> Iterator[None]:
    """Have `rest` sleep this many times as long as this thread has worked at most, whatever its lane's pace."""
    _worker.most = rests
    try:
        yield
    finally:
        _worker.most = inf


def busy_time() -> float:
    """Seconds of a clock that stands while this thread rests: what work takes is the difference of two."""
    return time.perf_counter() - _worker.rested


@dataclass(frozen=True, slots=True)
class TierLanes:
    """`names`: digests and look-ups; `copies`: out of the pool; `reads`: what requests wait for; `writes`: what nobody
    waits for. A disk that stands still keeps the last two."""

    names: Lane
    copies: Lane
    reads: Lane
    writes: Lane

    def pace(self, rests: float) -> None:
        """See `Lane.pace`: of those that move bytes."""
        for lane in (self.copies, self.reads, self.writes):
            lane.pace(rests)

    def close(self) -> None:
        """See `Lane.close`."""
        for lane in (self.names, self.copies, self.reads, self.writes):
            lane.close()


def thread_lanes(wake: Callable[[], None]) -> TierLanes:
    """The lanes of a server. `wake`: has the thread that plans steps look at what is done."""
    turns = RestTurns()
    return TierLanes(
        ThreadLane("tier-names", wake, turns),
        ThreadLane("tier-copies", wake, turns, nice=LOW_PRIORITY),
        ThreadLane("tier-reads", wake, turns, num_threads=2),
        ThreadLane("tier-writes", wake, turns, nice=LOW_PRIORITY),
    )
