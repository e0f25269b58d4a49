"""A device that is none, with a pool in it: nothing is at its addresses, so whoever takes them for the host's dies of
it. Links reach it by `copy_in` and `copy_out`, steps by `numbers`, which are what steps see.

It is as slow as a device may be. Work waits in a stream and is done piece by piece, while somebody asks for an event
behind it; what a link has written is seen by nobody before an event that was put into the stream after it.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.links.contract import Region
from cairn.transfer.memory import Fence

__all__ = ["FakeDevicePool", "Stream"]

_ADDRESS = 0x7D00_0000_0000_0000
"""Beyond what a process can have."""


class Stream:
    """Work in order, carried out as late as may be: a piece for every `PATIENCE` questions about events.
    `done`: what has been."""

    PATIENCE = 4

    def __init__(self) -> None:
        self._work: deque[tuple[str, Callable[[], None]]] = deque()
        self._asked = 0
        self.done: list[str] = []

    @property
    def num_waiting(self) -> int:
        return len(self._work)

    def put(self, name: str, work: Callable[[], None]) -> None:
        self._work.append((name, work))

    def record(self) -> Fence:
        """An event behind the work so far."""
        reached: list[bool] = []
        self.put("event", lambda: reached.append(True))

        def query() -> bool:
            self._asked += 1
            if not reached and self._asked % self.PATIENCE == 0:
                self.step()
            return bool(reached)

        return query

    def step(self) -> None:
        name, work = self._work.popleft()
        work()
        self.done.append(name)


class FakeDevicePool:
    """A `PoolMemory`. `numbers`: uint8 [rows, page_bytes], what steps on the device see of it."""

    def __init__(self, numbers: NDArray[np.uint8], *, is_late: bool = True) -> None:
        """`is_late`: False for one whose writes are seen at once."""
        self.numbers = numbers
        self.stream = Stream()
        self.region = Region(_ADDRESS, *numbers.shape, self, device=0)
        self._unseen: deque[tuple[int, NDArray[np.uint8]]] = deque()
        self._num_seen = 0
        self._is_late = is_late

    def enter_thread(self) -> None:
        """All threads can use it."""

    def copy_out(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """What a peer reads. It has been seen to that a step which wrote it is done."""
        start = address - _ADDRESS
        return self.numbers.reshape(-1)[start : start + num_bytes].copy()

    def copy_in(self, address: int, data: NDArray[np.uint8]) -> None:
        """What comes from a peer."""
        self._unseen.append((address - _ADDRESS, data))
        if not self._is_late:
            self._show(self._num_written)

    def fence(self) -> Fence:
        num_written = self._num_written
        self.stream.put("show", lambda: self._show(num_written))
        return self.stream.record()

    @property
    def _num_written(self) -> int:
        return self._num_seen + len(self._unseen)

    def _show(self, num_writes: int) -> None:
        """Steps see this many of all writes."""
        while self._num_seen < num_writes:
            start, data = self._unseen.popleft()
            self.numbers.reshape(-1)[start : start + len(data)] = data
            self._num_seen += 1
