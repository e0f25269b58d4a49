"""Which bytes one rank reads from a peer's ranks, when the two servers cut the same model differently. Pure.

    remote   the server that is read from, `tp_size` ranks with pages of `block_size` tokens
    local    the server that reads; everything here is for one of its ranks
    unit     what tensor parallelism shares out: a key-value head, or a unit of the recurrent state
    page     [unit][layer][k|v][token][dim]      the units of a rank are contiguous
    state    [header | unit 0 | unit 1 | ...]    a checkpoint, cut into pages anywhere, by each side's page size
    slot     the local units of one remote page, as they lie in staging

Units are assigned to ranks in order; with fewer units than ranks, neighbouring ranks have the same one. Where several
remote ranks have a unit, the local ranks are spread evenly over them. `pair` works that out once per peer; from it
follow, for each request:

    equal block sizes     page_reads: straight into the local pages
    unequal block sizes   staging_reads into slots, then lay_out(staging_copies)
    checkpoint            state_reads
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.transfer.contract import PeerGeometry, num_range_pages
from cairn.transfer.links.contract import Descriptors
from cairn.types import Pages

_Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelUnits:
    """Units that tensor parallelism shares out, counted over the whole model. `kv_heads` and `attention_layers` are 0
    for a model without attention, `state_units` for one without recurrent state."""

    kv_heads: int
    attention_layers: int
    state_units: int


class Ranges(NamedTuple):
    """Byte ranges, int64 [n] each: offsets in a remote page and its slot, or in two states."""

    remote: _Array
    local: _Array
    num_bytes: _Array


@dataclass(frozen=True, slots=True, eq=False)
class RankSource:
    """Byte ranges to read from remote rank `rank`: of each page, and of a state. Either may be empty."""

    rank: int
    page: Ranges
    state: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """How one local rank reads from a peer, for every request.

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
        """Whether pages are read into staging and laid out anew."""
        return self.runs > 0 and self.remote.block_size != self.local.block_size


def geometry_of(layout: CacheLayout, tp_size: int) -> PeerGeometry:
    """The geometry of a server whose ranks have this layout. Raises ConfigError for more than one attention group."""
    if len(layout.groups) > 1 or any(group.reach is not None for group in layout.groups):
        raise ConfigError("--kv-transfer-config: not for a model whose attention has heads of several sizes")
    return PeerGeometry(
        block_size=layout.groups[0].tokens_per_page if layout.groups else layout.block_size,
        page_bytes=layout.page_bytes,
        page_units=layout.page_units,
        header_bytes=layout.header_bytes,
        state_bytes=layout.state_bytes,
        state_units=layout.state_units,
        tp_size=tp_size,
        checkpoint_dtype=layout.checkpoint_dtype,
        state_dtype=layout.state_dtype,
    )


def pair(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry, rank: int) -> Pairing:
    """How local rank `rank` reads from a peer. Raises ConfigError where the two cannot hold the same model."""
    if not 0 <= rank < local.tp_size:
        raise ConfigError(f"rank {rank} is none of the {local.tp_size} of --tensor-parallel-size")
    check_checkpoint_dtypes(remote, local)
    _check_states(model, remote, local)
    runs = 2 * model.attention_layers if model.kv_heads else 0
    row_bytes = _checked_row_bytes(model, remote, local) if runs else 0
    if not runs:
        _check_equal("page_bytes of a model without attention", remote.page_bytes, local.page_bytes)
    slot_bytes = local.page_units * runs * remote.block_size * row_bytes
    pages = _page_ranges(model, remote, local, rank, runs * remote.block_size * row_bytes)
    states = _state_ranges(model, remote, local, rank)
    nothing = Ranges(*np.zeros((3, 0), np.int64))
    sources = tuple(
        RankSource(
            rank=each,
            page=_cut(pages.get(each, nothing), remote.page_bytes, local.page_bytes),
            state=_cut(states.get(each, nothing), remote.page_bytes, local.page_bytes),
        )
        for each in sorted(pages.keys() | states.keys())
    )
    return Pairing(remote, local, sources, slot_bytes, runs, row_bytes)


