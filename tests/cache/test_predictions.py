"""Checkpoints where later prompts are likely to diverge: which are taken when, and what they are worth."""

from itertools import islice

import numpy as np
import pytest
from simulation import PLAIN, small_layout
from test_learning import chain, dropped, learner, used

from cairn.cache.audit import audit
from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.divergence import MAX_DIVERGENCES, DivergenceStats
from cairn.cache.eviction import DISCOUNT, LeastRecentlyUsed, ValuePerByte
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.tree import Checkpoint
from cairn.types import Boundary, ManualClock

LENGTH = 640


def prompt(number, shared=0, other=0):
    """Tokens of a prompt of its own, the first `shared` of them those of prompt `other`."""
    return (*range(10_000 * other, 10_000 * other + shared), *range(10_000 * number + shared, 10_000 * number + LENGTH))


def run(cache, keys):
    """One request, computed in one step; returns what its lookup found."""
    lease = cache.lookup(PLAIN, np.array(keys), "r")
    assert cache.extend(lease, len(keys)) is not None
    cache.begin_request(lease)
    wanted = cache.policy.placement.in_prefill(cache.prompt_facts(lease, len(keys)), lease.hit, len(keys))
    kept = [want.position for want in wanted if cache.reserve_checkpoint(lease, want) is not None]
    cache.pin_until(1, lease)
    cache.commit(lease, len(keys), kept)
    cache.release_step(1)
    cache.release(lease)
    return lease


