"""What the cache learns of reuse: hazards by age, records and their ghosts, and where prompts diverge."""

from itertools import combinations, pairwise
from math import e, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.divergence import MAX_DIVERGENCES, DivergenceStats
from cairn.cache.eviction import MIN_REFRESH_INTERVAL, ValuePerByte
from cairn.cache.hazard import _EDGES, BINS, MAX_HITS, HazardTable, Watched
from cairn.cache.tree import Checkpoint, Node
from cairn.step import GRID

KEYS = bytes(8)


def live(table, events):
    """Let `table` see one thing after the other: its class, its age in the end, whether it was used then."""
    now = 0
    for kind, age, is_used in events:
        watched = Watched(since=now)
        table.watch(watched, kind, now)
        now += age
        if is_used:
            table.use(watched, now)
        table.forget(watched, now)
    table.refresh(now)


def taught(events):
    """A table that has seen `events`: class, age, whether it was used then or only lived so long."""
    table = HazardTable()
    live(table, events)
    return table


# -- hazards ---------------------------------------------------------------------------------------------------------


def test_what_is_used_more_often_ranks_higher():
    table = taught(
        [((1,), 20, True)] * 90 + [((1,), 20, False)] * 10 + [((2,), 20, True)] * 10 + [((2,), 20, False)] * 90
    )
    often, seldom = table.row((1,)), table.row((2,))
    assert all(table.index(often, age) > table.index(seldom, age) for age in (0, 5, 15))


def test_a_pause_before_the_use_does_not_lower_the_index():
    # all are used at age 100: nothing happens before, and yet the nearer the use the higher the index
    table = taught([((1,), 100, True)] * 200)
    row = table.row((1,))
    indices = [table.index(row, age) for age in (10, 30, 60, 90)]
    assert indices == sorted(indices) and indices[0] > 0.5 / 100
    assert table.index(row, 500) < indices[0] / 5, "what was not used by then will not be"


def test_the_index_is_hits_per_time_up_to_the_best_moment_to_stop():
    # half are used at age 16, the others live to 1024: it is best to stop where the bin of 16 ends, at 22.6
    table = taught([((1,), 16, True)] * 500 + [((1,), 1024, False)] * 500)
    assert table.index(table.row((1,)), 0) == pytest.approx(0.5 / 22.6, rel=0.15)


def test_what_is_seen_at_an_age_counts_for_those_around_it():
    table = taught([((1,), 100, True)] * 40 + [((1,), 2000, False)] * 160)
    row = table.row((1,))
    assert table.index(row, 100) / 4 < table.index(row, 150) < table.index(row, 100), "somewhat later is no surprise"
    assert table.index(row, 300) < table.index(row, 150) / 10, "much later is one"


def test_a_new_class_takes_after_the_one_above_it_until_it_knows_better():
    events = [((1, 1), 8, True)] * 100
    before = taught(events)
    assert before.index(before.row((1, 2)), 0) == pytest.approx(before.index(before.row((1,)), 0), rel=0.3)
    after = taught(events + [((1, 2), 500, False)] * 100)
    assert after.index(after.row((1, 2)), 0) < before.index(before.row((1, 2)), 0) / 4
    assert after.index(after.row((1, 1)), 0) == pytest.approx(before.index(before.row((1, 1)), 0), rel=0.3)


def test_a_class_that_is_not_in_the_table_yet_reads_from_above():
    table = taught([((1,), 8, True)] * 50)
    assert table.index(table.row((1, 7)), 3) == table.index(table.row((1,)), 3)


def test_the_table_is_bounded_and_forgets():
    table = HazardTable(max_classes=10)
    rows = {table.row((kind,)) for kind in range(100)}
    assert len(table._rows) == 10 and len(rows) == 10
    table = taught([((1,), 4, True)] * (MAX_HITS + 10))
    assert table._counts[:, :BINS].sum() <= (MAX_HITS + 10) / 2
    # what holds now soon outweighs what held then
    live(table, [((1,), 400, False)] * MAX_HITS)
    assert table.index(table.row((1,)), 0) < 0.2


