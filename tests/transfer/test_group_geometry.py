"""As `test_geometry`, of models with several attention groups: pages of equal bytes have other numbers of tokens in
each, seldom multiples of one another, and leave something at the ends of their units."""

import itertools
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.errors import ConfigError
from cairn.layers.memory import AttentionSpec
from cairn.models.layer_sizes import CacheSpec
from cairn.transfer.geometry import AttentionUnits, ModelUnits, pair
from cairn.transfer.session import explain_layouts
from cairn.transfer.wire import encode
from tiers import first_of
from transfer.test_geometry import ROW, check_pages, key_values, page_reads

ATTENTION = ((2, 2, None, False), (5, 4, 40, False), (3, 2, 64, True))
"""Of each group the layers, kv heads, reach, and whether it is a chunk."""

SIZES, BLOCKS = (1, 2, 4), (16, 64)
SPANS = ((0, 200), (0, 1), (61, 101), (64, 100), (160, 199), (70, 70))
MODEL = ModelUnits(tuple(AttentionUnits(heads, layers, ROW) for layers, heads, *_ in ATTENTION), 0)


def geometry(tp_size: int, block_size: int) -> CacheLayout:
    """As a model has it, one byte a number."""
    groups = (
        AttentionSpec(layers, max(1, heads // tp_size), ROW, reach, chunked)
        for layers, heads, reach, chunked in ATTENTION
    )
    return CacheSpec(7, None, tuple(groups)).layout(block_size, 1, tp_size=tp_size)


def test_groups_leave_something_and_do_not_divide_one_another():
    sizes = [[group.tokens_per_page for group in geometry(1, block).groups] for block in BLOCKS]
    assert sizes == [[80, 16, 53], [320, 64, 213]]


@pytest.mark.parametrize(
    ("remote_tp", "local_tp", "remote_block", "local_block"),
    first_of(
        [(1, 1, 64, 16), (2, 1, 16, 16), (1, 2, 16, 64), (4, 2, 16, 16), (1, 4, 64, 16)], SIZES, SIZES, *[BLOCKS] * 2
    ),
)
def test_every_byte_of_every_group_arrives_once(remote_tp, local_tp, remote_block, local_block):
    remote, local = geometry(remote_tp, remote_block), geometry(local_tp, local_block)
    for group, (layers, heads, *_) in enumerate(ATTENTION):
        values = key_values(heads, 200, seed=group, runs=2 * layers)
        for rank in range(local_tp):
            pairing = pair(MODEL, remote, local, rank)
            for start, end in SPANS:
                check_pages(pairing, rank, values, start, end, group)


@pytest.mark.parametrize("seed", range(10))
def test_random_spans_of_random_pairs(seed):
    rng = random.Random(seed)
    remote, local = (geometry(rng.choice(SIZES), rng.choice((8, 16, 32, 128))) for _ in range(2))
    group = rng.randrange(3)
    layers, heads, *_ = ATTENTION[group]
    values, start = key_values(heads, 300, seed, 2 * layers), rng.randrange(299)
    for rank in range(local.tp_size):
        check_pages(pair(MODEL, remote, local, rank), rank, values, start, rng.randrange(start, 300), group)


def test_a_peer_whose_pages_cannot_be_those_is_refused():
    side = geometry(1, 16)
    for tokens in (79, 81):
        other = replace(side, groups=(AttentionGroup("full", tokens), *side.groups[1:]))
        with pytest.raises(ConfigError, match=f"the peer's pages have 2 kv heads in .* in 2 layers of {tokens} tokens"):
            pair(MODEL, other, side, 0)


def test_what_differs_is_named_at_the_handshake():
    with_windows, whole = geometry(1, 16), CacheLayout(16, 4000, 2, (AttentionGroup("full", 16),), 7, 0, 0)
    for remote, local, words in (
        (whole, with_windows, "full at the peer, full, window of 40, chunk of 64 here"),
        (with_windows, whole, "full, window of 40, chunk of 64 at the peer, full here"),
    ):
        assert words in explain_layouts(remote, local)


class OldGroup(msgspec.Struct):
    """An attention group, as version 8 reads it."""

    tokens_per_page: int
    reach: int | None = None
    chunked: bool = False


class OldGeometry(msgspec.Struct):
    block_size: int
    page_bytes: int
    page_units: int
    header_bytes: int
    state_bytes: int
    state_units: int
    tp_size: int = 1
    checkpoint_dtype: str = "float32"
    state_dtype: str = "float32"
    groups: tuple[OldGroup, ...] = ()


def test_a_server_says_of_its_groups_what_it_always_said():
    """So that older ones read it."""
    plain = CacheSpec(7, None, (AttentionSpec(2, 2, ROW),)).layout(16, 1, tp_size=2)
    window = CacheSpec(7, None, (AttentionSpec(2, 2, ROW, 40),)).layout(16, 1)
    for side, group, tp_size in ((plain, OldGroup(16), 2), (window, OldGroup(16, 40), 1)):
        read = msgspec.msgpack.decode(encode(side), type=OldGeometry)
        assert read == OldGeometry(16, side.page_bytes, 2, 7, 0, 0, tp_size, groups=(group,))
    assert np.prod([each.page_bytes for each in (plain, window)]) == (2 * 2 * 2 * ROW * 16) ** 2


def test_reads_of_equal_sizes_are_pages_and_nothing_else():
    for tp_size, block in itertools.product(SIZES, BLOCKS):
        side = geometry(tp_size, block)
        for rank in range(tp_size):
            pairing = pair(MODEL, side, side, rank)
            for group, tokens in enumerate(each.tokens_per_page for each in side.groups):
                one = np.zeros(1, np.int32)
                (found,) = page_reads(pairing, 0, tokens, one, one + 1, group).items()
                assert found[0] == rank and (found[1].remote_page, found[1].local_page) == ([0], [1])
                assert (found[1].remote_offset, found[1].local_offset, found[1].num_bytes) == (0, 0, side.page_bytes)
