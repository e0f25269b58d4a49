"""Which bytes one rank reads from a peer's ranks, when the two servers cut the same model differently. Pure.

    remote   the server that is read from, `tp_size` ranks with pages of `block_size` tokens
    local    the server that reads; everything here is for one of its ranks
    unit     what tensor parallelism shares out: a key-value head, or a unit of the recurrent state
    page     [unit][layer][k|v][token][dim]      of one attention group; the units of a rank are contiguous
    state    [header | unit 0 | unit 1 | ...]    a checkpoint, cut into pages anywhere, by each side's page size
    slot     the local units of one remote page, as they lie in staging

Units are assigned to ranks in order; with fewer units than ranks, neighbouring ranks have the same one. Where several
remote ranks have a unit, the local ranks are spread evenly over them. Every page has the same bytes, so a group whose
tokens are smaller has more of them in a page, and may leave less than one token's bytes at the end of each unit. `pair`
works that out once per peer; from it follow, for each request and attention group:

    equal sizes of pages     `GroupPairing.reads`: straight into the local pages
    unequal sizes of pages   the same into slots, then `token_copies.lay_out`
    checkpoint               state_reads
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout, reach_name
from cairn.errors import ConfigError
from cairn.transfer.contract import PeerGeometry, PeerGroup, num_range_pages
from cairn.transfer.links.contract import Descriptors
from cairn.types import Pages

_Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionUnits:
    """An attention group of the whole model: its kv heads and layers. `row_bytes`: of one token's keys of one head in
    one layer; its values have as many."""

    kv_heads: int
    layers: int
    row_bytes: int

    @property
    def runs(self) -> int:
        """[token][dim] runs of one unit, two a layer."""
        return 2 * self.layers


@dataclass(frozen=True, slots=True)
class ModelUnits:
    """Units that tensor parallelism shares out, counted over the whole model. `attention`: by group, none for a model
    without attention; `state_units` is 0 for one without recurrent state."""

    attention: tuple[AttentionUnits, ...]
    state_units: int


class Ranges(NamedTuple):
    """Byte ranges, int64 [n] each: offsets in a remote page and its slot, or in two states."""

    remote: _Array
    local: _Array
    num_bytes: _Array


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """What to read for each page of a group, or for a state: `by_rank`, byte ranges in it and in what it is read into,
    which is `stride` bytes further on for every page. None crosses the end of a page on either side."""

    by_rank: dict[int, Ranges]
    remote_page_bytes: int
    local_page_bytes: int
    stride: int = 0

    def reads(self, count: int, remote_pages: Pages, local_pages: Pages) -> dict[int, Descriptors]:
        """By remote rank the reads of `count` pages of a group, or of one state, into these pages."""
        places = np.arange(count)[:, None]
        reads = {}
        for rank, ranges in self.by_rank.items() if count else ():
            there = np.divmod((places * self.remote_page_bytes + ranges.remote).reshape(-1), self.remote_page_bytes)
            here = np.divmod((places * self.stride + ranges.local).reshape(-1), self.local_page_bytes)
            reads[rank] = Descriptors(
                remote_page=remote_pages.astype(np.int64)[there[0]],
                remote_offset=there[1],
                local_page=local_pages.astype(np.int64)[here[0]],
                local_offset=here[1],
                num_bytes=np.tile(ranges.num_bytes, count),
            )
        return reads


@dataclass(frozen=True, slots=True, eq=False)
class GroupPairing:
    """How one local rank reads the pages of one attention group from a peer, for every request.

    `remote_tokens`, `local_tokens`: of a page. `page_bytes`: of a local page, which has `units` units of `runs` runs,
    where each token has `row_bytes`.
    """

    remote_tokens: int
    local_tokens: int
    page_bytes: int
    units: int
    runs: int
    row_bytes: int
    sources: Sources

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next; where nothing is staged a local page is the slot."""
        return self.sources.stride

    @property
    def is_staged(self) -> bool:
        """Whether pages are read into staging and laid out anew."""
        return self.remote_tokens != self.local_tokens

    @property
    def unit_bytes(self) -> int:
        """From one unit of a local page to the next."""
        return self.page_bytes // self.units

    def reads(self, remote_pages: Pages, local_pages: Pages) -> dict[int, Descriptors]:
        """By remote rank the reads of `remote_pages`: for equal sizes of pages into the local pages of the same tokens,
        whole, one descriptor a page and rank; else into pages of staging, where slots lie back to back.
        `check_page_lists` has looked at both."""
        return self.sources.reads(len(remote_pages), remote_pages, local_pages)


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """How one local rank reads from a peer, for every request: the pages of each attention group, and states."""

    remote: PeerGeometry
    local: PeerGeometry
    groups: tuple[GroupPairing, ...]
    states: Sources


