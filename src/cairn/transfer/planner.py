"""From what a rank is to read to pieces that a link can read, for any pair of sizes.

equal sizes             one piece: page for page, one descriptor each, so that a link's prepared lists serve
other numbers of ranks  one piece: `geometry.page_reads` and `file_reads`, straight into the own pages
other block sizes       a piece with the checkpoint, and pieces of whole remote pages by way of `staging`
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from cairn.errors import ConfigError
from cairn.transfer.contract import PeerGeometry, ReadOrder
from cairn.transfer.geometry import file_reads, page_reads
from cairn.transfer.geometry_pairing import ModelUnits, Pairing, pair
from cairn.transfer.links.contract import Descriptors, LinkError
from cairn.transfer.staging import StagingArea
from cairn.types import Pages

RankReads: TypeAlias = tuple[int, Descriptors]
"""What to read from which of the peer's ranks."""

_MAX_PAIRINGS = 64


class Piece(Protocol):
    """A part of an order. Begun at most once; after that exactly one of `land` and `drop` is called. The others of its
    order that never began get a `drop`, too."""

    def begin(self) -> Sequence[RankReads] | None:
        """What to read, or None while there is no room for it: then it has not begun."""
        ...

    def land(self) -> None:
        """All of it has arrived, and it is still wanted."""
        ...

    def drop(self) -> None:
        """It is not wanted any more, and nothing of it can arrive any more. Gives back what it holds."""
        ...


Planner: TypeAlias = Callable[[ReadOrder], Sequence[Piece]]
"""The pieces of an order, in the order in which to begin them. Raises LinkError when it cannot be read."""


@dataclass(frozen=True, slots=True)
class DirectPiece:
    """Reads that end where they belong."""

    reads: Sequence[RankReads]

    def begin(self) -> Sequence[RankReads]:
        return self.reads

    def land(self) -> None:
        """Nothing is left to do."""

    def drop(self) -> None:
        """It held nothing of its own."""


def whole_pages(rank: int, page_bytes: int) -> Planner:
    """The planner of equal sizes: page for page, one descriptor each, from the peer's rank of the same number."""

    def plan(order: ReadOrder) -> Sequence[Piece]:
        pairs = [(order.remote_pages, order.local_pages), *_files(order)]
        for remote, local in pairs:
            if len(remote) != len(local):
                raise LinkError(f"the peer gives {len(remote)} pages where {len(local)} were expected")
        if order.peer.geometry.page_bytes != page_bytes or rank >= len(order.peer.ranks):
            raise LinkError(
                f"the peer has {len(order.peer.ranks)} ranks and pages of {order.peer.geometry.page_bytes} bytes; "
                f"rank {rank} here has pages of {page_bytes} bytes"
            )
        reads = _pages(
            np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs]), page_bytes
        )
        return [DirectPiece([(rank, reads)])]

    return plan


class PairedPages:
    """The `Planner` of rank `rank` of a server of geometry `local`, for peers of any sizes. What follows from a peer's
    geometry is worked out once, for the latest 64 geometries."""

    def __init__(self, model: ModelUnits, local: PeerGeometry, rank: int, staging: StagingArea | None = None) -> None:
        """Raises ConfigError where the own sizes cannot hold the model."""
        self._model = model
        self._local = local
        self._rank = rank
        self._staging = staging
        self._whole = whole_pages(rank, local.page_bytes)
        self._pairings: OrderedDict[PeerGeometry, Pairing] = OrderedDict()
        pair(model, local, local, rank)

    def __call__(self, order: ReadOrder) -> Sequence[Piece]:
        remote = order.peer.geometry
        if len(order.peer.ranks) != remote.tp_size:
            raise LinkError(f"the peer describes {len(order.peer.ranks)} ranks and has {remote.tp_size}")
        if remote == self._local:
            return self._whole(order)
        pairing = self._pairing(remote)
        try:
            return self._pieces(pairing, order)
        except ValueError as error:
            raise LinkError(f"the peer's pages do not fit what is to be read: {error}") from error

    def _pieces(self, pairing: Pairing, order: ReadOrder) -> Sequence[Piece]:
        reads = [read for files in _files(order) for read in file_reads(pairing, *files).items()]
        if not pairing.staged:
            pages = page_reads(pairing, order.start, order.end, order.remote_pages, order.local_pages)
            return [DirectPiece([*pages.items(), *reads])]
        if self._staging is None:
            raise LinkError(
                f"blocks of {pairing.remote.block_size} tokens at the peer and {pairing.local.block_size} here need "
                "staging pages, and there are none"
            )
        staged: list[Piece] = [*self._staging.pieces(pairing, order)]
        return [DirectPiece(reads), *staged] if reads else staged

    def _pairing(self, remote: PeerGeometry) -> Pairing:
        known = self._pairings.get(remote)
        if known is None:
            try:
                known = pair(self._model, remote, self._local, self._rank)
            except ConfigError as error:
                raise LinkError(str(error)) from error
            self._pairings[remote] = known
            if len(self._pairings) > _MAX_PAIRINGS:
                self._pairings.popitem(last=False)
        self._pairings.move_to_end(remote)
        return known


def _files(order: ReadOrder) -> list[tuple[Pages, Pages]]:
    """The checkpoint's pages on both sides, where there is one to read."""
    if order.remote_checkpoint is None or order.local_checkpoint is None:
        return []
    return [(order.remote_checkpoint, order.local_checkpoint)]


def _pages(remote: Pages, local: Pages, page_bytes: int) -> Descriptors:
    zeros = np.zeros(len(remote), np.int64)
    whole = np.full(len(remote), page_bytes, np.int64)
    return Descriptors(remote.astype(np.int64), zeros, local.astype(np.int64), zeros, whole)
