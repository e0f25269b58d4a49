"""A way between two ranks of one server within one process."""

from collections import deque
from collections.abc import Sequence

__all__ = ["MemoryRankChannel", "memory_rank_channel"]


class MemoryRankChannel:
    """One end of a `RankChannel` within one process: see `memory_rank_channel`."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, frame: bytes) -> None:
        self._outbox.append(frame)

    def receive(self) -> Sequence[bytes]:
        frames = tuple(self._inbox)
        self._inbox.clear()
        return frames


def memory_rank_channel() -> tuple[MemoryRankChannel, MemoryRankChannel]:
    """Both ends. What lies between them is bounded by the reads that are open: a few frames each."""
    there: deque[bytes] = deque()
    back: deque[bytes] = deque()
    return MemoryRankChannel(back, there), MemoryRankChannel(there, back)
