"""One rank's reads: an order becomes pieces, and these become handles of at most 64 MiB."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cairn.transfer.contract import Peer, PullId, ReadOrder, Volume
from cairn.transfer.links.contract import Descriptors, Link, LinkError, ReadHandle, ReadState
from cairn.transfer.planner import Piece, Planner

CHUNK_BYTES = 64 << 20
"""Most bytes of one handle: a link may move all of them before it returns, and a cancel waits for all of them."""

_HANDLES = 2
"""Handles of one read that are out at a time."""


@dataclass(slots=True, eq=False)
class _Begun:
    """A piece whose bytes are on their way: `chunks` have no handle yet."""

    piece: Piece
    chunks: deque[tuple[str, Descriptors]]
    handles: set[ReadHandle] = field(default_factory=set)

    @property
    def is_read(self) -> bool:
        return not self.chunks and not self.handles


@dataclass(slots=True, eq=False)
class _Read:
    """`pieces` have not begun. `connected`: names of the peer's ranks that were needed so far."""

    peer: Peer
    pieces: deque[Piece]
    begun: list[_Begun] = field(default_factory=list)
    connected: dict[int, str] = field(default_factory=dict)
    end: ReadState = ReadState.DONE
    volume: Volume = field(default_factory=Volume)

    @property
    def num_handles(self) -> int:
        return sum(len(begun.handles) for begun in self.begun)


class LinkWorker:
    """A `WorkerSide` on one link. `plan` may raise LinkError."""

    def __init__(self, link: Link, plan: Planner, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._link = link
        self._plan = plan
        self._chunk_bytes = chunk_bytes
        self._reads: dict[PullId, _Read] = {}
        self._volumes: dict[PullId, Volume] = {}

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def start(self, order: ReadOrder) -> None:
        read = _Read(order.peer, deque(self._plan(order)))
        try:
            self._post_next(read)
        except LinkError:
            # Nothing is out: the first handle is the one that failed.
            self._stop(read, ReadState.FAILED)
            self._settle(read)
            self._forget_peers(read)
            raise
        self._reads[order.pull] = read

    def poll(self, pull: PullId) -> ReadState:
        read = self._reads.get(pull)
        if read is None:
            raise AssertionError(f"pull {pull} has no read")
        self._look(read)
        self._settle(read)
        try:
            while self._post_next(read):
                pass
        except LinkError:
            self._stop(read, ReadState.FAILED)
        self._settle(read)
        if read.begun or read.pieces:
            return ReadState.READING
        del self._reads[pull]
        if read.end is ReadState.FAILED:
            self._forget_peers(read)
        elif read.end is ReadState.DONE:
            self._volumes[pull] = read.volume
        return read.end

    def take_volume(self, pull: PullId) -> Volume:
        return self._volumes.pop(pull)

    def cancel(self, pull: PullId) -> None:
        read = self._reads.get(pull)
        if read is not None and read.end is ReadState.DONE:
            self._stop(read, ReadState.CANCELLED)

    def _look(self, read: _Read) -> None:
        for begun in read.begun:
            for handle in list(begun.handles):
                state = self._link.poll(handle)
                if state is ReadState.READING:
                    continue
                begun.handles.discard(handle)
                # Cancelled by nobody here means that the link itself has dropped the peer.
                if state is not ReadState.DONE and read.end is ReadState.DONE:
                    self._stop(read, ReadState.FAILED)

    def _settle(self, read: _Read) -> None:
        """Pieces of which nothing more can arrive; what arrived of an unwanted one is worthless."""
        for begun in [begun for begun in read.begun if begun.is_read]:
            read.begun.remove(begun)
            if read.end is ReadState.DONE:
                begun.piece.finish()
            else:
                begun.piece.discard()

    def _post_next(self, read: _Read) -> bool:
        """One handle more, if there may be one. Whether there may be another."""
        if read.num_handles >= _HANDLES:
            return False
        begun = next((begun for begun in read.begun if begun.chunks), None) or self._begin_next(read)
        if begun is None:
            return False
        if begun.chunks:
            begun.handles.add(self._link.read(*begun.chunks.popleft()))
        return True

    def _begin_next(self, read: _Read) -> _Begun | None:
        reads = read.pieces[0].begin() if read.pieces else None
        if reads is None:
            return None
        begun = _Begun(read.pieces.popleft(), deque())
        read.begun.append(begun)
        for rank, descriptors in reads:
            peer = self._connected(read, rank)
            read.volume += Volume(int(descriptors.num_bytes.sum()), len(descriptors))
            begun.chunks.extend((peer, chunk) for chunk in _chunks(descriptors, self._chunk_bytes))
        return begun

    def _connected(self, read: _Read, rank: int) -> str:
        if rank not in read.connected:
            read.connected[rank] = self._link.connect(read.peer.ranks[rank])
        return read.connected[rank]

    def _forget_peers(self, read: _Read) -> None:
        """A link may hold a failed peer to be dead for good; forgotten, it can be connected to again."""
        for peer in read.connected.values():
            self._link.disconnect(peer)

    def _stop(self, read: _Read, end: ReadState) -> None:
        read.end = end
        for piece in read.pieces:
            piece.discard()
        read.pieces.clear()
        for begun in read.begun:
            begun.chunks.clear()
            for handle in begun.handles:
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
