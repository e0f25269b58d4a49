"""What a look at the cache shows: the tree folded to so many paths, with nothing lost and nothing told."""

import dataclasses
import json

import numpy as np
import pytest
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import PLAIN, Simulation
from trees import grown

from cairn.cache.eviction import LeastRecentlyUsed, ValuePerByte
from cairn.cache.journal import Journal, PrefixNames
from cairn.cache.placement import Auto
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace
from cairn.cache.view import PolicyView
from cairn.cache.view_builder import build_view
from cairn.types import ManualClock

SALT = Namespace(cache_salt="a secret of the tenant's")


def simulation(num_pages=400):
    return Simulation.build(num_pages, Auto(), LeastRecentlyUsed())


def run(sim, prompt, namespace=PLAIN):
    request = sim.start("r", tuple(prompt), namespace)
    if request.computed < len(prompt):
        sim.prefill(request, len(prompt))
    sim.finish(request)


def whole(cache, most=500):
    *nothing, view = build_view(cache, most)
    assert nothing and set(nothing) == {None}
    return view


def check_sums(view):
    """What is shown and what is folded is all there is, each once."""
    tree, paths = view.tree, view.paths
    folded = [tree.below, *(path.below for path in paths)]
    assert sum(part.paths for part in folded) + len(paths) == tree.paths
    assert min(min(part.paths, part.tokens, part.bytes, part.checkpoints, part.hits) for part in folded) >= 0
    assert (max(part.paths for part in folded) == 0) == (len(paths) == tree.paths)
    shown = sum(path.end - path.start for path in paths)
    assert shown + sum(part.tokens for part in folded) == tree.tokens
    stones = [stone for path in paths for stone in path.checkpoints]
    counted = len(stones) + sum(path.more.checkpoints for path in paths) + sum(part.checkpoints for part in folded)
    assert counted == tree.checkpoints
    hits = sum(stone.hits for stone in stones) + sum(path.more.hits for path in paths)
    assert hits + sum(part.hits for part in folded) == tree.hits
    for index, path in enumerate(paths):
        assert path.start < path.end and (path.parent is None or path.parent < index)
        assert path.start == (0 if path.parent is None else paths[path.parent].end)
        assert path.children == sum(other.parent == index for other in paths)
        assert [s.position for s in path.checkpoints] == sorted(s.position for s in path.checkpoints)
        assert all(path.start < stone.position <= path.end for stone in path.checkpoints)


def check_parts(pool):
    """Every page of the pool has one place."""
    held = pool.held_by_requests + pool.held_by_transfers + pool.held_by_steps
    assert pool.free_pages + pool.cached_pages + held == pool.pages


def test_a_chain_of_nodes_is_one_path_with_its_cairns():
    sim = simulation()
    run(sim, range(200))
    run(sim, (*range(200), *range(500, 530)))
    view = whole(sim.cache)
    [path] = view.paths
    assert (path.start, path.end, path.parent, path.resident) == (0, 230, None, True)
    assert [stone.position for stone in path.checkpoints] == [64, 128, 192, 200, 230]
    assert [stone.hits for stone in path.checkpoints] == [0, 0, 0, 1, 0]
    assert [stone.saved_tokens for stone in path.checkpoints] == [64, 64, 64, 8, 30]
    assert path.checkpoints[0].probation and not path.checkpoints[3].probation
    assert view.tree.nodes == 5 and view.tree.checkpoints == 5
    check_sums(view)


def test_a_checkpoint_frees_what_the_view_says_it_frees():
    """Also the runs above it that had lost their own checkpoints, down from the next one that is left."""
    sim = simulation()
    run(sim, range(200))
    sim.apply()
    cache = sim.cache
    checkpoints, pool = cache.checkpoints, cache.pool

    def drop(checkpoint):
        checkpoints.queue.remove(checkpoint)
        checkpoints._drop(checkpoint)

    for checkpoint in [c for c in checkpoints.queue if c.position in (128, 192)]:
        drop(checkpoint)
    assert not cache.tree.unreachable
    said = {stone.position: stone.freed_bytes for stone in whole(cache).paths[0].checkpoints}
    free, (last,) = pool.num_free, [c for c in checkpoints.queue if c.position == 200]
    drop(last)
    assert not cache.tree.drop_unneeded(pool.num_pages)
    freed = pool.num_free - free
    size = cache.layout.pages_per_checkpoint
    assert freed == size + cache.layout.pages_for(200) - cache.layout.pages_for(64) > size
    assert said == {64: size * cache.layout.page_bytes, 200: freed * cache.layout.page_bytes}


