"""Pages that a rank reads a peer's blocks into when the block sizes differ, before they are laid out as its own.

    rows of the rank's pool   [0, num_pages) the scheduler's | [num_pages, ...) staging: bay 0 | bay 1 | ...

A bay holds the slots (`geometry`) of at least one remote block and is lent to one piece of one read, until its bytes
are laid out or none can arrive any more. Reads that wait for one are served in turn, so a long read shares with short
ones, and a bay in quarantine costs no more than itself.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cairn.errors import ConfigError
from cairn.transfer.contract import PeerGeometry, PullId, ReadOrder, num_range_pages
from cairn.transfer.geometry import lay_out, staging_copies, staging_reads
from cairn.transfer.geometry_pairing import ModelUnits, Pairing
from cairn.transfer.links.contract import Descriptors, LinkError
from cairn.types import Pages

STAGING_BYTES = 64 << 20
"""More staging than this makes nothing faster."""

_LARGEST_BLOCK = 128
_BAYS = 4
_MOST_BLOCKS = 64


def staging_pages_for(model: ModelUnits, local: PeerGeometry) -> int:
    """How many pages a rank should register behind its pool: room for 64 remote blocks of 128 tokens in at most 64 MiB,
    yet for two such blocks always; 0 for a model without attention."""
    if not model.kv_heads:
        return 0
    block = _block_pages(local.block_size)
    blocks = STAGING_BYTES // (block * local.page_bytes)
    return block * max(2, min(blocks, _MOST_BLOCKS))


class StagingArea:
    """The bays of one rank. `pool`: uint8 [rows, page_bytes], contiguous, the memory that the rank's link has
    registered; its rows from `num_pages` on are this object's alone. Sizes in tokens: `block_size`, the own one.

    Raises ConfigError when not even one block of 128 tokens fits.
    """

    def __init__(self, pool: NDArray[np.uint8], num_pages: int, block_size: int) -> None:
        rows, need = len(pool) - num_pages, _block_pages(block_size)
        if rows < need:
            raise ConfigError(
                f"{rows} staging pages cannot take a peer's block of {_LARGEST_BLOCK} tokens: with --block-size "
                f"{block_size} at least {need} are needed"
            )
        num_bays = min(_BAYS, rows // need)
        self.pool = pool
        self.bay_pages = rows // num_bays
        self._free = [num_pages + bay * self.bay_pages for bay in range(num_bays)]
        self._waiting: OrderedDict[PullId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Bays that nobody uses, and nothing can be written to."""
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Reads that wait for a bay."""
        return len(self._waiting)

    def take(self, pull: PullId) -> int | None:
        """First page of a bay, or None: then the read has its place in the queue until it takes one or leaves."""
        self._waiting[pull] = None
        ahead = list(self._waiting).index(pull)
        if ahead >= len(self._free):
            return None
        del self._waiting[pull]
        return self._free.pop(0)

    def give_back(self, first_page: int) -> None:
        """Nothing can be written to this bay any more, and what is in it is not needed."""
        self._free.append(first_page)

    def leave(self, pull: PullId) -> None:
        """The read waits no longer; later calls do nothing."""
        self._waiting.pop(pull, None)

    def pieces(self, pairing: Pairing, order: ReadOrder) -> "list[StagedPiece]":
        """The order's pages, cut at remote blocks into pieces of at most a bay each. Raises LinkError when no remote
        block fits, ValueError for page lists of another length than the tokens take."""
        remote, local = pairing.remote.block_size, pairing.local.block_size
        blocks = self.bay_pages * pairing.local.page_bytes // pairing.slot_bytes
        if not blocks:
            raise LinkError(f"a block of {remote} tokens at the peer does not fit {self.bay_pages} staging pages")
        _check_lists(order, remote, local)
        first, first_local = order.start // remote, order.start // local
        pieces = []
        for block in range(first, -(-order.end // remote) if order.start < order.end else first, blocks):
            start, end = max(order.start, block * remote), min(order.end, (block + blocks) * remote)
            from_pages = order.remote_pages[block - first : -(-end // remote) - first]
            to_pages = order.local_pages[start // local - first_local : -(-end // local) - first_local]
            pieces.append(StagedPiece(self, pairing, order.pull, start, end, from_pages, to_pages))
        return pieces


@dataclass(slots=True, eq=False)
class StagedPiece:
    """A `planner.Piece`: tokens [start, end) by way of a bay."""

    staging: StagingArea
    pairing: Pairing
    pull: PullId
    start: int
    end: int
    remote_pages: Pages
    local_pages: Pages
    bay: int | None = field(default=None, init=False)

    def begin(self) -> Sequence[tuple[int, Descriptors]] | None:
        self.bay = self.staging.take(self.pull)
        if self.bay is None:
            return None
        return [*staging_reads(self.pairing, self.start, self.end, self.remote_pages, self.bay).items()]

    def land(self) -> None:
        if self.bay is None:
            raise AssertionError(f"pull {self.pull}: tokens [{self.start}, {self.end}) landed nowhere")
        pool = self.staging.pool
        copies = staging_copies(self.pairing, self.start, self.end, self.local_pages)
        lay_out(self.pairing, copies, pool[self.bay : self.bay + self.staging.bay_pages], pool)
        self._give_back()

    def drop(self) -> None:
        self.staging.leave(self.pull)
        self._give_back()

    def _give_back(self) -> None:
        if self.bay is not None:
            self.staging.give_back(self.bay)
            self.bay = None


def _block_pages(block_size: int) -> int:
    """Own pages that hold the largest remote block."""
    return -(-_LARGEST_BLOCK // block_size)


def _check_lists(order: ReadOrder, remote: int, local: int) -> None:
    for name, pages, block in (("remote_pages", order.remote_pages, remote), ("local_pages", order.local_pages, local)):
        need = num_range_pages(order.start, order.end, block)
        if len(pages) != need:
            raise ValueError(f"{name} lists {len(pages)} pages, tokens [{order.start}, {order.end}) take {need}")