def check_checkpoint_dtypes(remote: PeerGeometry, local: PeerGeometry) -> None:
    """Raises ConfigError for two servers whose states run in two dtypes, or are in two forms in checkpoints."""
    if remote.state_dtype != local.state_dtype:
        raise ConfigError(
            f"state_dtype: {remote.state_dtype} at the peer, {local.state_dtype} here; start both with the same "
            "--mamba-ssm-cache-dtype"
        )
    if remote.checkpoint_dtype != local.checkpoint_dtype:
        raise ConfigError(
            f"checkpoint_dtype: {remote.checkpoint_dtype} at the peer, {local.checkpoint_dtype} here; start both with "
            "the same --checkpoint-dtype"
        )


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


def _checked_row_bytes(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry) -> int:
    """Bytes of one token in one unit, layer, and k or v."""
    row_bytes = []
    for name, side in (("the peer's", remote), ("the own", local)):
        held = _units_per_rank("kv heads", model.kv_heads, side.tp_size)
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


def _state_ranges(model: ModelUnits, remote: PeerGeometry, local: PeerGeometry, rank: int) -> dict[int, Ranges]:
    """Of a state: by remote rank the runs that this rank needs."""
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


@dataclass(frozen=True, slots=True, eq=False)
class TokenCopies:
    """Runs of tokens from slots to local pages, int64 [n] each; every run is there once for each unit, layer, k and v.

        slots   [slot][unit][layer, k|v][slot_token ...][row]
        pages   [page][unit][layer, k|v][page_token ...][row]

    All but the first and the last run have `granule` tokens and lie at multiples of it on both sides.
    """

    slot: _Array
    slot_token: _Array
    page: _Array
    page_token: _Array
    num_tokens: _Array
    granule: int

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def num_slots(self) -> int:
        """How many slots they come from, the first one included."""
        return int(self.slot[-1]) + 1 if len(self) else 0

    def by_token(self) -> "tuple[_Array, _Array, _Array, _Array]":
        """The same token by token: slot, token of it, page, and token of it, int64 [tokens] each."""
        ends = np.cumsum(self.num_tokens)
        within = np.arange(ends[-1] if len(self) else 0) - np.repeat(ends - self.num_tokens, self.num_tokens)
        slot, slot_token, page, page_token = (
            np.repeat(each, self.num_tokens) for each in (self.slot, self.slot_token, self.page, self.page_token)
        )
        return slot, slot_token + within, page, page_token + within


def page_reads(
    pairing: Pairing, start: int, end: int, remote_pages: Pages, local_pages: Pages
) -> dict[int, Descriptors]:
    """By remote rank the reads that fill `local_pages` whole, for equal block sizes: one descriptor a page and rank.

    Tokens [start, end); the page lists cover them in each side's block size. Raises ValueError for lists of another
    length, and for unequal block sizes.
    """
    if pairing.staged:
        raise ValueError(f"blocks of {pairing.remote.block_size} and {pairing.local.block_size} tokens need staging")
    check_page_list(pairing, "remote_pages", remote_pages, pairing.remote, start, end)
    check_page_list(pairing, "local_pages", local_pages, pairing.local, start, end)
    return _reads_into(pairing, remote_pages, local_pages.astype(np.int64))