def test_a_fork_and_a_dropped_run_are_paths_of_their_own():
    sim = simulation()
    run(sim, range(200))
    run(sim, (*range(100), *range(500, 700)))
    view = whole(sim.cache)
    assert [(path.start, path.end, path.parent) for path in view.paths] == [
        (0, 100, None),
        (100, 300, 0),
        (100, 200, 0),
    ]
    check_sums(view)
    sim.apply()
    sim.cache.make_room(400)
    view = whole(sim.cache)
    assert not any(path.resident for path in view.paths) and view.pool.free_pages == 400
    assert view.tree.dropped_tokens == view.tree.tokens == 400 and view.tree.checkpoints == 0
    assert view.tree.dropped_checkpoints > 0


def test_a_path_ends_where_what_follows_was_dropped():
    sim = simulation()
    run(sim, range(200))
    run(sim, (*range(200), *range(500, 700)))
    sim.apply()
    view = whole(sim.cache)
    while all(path.resident for path in view.paths):
        sim.cache.make_room(sim.cache.pool.num_free + 1)
        view = whole(sim.cache)
    assert [path.resident for path in view.paths] == [True, False] and view.paths[1].parent == 0
    assert view.tree.dropped_tokens == view.paths[1].end - view.paths[1].start
    check_sums(view)


def test_the_pool_adds_up_while_requests_run():
    sim = simulation()
    run(sim, range(200))
    writer = sim.start("w", (*range(200), *range(300, 400)))
    sim.prefill(writer, 300)
    pool = whole(sim.cache).pool
    assert pool.open_leases == 1 and pool.held_by_requests > 0 and pool.cached_pages > 0
    held = sim.cache.pinned.num_pages()
    assert pool.pages == pool.free_pages + pool.cached_pages + held == 400
    assert max(path.users for path in whole(sim.cache).paths) == 1
    sim.offer(writer)
    pool = whole(sim.cache).pool
    # the writer still holds what another server is going to read
    assert (pool.open_holds, pool.held_by_transfers, pool.cached_pages) == (1, 0, pool.pages - pool.free_pages - held)
    check_parts(pool)
    sim.end(writer)
    pool = whole(sim.cache).pool
    assert (pool.open_leases, pool.held_by_requests, pool.held_by_transfers) == (0, 0, 75)
    check_parts(pool)


def test_what_answers_to_one_prompt_start_from_is_held_by_requests():
    """Not by other servers, and no page twice."""
    driver = Driver(max_num_seqs=2)
    driver.submit(range(100), max_tokens=9, n=4)
    seen = []
    while driver.scheduler.has_work:
        driver.step()
        pool = whole(driver.cache).pool
        check_parts(pool)
        assert (pool.held_by_transfers, pool.open_holds) == (0, 0)
        seen.append((len(driver.cache.pinned.pins), pool.held_by_requests))
    assert (0, 0) in seen and any(holds and pages for holds, pages in seen)


@pytest.mark.more
def test_many_nodes_are_folded():
    cache = grown(12_000)
    slices = list(build_view(cache, 500))
    view = slices[-1]
    assert view.tree.nodes >= 12_000 and view.tree.paths > 1000 and len(view.paths) == 500
    # no slice looks at more than 1,024 nodes
    assert len(slices) >= view.tree.nodes // 1024
    check_sums(view)
    assert max(len(path.checkpoints) for path in view.paths) <= 8
    assert sum(path.more.checkpoints for path in view.paths) > 0
    assert max(path.below.paths for path in view.paths) > 1
    everything = whole(cache, 5000)
    check_sums(everything)
    names = {path.name for path in everything.paths}
    assert len(names) == everything.tree.paths == view.tree.paths and names > {path.name for path in view.paths}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 40),
)
def test_any_tree_at_any_size(requests, most):
    sim = simulation(200)
    for parts, salted in requests:
        prompt = [token for part in parts for token in range(part * 100, part * 100 + 17 * (part + 1))]
        run(sim, prompt, SALT if salted else PLAIN)
    view = whole(sim.cache, most)
    check_sums(view)
    assert len(view.paths) == min(most, view.tree.paths)


def test_the_tree_may_change_between_slices():
    cache = grown(5000)
    looking = build_view(cache, 300)
    for turn, _view in enumerate(looking):
        if turn % 2:
            cache.clear()
        else:
            lease = cache.lookup(PLAIN, np.arange(turn, turn + 300), "r")
            assert cache.extend(lease, 300) is not None
            cache.commit(lease, 300)
            cache.release(lease)
    assert _view is not None and len(_view.paths) == 300
    for index, path in enumerate(_view.paths):
        assert path.start < path.end and (path.parent is None or path.parent < index)


