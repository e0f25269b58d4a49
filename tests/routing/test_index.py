"""Which replica has which block: events, routed prompts, age and bounds."""

import random

import pytest

from cairn.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from cairn.routing.index import PrefixIndex
from routing.index_audit import audit

PROMPT = list(range(100, 120))


def stored(*hashes, parent=None):
    return BlockStored(tuple(hashes), parent, tuple(range(4 * len(hashes))), 4, "")


def index_of(max_blocks=1000, **prompts):
    """An index in which each replica has announced so many blocks of PROMPT."""
    index = PrefixIndex(max_blocks, routed_seconds=60)
    for replica, num_blocks in prompts.items():
        index.apply(replica, stored(*PROMPT[:num_blocks]))
    audit(index)
    return index


def matched(index, prompt, resolution=1):
    """How many leading blocks each replica has, as the rule asks for them; those that have none are left out."""
    found = {}
    for num_blocks, mask in index.matched_masks(prompt, resolution):
        found |= {name: num_blocks for name in index.replicas if mask >> index.number(name) & 1}
    return found


def test_each_replica_has_its_leading_blocks():
    index = index_of(a=20, b=3, c=1, d=0, e=3)
    assert matched(index, PROMPT) == {"a": 20, "b": 3, "c": 1, "e": 3}
    assert matched(index, PROMPT[:2]) == {"a": 2, "b": 2, "c": 1, "e": 2}
    assert matched(index, []) == matched(index, [7]) == {}
    assert matched(index, [*PROMPT[:4], 1, 2, 3]) == {"a": 4, "b": 3, "c": 1, "e": 3}
    assert [index.matched_by(name, PROMPT) for name in "abcdx"] == [20, 3, 1, 0, 0]


@pytest.mark.parametrize("num_blocks", range(21))
def test_every_depth_is_found(num_blocks):
    index = index_of(a=num_blocks, b=20 - num_blocks)
    assert index.matched_by("a", PROMPT) == num_blocks
    assert matched(index, PROMPT).get("b", 0) == 20 - num_blocks


@pytest.mark.parametrize("resolution", [2, 5, 40])
def test_a_coarse_look_misses_fewer_blocks_than_its_resolution(resolution):
    for num_blocks in range(21):
        index = index_of(a=num_blocks, b=7)
        found = dict.fromkeys("ab", 0) | matched(index, PROMPT, resolution)
        assert num_blocks - resolution < found["a"] <= num_blocks and 7 - resolution < found["b"] <= 7


def test_removed_blocks_are_gone_for_that_replica_alone():
    index = index_of(a=5, b=5)
    index.apply("a", BlockRemoved((104, 103)))
    index.apply("c", BlockRemoved((100, 999)))
    assert matched(index, PROMPT) == {"a": 3, "b": 5}
    index.apply("b", BlockRemoved(tuple(PROMPT[4::-1])))
    index.apply("a", BlockRemoved((102, 101, 100)))
    audit(index)
    assert matched(index, PROMPT) == {} and index.num_blocks == 0


def test_a_cleared_replica_starts_anew_and_a_removed_one_is_forgotten():
    index = index_of(a=5, b=5, c=5)
    index.apply("a", AllBlocksCleared())
    index.remove("b")
    index.remove("nobody")
    index.clear("nobody")
    assert matched(index, PROMPT) == {"c": 5} and set(index.replicas) == {"a", "c"}
    index.apply("a", stored(100))
    index.apply("b", stored(100, 101))
    audit(index)
    assert matched(index, PROMPT) == {"a": 1, "b": 2, "c": 5}


def test_numbers_of_dead_replicas_are_given_again():
    index = index_of(a=5)
    for _ in range(1000):
        index.apply("b", stored(*PROMPT[:7]))
        index.clear("b")
        assert matched(index, PROMPT) == {"a": 5}
    audit(index)
    assert max(map(index.number, "ab")) < 100


def test_a_routed_prompt_is_expected_until_it_is_old():
    index = index_of(a=2)
    index.add_routed("b", PROMPT[:6], 1000.0)
    assert matched(index, PROMPT) == {"a": 2, "b": 6}
    index.add_routed("c", PROMPT[:1], 1059.0)
    assert index.matched_by("b", PROMPT) == 6
    index.add_routed("c", PROMPT[:1], 1119.0)
    assert index.matched_by("b", PROMPT) == 6, "it is not old yet"
    index.add_routed("c", PROMPT[:1], 1180.0)
    assert matched(index, PROMPT) == {"a": 2, "c": 1}
    audit(index)


