"""One rank's reads: an order is cut into pieces, and those into handles of at most 64 MiB.

Behind the last byte of a piece comes a fence: what has arrived is laid out, and a read is READING until all of it is
seen by the steps that are launched next. So is a read that is given up: a device may still be laying out bytes in its
pages, and those are somebody else's next.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cairn.transfer.contract import Peer, PullId, ReadEnded, ReadOrder, Volume
from cairn.transfer.links.contract import Descriptors, Link, LinkError, ReadState
from cairn.transfer.memory import Fence
from cairn.transfer.planner import Piece, Planner

CHUNK_BYTES = 64 << 20
"""Most bytes of one handle: a link may move all of them before a call returns, and cancelling waits for all of them."""

_HANDLES = 2
"""Open handles of one read."""


@dataclass(slots=True, eq=False)
class _Read:
    """`pieces` have not begun. `peer_names`: the link's names of the peer's ranks, as far as they are connected. `end`:
    the state once nothing can arrive any more."""

    peer: Peer
    pieces: deque[Piece]
    open_pieces: list[Piece] = field(default_factory=list)
    peer_names: dict[int, str] = field(default_factory=dict)
    end: ReadState = ReadState.DONE
    volume: Volume = field(default_factory=Volume)


class LinkWorker:
    """A `WorkerSide` on one link. `plan` may raise LinkError. `new_fence`: `PoolMemory.fence` of the link's memory."""

    def __init__(
        self, link: Link, plan: Planner, new_fence: Callable[[], Fence], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._link = link
        self._plan = plan
        self._new_fence = new_fence
        self._chunk_bytes = chunk_bytes
        self._reads: dict[PullId, _Read] = {}

    def start(self, order: ReadOrder) -> None:
        read = _Read(order.peer, deque(self._plan(order)))
        try:
            self._post_handle(read)
        except LinkError:
            # Nothing is out: the first handle is the one that failed.
            for piece in (*read.open_pieces, *read.pieces):
                piece.release()
            self._disconnect(read)
            raise
        self._reads[order.pull] = read

    def poll(self, pull: PullId) -> ReadEnded | None:
        read = self._reads.get(pull)
        if read is None:
            raise AssertionError(f"pull {pull} has no read")
        self._poll_handles(read)
        self._finish_pieces(read)
        try:
            while self._post_handle(read):
                pass
        except LinkError:
            self._stop(read, ReadState.FAILED)
        self._finish_pieces(read)
        if read.open_pieces or read.pieces:
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
        for opened in read.open_pieces:
            for handle in list(opened.handles):
                state = self._link.poll(handle)
                if state is ReadState.READING:
                    continue
                opened.handles.discard(handle)
                # Cancelled by nobody here means that the link itself has dropped the peer.
                if state is not ReadState.DONE and read.end is ReadState.DONE:
                    self._stop(read, ReadState.FAILED)

    def _finish_pieces(self, read: _Read) -> None:
        """Finish the pieces of which nothing more can arrive, unless the read was stopped; release those whose fence is
        passed."""
        for opened in [opened for opened in read.open_pieces if opened.is_read]:
            if opened.fence is None:
                if read.end is ReadState.DONE:
                    opened.finish()
                opened.fence = self._new_fence()
            if opened.fence():
                read.open_pieces.remove(opened)
                opened.release()

    def _post_handle(self, read: _Read) -> bool:
        """Post one more handle if there may be one; returns whether another call may post one, too."""
        if sum(len(opened.handles) for opened in read.open_pieces) >= _HANDLES:
            return False
        opened = next((opened for opened in read.open_pieces if opened.chunks), None) or self._begin_piece(read)
        if opened is None:
            return False
        if opened.chunks:
            opened.handles.add(self._link.read(*opened.chunks.popleft()))
        return True

    def _begin_piece(self, read: _Read) -> Piece | None:
        reads = read.pieces[0].begin() if read.pieces else None
        if reads is None:
            return None
        opened = read.pieces.popleft()
        read.open_pieces.append(opened)
        for rank, descriptors in reads.items():
            peer = self._connect(read, rank)
            read.volume += Volume(int(descriptors.num_bytes.sum()), len(descriptors))
            opened.chunks.extend((peer, chunk) for chunk in _chunks(descriptors, self._chunk_bytes))
        return opened

    def _connect(self, read: _Read, rank: int) -> str:
        if rank not in read.peer_names:
            read.peer_names[rank] = self._link.connect(read.peer.ranks[rank])
        return read.peer_names[rank]

    def _disconnect(self, read: _Read) -> None:
        """A link may take a failed peer for dead for good; after this it can be connected to again."""
        for peer in read.peer_names.values():
            self._link.disconnect(peer)

    def _stop(self, read: _Read, end: ReadState) -> None:
        read.end = end
        for piece in read.pieces:
            piece.release()
        read.pieces.clear()
        for opened in read.open_pieces:
            opened.chunks.clear()
            for handle in opened.handles:
                self._link.cancel(handle)


def _chunks(descriptors: Descriptors, chunk_bytes: int) -> list[Descriptors]:
    """Consecutive parts of at most `chunk_bytes`, at least one descriptor each."""
    if not len(descriptors):
        return []
    total = np.cumsum(descriptors.num_bytes)
    cuts = [0]
    while cuts[-1] < len(descriptors):
        before = int(total[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(total, before + chunk_bytes, side="right"))))
    return [descriptors.take(start, stop) for start, stop in pairwise(cuts)]
