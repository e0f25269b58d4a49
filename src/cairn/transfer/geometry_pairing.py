"""How one rank shares out what it reads among a peer's ranks: worked out once per peer. Pure, see `geometry`.

    page     [unit][layer][k|v][token][dim]      a rank's units lie in one run
    file     [header | unit 0 | unit 1 | ...]    cut into pages anywhere, on each side at its own page size

Units are dealt to ranks in order; with fewer units than ranks, neighbouring ranks hold the same one. Where several
remote ranks hold what is wanted, the local ranks are spread evenly over them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.transfer.contract import PeerGeometry

_Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelUnits:
    """What tensor parallelism shares out, counted over the whole model. `kv_heads` and `attention_layers` are 0 for a
    model without attention, `state_units` for one without recurrent state."""

    kv_heads: int
    attention_layers: int
    state_units: int


class Ranges(NamedTuple):
    """Runs of bytes, int64 [n] each, by their offsets from the start of a page and its slot, or of two files."""

    remote: _Array
    local: _Array
    num_bytes: _Array


@dataclass(frozen=True, slots=True, eq=False)
class RankSource:
    """What is read from remote rank `rank`: of each page, and of a checkpoint file. Either may be empty."""

    rank: int
    page: Ranges
    file: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """How one local rank reads from a peer; the same for every request, so made once per peer.

    `sources`: by rank. `slot_bytes`: the local units of one remote page. `runs`: [token][dim] runs of one unit, two a
    layer. `row_bytes`: one token's bytes in such a run.
    """

    remote: PeerGeometry
    local: PeerGeometry
    sources: tuple[RankSource, ...]
    slot_bytes: int
    runs: int
    row_bytes: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The remote ranks to read from."""
        return tuple(source.rank for source in self.sources)

    @property
    def staged(self) -> bool:
        """Whether pages have to be laid out again."""
        return self.runs > 0 and self.remote.block_size != self.local.block_size


def geometry_of(layout: CacheLayout, tp_size: int) -> PeerGeometry:
    """The geometry of a server whose ranks have this layout. Raises ConfigError for more than one attention group."""
    if len(layout.groups) > 1 or any(group.reach is not None for group in layout.groups):
        raise ConfigError("only models with one group of attention layers of full reach can be transferred")
    return PeerGeometry(
        block_size=layout.groups[0].tokens_per_page if layout.groups else layout.block_size,
        page_bytes=layout.page_bytes,
        page_units=layout.page_units,
        header_bytes=layout.header_bytes,
        state_bytes=layout.state_bytes,
        state_units=layout.state_units,
        tp_size=tp_size,
    )


def pair(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry, rank: int) -> Pairing:
    """How local rank `rank` reads from a peer. Raises ConfigError where the two cannot hold the same model."""
    if not 0 <= rank < local.tp_size:
        raise ConfigError(f"rank {rank} is none of the {local.tp_size} of --tensor-parallel-size")
    _check_files(model, remote, local)
    runs = 2 * model.attention_layers if model.kv_heads else 0
    row_bytes = _checked_row_bytes(model, remote, local) if runs else 0
    if not runs:
        _check_equal("page_bytes of a model without attention", remote.page_bytes, local.page_bytes)
    slot_bytes = local.page_units * runs * remote.block_size * row_bytes
    pages = _page_ranges(model, remote, local, rank, runs * remote.block_size * row_bytes)
    files = _file_ranges(model, remote, local, rank)
    nothing = Ranges(*np.zeros((3, 0), np.int64))
    sources = tuple(
        RankSource(
            rank=each,
            page=_cut(pages.get(each, nothing), remote.page_bytes, local.page_bytes),
            file=_cut(files.get(each, nothing), remote.page_bytes, local.page_bytes),
        )
        for each in sorted(pages.keys() | files.keys())
    )
    return Pairing(remote, local, sources, slot_bytes, runs, row_bytes)


