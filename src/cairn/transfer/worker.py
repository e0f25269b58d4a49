"""One rank's reads: an order becomes byte ranges, and these become handles of at most 64 MiB."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from cairn.transfer.contract import Descriptors, Link, LinkError, PullId, ReadHandle, ReadOrder, ReadState
from cairn.types import Pages

__all__ = ["CHUNK_BYTES", "LinkWorker", "Planner", "whole_pages"]

CHUNK_BYTES = 64 << 20
"""Most bytes of one handle: a link may move all of them before it returns, and a cancel waits for all of them."""

_HANDLES = 2
"""Handles of one read that are out at a time."""

Planner: TypeAlias = Callable[[ReadOrder], Sequence[tuple[int, Descriptors]]]
"""What to read from which of the peer's ranks."""


def whole_pages(rank: int, page_bytes: int) -> Planner:
    """The planner of equal sizes: page for page, one descriptor each, from the peer's rank of the same number."""

    def plan(order: ReadOrder) -> Sequence[tuple[int, Descriptors]]:
        pairs = [(order.remote_pages, order.local_pages)]
        if order.remote_checkpoint is not None and order.local_checkpoint is not None:
            pairs.append((order.remote_checkpoint, order.local_checkpoint))
        for remote, local in pairs:
            if len(remote) != len(local):
                raise LinkError(f"the peer gives {len(remote)} pages where {len(local)} were expected")
        if order.peer.geometry.page_bytes != page_bytes or rank >= len(order.peer.ranks):
            raise LinkError(
                f"the peer has {len(order.peer.ranks)} ranks and pages of {order.peer.geometry.page_bytes} bytes; "
                f"rank {rank} here has pages of {page_bytes} bytes"
            )
        return [(rank, _pages(_joined(pairs, 0), _joined(pairs, 1), page_bytes))]

    return plan


def _joined(pairs: list[tuple[Pages, Pages]], side: int) -> Pages:
    return np.concatenate([pair[side] for pair in pairs])


def _pages(remote: Pages, local: Pages, page_bytes: int) -> Descriptors:
    zeros = np.zeros(len(remote), np.int64)
    whole = np.full(len(remote), page_bytes, np.int64)
    return Descriptors(remote.astype(np.int64), zeros, local.astype(np.int64), zeros, whole)


@dataclass(slots=True)
class _Read:
    chunks: deque[tuple[str, Descriptors]]
    peers: frozenset[str]
    handles: set[ReadHandle] = field(default_factory=set)
    end: ReadState = ReadState.DONE


class LinkWorker:
    """A `WorkerSide` on one link. `plan` may raise LinkError."""

    def __init__(self, link: Link, plan: Planner, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._link = link
        self._plan = plan
        self._chunk_bytes = chunk_bytes
        self._reads: dict[PullId, _Read] = {}

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def start(self, order: ReadOrder) -> None:
        chunks: deque[tuple[str, Descriptors]] = deque()
        for rank, descriptors in self._plan(order):
            peer = self._link.connect(order.peer.ranks[rank])
            chunks.extend((peer, chunk) for chunk in _chunks(descriptors, self._chunk_bytes))
        read = _Read(chunks, frozenset(peer for peer, _ in chunks))
        try:
            if chunks:
                read.handles.add(self._link.read(*chunks.popleft()))
        except LinkError:
            self._forget_peers(read)
            raise
        self._reads[order.pull] = read

    def poll(self, pull: PullId) -> ReadState:
        read = self._reads.get(pull)
        if read is None:
            raise AssertionError(f"pull {pull} has no read")
        for handle in list(read.handles):
            state = self._link.poll(handle)
            if state is ReadState.READING:
                continue
            read.handles.discard(handle)
            # Cancelled by nobody here means that the link itself has dropped the peer.
            if state is not ReadState.DONE and read.end is ReadState.DONE:
                self._stop(read, ReadState.FAILED)
        self._post(read)
        if read.handles:
            return ReadState.READING
        del self._reads[pull]
        if read.end is ReadState.FAILED:
            self._forget_peers(read)
        return read.end

    def cancel(self, pull: PullId) -> None:
        if (read := self._reads.get(pull)) is not None:
            self._stop(read, ReadState.CANCELLED)

    def _post(self, read: _Read) -> None:
        while read.chunks and len(read.handles) < _HANDLES:
            try:
                read.handles.add(self._link.read(*read.chunks.popleft()))
            except LinkError:
                self._stop(read, ReadState.FAILED)

    def _forget_peers(self, read: _Read) -> None:
        """A link may hold a failed peer to be dead for good; forgotten, it can be connected to again."""
        for peer in read.peers:
            self._link.disconnect(peer)

    def _stop(self, read: _Read, end: ReadState) -> None:
        read.end = end
        read.chunks.clear()
        for handle in read.handles:
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