def geometry_of(layout: CacheLayout, tp_size: int) -> PeerGeometry:
    """The geometry of a server whose ranks have this layout."""
    groups = tuple(PeerGroup(group.tokens_per_page, group.reach, group.chunked) for group in layout.groups)
    is_plain = not groups or groups == (PeerGroup(layout.block_size),)
    return PeerGeometry(
        block_size=layout.block_size,
        page_bytes=layout.page_bytes,
        page_units=layout.page_units,
        header_bytes=layout.header_bytes,
        state_bytes=layout.state_bytes,
        state_units=layout.state_units,
        tp_size=tp_size,
        checkpoint_dtype=layout.checkpoint_dtype,
        state_dtype=layout.state_dtype,
        groups=() if is_plain else groups,
    )


def pair(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry, rank: int) -> Pairing:
    """How local rank `rank` reads from a peer. Raises ConfigError where the two cannot hold the same model."""
    if not 0 <= rank < local.tp_size:
        raise ConfigError(f"rank {rank} is none of the {local.tp_size} of --tensor-parallel-size")
    check_peers(remote, local)
    _check_states(model, remote, local)
    if model.attention:
        _check_block_sizes(model, remote, local)
    else:
        _check_equal("page_bytes of a model without attention", remote.page_bytes, local.page_bytes)
    sides = zip(remote.attention_groups, local.attention_groups, strict=True)
    groups = [
        _pair_group(units, (remote, theirs), (local, ours), rank)
        for units, (theirs, ours) in zip(model.attention, sides, strict=False)
    ]
    return Pairing(remote, local, tuple(groups), _state_sources(model, remote, local, rank))


def _pair_group(
    units: AttentionUnits,
    remote: tuple[PeerGeometry, PeerGroup],
    local: tuple[PeerGeometry, PeerGroup],
    rank: int,
) -> GroupPairing:
    """Of one attention group, as both sides have it."""
    strides = [_unit_bytes(units, *side, name) for side, name in ((remote, "the peer's"), (local, "the own"))]
    (there, theirs), (here, ours) = remote, local
    held = here.page_bytes // strides[1]
    size = units.runs * theirs.tokens_per_page * units.row_bytes
    is_staged = theirs.tokens_per_page != ours.tokens_per_page
    slot_stride, slot_bytes = strides[1], here.page_bytes
    if is_staged:
        slot_stride, slot_bytes = size, _slot_bytes(held * size, here.page_bytes)
    elif strides[0] == strides[1]:
        # what a unit leaves at its end comes along: so all are one run
        size = strides[0]
    owner, index = _owners(units.kv_heads, there.tp_size, here, held, rank)
    ranges = Ranges(index * strides[0], np.arange(held) * slot_stride, np.full(held, size))
    return GroupPairing(
        remote_tokens=theirs.tokens_per_page,
        local_tokens=ours.tokens_per_page,
        page_bytes=here.page_bytes,
        units=held,
        runs=units.runs,
        row_bytes=units.row_bytes,
        sources=_sources(owner, ranges, there.page_bytes, here.page_bytes, slot_bytes),
    )


