"""Which replica has which block: events, routed prompts, age and bounds."""

import pytest

from cairn.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from cairn.routing.index import PrefixIndex

PROMPT = list(range(100, 120))


def stored(*hashes, parent=None):
    return BlockStored(tuple(hashes), parent, tuple(range(4 * len(hashes))), 4, "")


def index_of(max_blocks=1000, **prompts):
    """An index in which each replica has announced so many blocks of PROMPT."""
    index = PrefixIndex(max_blocks, routed_seconds=60)
    for replica, num_blocks in prompts.items():
        index.apply(replica, stored(*PROMPT[:num_blocks]))
    index.audit()
    return index


def test_each_replica_has_its_leading_blocks():
    index = index_of(a=20, b=3, c=1, d=0, e=3)
    assert index.matched_blocks(PROMPT) == {"a": 20, "b": 3, "c": 1, "e": 3}
    assert index.matched_blocks(PROMPT[:2]) == {"a": 2, "b": 2, "c": 1, "e": 2}
    assert index.matched_blocks([]) == index.matched_blocks([7]) == {}
    assert index.matched_blocks([*PROMPT[:4], 1, 2, 3]) == {"a": 4, "b": 3, "c": 1, "e": 3}
    assert [index.matched_by(name, PROMPT) for name in "abcdx"] == [20, 3, 1, 0, 0]


@pytest.mark.parametrize("num_blocks", range(21))
def test_every_depth_is_found(num_blocks):
    index = index_of(a=num_blocks, b=20 - num_blocks)
    assert index.matched_by("a", PROMPT) == num_blocks
    assert index.matched_blocks(PROMPT).get("b", 0) == 20 - num_blocks


@pytest.mark.parametrize("resolution", [2, 5, 40])
def test_a_coarse_look_misses_fewer_blocks_than_its_resolution(resolution):
    for num_blocks in range(21):
        index = index_of(a=num_blocks, b=7)
        found = dict.fromkeys("ab", 0)
        for matched, mask in index.matched_masks(PROMPT, resolution):
            found |= {name: matched for name in index.replicas if mask >> index.number(name) & 1}
        assert num_blocks - resolution < found["a"] <= num_blocks and 7 - resolution < found["b"] <= 7


def test_removed_blocks_are_gone_for_that_replica_alone():
    index = index_of(a=5, b=5)
    index.apply("a", BlockRemoved((104, 103)))
    index.apply("c", BlockRemoved((100, 999)))
    assert index.matched_blocks(PROMPT) == {"a": 3, "b": 5}
    index.apply("b", BlockRemoved(tuple(PROMPT[4::-1])))
    index.apply("a", BlockRemoved((102, 101, 100)))
    index.audit()
    assert index.matched_blocks(PROMPT) == {} and index.num_blocks == 0


def test_a_cleared_replica_starts_anew_and_a_removed_one_is_forgotten():
    index = index_of(a=5, b=5, c=5)
    index.apply("a", AllBlocksCleared())
    index.remove("b")
    index.remove("nobody")
    index.clear("nobody")
    assert index.matched_blocks(PROMPT) == {"c": 5} and set(index.replicas) == {"a", "c"}
    index.apply("a", stored(100))
    index.apply("b", stored(100, 101))
    index.audit()
    assert index.matched_blocks(PROMPT) == {"a": 1, "b": 2, "c": 5}


def test_numbers_of_dead_replicas_are_given_again():
    index = index_of(a=5)
    for _ in range(1000):
        index.apply("b", stored(*PROMPT[:7]))
        index.clear("b")
        assert index.matched_blocks(PROMPT) == {"a": 5}
    index.audit()
    assert max(map(index.number, "ab")) < 100


def test_a_routed_prompt_is_expected_until_it_is_old():
    index = index_of(a=2)
    index.add_routed("b", PROMPT[:6], 1000.0)
    assert index.matched_blocks(PROMPT) == {"a": 2, "b": 6}
    index.add_routed("c", PROMPT[:1], 1059.0)
    assert index.matched_by("b", PROMPT) == 6
    index.add_routed("c", PROMPT[:1], 1119.0)
    assert index.matched_by("b", PROMPT) == 6, "it is not old yet"
    index.add_routed("c", PROMPT[:1], 1180.0)
    assert index.matched_blocks(PROMPT) == {"a": 2, "c": 1}
    index.audit()


def test_a_routed_prompt_that_is_announced_or_routed_again_stays():
    index = PrefixIndex(1000, routed_seconds=60)
    index.add_routed("a", PROMPT[:6], 0.0)
    index.apply("a", stored(*PROMPT[:4]))
    for now in range(0, 1000, 50):
        index.add_routed("b", PROMPT[:5], float(now))
    assert index.matched_blocks(PROMPT) == {"a": 4, "b": 5}


def test_what_is_removed_is_no_longer_expected_either():
    index = PrefixIndex(1000, routed_seconds=60)
    index.add_routed("a", PROMPT[:6], 0.0)
    index.add_routed("a", PROMPT[:6], 61.0)
    index.apply("a", BlockRemoved((105, 104)))
    assert index.matched_blocks(PROMPT) == {"a": 4}


def test_the_index_is_bounded_and_drops_what_nobody_uses():
    index = PrefixIndex(160, routed_seconds=60)
    index.apply("a", stored(*PROMPT))
    for first in range(1000, 3000, 20):
        # the oldest of all, but in use
        index.add_routed("b", PROMPT[:1], 0.0)
        index._used.update(PROMPT)
        index.apply("a", stored(*range(first, first + 20)))
        index.audit()
    assert index.matched_by("a", PROMPT) == 20
    assert index.matched_by("a", range(2980, 3000)) == 20
    assert index.matched_by("a", range(1000, 1020)) == 0


def test_routed_prompts_are_bounded_too():
    index = PrefixIndex(100, routed_seconds=1e9)
    for first in range(0, 10_000, 40):
        index.add_routed("a", range(first, first + 40), 0.0)
        index.audit()
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
