"""Every byte of every unit arrives exactly once: the reads, carried out, against pages filled by counting on fingers.

The naive side knows only the layouts' definitions: it names each byte of the whole model by (unit, run, token, byte)
and puts it where a rank of some size and block size keeps it, one address at a time.
"""

import itertools
import random
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.errors import ConfigError
from cairn.transfer.contract import Peer, PullId, ReadOrder
from cairn.transfer.geometry import AttentionUnits, ModelUnits, PairedPages, Pairing, pair
from cairn.transfer.links.contract import LinkError
from tiers import first_of

SIZES = (1, 2, 4)
BLOCKS = (16, 32, 64, 128)
ANY_BLOCKS = (*BLOCKS, 48)
UNITS = (1, 2, 4, 8)
LAYERS, ROW = 1, 3
RUNS = 2 * LAYERS
SPANS = ((0, 128), (0, 256), (0, 1), (128, 300), (48, 130), (37, 41), (5, 261), (256, 256))
TP_PAIRS = tuple(itertools.product(SIZES, SIZES))
# One unit that ranks share, and four that are dealt out to fewer, more and as many.
UNITS_AND_SIZES = first_of(
    [(1, 1, 4), (1, 4, 2), (4, 1, 1), (4, 1, 4), (4, 4, 1), (4, 2, 4), (4, 4, 4)], UNITS, SIZES, SIZES
)


def full(block_size: int) -> tuple[AttentionGroup, ...]:
    """The attention group of a model that has one, of unlimited reach."""
    return (AttentionGroup("full", block_size),)