def _slot_bytes(used: int, page_bytes: int) -> int:
    """From one slot of `used` bytes to the next, so that they lie alike in all pages of staging."""
    if used < page_bytes:
        return used if page_bytes % used == 0 else page_bytes
    return -(-used // page_bytes) * page_bytes


def check_peers(remote: PeerGeometry, local: PeerGeometry) -> None:
    """Raises ConfigError for two servers whose states run in two dtypes, or are in two forms in checkpoints, and for
    those that keep keys and values by other attention groups."""
    for name, flag in (("state_dtype", "--mamba-ssm-cache-dtype"), ("checkpoint_dtype", "--checkpoint-dtype")):
        there, here = getattr(remote, name), getattr(local, name)
        if there != here:
            raise ConfigError(f"{name}: {there} at the peer, {here} here; start both with the same {flag}")
    there, here = (
        ", ".join(reach_name(group.reach, group.chunked) for group in side.attention_groups) for side in (remote, local)
    )
    if there != here:
        raise ConfigError(f"attention groups: {there} at the peer, {here} here: both sides must serve the same model")


def _units_per_rank(what: str, total: int, tp_size: int) -> int:
    """Number of units on one rank."""
    if total % tp_size and tp_size % total:
        raise ConfigError(f"--tensor-parallel-size {tp_size} and {total} {what}: one must be a multiple of the other")
    return max(1, total // tp_size)


def _check_states(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry) -> None:
    unit_bytes = []
    for name, side in (("the peer's", remote), ("the own", local)):
        held = _units_per_rank("state units", model.state_units, side.tp_size) if model.state_units else 0
        if (side.state_units if side.state_bytes else 0) != held or side.state_bytes % max(1, held):
            raise ConfigError(
                f"{name} checkpoints have {side.state_units} units in {side.state_bytes} bytes, but of the model's "
                f"{model.state_units} a rank of {side.tp_size} holds {held}"
            )
        unit_bytes.append(side.state_bytes // max(1, held))
    _check_equal("header_bytes", remote.header_bytes, local.header_bytes)
    _check_equal("bytes of a state unit", *unit_bytes)


def _unit_bytes(units: AttentionUnits, side: PeerGeometry, group: PeerGroup, name: str) -> int:
    """From one unit of a page to the next on this side, which has room for as many tokens as it says and no more."""
    held, tokens = _units_per_rank("kv heads", units.kv_heads, side.tp_size), group.tokens_per_page
    token_bytes = units.runs * units.row_bytes
    left = side.page_bytes // held - tokens * token_bytes
    if held % side.page_units or side.page_bytes % held or not 0 <= left < token_bytes:
        raise ConfigError(
            f"{name} pages have {side.page_units} kv heads in {side.page_bytes} bytes, but a rank of {side.tp_size} "
            f"holds {held} of {units.kv_heads}, in {units.layers} layers of {tokens} tokens of {units.row_bytes} bytes"
        )
    return side.page_bytes // held


def _check_block_sizes(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry) -> None:
    if len(model.attention) != len(local.attention_groups):
        raise ConfigError(f"{len(local.attention_groups)} attention groups, the model has {len(model.attention)}")
    if remote.block_size % local.block_size and local.block_size % remote.block_size:
        raise ConfigError(
            f"--block-size {local.block_size} and the peer's {remote.block_size}: one must be a multiple of the other"
        )


def _check_equal(what: str, remote: int, local: int) -> None:
    if remote != local:
        raise ConfigError(f"{what}: {remote} at the peer, {local} here; both must serve the same model and dtype")


def _state_sources(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry, rank: int) -> Sources:
    header, held = local.header_bytes, local.state_units if model.state_units else 0
    owner, index = _owners(max(1, model.state_units), remote.tp_size, local, held, rank)
    unit_bytes = local.state_bytes // max(1, held)
    ranges = Ranges(
        remote=np.concatenate(([0], header + index * unit_bytes)),
        local=np.concatenate(([0], header + np.arange(held) * unit_bytes)),
        num_bytes=np.concatenate(([header], np.full(held, unit_bytes))),
    )
    owner = np.concatenate(([_home(remote.tp_size, local, rank)], owner))
    return _sources(owner, ranges, remote.page_bytes, local.page_bytes)


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


def _sources(owner: _Array, ranges: Ranges, remote_page: int, local_page: int, stride: int = 0) -> Sources:
    """Runs that follow each other on both sides joined, empty ones left out, cut where a page ends on either side."""
    filled = ranges.num_bytes > 0
    owner, (remote, local, size) = owner[filled], (each[filled] for each in ranges)
    apart = (np.diff(owner) != 0) | (np.diff(remote) != size[:-1]) | (np.diff(local) != size[:-1])
    heads = np.concatenate(([0], np.flatnonzero(apart) + 1))[: len(owner)]
    parts: dict[int, list[_Array]] = {}
    joined = owner[heads], remote[heads], local[heads], np.add.reduceat(size, heads)
    for rank, there, here, num_bytes in zip(*joined, strict=True):
        borders = (
            np.arange(-there % remote_page, num_bytes, remote_page),
            np.arange(-here % local_page, num_bytes, local_page),
        )
        starts = np.unique(np.concatenate(([0], *borders)))
        part = np.stack((there + starts, here + starts, np.diff(starts, append=num_bytes)))
        parts.setdefault(int(rank), []).append(part)
    by_rank = {rank: Ranges(*np.concatenate(parts[rank], axis=1)) for rank in sorted(parts)}
    return Sources(by_rank, remote_page, local_page, stride)


def staging_pages(pairing: GroupPairing, start: int, end: int) -> int:
    """How many local pages of slots the tokens [start, end) take."""
    return -(-num_range_pages(start, end, pairing.remote_tokens) * pairing.slot_bytes // pairing.page_bytes)


def state_reads(pairing: Pairing, remote_state: Pages, local_state: Pages) -> dict[int, Descriptors]:
    """By remote rank the reads that fill a state's pages. `remote_state` lists those on every remote
    rank, `local_state` on every local one. Raises ValueError for lists of another length."""
    for name, pages, side in (
        ("remote_state", remote_state, pairing.remote),
        ("local_state", local_state, pairing.local),
    ):
        need = max(1, -(-(side.header_bytes + side.state_bytes) // side.page_bytes))
        if len(pages) != need:
            raise ValueError(f"{name} lists {len(pages)} pages, a checkpoint takes {need}")
    return pairing.states.reads(1, remote_state, local_state)


def check_page_lists(pairing: GroupPairing, start: int, end: int, remote_pages: Pages, local_pages: Pages) -> None:
    """Raises ValueError unless both are as many as the tokens [start, end) take on their side."""
    if not 0 <= start <= end:
        raise ValueError(f"tokens [{start}, {end}) are no range")
    for name, pages, tokens_per_page in (
        ("remote_pages", remote_pages, pairing.remote_tokens),
        ("local_pages", local_pages, pairing.local_tokens),
    ):
        need = num_range_pages(start, end, tokens_per_page)
        if len(pages) != need:
            raise ValueError(f"{name} lists {len(pages)} pages, tokens [{start}, {end}) take {need}")
