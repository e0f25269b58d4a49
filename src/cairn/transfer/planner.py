"""A read order cut into pieces that a link can read, for any pair of sizes, and the staging pages for that.

equal sizes of pages    one piece: `GroupPairing.reads` and `state_reads`, straight into the own pages; with as many
                        ranks page for page, one descriptor each, so that a link's prepared lists serve
other sizes of pages    a piece with the checkpoint, and of each attention group whose pages have another number of
                        tokens pieces of whole remote pages that are read into staging

    rows of the rank's pool   [0, num_pages) the scheduler's | [num_pages, ...) staging: buffer 0 | buffer 1 | ...

A staging buffer has room for the slots (`geometry`) of at least one remote block. One piece of one read has it until
its bytes are laid out or none can arrive any more. Reads that wait for a buffer are served in turn, so a long read
shares with short ones, and one in quarantine costs one buffer.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from cairn.cache.group_pages import GroupPages
from cairn.errors import ConfigError
from cairn.transfer.contract import PeerGeometry, PullId, ReadOrder
from cairn.transfer.geometry import (
    GroupPairing,
    ModelUnits,
    Pairing,
    check_page_lists,
    pair,
    staging_pages,
    state_reads,
)
from cairn.transfer.links.contract import Descriptors, LinkError, ReadHandle
from cairn.transfer.memory import Fence, PoolMemory
from cairn.transfer.token_copies import staging_copies
from cairn.types import Pages

STAGING_BYTES = 64 << 20
"""More staging than this makes nothing faster."""

_LARGEST_BLOCK = 128
_NUM_BUFFERS = 4
_MOST_BLOCKS = 64
_MAX_PAIRINGS = 64

Reads: TypeAlias = Mapping[int, Descriptors]
"""By rank of the peer, what to read from it."""


@dataclass(slots=True, eq=False)
class Piece:
    """A part of an order: `reads` straight into the own pages. `begin` is called until it returns reads, then `finish`
    unless the order is given up, and `release` once in any case, also for a piece that never began.

    Whoever reads it keeps here what is under way: `chunks` have no handle yet; `fence`: what it waits for once all is
    read."""

    reads: Reads
    chunks: deque[tuple[str, Descriptors]] = field(default_factory=deque, init=False)
    handles: set[ReadHandle] = field(default_factory=set, init=False)
    fence: Fence | None = field(default=None, init=False)

    @property
    def is_read(self) -> bool:
        return not self.chunks and not self.handles

    def begin(self) -> Reads | None:
        """The reads, or None while there is no room for them."""
        return self.reads

    def finish(self) -> None:
        """All reads are done, and the order was not cancelled: put the bytes where they belong."""

    def release(self) -> None:
        """Nothing can arrive any more, and what `finish` has begun is done."""


Planner: TypeAlias = Callable[[ReadOrder], Sequence[Piece]]
"""The pieces of an order, in the order in which to begin them. Raises LinkError when it cannot be read."""


def staging_pages_for(model: ModelUnits, local: PeerGeometry) -> int:
    """Number of staging pages that a rank needs after its pool: room for 64 remote blocks of 128 tokens in at most 64
    MiB, but always for two; 0 for a model without attention."""
    if not model.attention:
        return 0
    block = _block_pages(local.block_size)
    blocks = STAGING_BYTES // (block * local.page_bytes)
    return block * max(2, min(blocks, _MOST_BLOCKS))


class StagingArea:
    """The staging buffers of one rank. `memory` is registered with the rank's link; its rows from `num_pages` on are
    used by this object alone. `block_size`: the own one, in tokens.

    Raises ConfigError when not even one block of 128 tokens fits.
    """

    def __init__(self, memory: PoolMemory, num_pages: int, block_size: int) -> None:
        rows, need = memory.region.num_pages - num_pages, _block_pages(block_size)
        if rows < need:
            raise ConfigError(
                f"{rows} staging pages cannot take a peer's block of {_LARGEST_BLOCK} tokens: with --block-size "
                f"{block_size} at least {need} are needed"
            )
        num_buffers = min(_NUM_BUFFERS, rows // need)
        self.memory = memory
        self.buffer_pages = rows // num_buffers
        self._free = [num_pages + buffer * self.buffer_pages for buffer in range(num_buffers)]
        self._waiting: OrderedDict[PullId, None] = OrderedDict()

    def acquire(self, pull: PullId) -> int | None:
        """First page of a buffer, or None: then the read waits in the queue until it gets one or `stop_waiting`."""
        self._waiting[pull] = None
        ahead = list(self._waiting).index(pull)
        if ahead >= len(self._free):
            return None
        del self._waiting[pull]
        return self._free.pop(0)

    def release(self, first_page: int) -> None:
        """Free a buffer that nothing can be written to any more."""
        self._free.append(first_page)

    def stop_waiting(self, pull: PullId) -> None:
        """Leave the queue; later calls do nothing."""
        self._waiting.pop(pull, None)

    def pieces(
        self, pairing: GroupPairing, pull: PullId, remote: GroupPages, local: GroupPages, end: int
    ) -> "list[StagedPiece]":
        """The pages of one attention group, of tokens up to `end`, cut at remote pages into pieces of at most a buffer
        each. Raises LinkError when no remote page fits."""
        size, start = pairing.remote_tokens, local.first_token
        count = self.buffer_pages * pairing.page_bytes // pairing.slot_bytes
        if not count:
            raise LinkError(f"a block of {size} tokens at the peer does not fit {self.buffer_pages} staging pages")
        borders = [start, *range((start // size + count) * size, end, count * size), end]
        return [
            StagedPiece(self, pairing, pull, first, stop, remote.span(first, stop).pages, local.span(first, stop).pages)
            for first, stop in pairwise(borders)
            if first < stop
        ]


@dataclass(slots=True, eq=False)
class StagedPiece(Piece):
    """Tokens [start, end) by way of a staging buffer."""

    reads: Reads = field(default_factory=dict, init=False)
    staging: StagingArea
    pairing: GroupPairing
    pull: PullId
    start: int
    end: int
    remote_pages: Pages
    local_pages: Pages
    buffer: int | None = field(default=None, init=False)

    def begin(self) -> Reads | None:
        self.buffer = self.staging.acquire(self.pull)
        if self.buffer is None:
            return None
        slots = np.arange(staging_pages(self.pairing, self.start, self.end), dtype=np.int32) + self.buffer
        return self.pairing.reads(self.remote_pages, slots)

    def finish(self) -> None:
        if self.buffer is None:
            raise AssertionError(f"pull {self.pull}: tokens [{self.start}, {self.end}) were not begun")
        copies = staging_copies(self.pairing, self.start, self.end, self.local_pages)
        self.staging.memory.lay_out(self.pairing, copies, self.buffer)

    def release(self) -> None:
        self.staging.stop_waiting(self.pull)
        if self.buffer is not None:
            self.staging.release(self.buffer)
            self.buffer = None


def _block_pages(block_size: int) -> int:
    """Number of own pages that the largest remote block takes."""
    return -(-_LARGEST_BLOCK // block_size)


class PairedPages:
    """The `Planner` of rank `rank` of a server of geometry `local`, for peers of any sizes. Keeps the pairings with the
    latest 64 geometries."""

    def __init__(self, model: ModelUnits, local: PeerGeometry, rank: int, staging: StagingArea | None = None) -> None:
        """Raises ConfigError where the own sizes cannot hold the model."""
        self._model = model
        self._local = local
        self._rank = rank
        self._staging = staging
        self._pairing = lru_cache(_MAX_PAIRINGS)(self._pair)
        pair(model, local, local, rank)

    def __call__(self, order: ReadOrder) -> Sequence[Piece]:
        remote = order.peer.geometry
        if len(order.peer.ranks) != remote.tp_size:
            raise LinkError(f"the peer describes {len(order.peer.ranks)} ranks and has {remote.tp_size}")
        try:
            return self._pieces(self._pairing(remote), order)
        except ConfigError as error:
            raise LinkError(str(error)) from error
        except ValueError as error:
            raise LinkError(f"the peer's pages do not fit what is to be read: {error}") from error

    def _pieces(self, pairing: Pairing, order: ReadOrder) -> Sequence[Piece]:
        direct, staged = list[Reads](), list[Piece]()
        if order.remote and len(order.remote) != len(pairing.groups):
            raise LinkError(f"pages of {len(order.remote)} attention groups where there are {len(pairing.groups)}")
        for group, remote, local in zip(pairing.groups, order.remote, order.local, strict=False):
            check_page_lists(group, local.first_token, order.end, remote.pages, local.pages)
            if not group.is_staged:
                direct.append(group.reads(remote.pages, local.pages))
            elif self._staging is not None:
                staged += self._staging.pieces(group, order.pull, remote, local, order.end)
            else:
                raise LinkError(
                    f"blocks of {group.remote_tokens} tokens at the peer and {group.local_tokens} here need "
                    "staging pages, and there are none"
                )
        if order.remote_checkpoint is not None and order.local_checkpoint is not None:
            direct.append(state_reads(pairing, order.remote_checkpoint, order.local_checkpoint))
        ranks = sorted({rank for reads in direct for rank in reads})
        joined = {rank: Descriptors.join([reads[rank] for reads in direct if rank in reads]) for rank in ranks}
        if pairing.remote == pairing.local:
            # whole pages, for which links have prepared lists: what is behind the end of a state comes along
            joined = {rank: reads.whole(pairing.local.page_bytes) for rank, reads in joined.items()}
        return [Piece(joined), *staged] if joined else staged

    def _pair(self, remote: PeerGeometry) -> Pairing:
        return pair(self._model, remote, self._local, self._rank)