def test_a_routed_prompt_that_is_announced_or_routed_again_stays():
    index = PrefixIndex(1000, routed_seconds=60)
    index.add_routed("a", PROMPT[:6], 0.0)
    index.apply("a", stored(*PROMPT[:4]))
    for now in range(0, 1000, 50):
        index.add_routed("b", PROMPT[:5], float(now))
    assert matched(index, PROMPT) == {"a": 4, "b": 5}


def test_what_is_removed_is_no_longer_expected_either():
    index = PrefixIndex(1000, routed_seconds=60)
    index.add_routed("a", PROMPT[:6], 0.0)
    index.add_routed("a", PROMPT[:6], 61.0)
    index.apply("a", BlockRemoved((105, 104)))
    assert matched(index, PROMPT) == {"a": 4}


def test_the_index_is_bounded_and_drops_what_nobody_uses():
    index = PrefixIndex(160, routed_seconds=60)
    index.apply("a", stored(*PROMPT))
    for first in range(1000, 3000, 20):
        # the oldest of all, but in use
        index.add_routed("b", PROMPT[:1], 0.0)
        index._used.update(PROMPT)
        index.apply("a", stored(*range(first, first + 20)))
        audit(index)
    assert index.matched_by("a", PROMPT) == 20
    assert index.matched_by("a", range(2980, 3000)) == 20
    assert index.matched_by("a", range(1000, 1020)) == 0


def test_routed_prompts_are_bounded_too():
    index = PrefixIndex(100, routed_seconds=1e9)
    for first in range(0, 10_000, 40):
        index.add_routed("a", range(first, first + 40), 0.0)
        audit(index)
        assert index.num_blocks <= 100 and index.matched_by("a", range(first, first + 40)) == 40
    index.add_routed("b", range(1000), 0.0)
    assert index.matched_by("b", range(1000)) == 50


def test_it_tells_its_size():
    small, large = PrefixIndex(10_000), PrefixIndex(10_000)
    large.apply("a", stored(*range(5000)))
    assert 0 < small.num_bytes < 2000
    assert 5000 * 60 < large.num_bytes < 5000 * 200


@pytest.mark.parametrize(("max_blocks", "seconds", "name"), [(0, 1, "max_blocks"), (1, 0, "routed_seconds")])
def test_bounds_that_are_none_are_refused(max_blocks, seconds, name):
    with pytest.raises(ValueError, match=name):
        PrefixIndex(max_blocks, seconds)


@pytest.mark.parametrize("sample_every", [0, 3, -2])
def test_a_sample_is_one_of_a_power_of_two(sample_every):
    with pytest.raises(ValueError, match="max_sample_every"):
        PrefixIndex(10, max_sample_every=sample_every)


@pytest.mark.parametrize("resolution", [1, 3, 64])
@pytest.mark.parametrize("sample_every", [2, 8])
def test_a_full_index_knows_each_replica_up_to_the_last_sampled_block_it_has(sample_every, resolution):
    rng = random.Random(sample_every)
    prompt = [rng.getrandbits(64) - (1 << 63) for _ in range(200)]
    sampled = [number for number, block_hash in enumerate(prompt) if block_hash % sample_every == 0]
    index = PrefixIndex(2 * len(sampled), max_sample_every=sample_every)
    depths = {"all": 200, "none": 0} | {f"r{number}": rng.randrange(201) for number in range(20)}
    for name, depth in depths.items():
        index.apply(name, stored(*prompt[: depth // 3]))
        index.apply(name, stored(*prompt[depth // 3 : depth]))
        index.add_routed(name, prompt[: depth // 2], 0.0)
        audit(index)
    assert index.sample_every == sample_every
    found = dict.fromkeys(depths, 0) | matched(index, prompt, resolution)
    looked_at = [*range(resolution - 1, 199, resolution), 199]
    seen = {max((one for one in sampled if one <= place), default=-1) for place in looked_at}
    for name, depth in depths.items():
        assert index.matched_by(name, prompt) == max((one + 1 for one in sampled if one < depth), default=0)
        assert found[name] == max((one + 1 for one in seen if one < depth), default=0)
    for name, depth in depths.items():
        index.apply(name, BlockRemoved(tuple(reversed(prompt[:depth]))))
    audit(index)
    assert index.num_blocks == 0


def test_a_full_index_knows_more_prompts_where_it_samples():
    rng = random.Random(0)
    prompts = [[rng.getrandbits(63) for _ in range(40)] for _ in range(100)]
    coarse, fine = PrefixIndex(800, max_sample_every=8), PrefixIndex(800)
    for index in (coarse, fine):
        for prompt in prompts:
            index.apply("a", stored(*prompt))
            audit(index)
    assert coarse.sample_every == 8
    assert sum(fine.matched_by("a", prompt) > 0 for prompt in prompts) <= 20
    assert sum(coarse.matched_by("a", prompt) > 20 for prompt in prompts) >= 90