def test_nothing_is_told_of_texts_tokens_and_salts():
    sim = simulation()
    tokens = [4_611_686_018_427_000_000 + i for i in range(90)]
    run(sim, tokens, SALT)
    run(sim, [*tokens[:70], 1, 2, 3], SALT)
    text = json.dumps(dataclasses.asdict(whole(sim.cache)))
    assert "secret" not in text and "4611686018427" not in text
    view = whole(sim.cache)
    assert {path.namespace for path in view.paths} == {1} and {visit.namespace for visit in view.visits} == {1}


def test_names_are_equal_for_equal_prefixes_only_within_a_process():
    names, same, others = (PrefixNames(key) for key in (b"k", b"k", b"another"))
    assert names.name(0, 5, b"x") == same.name(0, 5, b"x") != others.name(0, 5, b"x")
    assert len({names.name(*what) for what in ((0, 5, b"x"), (1, 5, b"x"), (0, 6, b"x"), (0, 5, b"y"))}) == 4
    assert PrefixNames().name(0, 1, b"") != PrefixNames().name(0, 1, b"")


def test_the_books_of_requests():
    sim = simulation()
    run(sim, range(200))
    sim.clock.advance(25)
    run(sim, (*range(100), *range(500, 600)))
    sim.clock.advance(5)
    view = whole(sim.cache)
    newest, oldest = view.visits
    assert (newest.prompt, newest.hit, newest.matched, newest.reason) == (200, 64, 100, "no_checkpoint")
    assert newest.lost == {"no_checkpoint": 36, "never_seen": 100} and (newest.age, oldest.age) == (5, 30)
    assert [(part.requests, part.prompt, part.hit, part.age) for part in view.history] == [
        (1, 200, 0, 30),
        (1, 200, 64, 10),
    ]
    [lost] = view.lost
    assert (lost.depth, lost.tokens, lost.requests, lost.reason) == (100, 36, 1, "no_checkpoint")
    assert lost.cure == "a breakpoint (cache_control) at token 100"
    # the prefix is the path that ends there
    assert lost.name in {path.name for path in view.paths if path.end == 100}


def test_the_books_are_bounded_and_keep_the_costliest():
    sim, rng = simulation(4000), np.random.default_rng(0)
    journal = Journal(ManualClock())
    sim.cache.journal = journal
    for number in range(700):
        tokens = rng.integers(0, 1 << 40, 300 if number % 50 == 0 else 70)
        lease = sim.cache.lookup(Namespace(cache_salt=str(number)), tokens, "r")
        lease.set_miss_reason(Reason.REMOTE_FAILED)
        journal.record(lease, lease.lost)
        sim.cache.release(lease)
        journal.clock.advance(20)
    assert len(journal.visits) == 200 and len(journal.intervals) == 360
    heaviest = journal.heaviest(1000)
    assert len(heaviest) <= 256 and [p.tokens for p in heaviest[:14]] == [300] * 14 and journal.floor >= 70
    assert heaviest[0].tokens >= heaviest[-1].tokens


@pytest.mark.parametrize("most", [1, 2, 7])
def test_no_more_paths_than_asked_for(most):
    assert len(whole(grown(300), most).paths) == most


def test_it_shows_what_is_kept_for_what_and_what_it_has_earned():
    sim = Simulation.build(400, Auto(), ValuePerByte())
    assert whole(sim.cache).policy == PolicyView(price=None, kinds=[])
    run(sim, range(300))
    run(sim, (*range(200), *range(1000, 1100)))
    run(sim, (*range(300), 1, 2, 3))
    policy, store = whole(sim.cache).policy, sim.cache.checkpoints
    kinds = {row.kind: row for row in policy.kinds}
    assert [*kinds] == ["prompt_end", "junction", "grid"]
    assert (kinds["grid"].used, kinds["grid"].earned_tokens) == (1, 64), (
        "192 tokens, of which 128 were not its own to save"
    )
    assert (kinds["prompt_end"].used, kinds["prompt_end"].earned_tokens) == (1, 44)
    for row in policy.kinds:
        assert row.present == row.taken == sum(each.kind == row.kind for each in store.queue) and row.evicted == 0
    assert all(row.expected_tokens > 0 for row in policy.kinds)
    assert policy.price == pytest.approx(1000 * store.queue.price() * (1 << 20), abs=0.01)


def test_second_sightings_are_counted():
    sim = Simulation.build(400, Auto(), ValuePerByte())
    counters = sim.cache.counters
    run(sim, range(300))
    run(sim, (*range(30), *range(5000, 5100)))
    assert counters.second_shared == 0, "too short for a checkpoint of the grid"
    run(sim, (*range(200), *range(1000, 1100)))
    assert (counters.second_shared, counters.second_hits) == (200, 192)
    run(sim, (*range(200), *range(2000, 2100)))
    assert counters.second_shared == 200, "the third"