def _held(what: str, total: int, tp_size: int) -> int:
    """How many of `total` units one rank holds."""
    if total % tp_size and tp_size % total:
        raise ConfigError(f"--tensor-parallel-size {tp_size} and {total} {what}: one must be a multiple of the other")
    return max(1, total // tp_size)


def _check_files(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry) -> None:
    unit_bytes = []
    for name, side in (("the peer's", remote), ("the own", local)):
        held = _held("state units", model.state_units, side.tp_size) if model.state_units else 0
        if (side.state_units if side.state_bytes else 0) != held or side.state_bytes % max(1, held):
            raise ConfigError(
                f"{name} checkpoints have {side.state_units} units in {side.state_bytes} bytes, but of the model's "
                f"{model.state_units} a rank of {side.tp_size} holds {held}"
            )
        unit_bytes.append(side.state_bytes // max(1, held))
    _check_equal("header_bytes", remote.header_bytes, local.header_bytes)
    _check_equal("bytes of a state unit", *unit_bytes)


def _checked_row_bytes(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry) -> int:
    """Bytes of one token in one unit, layer, and k or v."""
    row_bytes = []
    for name, side in (("the peer's", remote), ("the own", local)):
        held = _held("kv heads", model.kv_heads, side.tp_size)
        rows = held * 2 * model.attention_layers * side.block_size
        if side.page_units != held or side.page_bytes % rows:
            raise ConfigError(
                f"{name} pages have {side.page_units} kv heads in {side.page_bytes} bytes, but a rank of "
                f"{side.tp_size} holds {held} of {model.kv_heads}, in {model.attention_layers} layers of "
                f"{side.block_size} tokens"
            )
        row_bytes.append(side.page_bytes // rows)
    _check_equal("bytes of one head of one token", *row_bytes)
    if remote.block_size % local.block_size and local.block_size % remote.block_size:
        raise ConfigError(
            f"--block-size {local.block_size} and the peer's {remote.block_size}: one must be a multiple of the other"
        )
    return row_bytes[0]


def _check_equal(what: str, remote: int, local: int) -> None:
    if remote != local:
        raise ConfigError(f"{what}: {remote} at the peer, {local} here; both must serve the same model and dtype")


def _page_ranges(
    model: ModelUnits, remote: PeerGeometry, local: PeerGeometry, rank: int, unit_bytes: int
) -> dict[int, Ranges]:
    """Of one remote page: by remote rank the runs that this rank needs."""
    if not unit_bytes:
        return {}
    owner, index = _owners(model.kv_heads, remote.tp_size, local, local.page_units, rank)
    size = np.full(len(owner), unit_bytes)
    return _by_rank(owner, Ranges(index * unit_bytes, np.arange(len(owner)) * unit_bytes, size))


def _file_ranges(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry, rank: int) -> dict[int, Ranges]:
    """Of a checkpoint file: by remote rank the runs that this rank needs."""
    header, held = local.header_bytes, local.state_units if model.state_units else 0
    owner, index = _owners(max(1, model.state_units), remote.tp_size, local, held, rank)
    unit_bytes = local.state_bytes // max(1, held)
    ranges = Ranges(
        remote=np.concatenate(([0], header + index * unit_bytes)),
        local=np.concatenate(([0], header + np.arange(held) * unit_bytes)),
        num_bytes=np.concatenate(([header], np.full(held, unit_bytes))),
    )
    return _by_rank(np.concatenate(([_home(remote.tp_size, local, rank)], owner)), ranges)


def _home(remote_tp: int, local: PeerGeometry, rank: int) -> int:
    """The remote rank at the same place as this one: its first units, and whatever all have, come from there."""
    return rank * remote_tp // local.tp_size


def _owners(total: int, remote_tp: int, local: PeerGeometry, held: int, rank: int) -> tuple[_Array, _Array]:
    """For each of this rank's `held` units the remote rank to read it from and its number there, int64 [held].

    Rank r of n holds the units from r * total // n on, and unit u is held by the ranks from u * n // total on. `_home`
    holds the first of the units, and no later one is held by lower ranks alone; so wherever `_home` holds a unit it
    is read from there, and otherwise from the first rank that does.
    """
    units = np.arange(held) + rank * total // local.tp_size
    owner = np.maximum(_home(remote_tp, local, rank), units * remote_tp // total)
    return owner, units - owner * total // remote_tp


def _by_rank(owner: _Array, ranges: Ranges) -> dict[int, Ranges]:
    """Runs that follow each other at the peer joined (here they all do), empty ones left out, the rest by rank."""
    filled = ranges.num_bytes > 0
    owner, (remote, local, size) = owner[filled], (each[filled] for each in ranges)
    if not len(owner):
        return {}
    apart = (np.diff(owner) != 0) | (np.diff(remote) != size[:-1])
    heads = np.concatenate(([0], np.flatnonzero(apart) + 1))
    owner, joined = owner[heads], Ranges(remote[heads], local[heads], np.add.reduceat(size, heads))
    return {int(each): Ranges(*(part[owner == each] for part in joined)) for each in np.unique(owner)}


def _cut(ranges: Ranges, remote_page: int, local_page: int) -> Ranges:
    """The runs, cut where a page ends on either side."""
    parts = [np.zeros((3, 0), np.int64)]
    for remote, local, size in zip(*ranges, strict=True):
        borders = (
            np.arange(-remote % remote_page, size, remote_page),
            np.arange(-local % local_page, size, local_page),
        )
        starts = np.unique(np.concatenate(([0], *borders)))
        parts.append(np.stack((remote + starts, local + starts, np.diff(starts, append=size))))
    return Ranges(*np.concatenate(parts, axis=1))
