"""One rank's reads: an order is turned into byte ranges, and those into handles of at most 64 MiB.

Behind the last byte comes a fence: a read is READING until all of it is seen by the steps that are launched next. So is
a read that is given up: what has arrived of it is not to be written over whoever gets its pages next.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cairn.transfer.contract import PullId, ReadEnded, ReadOrder, Volume
from cairn.transfer.geometry import PairedPages
from cairn.transfer.links.contract import Descriptors, Link, LinkError, ReadHandle, ReadState
from cairn.transfer.memory import Fence

CHUNK_BYTES = 64 << 20
"""Most bytes of one handle: a link may move all of them before a call returns, and cancelling waits for all of them."""

_MOST_RANGES = 1 << 14
"""Of one handle: short ranges take as long as longer ones."""

_HANDLES = 2
"""Open handles of one read."""


@dataclass(slots=True, eq=False)
class _Read:
    """`peers`: the link's names of the peer's ranks. `chunks` have no handle yet. `end`: the state once nothing can
    arrive any more; `fence`: what it waits for then."""

    volume: Volume
    peers: list[str] = field(default_factory=list)
    chunks: deque[tuple[str, Descriptors]] = field(default_factory=deque)
    handles: set[ReadHandle] = field(default_factory=set)
    end: ReadState = ReadState.DONE
    fence: Fence | None = None


class LinkWorker:
    """A `WorkerSide` on one link. `new_fence`: `PoolMemory.fence` of the link's memory."""

    def __init__(
        self, link: Link, plan: PairedPages, new_fence: Callable[[], Fence], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._link = link
        self._plan = plan
        self._new_fence = new_fence
        self._chunk_bytes = chunk_bytes
        self._reads: dict[PullId, _Read] = {}

    def start(self, order: ReadOrder) -> None:
        reads = self._plan(order)
        num_bytes = sum(int(descriptors.num_bytes.sum()) for descriptors in reads.values())
        read = _Read(Volume(num_bytes, sum(map(len, reads.values()))))
        try:
            for rank, descriptors in reads.items():
                peer = self._link.connect(order.peer.ranks[rank])
                read.peers.append(peer)
                read.chunks.extend((peer, chunk) for chunk in _chunks(descriptors, self._chunk_bytes))
            self._post_handle(read)
        except LinkError:
            # Nothing is out: the first handle is the one that failed.
            self._disconnect(read)
            raise
        self._reads[order.pull] = read

    def poll(self, pull: PullId) -> ReadEnded | None:
        read = self._reads.get(pull)
        if read is None:
            raise AssertionError(f"pull {pull} has no read")
        self._poll_handles(read)
        try:
            while self._post_handle(read):
                pass
        except LinkError:
            self._stop(read, ReadState.FAILED)
        if read.chunks or read.handles:
            return None
        read.fence = read.fence or self._new_fence()
        if not read.fence():
            return None
        del self._reads[pull]
        if read.end is ReadState.FAILED:
            self._disconnect(read)
        return ReadEnded(pull, read.end, volume=read.volume)

    def cancel(self, pull: PullId) -> None:
        read = self._reads.get(pull)
        if read is not None and read.end is ReadState.DONE:
            self._stop(read, ReadState.CANCELLED)

    def _poll_handles(self, read: _Read) -> None:
        for handle in list(read.handles):
            state = self._link.poll(handle)
            if state is ReadState.READING:
                continue
            read.handles.discard(handle)
            # Cancelled by nobody here means that the link itself has dropped the peer.
            if state is not ReadState.DONE and read.end is ReadState.DONE:
                self._stop(read, ReadState.FAILED)

    def _post_handle(self, read: _Read) -> bool:
        """Post one more handle if there may be one; returns whether it did."""
        if not read.chunks or len(read.handles) >= _HANDLES:
            return False
        read.handles.add(self._link.read(*read.chunks.popleft()))
        return True

    def _disconnect(self, read: _Read) -> None:
        """A link may take a failed peer for dead for good; after this it can be connected to again."""
        for peer in read.peers:
            self._link.disconnect(peer)

    def _stop(self, read: _Read, end: ReadState) -> None:
        read.end = end
        read.chunks.clear()
        for handle in read.handles:
            self._link.cancel(handle)


def _chunks(descriptors: Descriptors, chunk_bytes: int) -> list[Descriptors]:
    """Consecutive parts of at most `chunk_bytes` and `_MOST_RANGES`, at least one descriptor each."""
    if not len(descriptors):
        return []
    total = np.cumsum(np.maximum(descriptors.num_bytes, chunk_bytes // _MOST_RANGES))
    cuts = [0]
    while cuts[-1] < len(descriptors):
        before = int(total[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(total, before + chunk_bytes, side="right"))))
    return [descriptors.take(start, stop) for start, stop in pairwise(cuts)]