def geometry(
    tp_size: int, block_size: int = 16, kv_heads: int = 1, state_units: int = 1, header: int = 7, unit_bytes: int = 50
) -> CacheLayout:
    held, states = max(1, kv_heads // tp_size), max(1, state_units // tp_size)
    return CacheLayout(
        block_size=block_size,
        page_bytes=held * RUNS * block_size * ROW,
        page_units=held,
        groups=full(block_size),
        header_bytes=header,
        state_bytes=states * unit_bytes,
        state_units=states,
        tp_size=tp_size,
    )


def model(kv_heads: int = 1, state_units: int = 1) -> ModelUnits:
    return ModelUnits((AttentionUnits(kv_heads, LAYERS, ROW),), state_units)


def units_of(total: int, tp_size: int, rank: int) -> list[int]:
    """The units that a rank holds, by dealing them out one by one."""
    if total >= tp_size:
        hands = [[] for _ in range(tp_size)]
        for unit in range(total):
            hands[unit // (total // tp_size)].append(unit)
        return hands[rank]
    return [rank // (tp_size // total)]


@dataclass
class Memory:
    """The pool of one rank, and how often each byte was written."""

    bytes: np.ndarray
    writes: np.ndarray

    @classmethod
    def empty(cls, num_pages: int, page_bytes: int) -> "Memory":
        return cls(np.full((num_pages, page_bytes), 255, np.uint8), np.zeros((num_pages, page_bytes), np.int64))


def key_values(kv_heads: int, num_tokens: int, seed: int, runs: int = RUNS) -> np.ndarray:
    """The whole model's keys and values, [head][run][token][byte], no byte 255."""
    return np.random.default_rng(seed).integers(0, 255, (kv_heads, runs, num_tokens, ROW), np.uint8)


def tokens_of(side: CacheLayout, group: int) -> int:
    """Tokens of a page of this attention group."""
    return side.groups[group].tokens_per_page if side.groups else side.block_size


def token_addresses(
    side: CacheLayout, heads: list[int], token: int, group: int = 0, runs: int = RUNS
) -> list[tuple[int, int, tuple[int, int]]]:
    """(block number, byte offset, (head, run)) of each row of one token on a rank that holds `heads`, which share a
    page evenly."""
    found, size = [], tokens_of(side, group)
    for place, head in enumerate(heads):
        for run in range(runs):
            offset = side.page_bytes // len(heads) * place + (run * size + token % size) * ROW
            found.append((token // size, offset, (head, run)))
    return found


def store_pages(
    side: CacheLayout, rank: int, values: np.ndarray, first: int, pages: np.ndarray, num_pages: int, group: int = 0
) -> np.ndarray:
    """What a rank's pool holds when `pages` are its blocks from `first` on, of this attention group."""
    pool = np.full((num_pages, side.page_bytes), 254, np.uint8)
    heads, size = units_of(len(values), side.tp_size, rank), tokens_of(side, group)
    for token in range(first * size, min(values.shape[2], (first + len(pages)) * size)):
        for block, offset, (head, run) in token_addresses(side, heads, token, group, values.shape[1]):
            pool[pages[block - first], offset : offset + ROW] = values[head, run, token]
    return pool


def transfer(reads, remote_pools, memory: Memory) -> None:
    """Carry reads out, descriptor by descriptor."""
    for rank, found in reads.items():
        columns = (found.remote_page, found.remote_offset, found.local_page, found.local_offset, found.num_bytes)
        for page, offset, local_page, local_offset, size in zip(*(each.tolist() for each in columns), strict=True):
            assert size > 0 and offset + size <= remote_pools[rank].shape[1]
            assert local_offset + size <= memory.bytes.shape[1]
            source = remote_pools[rank][page, offset : offset + size]
            memory.bytes[local_page, local_offset : local_offset + size] = source
            memory.writes[local_page, local_offset : local_offset + size] += 1


def shuffled(count: int, total: int, seed: int) -> np.ndarray:
    return np.array(random.Random(seed).sample(range(total), count), np.int32)


def blocks_of(side: CacheLayout, start: int, end: int, group: int = 0) -> tuple[int, int]:
    """First block and number of blocks that tokens [start, end) touch."""
    touched = sorted({token // tokens_of(side, group) for token in range(start, end)})
    return (touched[0], len(touched)) if touched else (0, 0)


# -- pages -------------------------------------------------------------------------------------------------------------


def order(pairing: Pairing, start: int, end: int, pages, group: int = 0, states=(None, None)) -> ReadOrder:
    """What is read of tokens [start, end) of one attention group, and of a checkpoint; `pages`: remote and local."""
    sides = []
    for side, own in zip((pairing.remote, pairing.local), pages, strict=True):
        other = [GroupPages(each, end, own[:0]) for each in side.groups]
        sides.append((*other[:group], GroupPages(side.groups[group], start, own), *other[group + 1 :]))
    ranks = (b"",) * pairing.remote.tp_size
    return ReadOrder(PullId(1), Peer("p", pairing.remote, ranks), end, *sides, *states)


def page_reads(pairing: Pairing, start: int, end: int, remote_pages, local_pages, group: int = 0):
    """By remote rank what is read of these tokens."""
    return pairing.reads(order(pairing, start, end, (remote_pages, local_pages), group))


def state_reads(pairing: Pairing, remote_state, local_state):
    """By remote rank what is read of a checkpoint in these pages."""
    read = ReadOrder(PullId(1), Peer("p", pairing.remote, ()), 0, (), (), remote_state, local_state)
    return pairing.reads(read)


def check_pages(pairing: Pairing, rank: int, values: np.ndarray, start: int, end: int, group: int = 0) -> None:
    """Move tokens [start, end) of an attention group to one rank and look at every byte of its pool."""
    remote, local = pairing.remote, pairing.local
    is_whole = tokens_of(remote, group) == tokens_of(local, group)
    (first, count), (own_first, own_count) = (blocks_of(side, start, end, group) for side in (remote, local))
    remote_pages, local_pages = shuffled(count, count + 3, 1), shuffled(own_count, own_count + 3, 2)
    pools = [store_pages(remote, each, values, first, remote_pages, count + 3, group) for each in range(remote.tp_size)]
    memory = Memory.empty(own_count + 3, local.page_bytes)
    reads = page_reads(pairing, start, end, remote_pages, local_pages, group)
    transfer(reads, pools, memory)
    expected = np.full_like(memory.bytes, 255)
    heads = units_of(len(values), local.tp_size, rank)
    for token in range(start, end):
        for block, offset, (head, run) in token_addresses(local, heads, token, group, values.shape[1]):
            expected[local_pages[block - own_first], offset : offset + ROW] = values[head, run, token]
    inside = expected != 255
    if is_whole:
        written = np.zeros_like(memory.writes)
        written[local_pages] = 1
        np.testing.assert_array_equal(memory.writes, written)
        for found in reads.values():
            assert len(found) == count, "one descriptor a page and rank"
        np.testing.assert_array_equal(memory.bytes[inside], expected[inside])
    else:
        np.testing.assert_array_equal(memory.writes, inside)
        np.testing.assert_array_equal(memory.bytes, expected)
        pieces = {(token // tokens_of(remote, group), token // tokens_of(local, group)) for token in range(start, end)}
        assert sum(map(len, reads.values())) <= len(pieces) * len(heads) * values.shape[1], "no run is cut in vain"


@pytest.mark.parametrize(("kv_heads", "remote_tp", "local_tp"), UNITS_AND_SIZES)
def test_every_byte_of_every_page_arrives_once(remote_tp: int, local_tp: int, kv_heads: int) -> None:
    values = key_values(kv_heads, max(end for _, end in SPANS), seed=kv_heads)
    for remote_block, local_block in itertools.product(BLOCKS, BLOCKS):
        remote, local = geometry(remote_tp, remote_block, kv_heads), geometry(local_tp, local_block, kv_heads)
        for rank in range(local_tp):
            pairing = pair(model(kv_heads), remote, local, rank)
            # all spans for one rank of each pair of sizes, two of them for the others
            for index, (start, end) in enumerate(SPANS):
                if rank == remote_block % local_tp or index % 4 == (rank + kv_heads) % 4:
                    check_pages(pairing, rank, values, start, end)


@pytest.mark.parametrize("kv_heads", UNITS)
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("tp_size", SIZES)
def test_equal_sizes_take_one_descriptor_a_page_and_one_a_file_page(tp_size, block_size, kv_heads) -> None:
    side = geometry(tp_size, block_size, kv_heads, state_units=8, unit_bytes=500)
    pages, file = shuffled(9, 40, 3), shuffled(-(-(7 + 500 * 8 // tp_size) // side.page_bytes), 60, 4)
    for rank in range(tp_size):
        pairing = pair(model(kv_heads, 8), side, side, rank)
        by_rank = page_reads(pairing, 0, 9 * block_size, pages, pages[::-1])
        assert list(by_rank) == list(state_reads(pairing, file, file[::-1])) == [rank]
        reads = by_rank[rank]
        assert len(reads) == 9
        assert (reads.num_bytes == side.page_bytes).all()
        assert reads.remote_page.tolist() == pages.tolist() and reads.local_page.tolist() == pages[::-1].tolist()
        reads = state_reads(pairing, file, file[::-1])[rank]
        assert len(reads) == len(file)
        assert reads.remote_page.tolist() == file.tolist() and reads.local_page.tolist() == file[::-1].tolist()
        assert int(reads.num_bytes.sum()) == side.header_bytes + side.state_bytes


# -- checkpoints -------------------------------------------------------------------------------------------------------


def store_file(side: CacheLayout, rank: int, header: np.ndarray, states: np.ndarray) -> np.ndarray:
    """The bytes of one rank's file."""
    units = units_of(len(states), side.tp_size, rank) if len(states) else []
    return np.concatenate([header, *(states[unit] for unit in units)])


def pooled(file: np.ndarray, pages: np.ndarray, num_pages: int, page_bytes: int) -> np.ndarray:
    pool = np.full((num_pages, page_bytes), 254, np.uint8)
    for at, value in enumerate(file.tolist()):
        pool[pages[at // page_bytes], at % page_bytes] = value
    return pool


def check_file(pairing: Pairing, rank: int, header: np.ndarray, states: np.ndarray) -> None:
    remote, local = pairing.remote, pairing.local
    files = [store_file(remote, each, header, states) for each in range(remote.tp_size)]
    expected = store_file(local, rank, header, states)
    count, own = (max(1, -(-len(each) // side.page_bytes)) for each, side in ((files[0], remote), (expected, local)))
    remote_state, local_state = shuffled(count, count + 2, 5), shuffled(own, own + 2, 6)
    pools = [pooled(file, remote_state, count + 2, remote.page_bytes) for file in files]
    memory = Memory.empty(own + 2, local.page_bytes)
    reads = state_reads(pairing, remote_state, local_state)
    transfer(reads, pools, memory)
    wanted = pooled(expected, local_state, own + 2, local.page_bytes)
    np.testing.assert_array_equal(np.where(memory.writes == 1, memory.bytes, 254), wanted)
    assert memory.writes.max(initial=0) <= 1 and memory.writes.sum() == len(expected)
    assert sum(map(len, reads.values())) == fewest(pairing, rank, len(header), len(states))


def fewest(pairing: Pairing, rank: int, header_bytes: int, state_units: int) -> int:
    """Descriptors that cannot be avoided: walk the local file byte by byte, and begin a new one only where the page of
    either side ends, or where the next byte does not follow on the same remote rank."""
    remote, local = pairing.remote, pairing.local
    unit_bytes = local.state_bytes // max(1, local.state_units)
    needed, previous = 0, None
    for at in range(header_bytes + local.state_bytes):
        if at < header_bytes:
            owner, offset = rank * remote.tp_size // local.tp_size, at
        else:
            place, inside = divmod(at - header_bytes, unit_bytes)
            unit = units_of(state_units, local.tp_size, rank)[place]
            holders = [r for r in range(remote.tp_size) if unit in units_of(state_units, remote.tp_size, r)]
            owner = min(holders, key=lambda r: abs(r - rank * remote.tp_size // local.tp_size))
            place = units_of(state_units, remote.tp_size, owner).index(unit)
            offset = header_bytes + place * unit_bytes + inside
        follows = previous == (owner, offset - 1) and offset % remote.page_bytes and at % local.page_bytes
        needed += not follows
        previous = (owner, offset)
    return needed


@pytest.mark.parametrize(("state_units", "remote_tp", "local_tp"), UNITS_AND_SIZES)
def test_every_byte_of_a_checkpoint_arrives_once_in_the_fewest_pieces(remote_tp, local_tp, state_units) -> None:
    rng = np.random.default_rng(0)
    for header, unit_bytes, blocks in itertools.product(
        (0, 7, 96, 130), (1, 50, 96, 333), ((16, 16), (16, 64), (128, 32))
    ):
        head, states = rng.integers(0, 254, header, np.uint8), rng.integers(0, 254, (state_units, unit_bytes), np.uint8)
        remote, local = (
            geometry(tp, block, 4, state_units, header, unit_bytes)
            for tp, block in zip((remote_tp, local_tp), blocks, strict=True)
        )
        for rank in range(local_tp):
            check_file(pair(model(4, state_units), remote, local, rank), rank, head, states)


def test_a_model_without_recurrent_state_moves_its_header() -> None:
    side = CacheLayout(16, RUNS * 16 * ROW, 1, full(16), 200, 0, 0)
    pairing = pair(model(state_units=0), side, side, 0)
    check_file(pairing, 0, np.arange(200, dtype=np.uint8), np.zeros((0, 1), np.uint8))


def test_a_model_without_attention_has_no_pages_to_move() -> None:
    sides = [CacheLayout(block, 64, 1, (), 7, 50 * 4 // tp, 4 // tp, tp_size=tp) for block, tp in ((16, 1), (24, 2))]
    pairing = pair(ModelUnits((), 4), *sides, 1)
    assert not pairing.groups
    rng = np.random.default_rng(0)
    check_file(pairing, 1, rng.integers(0, 254, 7, np.uint8), rng.integers(0, 254, (4, 50), np.uint8))


def test_nothing_to_move_is_no_read() -> None:
    empty = np.empty(0, np.int32)
    for block in (16, 64):
        pairing = pair(model(), geometry(1), geometry(1, block), 0)
        assert page_reads(pairing, 40, 40, empty, empty) == page_reads(pairing, 64, 64, empty, empty) == {}


# -- which ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("remote_tp", "local_tp"), TP_PAIRS)
@pytest.mark.parametrize(("kv_heads", "state_units"), list(itertools.product(UNITS, UNITS)))
def test_as_few_ranks_as_hold_it_and_the_load_spread_evenly(remote_tp, local_tp, kv_heads, state_units) -> None:
    remote, local = (geometry(tp, 16, kv_heads, state_units) for tp in (remote_tp, local_tp))
    units = model(kv_heads, state_units)
    pairings = [pair(units, remote, local, rank) for rank in range(local_tp)]
    file_pages = [shuffled(-(-(7 + side.state_bytes) // side.page_bytes), 99, 0) for side in (remote, local)]
    load = dict.fromkeys(range(remote_tp), 0)
    for rank, pairing in enumerate(pairings):
        page = page_reads(pairing, 0, 16, np.zeros(1, np.int32), np.zeros(1, np.int32))
        file = state_reads(pairing, *file_pages)
        for reads, total in ((page, kv_heads), (file, state_units)):
            own = set(units_of(total, local_tp, rank))
            spans = [set(units_of(total, remote_tp, other)) for other in reads]
            assert set.union(*spans) >= own
            assert len(reads) == min(len(own), max(1, remote_tp // local_tp)) or total < remote_tp
            assert len(reads) <= len(own) and all(own & span for span in spans)
        for other, reads in page.items():
            load[other] += int(reads.num_bytes.sum())
    if kv_heads >= remote_tp or local_tp >= remote_tp:
        assert len(set(load.values())) == 1, "a remote rank serves more than another"


# -- everything at once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_random_pairs_move_pages_and_checkpoint(seed: int) -> None:
    rng = random.Random(seed)
    kv_heads, state_units = rng.choice(UNITS), rng.choice(UNITS)
    header, unit_bytes = rng.randrange(300), rng.randrange(1, 400)
    remote, local = (
        geometry(rng.choice(SIZES), rng.choice(ANY_BLOCKS), kv_heads, state_units, header, unit_bytes) for _ in range(2)
    )
    start = rng.randrange(300)
    end = rng.randrange(start, 400)
    values, noise = key_values(kv_heads, 400, seed), np.random.default_rng(seed)
    head, states = noise.integers(0, 254, header, np.uint8), noise.integers(0, 254, (state_units, unit_bytes), np.uint8)
    for rank in range(local.tp_size):
        pairing = pair(model(kv_heads, state_units), remote, local, rank)
        check_pages(pairing, rank, values, start, end)
        check_file(pairing, rank, head, states)


def test_no_range_leaves_its_page() -> None:
    for (remote_tp, local_tp), (remote_block, local_block) in itertools.product(TP_PAIRS, ((16, 128), (128, 16))):
        remote, local = (
            geometry(tp, block, 8, 8, 130, 999) for tp, block in ((remote_tp, remote_block), (local_tp, local_block))
        )
        pairing = pair(model(8, 8), remote, local, local_tp - 1)
        local_pages = np.arange(1024 // local_block) + 5
        reads = page_reads(pairing, 0, 1024, shuffled(1024 // remote_block, 64, 0), local_pages)
        for found in reads.values():
            assert (found.remote_offset + found.num_bytes <= remote.page_bytes).all()
            assert (found.local_offset + found.num_bytes <= local.page_bytes).all()
            assert found.local_page.min() >= 5 and found.local_page.max() < 5 + len(local_pages)


# -- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "remote", "local", "rank", "words"),
    [
        (model(6), geometry(4, kv_heads=4), geometry(1, kv_heads=6), 0, "--tensor-parallel-size 4 and 6 kv heads"),
        (model(3), geometry(1, kv_heads=3), geometry(2, kv_heads=3), 0, "--tensor-parallel-size 2 and 3 kv heads"),
        (model(1, 6), geometry(1, state_units=6), geometry(4, state_units=6), 0, "and 6 state units"),
        (model(4), geometry(2, kv_heads=4), geometry(2, kv_heads=2), 0, "the own pages have 1 kv heads"),
        (model(4), geometry(2, kv_heads=8), geometry(2, kv_heads=4), 0, "the peer's pages have 4 kv heads"),
        (model(1, 4), geometry(1, state_units=2), geometry(1, state_units=4), 0, "the peer's checkpoints have 2 units"),
        (model(), geometry(1, header=8), geometry(1), 0, "header_bytes: 8 at the peer, 7 here"),
        (
            model(),
            replace(geometry(1), checkpoint_dtype="float16"),
            geometry(1),
            0,
            "checkpoint_dtype: float16 at the peer, float32 here; start both with the same --checkpoint-dtype",
        ),
        (model(), geometry(1, unit_bytes=8), geometry(1, unit_bytes=9), 0, "bytes of a state unit: 8 at the peer, 9"),
        (model(), geometry(1), geometry(2), 2, "rank 2 is none of the 2"),
        (
            model(),
            CacheLayout(16, 192, 1, full(16), 7, 50, 1),
            geometry(1),
            0,
            "the peer's pages have 1 kv heads in 192 bytes",
        ),
        (
            model(),
            CacheLayout(16, 102, 1, full(16), 7, 50, 1),
            geometry(1),
            0,
            "the peer's pages have 1 kv heads in 102 bytes",
        ),
        (
            ModelUnits((), 1),
            CacheLayout(16, 1, 1, full(16), 7, 50, 1),
            geometry(1),
            0,
            "page_bytes of a model without attention: 1 ",
        ),
        (model(state_units=0), geometry(1), geometry(1), 0, "the peer's checkpoints have 1 units in 50 bytes"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(units, remote, local, rank, words) -> None:
    with pytest.raises(ConfigError, match=words):
        pair(units, remote, local, rank)


def test_other_attention_groups_are_refused_by_name() -> None:
    both = (*full(16), AttentionGroup("window", 16, 64))
    two, one = (CacheLayout(16, 96, 1, groups, 7, 50, 1) for groups in (both, full(16)))
    units = ModelUnits((AttentionUnits(1, LAYERS, ROW),) * 2, 1)
    assert len(pair(units, two, two, 0).groups) == 2
    chunked = replace(two, groups=(two.groups[0], replace(two.groups[1], chunked=True)))
    for remote, words in ((one, "full at the peer, full, window of 64 here"), (chunked, "full, chunk of 64 at the")):
        with pytest.raises(ConfigError, match=words):
            pair(units, remote, two, 0)
    with pytest.raises(ConfigError, match="2 attention groups, the model has 1"):
        pair(model(), two, two, 0)


def test_lists_of_the_wrong_length_are_refused() -> None:
    equal, unequal = (pair(model(), geometry(1), geometry(1, block), 0) for block in (16, 64))
    two, three = np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32)
    for pairing, start, end, remote, local, words in (
        (equal, 10, 40, two, three, "remote_pages lists 2 pages, tokens \\[10, 40\\) take 3"),
        (equal, 10, 40, three, two, "local_pages lists 2 pages"),
        (unequal, 0, 64, np.arange(4, dtype=np.int32), three, "local_pages lists 3 pages, tokens \\[0, 64\\) take 1"),
        (unequal, 0, 64, three, three[:1], "remote_pages lists 3 pages"),
        (equal, 40, 10, two, two, "are no range"),
    ):
        with pytest.raises(LinkError, match=words):
            page_reads(pairing, start, end, remote, local)
    with pytest.raises(LinkError, match="remote_state lists 2 pages, a checkpoint takes 1"):
        state_reads(equal, two, two[:1])
    with pytest.raises(LinkError, match="local_state lists 3 pages, a checkpoint takes 1"):
        state_reads(equal, two[:1], three)


# -- orders ------------------------------------------------------------------------------------------------------------


def order_from(remote: CacheLayout, *, ranks=None, local_pages: int = 25) -> ReadOrder:
    """Of 400 tokens, for a server with blocks of 16."""
    pairing = Pairing(0, remote, geometry(1), (), np.zeros((4, 0), np.int64))
    lists = np.arange(-(-400 // remote.block_size)), np.arange(local_pages)
    read = order(pairing, 0, 400, lists)
    return read if ranks is None else msgspec.structs.replace(read, peer=Peer("p", remote, ranks))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"remote": geometry(1, 64, header=8)}, "header_bytes: 8 at the peer, 7 here"),
        ({"remote": geometry(1, 64), "local_pages": 24}, "local_pages lists 24 pages"),
        ({"remote": geometry(2, 16), "local_pages": 24}, "local_pages lists 24 pages"),
        ({"remote": geometry(2, 64), "ranks": (b"r0",)}, "the peer describes 1 ranks and has 2"),
        ({"remote": geometry(1, 64), "ranks": ()}, "the peer describes 0 ranks and has 1"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_in_words(changed, why) -> None:
    plan = PairedPages(model(), geometry(1), 0)
    with pytest.raises(LinkError, match=why):
        plan(order_from(**changed))


def test_own_sizes_that_cannot_hold_the_model_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="kv heads"):
        PairedPages(model(4), geometry(1), 0)
    with pytest.raises(ConfigError, match="rank 1"):
        PairedPages(model(), geometry(1), 1)


def test_what_follows_from_a_peer_is_worked_out_once_and_forgotten_in_time(monkeypatch) -> None:
    plan, made = PairedPages(model(), geometry(1), 0), []
    monkeypatch.setattr("cairn.transfer.geometry.pair", lambda *args: made.append(args) or pair(*args))
    for _ in range(3):
        plan(order_from(geometry(1, 64)))
    assert len(made) == 1
    for tp_size in range(2, 100):
        plan(order_from(geometry(tp_size, 64)))
    plan(order_from(geometry(1, 64)))
    assert len(made) == 1 + 98 + 1 and plan._pairing.cache_info().currsize == 64
