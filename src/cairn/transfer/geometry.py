"""Which bytes one rank reads from a peer's ranks, when the two servers cut the same model differently. Pure.

    remote   the server that is read from, `tp_size` ranks with pages of `block_size` tokens
    local    the server that reads; everything here is for one of its ranks
    unit     what tensor parallelism shares out: a key-value head, or a unit of the recurrent state
    page     [unit][layer][k|v][token][dim]      of one attention group; the units of a rank are contiguous
    state    [header | unit 0 | unit 1 | ...]    a checkpoint, cut into pages anywhere, by each side's page size
    place    where a byte is in the pages of a list, laid end to end

Units are assigned to ranks in order; with fewer units than ranks, neighbouring ranks have the same one. Where several
remote ranks have a unit, the local ranks are spread evenly over them. Every page has the same bytes, so a group whose
tokens are smaller has more of them in a page, and may leave less than one token's bytes at the end of each unit.

All sizes are one rule: every run of bytes that lies in one piece on both sides is a range, ranges that follow each
other on both sides are joined, and those that cross the end of a page on either side are cut. So pages of equal sizes
are read whole, and with other sizes the tokens that two pages share, unit by unit and layer by layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import AttentionGroup, CacheLayout, reach_name
from cairn.errors import ConfigError
from cairn.transfer.contract import ReadOrder, num_range_pages
from cairn.transfer.links.contract import Descriptors, LinkError
from cairn.types import Pages

_Array = NDArray[np.int64]

_Ranges: TypeAlias = NDArray[np.int64]
"""Byte ranges, int64 [4, n]: the remote rank, the place there, the place here, the size."""

_THERE, _HERE, _SIZE = 1, 2, 3

_MAX_PAIRINGS = 64

Reads: TypeAlias = Mapping[int, Descriptors]
"""By rank of the peer, what to read from it."""


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


@dataclass(frozen=True, slots=True, eq=False)
class GroupSide:
    """An attention group in one side's pages of `page_bytes`: `tokens` in each, and where its units begin, int64
    [units]: those of the reading rank, in its order."""

    page_bytes: int
    tokens: int
    units: _Array

    def places(self, start: int, first: _Array, num_runs: int, row_bytes: int) -> _Array:
        """Where the tokens `first`, int64 [n], lie in the pages from token `start` on, int64 [n, units, runs]."""
        pages = (first // self.tokens - start // self.tokens) * self.page_bytes + first % self.tokens * row_bytes
        return pages[:, None, None] + self.units[:, None] + np.arange(num_runs) * self.tokens * row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class GroupPairing:
    """How one local rank reads the pages of one attention group, for every request. `owners`: the remote rank of each
    unit, int64 [units]. A unit has `runs` runs, where each token has `row_bytes`; `unit_bytes` is all that is read of
    one where pages have equal sizes."""

    remote: GroupSide
    local: GroupSide
    owners: _Array
    runs: int
    row_bytes: int
    unit_bytes: int

    def ranges(self, start: int, end: int) -> _Ranges:
        """Of the tokens [start, end): these and no others, or, where pages have equal sizes, the pages they are in."""
        remote, local, runs, row = self.remote, self.local, self.runs, self.row_bytes
        if remote.tokens == local.tokens:
            # as if each page were one token, and each unit one run
            start, end = start // local.tokens, -(-end // local.tokens)
            remote, local = (GroupSide(side.page_bytes, 1, side.units) for side in (remote, local))
            runs, row = 1, self.unit_bytes
        inner = (np.arange(start // size * size + size, end, size) for size in (remote.tokens, local.tokens))
        borders = np.unique(np.concatenate(([start, end], *inner)))
        first, sizes = borders[:-1], np.diff(borders) * row
        there, here = (side.places(start, first, runs, row) for side in (remote, local))
        columns = np.broadcast_arrays(self.owners[:, None], there, here, sizes[:, None, None])
        return np.stack([column.reshape(-1) for column in columns])


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """How local rank `rank` reads from a peer, for every request: the pages of each attention group, and `states`."""

    rank: int
    remote: CacheLayout
    local: CacheLayout
    groups: tuple[GroupPairing, ...]
    states: _Ranges

    def reads(self, order: ReadOrder, *, whole: bool = False) -> Reads:
        """What the order takes of each remote rank; `whole`: all of each page, of a peer of equal sizes. Raises
        LinkError for page lists of another length."""
        parts = []
        if order.remote and len(order.remote) != len(self.groups):
            raise LinkError(f"pages of {len(order.remote)} attention groups where there are {len(self.groups)}")
        for group, remote, local in zip(self.groups, order.remote, order.local, strict=False):
            start, end = local.first_token, order.end
            if not 0 <= start <= end:
                raise LinkError(f"tokens [{start}, {end}) are no range")
            for name, pages, side in (("remote", remote.pages, group.remote), ("local", local.pages, group.local)):
                _check_count(
                    f"{name}_pages", pages, num_range_pages(start, end, side.tokens), f"tokens [{start}, {end}) take"
                )
            if whole:
                parts.append(self._whole_pages(remote.pages, local.pages))
            elif start < end:
                ranges = _cut(group.ranges(start, end), self.remote.page_bytes, self.local.page_bytes)
                parts.append(self._descriptors(ranges, remote.pages, local.pages))
        if order.remote_checkpoint is not None and order.local_checkpoint is not None:
            states = order.remote_checkpoint, order.local_checkpoint
            for name, pages, geometry in zip(("remote", "local"), states, (self.remote, self.local), strict=True):
                _check_count(f"{name}_state", pages, geometry.pages_per_checkpoint, "a checkpoint takes")
            parts.append(self._whole_pages(*states) if whole else self._descriptors(self.states, *states))
        if not parts:
            return {}
        ranks, *columns = np.concatenate(parts, axis=1)
        return {rank: Descriptors(*(each[ranks == rank] for each in columns)) for rank in set(ranks.tolist())}

    def _whole_pages(self, remote_pages: Pages, local_pages: Pages) -> _Array:
        """As `_descriptors`; what is behind the end of a state comes along."""
        zeros = np.zeros(len(local_pages), np.int64)
        size = zeros + self.local.page_bytes
        return np.stack((zeros + self.rank, remote_pages, zeros, local_pages, zeros, size))

    def _descriptors(self, ranges: _Ranges, remote_pages: Pages, local_pages: Pages) -> _Array:
        """Ranks and columns of `Descriptors`, int64 [6, n], of ranges in these pages that cross the end of none."""
        rank, there, here, size = ranges
        there_page, there_offset = np.divmod(there, self.remote.page_bytes)
        here_page, here_offset = np.divmod(here, self.local.page_bytes)
        return np.stack((rank, remote_pages[there_page], there_offset, local_pages[here_page], here_offset, size))


def pair(model: ModelUnits, remote: CacheLayout, local: CacheLayout, rank: int) -> Pairing:
    """How local rank `rank` reads from a peer. Raises ConfigError where the two cannot hold the same model."""
    if not 0 <= rank < local.tp_size:
        raise ConfigError(f"rank {rank} is none of the {local.tp_size} of --tensor-parallel-size")
    if (difference := find_difference(remote, local)) is not None:
        raise ConfigError(difference)
    _check_states(model, remote, local)
    if not model.attention:
        _check_equal("page_bytes of a model without attention", remote.page_bytes, local.page_bytes)
    elif len(model.attention) != len(local.groups):
        raise ConfigError(f"{len(local.groups)} attention groups, the model has {len(model.attention)}")
    sides = zip(remote.groups, local.groups, strict=True)
    groups = [
        _pair_group(units, (remote, theirs), (local, ours), rank)
        for units, (theirs, ours) in zip(model.attention, sides, strict=False)
    ]
    states = _cut(_state_ranges(model, remote, local, rank), remote.page_bytes, local.page_bytes)
    return Pairing(rank, remote, local, tuple(groups), states)


def _pair_group(
    units: AttentionUnits,
    remote: tuple[CacheLayout, AttentionGroup],
    local: tuple[CacheLayout, AttentionGroup],
    rank: int,
) -> GroupPairing:
    """Of one attention group, as both sides have it."""
    strides = [_unit_bytes(units, *side, name) for side, name in ((remote, "the peer's"), (local, "the own"))]
    (there, theirs), (here, ours) = remote, local
    held = here.page_bytes // strides[1]
    owners, index = _owners(units.kv_heads, there.tp_size, here, held, rank)
    # with equal strides what a unit leaves at its end comes along: so all are one range
    used = units.runs * ours.tokens_per_page * units.row_bytes
    return GroupPairing(
        remote=GroupSide(there.page_bytes, theirs.tokens_per_page, index * strides[0]),
        local=GroupSide(here.page_bytes, ours.tokens_per_page, np.arange(held) * strides[1]),
        owners=owners,
        runs=units.runs,
        row_bytes=units.row_bytes,
        unit_bytes=strides[1] if strides[0] == strides[1] else used,
    )


def find_difference(remote: CacheLayout, local: CacheLayout) -> str | None:
    """Why two servers cannot pair whose states run in two dtypes, or are in two forms in checkpoints, or that keep keys
    and values by other attention groups."""
    for name, flag in (("state_dtype", "--mamba-ssm-cache-dtype"), ("checkpoint_dtype", "--checkpoint-dtype")):
        there, here = getattr(remote, name), getattr(local, name)
        if there != here:
            return f"{name}: {there} at the peer, {here} here; start both with the same {flag}"
    there, here = (", ".join(reach_name(each.reach, each.chunked) for each in side.groups) for side in (remote, local))
    if there != here:
        return f"attention groups: {there} at the peer, {here} here: both sides must serve the same model"
    return None


def _units_per_rank(what: str, total: int, tp_size: int) -> int:
    """Number of units on one rank."""
    if total % tp_size and tp_size % total:
        raise ConfigError(f"--tensor-parallel-size {tp_size} and {total} {what}: one must be a multiple of the other")
    return max(1, total // tp_size)


def _check_states(model: ModelUnits, remote: CacheLayout, local: CacheLayout) -> None:
    unit_bytes = []
    for name, side in (("the peer's", remote), ("the own", local)):
        held = _units_per_rank("state units", model.state_units, side.tp_size) if model.state_units else 0
        if (side.state_units if side.state_bytes else 0) != held:
            raise ConfigError(
                f"{name} checkpoints have {side.state_units} units in {side.state_bytes} bytes, but of the model's "
                f"{model.state_units} a rank of {side.tp_size} holds {held}"
            )
        unit_bytes.append(side.state_bytes // max(1, held))
    _check_equal("header_bytes", remote.header_bytes, local.header_bytes)
    _check_equal("bytes of a state unit", *unit_bytes)


def _unit_bytes(units: AttentionUnits, side: CacheLayout, group: AttentionGroup, name: str) -> int:
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


def _check_equal(what: str, remote: int, local: int) -> None:
    if remote != local:
        raise ConfigError(f"{what}: {remote} at the peer, {local} here; both must serve the same model and dtype")


def _state_ranges(model: ModelUnits, remote: CacheLayout, local: CacheLayout, rank: int) -> _Ranges:
    """Of the header and each unit of a state."""
    header, held = local.header_bytes, local.state_units if model.state_units else 0
    owners, index = _owners(max(1, model.state_units), remote.tp_size, local, held, rank)
    unit_bytes = local.state_bytes // max(1, held)
    parts = owners, header + index * unit_bytes, header + np.arange(held) * unit_bytes, np.full(held, unit_bytes)
    first = _home(remote.tp_size, local, rank), 0, 0, header
    return np.stack([np.concatenate(([begin], part)) for begin, part in zip(first, parts, strict=True)])


def _home(remote_tp: int, local: CacheLayout, rank: int) -> int:
    """The remote rank at the same place as this one: its first units, and whatever all have, come from there."""
    return rank * remote_tp // local.tp_size


def _owners(total: int, remote_tp: int, local: CacheLayout, held: int, rank: int) -> tuple[_Array, _Array]:
    """For each of this rank's `held` units the remote rank to read it from and its number there, int64 [held].

    Rank r of n holds the units from r * total // n on, and unit u is held by the ranks from u * n // total on. `_home`
    holds the first of the units, and no later one is held by lower ranks alone; so wherever `_home` holds a unit it
    is read from there, and otherwise from the first rank that does.
    """
    units = np.arange(held) + rank * total // local.tp_size
    owner = np.maximum(_home(remote_tp, local, rank), units * remote_tp // total)
    return owner, units - owner * total // remote_tp


def _cut(ranges: _Ranges, remote_page: int, local_page: int) -> _Ranges:
    """Ranges that follow each other on both sides joined, empty ones left out, cut where a page ends on either side."""
    rank, there, here, size = ranges = ranges[:, ranges[_SIZE] > 0]
    apart = (np.diff(rank) != 0) | (np.diff(there) != size[:-1]) | (np.diff(here) != size[:-1])
    heads = np.concatenate(([0], np.flatnonzero(apart) + 1))[: len(rank)]
    joined = np.stack((rank[heads], there[heads], here[heads], np.add.reduceat(size, heads)))
    return _cut_side(_cut_side(joined, _THERE, remote_page), _HERE, local_page)


def _cut_side(ranges: _Ranges, side: int, page_bytes: int) -> _Ranges:
    """Ranges cut where a page ends on the `side` of this row."""
    place, size = ranges[side], ranges[_SIZE]
    first_page = place // page_bytes
    num_pages = (place + size - 1) // page_bytes - first_page + 1
    whole = np.repeat(np.arange(len(place)), num_pages)
    page = first_page[whole] + np.arange(len(whole)) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    begin = np.maximum(page * page_bytes - place[whole], 0)
    end = np.minimum((page + 1) * page_bytes - place[whole], size[whole])
    rank, there, here, _ = ranges[:, whole]
    return np.stack((rank, there + begin, here + begin, end - begin))


def _check_count(name: str, pages: Pages, need: int, what: str) -> None:
    if len(pages) != need:
        raise LinkError(f"{name} lists {len(pages)} pages, {what} {need}")


class PairedPages:
    """What rank `rank` of a server of geometry `local` reads for an order, from peers of any sizes. Keeps the pairings
    with the latest 64 geometries."""

    def __init__(self, model: ModelUnits, local: CacheLayout, rank: int) -> None:
        """Raises ConfigError where the own sizes cannot hold the model."""
        self._local = local
        self._pairing = lru_cache(_MAX_PAIRINGS)(lambda remote: pair(model, remote, local, rank))
        pair(model, local, local, rank)

    def __call__(self, order: ReadOrder) -> Reads:
        """Raises LinkError when it cannot be read."""
        remote = order.peer.geometry
        if len(order.peer.ranks) != remote.tp_size:
            raise LinkError(f"the peer describes {len(order.peer.ranks)} ranks and has {remote.tp_size}")
        try:
            return self._pairing(remote).reads(order, whole=remote == self._local)
        except ConfigError as error:
            raise LinkError(str(error)) from error
