"""What waits is used for certain: which checkpoints these are, what that is worth, and that it is no lock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import PLAIN
from trees import grown, request

from cairn.cache.audit import audit
from cairn.cache.awaited import MAX_AWAITED, WaitingPrompt
from cairn.cache.eviction import ValuePerByte
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.tree import Node

EXACT = pytest.mark.parametrize("exact", [False, True])


def small_cache(num_pages: int, exact: bool = False, states: bool = True) -> PrefixCache:
    """A checkpoint takes three pages of 16 tokens, or, without states, next to none."""
    layout = CacheLayout(
        block_size=16,
        page_bytes=64,
        page_units=1,
        groups=(AttentionGroup("full", 16),),
        header_bytes=8,
        state_bytes=64 * 3 - 8 if states else 0,
        state_units=1 if states else 0,
    )
    return PrefixCache(layout, num_pages, CachePolicy(placement_for("auto", 16, exact), ValuePerByte(), exact))


def fill(cache: PrefixCache, seed: int, num_prompts: int, tokens: int = 256) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 1000, tokens) for _ in range(num_prompts)]
    for number, prompt in enumerate(prompts):
        request(cache, prompt, PLAIN, f"fill {seed} {number}")
    return prompts


def hit(cache: PrefixCache, prompt: np.ndarray) -> int:
    sequence = cache.lookup(PLAIN, prompt, "probe", probe=True)
    cache.discard(sequence)
    return sequence.hit


def first_token(node: Node) -> int:
    """Of the path that ends with `node`."""
    while node.parent.parent is not None:
        node = node.parent
    return int(node.keys()[0])


@EXACT
def test_what_waits_is_not_evicted_for_prompts_before_it(exact):
    kept, lost = (small_cache(100, exact) for _ in range(2))
    for cache in (kept, lost):
        first, *_ = fill(cache, 1, 3)
        if cache is kept:
            cache.await_hits([WaitingPrompt("waits", PLAIN, first)])
        fill(cache, 2, 8)
        audit(cache)
    assert hit(kept, first) == 256
    assert hit(lost, first) < 256, "nobody was evicted: this tests nothing"


def test_it_is_no_lock():
    cache = small_cache(100)
    first, *_ = fill(cache, 1, 3)
    cache.await_hits([WaitingPrompt("waits", PLAIN, first)])
    assert cache.make_room(100)
    assert hit(cache, first) == 0
    cache.await_hits([WaitingPrompt("waits", PLAIN, first)])  # what it would hit is gone, and so is its root
    audit(cache)


def test_who_waits_no_longer_keeps_nothing():
    cache, plain = small_cache(100), small_cache(100)
    for each in (cache, plain):
        first, *_ = fill(each, 1, 3)
        each.await_hits([WaitingPrompt("waits", PLAIN, first)] if each is cache else [])
        each.await_hits([])
        fill(each, 2, 8)
    assert hit(cache, first) == hit(plain, first)


def test_the_sooner_the_turns_the_likelier_the_use():
    """The most uses per request for waiting until some turn and no longer."""
    cache = small_cache(1000)
    first, second, third = fill(cache, 1, 3)
    waiting = [first, second, second, third, third, third, third, first]
    cache.await_hits(WaitingPrompt(str(number), PLAIN, prompt) for number, prompt in enumerate(waiting))
    chances = {first_token(node): chance for node, chance in cache.policy.eviction.awaited.items()}
    assert all(cache.policy.eviction.chance(node) >= chance for node, chance in cache.policy.eviction.awaited.items())
    assert chances == {int(first[0]): 1.0, int(second[0]): 2 / 3, int(third[0]): 4 / 7}


def test_those_far_behind_do_not_count():
    cache = small_cache(1000)
    first, second = fill(cache, 1, 2)
    waiting = [*[second] * MAX_AWAITED, first]
    cache.await_hits(WaitingPrompt(str(number), PLAIN, prompt) for number, prompt in enumerate(waiting))
    assert [first_token(node) for node in cache.policy.eviction.awaited] == [int(second[0])]


def test_a_hit_that_becomes_longer_while_it_waits():
    cache = small_cache(1000)
    (first,) = fill(cache, 1, 1)
    longer = np.concatenate([first, np.arange(2000, 2200)])
    prompts = [WaitingPrompt("waits", PLAIN, np.concatenate([longer, np.arange(50)]))]
    cache.await_hits(prompts)
    assert [node.end for node in cache.policy.eviction.awaited] == [256]
    request(cache, longer, PLAIN, "in between")
    cache.await_hits(prompts)
    assert [node.end for node in cache.policy.eviction.awaited] == [456]


def test_without_states_the_keys_and_values_of_the_hit_are_kept():
    kept, lost = (small_cache(60, states=False) for _ in range(2))
    for cache in (kept, lost):
        first, *_ = fill(cache, 1, 2)
        question = np.concatenate([first[:200], np.arange(2000, 2040)])
        cache.await_hits([WaitingPrompt("waits", PLAIN, question)] if cache is kept else [])
        fill(cache, 2, 5)
    assert hit(kept, question) == 200
    assert hit(lost, question) == 0, "nobody was evicted: this tests nothing"


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 16), rounds=st.integers(1, 4))
def test_it_is_what_a_lookup_finds(seed, rounds):
    """However the trees have changed since it was asked the last time."""
    rng = np.random.default_rng(seed)
    cache = grown(60, seed=seed % 5)
    paths = []
    for root in cache.tree.roots.values():
        for node in cache.tree.nodes():
            step, parts = node, []
            while step.parent is not None:
                parts.append(step.keys())
                step = step.parent
            if step is root:
                paths.append((cache.tree._names[root], np.concatenate(parts[::-1])))
    chosen = [paths[int(index)] for index in rng.integers(0, len(paths), 30)]
    prompts = [
        WaitingPrompt(str(number), space, np.concatenate([keys, rng.integers(0, 1000, int(rng.integers(1, 40)))]))
        for number, (space, keys) in enumerate(chosen)
    ]
    for number in range(rounds):
        cache.await_hits(prompts)
        for prompt in prompts:
            sequence = cache.lookup(prompt.namespace, prompt.keys, "probe", probe=True)
            cache.discard(sequence)
            node = cache._awaited.nodes.get(prompt.request_id)
            assert sequence.hit == (0 if node is None else node.end)
        cache.make_room(int(rng.integers(1, cache.pool.num_pages)))
        for again in rng.integers(0, len(prompts), 3):
            prompt = prompts[int(again)]
            if len(prompt.keys) < cache.layout.block_size * cache.pool.num_pages // 2:
                request(cache, prompt.keys, prompt.namespace, f"again {number} {again}")
        audit(cache)