EVENTS = st.tuples(
    st.sampled_from(["watch", "use", "forget", "refresh"]), st.integers(0, 5), st.integers(0, 2), st.integers(0, 2000)
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_time_at_risk_is_what_each_has_waited_at_each_age(events):
    table, watched = HazardTable(), [Watched() for _ in range(6)]
    rows = [table.row((kind,)) for kind in range(3)]
    hits, risk = np.zeros((64, BINS)), np.zeros((64, BINS))
    waits: dict[int, list[int]] = {}  # row, since, counted up to
    ages = [*_EDGES[:-1].tolist(), inf]

    def count(number: int) -> None:
        row, since, counted = waits[number]
        for age, (begin, end) in enumerate(pairwise(ages)):
            risk[row, age] += max(0.0, min(end, now - since) - max(begin, counted - since))
        waits[number][2] = now

    now = 0
    for event, number, kind, pause in events:
        now += pause
        each = watched[number]
        if number in waits:
            count(number)
        if event == "refresh":
            table.refresh(now)
        elif event == "watch":
            table.watch(each, (kind,), now)
            waits[number] = [rows[kind], each.since, now]
        elif event == "use":
            if number in waits:
                waited = now - waits[number][1]
                hits[waits[number][0], sum(waited >= age for age in ages) - 1] += 1
            table.use(each, now)
            table.watch(each, (kind,), now)
            waits[number] = [rows[kind], now, now]
        else:
            table.forget(each, now)
            waits.pop(number, None)
    table.refresh(now)
    for number in waits:
        count(number)
    assert (table._counts[:, :BINS] == hits).all() and np.allclose(table._counts[:, BINS:], risk)


def test_more_things_than_columns_are_counted():
    table, watched = HazardTable(), [Watched() for _ in range(200)]
    for each in watched:
        table.watch(each, (), 0)
    table.refresh(3)
    for each in watched[::2]:
        table.forget(each, 4)
    table.refresh(4)
    assert len({each.slot for each in watched[1::2]}) == 100
    assert table._counts[:, BINS:].sum() == pytest.approx(200 * 4)
    # and those that come and go take the places of those before them, whether or not anybody looks
    for now in range(5, 2000):
        table.watch(watched[0], (), now)
    assert table._waits.shape[1] == 256


# -- records ---------------------------------------------------------------------------------------------------------


def chain(length):
    """Nodes of one path, from the root on."""
    nodes = [Node(None, b"", 0, 0)]
    for _ in range(length):
        nodes.append(Node(nodes[-1], KEYS * 100, nodes[-1].end, nodes[-1].end + 100))
        nodes[-2].adopt(nodes[-1])
    return nodes[1:]


def learner(max_ghosts=8):
    policy = ValuePerByte()
    policy.start(100, DivergenceStats())
    policy.max_ghosts = max_ghosts
    return policy


def made(policy, node, kind=Kind.PROMPT_END, turn=0):
    """A checkpoint at `node`, which the policy is told of."""
    node.checkpoint = Checkpoint(node, np.empty(0, np.int32), kind, Origin.GRID, "r")
    policy.add(node.checkpoint, Lineage(turn, 0, 1000))
    return policy._records[node]


def dropped(policy, node):
    checkpoint, node.checkpoint = node.checkpoint, None
    policy.drop(checkpoint)


def used(policy, node, now):
    policy.now = now - 1
    lineage = Lineage()
    policy.begin_request(node, lineage, None)
    return lineage


def test_a_ghost_is_used_as_if_it_were_there_and_comes_back_with_what_it_knew():
    policy, (node,) = learner(), chain(1)
    first = made(policy, node)
    policy.now = 5
    dropped(policy, node)
    assert policy.records() == [(node, True)] and policy.recorded_origin(node) is Origin.GRID
    used(policy, node, 7)
    assert first.hits == 1
    version, again = policy.version, made(policy, node)
    assert again.hits == 1 and policy._records[node] is again is not first
    assert policy.records() == [(node, False)] and policy.version > version


def test_ghosts_are_bounded_the_longest_gone_go_first():
    policy, nodes = learner(3), chain(5)
    for node in nodes:
        made(policy, node)
    for node in nodes:
        dropped(policy, node)
    assert policy.records() == [(node, True) for node in nodes[2:]]
    policy.node_forgotten(nodes[4])
    assert policy.records() == [(node, True) for node in nodes[2:4]] and policy.chance(nodes[4]) == 0


def test_what_is_left_above_takes_over_the_chance_of_what_has_gone():
    policy, (above, below) = learner(), chain(2)
    made(policy, above), made(policy, below)
    for now in range(1, 200, 4):
        # the deeper one is used again and again, the other never
        used(policy, below, now)
    policy.refresh([])
    alone, wanted = policy.chance(above), policy.chance(below)
    assert wanted > 4 * alone
    dropped(policy, below)
    assert policy.chance(above) == pytest.approx(alone + wanted)
    made(policy, below)
    assert policy.chance(above) == pytest.approx(alone), "it is there again"
    dropped(policy, below)
    assert policy.chance(above) > alone
    policy.node_forgotten(below)
    assert policy.chance(above) == pytest.approx(alone), "nobody remembers it"


def test_a_chance_that_was_taken_over_is_handed_on():
    policy, (top, middle, below) = learner(), chain(3)
    for node in (top, middle, below):
        made(policy, node)
    for now in range(1, 200, 4):
        used(policy, below, now)
    policy.refresh([])
    wanted = policy.chance(below)
    dropped(policy, below)
    dropped(policy, middle)
    assert policy.chance(top) > wanted


def test_a_branch_makes_another_class_and_never_fewer():
    policy, (node,) = learner(), chain(1)
    record = made(policy, node)
    before = record.class_key()
    child = Node(node, KEYS, node.end, node.end + 1)
    node.adopt(child)
    policy.node_branched(node)
    assert record.class_key() != before and record.branches == 1
    node.disown(child)
    policy.node_branched(node)
    assert record.branches == 1, "that it was gone on from stays true"


def test_a_request_that_goes_on_where_another_one_ended_is_its_next_turn():
    policy, nodes = learner(), chain(4)
    turns = [used(policy, None, 1).turn]
    for now, node in enumerate(nodes, 2):
        made(policy, node, turn=turns[-1])
        turns.append(used(policy, node, now).turn)
    assert turns == [0, 0, 0, 0, 1], "what is in the middle has been gone on from"
    assert used(policy, nodes[0], 9).turn == 0


def test_it_learns_when_enough_requests_have_come():
    policy, (node,) = learner(), chain(1)
    made(policy, node)
    ranked = [node.checkpoint] * 1000
    assert policy.refresh(ranked) == ranked and policy.refresh(ranked) == []
    policy._to_rerank.clear()
    policy.now = MIN_REFRESH_INTERVAL
    assert policy.refresh(ranked) == [], "a large cache is ranked anew less often"
    policy.now = 250
    assert policy.refresh(ranked) == ranked


def test_a_policy_serves_one_cache():
    policy, (node,) = learner(), chain(1)
    made(policy, node)
    with pytest.raises(AssertionError, match="one cache"):
        policy.start(100, DivergenceStats())


# -- where prompts diverge ------------------------------------------------------------------------------------------


def after(*distances, length=5000):
    """What is learned from paths of `length` tokens that were left so many tokens before their ends."""
    stats = DivergenceStats()
    for distance in distances:
        stats.observe(Lineage(end=length), length - distance)
    return stats


def chosen(stats, length, most, hit=0, start=0):
    """The best `most` positions of a path, among the grid of 64."""
    path, grid = Lineage(start=start, end=length), np.arange(64, length, 64)
    found = stats.choose(path, hit, np.array([length]), grid[grid > hit], lambda number, _: number < most)
    return list(found)


def test_one_distance_is_predicted():
    stats = DivergenceStats()
    for length in range(3000, 6000, 97):
        stats.observe(Lineage(end=length), length - 901)
    assert chosen(stats, 5000, 1) == [4096]
    assert chosen(stats, 7000, 1) == [6080], "also on a path of another length"
    assert chosen(stats, 5000, 1, hit=4096) != [4096], "that is cached"


def test_places_from_the_start_and_shares_of_the_path_are_learned_as_well():
    lengths = [2000 + 97 * number for number in range(60)]
    for place in (lambda length: 1280, lambda length: length * 3 // 4):
        stats = DivergenceStats()
        for length in lengths:
            stats.observe(Lineage(end=length), place(length))
        (best,) = chosen(stats, 9000, 1)
        assert 0 <= place(9000) - best < 128


def test_before_anything_is_known_the_later_part_is_likelier_than_the_beginning():
    stats, path = DivergenceStats(), Lineage(start=1000, end=3000)
    shares = [stats.share(path, 0, end) for end in (500, 1000, 1500, 2000, 3000, inf)]
    assert shares == pytest.approx([0, 0, 19 / 4096, 7 / 64, 1, 1])
    assert [stats.share(Lineage(start=9, end=9), 0, end) for end in (9, inf)] == [0, 0]
    # where x (1 - 6x⁵ + 5x⁶) is largest, and then again
    assert chosen(stats, 4096, 1) == [2368]
    assert np.diff([1024, *sorted(chosen(stats, 4096, 7)), 4096]).max() <= 640


def test_shares_add_up_and_count_what_lies_on_the_path():
    stats = after(*range(100, 3000, 50), *[700] * 30)
    path = Lineage(start=1500, end=5000)
    places = np.array([1500, 2000, 3210, 4300, 4301, 5000])
    shares = stats.shares_from(path, places)
    assert shares[0] == pytest.approx(1) and (np.diff(shares) <= 0).all() and shares[-1] >= 0
    assert shares == pytest.approx([stats.share(path, int(place), inf) for place in places], abs=0.01)
    assert stats.share(path, 4300, 4301) > 0.3 / 3, "the position itself is where the share begins"


def test_distances_that_scatter_are_served_from_the_grid_below_them():
    distances = [300 + 37 * number for number in range(64)]
    picked = chosen(after(*distances, length=10_001), 10_001, 4)
    assert len(picked) == 4 and all(position % GRID == 0 for position in picked)
    served = [max((p for p in picked if p <= 10_001 - d), default=0) for d in distances]
    assert sum(served) / len(served) > 0.9 * sum(10_001 - d for d in distances) / len(distances)


def test_only_the_last_divergences_count():
    stats = after(*[100] * MAX_DIVERGENCES, *[700] * MAX_DIVERGENCES)
    assert chosen(stats, 5000, 1) == [4288] and len(stats._recent) == MAX_DIVERGENCES


def test_nothing_is_chosen_that_does_not_pay_and_all_if_that_costs_nothing():
    stats, path, grid = after(*[900] * 20), Lineage(end=5000), np.arange(64, 5000, 64)
    asked = []

    def pays(number, saved):
        asked.append((number, saved))
        return saved > 100

    best = stats.choose(path, 0, np.array([5000]), grid, pays)
    assert asked[0] == (len(grid) - 1, 0.0) and [number for number, _ in asked[1:]] == list(range(len(best) + 1))
    assert list(best.values()) == [saved for _, saved in asked[1:-1]] and min(best.values()) > 100 >= asked[-1][1]
    assert list(stats.choose(path, 0, np.array([5000]), grid, lambda *_: True)) == grid[::-1].tolist()
    assert stats.choose(path, 0, np.array([5000]), grid[:0], pays) == {}


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5000), max_size=40),
    st.integers(1, 4),
    st.sets(st.integers(1, 40), min_size=1, max_size=7),
    st.sets(st.integers(1, 40), max_size=3),
    st.integers(0, 640),
)
def test_the_greedy_choice_is_near_the_best_there_is(distances, most, places, others, hit):
    stats, path, length = after(*distances), Lineage(end=2600), 2600
    candidates = np.array(sorted(64 * place for place in places - others if 64 * place > hit), np.int64)
    fixed = np.array(sorted({64 * place for place in others if 64 * place > hit} | {length}))

    def saved(points):
        ascending = sorted({*points, *fixed.tolist()})
        ends = [*ascending[1:], inf]
        return sum((p - hit) * stats.share(path, p, end) for p, end in zip(ascending, ends, strict=True))

    found = stats.choose(path, hit, fixed, candidates, lambda number, _: number < most)
    assert set(found) <= set(candidates.tolist()) and len(found) <= max(most, len(candidates))
    best = max(saved(points) for points in combinations(candidates.tolist(), min(most, len(candidates))))
    assert saved(found) - saved(()) >= (1 - 1 / e) * (best - saved(())) - 1e-6
    if len(found) < len(candidates):
        assert sum(found.values()) == pytest.approx(saved(found) - saved(()), abs=1e-6), "each gain is what it adds"
