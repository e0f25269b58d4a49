"""Every pair of tensor-parallel sizes and of block sizes, from an offer to the last byte on every rank."""

import itertools

import numpy as np
import pytest

from cairn.transfer.contract import LeaseEnded, PagesFree, PullEnded
from transfer.ranked_world import CANARY, World, leased_spec_of, offer_of
from transfer.world import keys

SIZES, BLOCKS = (1, 2, 4), (16, 32, 64, 128)
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 400)


def hand_over(world, num_tokens, start, *, seed=0):
    """P hands a prompt over, D has the first `start` tokens. Checks every byte of D's memory."""
    p, d, content, prompt = world.p, world.d, world.content(num_tokens, seed), keys(num_tokens, seed)
    taken = world.some_pages(p, p.pages_of(num_tokens) + p.pages_per_file)
    pages, file = taken[p.pages_per_file :], taken[: p.pages_per_file]
    reference = p.door.offer(offer_of(p, content, prompt, pages, {num_tokens: file}))
    lacking = d.pages_of(num_tokens) - start // d.geometry.block_size if start < num_tokens else 0
    own = world.some_pages(d, lacking + d.pages_per_file)
    local, own_file = own[d.pages_per_file :], own[: d.pages_per_file]
    pull = d.door.pull(leased_spec_of(reference, p, prompt, local, start=start, checkpoint=own_file))
    events = world.run(400, until=2)
    assert events["d"] == [PullEnded(pull, None, num_tokens, num_tokens), PagesFree(pull)]
    assert events["p"] + p.turn() == [LeaseEnded(reference, "confirmed")]
    direct = p.geometry.block_size == d.geometry.block_size
    for rank in d.ranks:
        rank.check_tokens(content, start, num_tokens, local, only_these=not direct)
        rank.check_file(content, num_tokens, own_file)
        untouched = np.setdiff1d(np.arange(rank.num_pages), own)
        assert (rank.memory[untouched] == CANARY).all(), "a page of somebody else was written"
        assert rank.link.num_open == len(rank.worker._reads) == 0
        assert once(rank, own).max(initial=0) <= 1
        rank.memory[:] = CANARY
        rank.link.moved.clear()
    assert len(d.worker._reads) == 0 and p.door.is_idle and d.door.is_idle


def once(rank, own):
    """How often each byte of the own pages was written by the link."""
    written = np.zeros((len(rank.memory), rank.geometry.page_bytes), np.int64)
    for move in rank.link.moved:
        written[move.local_page, move.local_offset : move.local_offset + move.num_bytes] += 1
    return written[own]


def starts(num_tokens, block):
    """Cold; warm by some blocks, by all but the last, and wholly."""
    return sorted({0, block, num_tokens // 2 // block * block, (num_tokens - 1) // block * block, num_tokens})


def all_cases(p_tp, d_tp, p_block, d_block):
    for num_tokens in LENGTHS:
        for start in starts(num_tokens, d_block):
            if start <= num_tokens:
                yield num_tokens, start


TP_PAIRS = [*itertools.product(SIZES, SIZES)]
BLOCK_PAIRS = [*itertools.product(BLOCKS, BLOCKS)]


@pytest.mark.parametrize(("p_tp", "d_tp"), TP_PAIRS)
def test_a_sample_of_all_pairs_arrives_whole(p_tp, d_tp):
    """Each pair of numbers of ranks with some pairs of block sizes, so that every pair of those is there."""
    at = TP_PAIRS.index((p_tp, d_tp))
    for p_block, d_block in [*BLOCK_PAIRS[at::9], BLOCK_PAIRS[-1 - at]]:
        world = World((p_tp, p_block), (d_tp, d_block), kv_heads=2, seed=at, descriptors_per_poll=7 + 200 * (at % 3))
        for num_tokens, start in ((1, 0), (17, 16 if d_block == 16 else 0), (129, 128), (400, d_block)):
            hand_over(world, num_tokens, start, seed=at)


@pytest.mark.long
@pytest.mark.parametrize(("p_block", "d_block"), BLOCK_PAIRS)
@pytest.mark.parametrize(("p_tp", "d_tp"), TP_PAIRS)
def test_every_pair_every_length_every_byte(p_tp, d_tp, p_block, d_block):
    for kv_heads, state_units in ((1, 2), (4, 4), (2, 8)):
        world = World((p_tp, p_block), (d_tp, d_block), kv_heads=kv_heads, state_units=state_units)
        for num_tokens, start in all_cases(p_tp, d_tp, p_block, d_block):
            hand_over(world, num_tokens, start, seed=num_tokens)


@pytest.mark.parametrize(("p", "d"), [((1, 16), (1, 16)), ((2, 64), (2, 64)), ((4, 128), (4, 128))])
def test_equal_sizes_move_whole_pages(p, d):
    world = World(p, d)
    content, prompt = world.content(400), keys(400)
    count, k = world.p.pages_of(400), world.p.pages_per_file
    reference = world.p.door.offer(offer_of(world.p, content, prompt, range(count), {400: range(count, count + k)}))
    world.d.door.pull(leased_spec_of(reference, world.p, prompt, range(count), checkpoint=range(count, count + k)))
    world.run(20)
    for rank in world.d.ranks:
        assert len(rank.link.moved) == count + k
        assert {(move.local_offset, move.remote_offset) for move in rank.link.moved} == {(0, 0)}
        assert {move.num_bytes for move in rank.link.moved} == {rank.geometry.page_bytes}
        rank.check_tokens(content, 0, 400, range(count), only_these=False)
        rank.check_file(content, 400, range(count, count + k))