def staging_pages(pairing: Pairing, start: int, end: int) -> int:
    """How many local pages of staging the tokens [start, end) take."""
    return -(-num_range_pages(start, end, pairing.remote.block_size) * pairing.slot_bytes // pairing.local.page_bytes)


def staging_reads(
    pairing: Pairing, start: int, end: int, remote_pages: Pages, first_page: int
) -> dict[int, Descriptors]:
    """By remote rank the reads that fill the slots, which lie back to back from local page `first_page` on.

    Tokens [start, end), covered by `remote_pages`. Raises ValueError for a list of another length.
    """
    check_page_list(pairing, "remote_pages", remote_pages, pairing.remote, start, end)
    staging = np.arange(first_page, first_page + staging_pages(pairing, start, end))
    return _reads_into(pairing, remote_pages, staging)


def _reads_into(pairing: Pairing, remote_pages: Pages, local_pages: _Array) -> dict[int, Descriptors]:
    count, reads = len(remote_pages), {}
    for source in pairing.sources:
        pieces = len(source.page.num_bytes)
        if count and pieces:
            flat = (np.arange(count)[:, None] * pairing.slot_bytes + source.page.local).reshape(-1)
            number, offset = np.divmod(flat, pairing.local.page_bytes)
            reads[source.rank] = Descriptors(
                remote_page=np.repeat(remote_pages.astype(np.int64), pieces),
                remote_offset=np.tile(source.page.remote, count),
                local_page=local_pages[number],
                local_offset=offset,
                num_bytes=np.tile(source.page.num_bytes, count),
            )
    return reads


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
    reads = {}
    for source in pairing.sources:
        if len(source.state.num_bytes):
            remote, remote_offset = np.divmod(source.state.remote, pairing.remote.page_bytes)
            local, local_offset = np.divmod(source.state.local, pairing.local.page_bytes)
            reads[source.rank] = Descriptors(
                remote_page=remote_state.astype(np.int64)[remote],
                remote_offset=remote_offset,
                local_page=local_state.astype(np.int64)[local],
                local_offset=local_offset,
                num_bytes=source.state.num_bytes,
            )
    return reads


def staging_copies(pairing: Pairing, start: int, end: int, local_pages: Pages) -> TokenCopies:
    """From the slots of tokens [start, end) to the `local_pages` that cover them; exactly these tokens, no others.

    Raises ValueError for a list of another length.
    """
    check_page_list(pairing, "local_pages", local_pages, pairing.local, start, end)
    remote_block, local_block = pairing.remote.block_size, pairing.local.block_size
    granule = min(remote_block, local_block)
    token = np.concatenate(([start], np.arange(start // granule + 1, -(-end // granule)) * granule))[: end - start]
    return TokenCopies(
        slot=token // remote_block - start // remote_block,
        slot_token=token % remote_block,
        page=local_pages.astype(np.int64)[token // local_block - start // local_block],
        page_token=token % local_block,
        num_tokens=np.diff(token, append=end),
        granule=granule,
    )


def lay_out(pairing: Pairing, copies: TokenCopies, staging: NDArray[np.uint8], pool: NDArray[np.uint8]) -> None:
    """Carry the copies out. `staging`: uint8, the pages that hold the slots, back to back and contiguous; `pool`: uint8
    [num_pages, page_bytes], contiguous. The two may be parts of one array, but must not share a page of the copies."""
    if not len(copies):
        return
    heads, row, granule = (pairing.local.page_units, pairing.runs), pairing.row_bytes, copies.granule
    slots = staging.reshape(-1)[: copies.num_slots * pairing.slot_bytes]
    source = slots.view().reshape(-1, *heads, pairing.remote.block_size // granule, granule * row)
    target = pool.view()
    target.shape = (len(pool), *heads, pairing.local.block_size // granule, granule * row)
    whole = copies.num_tokens == granule
    slot_part, page_part = copies.slot_token // granule, copies.page_token // granule
    target[copies.page[whole], :, :, page_part[whole]] = source[copies.slot[whole], :, :, slot_part[whole]]
    for index in np.flatnonzero(~whole):
        skip = int(copies.slot_token[index]) % granule * row
        part = slice(skip, skip + int(copies.num_tokens[index]) * row)
        piece = source[copies.slot[index], :, :, slot_part[index], part]
        target[copies.page[index], :, :, page_part[index], part] = piece


def check_page_list(pairing: Pairing, name: str, pages: Pages, side: PeerGeometry, start: int, end: int) -> None:
    """Raises ValueError unless `pages` are as many as the tokens [start, end) take on this side."""
    if not 0 <= start <= end:
        raise ValueError(f"tokens [{start}, {end}) are no range")
    need = num_range_pages(start, end, side.block_size) if pairing.runs else 0
    if len(pages) != need:
        raise ValueError(f"{name} lists {len(pages)} pages, tokens [{start}, {end}) take {need}")
