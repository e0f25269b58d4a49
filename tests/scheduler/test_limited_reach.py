"""Attention of limited reach: what sequences hold of it, what hits, and what goes when room is needed."""

import numpy as np
import pytest
from driver import Driver, alone
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cache.audit import audit
from cairn.cache.layout import AttentionGroup
from cairn.cache.tree_store import pages_freed

WINDOW = AttentionGroup("window", 16, 128)
LONG = tuple(np.random.default_rng(0).integers(0, 50, 32_000).tolist())


@given(position=st.integers(0, 500), reach=st.integers(1, 80), size=st.integers(1, 20), chunked=st.booleans())
def test_what_is_needed_is_what_a_token_sees_besides_itself(position, reach, size, chunked):
    group = AttentionGroup("limited", size, reach, chunked)
    seen = [
        token
        for token in range(position)
        if (token // reach == position // reach if chunked else position - token < reach)
    ]
    assert list(range(group.needed_at(position), position)) == seen
    assert group.retained_pages(0, position) == len({token // size for token in seen})


def held(driver: Driver, request) -> int:
    """Pages of the window's group that a running request holds."""
    return len(request.sequence.tables[1].pages)


@pytest.mark.parametrize("length", [4_000, pytest.param(32_000, marks=pytest.mark.more)])
def test_a_long_context_holds_its_window_alone(length):
    """In a pool that has room for it and for little else."""
    num_pages = length // 16 + 100
    driver = Driver(num_pages=num_pages, limited=(WINDOW,), max_num_batched_tokens=512, max_model_len=40_000)
    request = driver.requests[driver.submit(LONG[:length], 40)]
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        if request.sequence is not None and request.num_computed == request.num_scheduled:
            most = max(most, held(driver, request))
    assert 8 <= most <= 128 // 16 + 2
    assert request.output == alone(LONG[:length], False, max_tokens=40, limited=(WINDOW,))
    assert driver.cache.clear()


def test_tables_have_entries_of_pages_that_are_gone():
    """Many more than there are pages, where those of windows hold few tokens."""
    narrow = AttentionGroup("window", 2, 20)
    driver = Driver(num_pages=500, limited=(narrow,), max_num_batched_tokens=128, max_in_flight=1, max_model_len=4_000)
    request = driver.ask(LONG[:3_000])
    assert request.output == alone(LONG[:3_000], False, max_tokens=4, limited=(narrow,))


@pytest.mark.parametrize("num_pages", [2_000, 260])
def test_sharing_that_nobody_announced_is_hit_as_without_windows(num_pages):
    """While memory is idle, and in a full pool."""
    prompt, other = LONG[:1500], LONG[2000:2700]
    hits = []
    for limited in ((), (WINDOW,)):
        driver = Driver(num_pages=num_pages * (1 + len(limited)), limited=limited)
        requests = [driver.ask(prompt[:1000] + other[begin : begin + 300]) for begin in (0, 300, 400)]
        hits.append([request.stats.first_sequence.hit for request in requests])
        for request, begin in zip(requests, (0, 300, 400), strict=True):
            asked = prompt[:1000] + other[begin : begin + 300]
            assert request.output == alone(asked, False, max_tokens=4, limited=limited)
    assert hits[0] == hits[1] and hits[1][2] >= 936


def test_without_recurrent_layers_hits_are_to_the_token():
    driver = Driver(limited=(WINDOW,), pages_per_checkpoint=0)
    driver.ask(LONG[:1000])
    for shared in (999, 778, 200, 129, 128, 127, 17, 1):
        request = driver.ask((*LONG[:shared], 50, *LONG[5000:5040]))
        assert request.stats.first_sequence.hit == shared


def test_a_dense_grid_within_a_window_costs_no_page_twice():
    """Checkpoints at each 16 tokens, of which a window of 1,024 spans 64."""
    wide = AttentionGroup("window", 16, 1024)
    driver = Driver("all", num_pages=3_000, limited=(wide,), max_num_batched_tokens=512, max_model_len=8_000)
    driver.ask(LONG[:2048], max_tokens=1)
    cache = driver.cache
    assert len(cache.checkpoints.queue) == 128
    pages = np.concatenate([node.pages[1].pages for node in cache.tree.nodes()])
    assert len(pages) == len(np.unique(pages)) == 2048 // 16
    # all that no checkpoint needs may go, and nothing of the others has to: they are next to one another
    while cache.tree.trimmable:
        cache.tree._trim(cache.tree.trimmable.popitem(last=False)[0])
    assert sum(len(node.pages[1].pages) for node in cache.tree.nodes()) == 2048 // 16


def test_windows_go_with_their_checkpoints():
    """Far from one another each has pages of its own, and the last one gives them all back."""
    driver = Driver("junction", num_pages=4_000, limited=(WINDOW,), max_num_batched_tokens=512, max_model_len=40_000)
    for begin in range(0, 20_000, 2_000):
        driver.ask(LONG[begin : begin + 1_000])
    cache = driver.cache
    count = len(cache.checkpoints.queue)
    assert count >= 10
    while cache.tree.trimmable:
        cache.tree._trim(cache.tree.trimmable.popitem(last=False)[0])
    kept = sum(len(node.pages[1].pages) for node in cache.tree.nodes())
    assert kept <= count * 9
    for left in range(count - 1, -1, -1):
        cache.checkpoints._drop(cache.checkpoints.queue.pop())
        cache.tree.drop_unneeded(cache.pool.num_pages)
        assert sum(len(node.pages[1].pages) for node in cache.tree.nodes() if node.pages) <= left * 9
    assert cache.pool.num_free == cache.pool.num_pages


@settings(max_examples=25, deadline=None)
@given(
    kept=st.sets(st.integers(1, 40).map(lambda block: 16 * block), min_size=2, max_size=12),
    order=st.randoms(use_true_random=False),
    reach=st.sampled_from([20, 128, 300]),
    chunked=st.booleans(),
)
def test_no_window_is_priceless_in_any_order(kept, order, reach, chunked):
    """A chain of checkpoints within one another's windows, or single ones: dropping one never seems to give much less
    than it gives, and the last one gives back what is left."""
    limited = (AttentionGroup("limited", 16, reach, chunked), AttentionGroup("narrow", 16, 40))
    driver = Driver("all", num_pages=600, limited=limited, max_num_batched_tokens=512)
    driver.ask(LONG[:640], max_tokens=1)
    cache, store = driver.cache, driver.cache.checkpoints

    def drop(checkpoint) -> int:
        """The pages that it gives."""
        before = cache.pool.num_free
        store.queue.remove(checkpoint)
        store._drop(checkpoint)
        while cache.tree.trimmable:
            cache.tree._trim(cache.tree.trimmable.popitem(last=False)[0])
        cache.tree.drop_unneeded(cache.pool.num_pages)
        audit(cache)
        return cache.pool.num_free - before

    there = {checkpoint.position: checkpoint for checkpoint in store.queue}
    for position in sorted(there.keys() - kept):
        drop(there[position])
    positions = sorted(kept)
    order.shuffle(positions)
    for position in positions:
        expected, whole = pages_freed(cache.layout, there[position]), cache.layout.window_pages(0, position)
        freed = drop(there[position])
        assert 2 * expected >= freed and 2 * (expected - 3) >= whole
    assert cache.pool.num_free == cache.pool.num_pages