def small_cache(num_files, eviction=None):
    """A pool for three prompts of `LENGTH` tokens and so many checkpoints, each as large as 160 tokens."""
    layout = small_layout(state_bytes=40 * 64 - 8)
    policy = CachePolicy(Auto(), eviction or ValuePerByte())
    return PrefixCache(layout, 3 * LENGTH // 4 + 40 * num_files, policy, clock=ManualClock())


def kept(cache, *kinds):
    return sorted(each.position for each in cache.checkpoints.queue if each.kind in kinds)


def test_an_idle_pool_gets_the_whole_grid():
    cache = small_cache(num_files=12)
    run(cache, prompt(1))
    assert kept(cache, Kind.GRID) == list(range(64, LENGTH, 64))
    assert run(cache, prompt(2, 500, 1)).hit == 448


def test_checkpoints_of_one_commit_are_ranked_with_all_of_them_there():
    cache = small_cache(num_files=12)
    run(cache, prompt(1))
    queue = cache.checkpoints.queue
    ranked = {checkpoint: priority for _, priority, version, checkpoint in queue._heap if version in queue._live}
    assert len(ranked) == LENGTH // 64
    for checkpoint, priority in ranked.items():
        assert priority == cache.checkpoints._place_of(checkpoint)[1]


def test_a_full_pool_hits_what_nobody_announced_at_the_second_sighting():
    cache, rng, hits, shares = small_cache(12), np.random.default_rng(3), [], []
    for number in range(1, 160, 3):
        run(cache, prompt(number))
        run(cache, prompt(number + 1))
        shares.append(int(rng.integers(200, 560)))
        hits.append(run(cache, prompt(number + 2, shares[-1], number)).hit)
    assert cache.pool.num_free < cache.layout.pages_per_checkpoint, "the pool is full"
    best = sum(share // 64 * 64 for share in shares[20:])
    assert sum(hits[20:]) > 0.8 * best
    audit(cache)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("from_end", [False, True])
def test_where_prompts_leave_again_and_again_to_the_token_they_hit_to_the_token(from_end, exact):
    policy = CachePolicy(Auto(), ValuePerByte(), exact)
    cache = PrefixCache(small_layout(state_bytes=40 * 64 - 8), 1200, policy, clock=ManualClock())
    rng, lacking = np.random.default_rng(3), []
    for number in range(1, 60, 2):
        length = int(rng.integers(400, 600))
        shared = length - 150 if from_end else 230
        first, second = (
            range(10_000 * number, 10_000 * number + length),
            range(10_000 * number + 5000, 10_000 * number + 5090),
        )
        run(cache, first)
        lacking.append(shared - run(cache, (*first[:shared], *second)).hit)
    assert cache.pool.num_free < cache.layout.pages_per_checkpoint, "the pool is full"
    # a state off the grid is of no use to others in exact mode
    assert (lacking[10:] == [0] * 20) is not exact
    assert not exact or max(lacking[10:]) < 64
    audit(cache)


def test_places_that_are_never_the_same_do_not_recur():
    stats, path = DivergenceStats(), Lineage(start=0, end=1000)
    for position in (*range(100, 900, 10), *[333] * 3):
        stats.observe(path, position)
    assert stats.recurring(path) == []
    for _ in range(8):
        stats.observe(path, 333)
    # in both views, and of a path of another length at two positions
    assert stats.recurring(path) == [333, 333]
    assert sorted(stats.recurring(Lineage(start=0, end=2000))) == [333, 1333]
    for _ in range(MAX_DIVERGENCES):
        stats.observe(path, 500)
    assert stats.recurring(path) == [500, 500], "what has not come up for long is forgotten"


def test_without_a_value_there_is_no_price_and_the_grid_takes_free_pages_alone():
    cache = small_cache(12, LeastRecentlyUsed())
    run(cache, prompt(1))
    assert kept(cache, Kind.GRID) == list(range(64, LENGTH, 64))
    for number in range(2, 40):
        run(cache, prompt(number))
    before = cache.checkpoints.taken[Kind.GRID]
    assert not run(cache, prompt(40, 500, 39)).hit and cache.checkpoints.taken[Kind.GRID] <= before + 1


class Priced(ValuePerByte):
    """`worthless` ones are worth nothing, and all others more than any point that is predicted."""

    worthless = frozenset()

    def priority(self, checkpoint, saved_tokens, freed_bytes):
        return float(checkpoint not in self.worthless)


@pytest.mark.parametrize(
    ("num_worthless", "ends", "taken"), [(1, 0, 1), (4, 0, 4), (4, 2, 2), (3, 2, 1), (2, 2, 0), (1, 2, 0)]
)
def test_a_point_goes_for_what_is_left_once_the_ends_that_stay_have_their_places(num_worthless, ends, taken):
    policy = Priced()
    cache = small_cache(37, policy)
    for number in range(1, 40):
        run(cache, prompt(number))
    lease = cache.lookup(PLAIN, np.array(prompt(40)), "r")
    assert cache.extend(lease, LENGTH) is not None and cache.pool.num_free < cache.layout.pages_per_checkpoint
    cache.begin_request(lease)
    store = cache.checkpoints
    policy.worthless = frozenset(islice(store.queue, num_worthless))
    for checkpoint in list(policy.worthless):
        store.queue.push(checkpoint)
    boundaries = (Boundary(200, "system_end"), Boundary(600, "message_end"))[:ends]
    assert len(cache.prompt_facts(lease, LENGTH, boundaries).predicted) == taken
    cache.release(lease)


def test_a_full_pool_takes_nothing_where_nobody_comes():
    cache = small_cache(num_files=12)
    for number in range(1, 160, 2):
        run(cache, prompt(number))
        # whoever comes again goes on from the end
        assert run(cache, (*prompt(number), *range(50))).hit == LENGTH
        if number == 99:
            before = cache.checkpoints.taken.copy()
    taken = cache.checkpoints.taken - before
    assert taken[Kind.PROMPT_END] == 60 and taken[Kind.GRID] <= 60, "a whole grid would be nine a prompt"


def test_a_prompt_leaves_the_path_that_goes_on_where_it_ends_its_match():
    cache = small_cache(num_files=40)
    run(cache, prompt(1))
    (path,) = {node.lineage for node in cache.tree.nodes()}
    assert (path.start, path.end, path.visits) == (0, LENGTH, 0)
    cases = [(100, True), (128, True), (300, True), (300, False), (LENGTH, False)]
    for number, (shared, is_first) in enumerate(cases, 2):
        visits = path.visits
        match = run(cache, prompt(number, shared, 1)).match
        assert match.ever_matched == shared and path.visits == visits + is_first
        assert match.left is (path if is_first else None)
    # 100 and 300 lie inside a run, at 128 is a checkpoint of the grid, and 300 is known at the second time


def grid(policy, node, path, kind=Kind.GRID):
    node.checkpoint = Checkpoint(node, np.empty(0, np.int32), kind, Origin.GRID, "r")
    policy.add(node.checkpoint, path)


def test_one_of_the_grid_is_worth_the_part_of_its_path_up_to_the_next_deeper_one():
    policy, nodes, path = learner(), chain(4), Lineage(start=0, end=400)
    for node in nodes:
        node.lineage = path
    policy.begin_request(None, path, None)
    whole = policy.path_chance(path)
    grid(policy, nodes[3], path, Kind.PROMPT_END)
    for node in (nodes[2], nodes[0]):  # the deepest first, as a step commits them
        grid(policy, node, path)
    quarters = np.diff([0, 19 / 4096, 7 / 64, 2187 / 4096, 1]) * whole  # of a beta distribution: 6x⁵ - 5x⁶
    assert policy.chance(nodes[0]) == pytest.approx(quarters[1] + quarters[2])
    assert policy.chance(nodes[2]) == pytest.approx(quarters[3])
    grid(policy, nodes[1], path)
    assert policy.chance(nodes[0]) == pytest.approx(quarters[1])
    assert policy.chance(nodes[1]) == pytest.approx(quarters[2])
    dropped(policy, nodes[1])
    assert policy.chance(nodes[0]) == pytest.approx(quarters[1] + quarters[2])
    dropped(policy, nodes[2])
    assert policy.chance(nodes[0]) == pytest.approx(quarters[1:].sum())
    dropped(policy, nodes[0])
    grid(policy, nodes[1], path)
    assert policy.chance(nodes[1]) == pytest.approx(quarters[2:].sum())
    used(policy, nodes[1], 2)
    assert policy.chance(nodes[1]) == policy.table.index(policy._records[nodes[1]].row, 0), "from now on by itself"


def test_chances_of_paths_are_learned_by_what_they_are():
    policy = learner(max_ghosts=100)
    for _ in range(300):
        path, fork = Lineage(end=1000), Lineage(start=500, end=1000, forked=True)
        policy.begin_request(None, path, None)
        policy.begin_request(None, fork, path)
    policy.refresh([])
    assert len(policy._paths) == 100 and policy.now == 600
    path, fork = Lineage(end=1000), Lineage(start=500, end=1000, forked=True)
    policy.begin_request(None, path, None)
    unvisited = policy.path_chance(path)
    policy.begin_request(None, fork, path)
    assert (
        unvisited > 0.3 * DISCOUNT
        and policy.path_chance(path) < unvisited / 20
        and policy.path_chance(fork) < unvisited / 20
    )
