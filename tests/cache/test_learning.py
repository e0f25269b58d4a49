"""What the cache learns of reuse: hazards by age, records and their ghosts, and where prompts diverge."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.eviction import MIN_REFRESH_INTERVAL, ValuePerByte
from cairn.cache.hazard import BINS, MAX_HITS, HazardTable
from cairn.cache.placement import MAX_DIVERGENCES, MIN_DIVERGENCES, MIN_DIVERGENCES_IDLE, DivergenceStats
from cairn.cache.tree import Checkpoint, Node
from cairn.step import GRID

KEYS = bytes(8)


def taught(events):
    """A table that has seen `events`: class, age, whether it was used then or only lived so long."""
    table = HazardTable()
    for kind, age, used in events:
        row = table.row(kind)
        table.at_risk(row, 0, age)
        if used:
            table.hit(row, age)
    table.refresh()
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
    # half are used at age 16, the others live to 1024: it is best to stop waiting soon after 16
    table = taught([((1,), 16.5, True)] * 500 + [((1,), 1024, False)] * 500)
    assert table.index(table.row((1,)), 0) == pytest.approx(0.5 / 19, rel=0.25)


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
    assert len(table) == 10 and len(rows) == 10
    table = taught([((1,), 4, True)] * (MAX_HITS + 10))
    table.refresh()
    assert table._hits.sum() <= (MAX_HITS + 10) / 2
    # what holds now soon outweighs what held then
    for _ in range(MAX_HITS):
        table.at_risk(table.row((1,)), 0, 400)
    table.refresh()
    assert table.index(table.row((1,)), 0) < 0.2


@given(st.lists(st.tuples(st.floats(0, 300_000), st.floats(0, 300_000)), max_size=20))
def test_time_at_risk_is_the_same_one_by_one_and_together(spans):
    spans = [(min(span), max(span)) for span in spans]
    one, many = HazardTable(), HazardTable()
    rows = np.array([one.row((number % 3,)) for number in range(len(spans))], np.int64)
    assert [many.row((number % 3,)) for number in range(len(spans))] == rows.tolist()
    for row, (since, until) in zip(rows.tolist(), spans, strict=True):
        one.at_risk(row, since, until)
    many.all_at_risk(rows, np.array([s for s, _ in spans]), np.array([u for _, u in spans]))
    assert np.allclose(one._risk[: len(one)], many._risk[: len(many)])
    assert one._risk.sum() == pytest.approx(sum(until - since for since, until in spans), abs=1e-6)
    assert one._risk.shape[1] == BINS


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
    policy.start(100)
    policy.max_ghosts = max_ghosts
    return policy


def made(policy, node, kind=Kind.PROMPT_END, turn=0):
    """A checkpoint at `node`, which the policy is told of."""
    node.checkpoint = Checkpoint(node, np.empty(0, np.int32), kind, Origin.GRID, "r")
    policy.add(node.checkpoint, Lineage(turn, 1000))
    return policy._records[node]


def dropped(policy, node):
    checkpoint, node.checkpoint = node.checkpoint, None
    policy.drop(checkpoint)


def used(policy, node, now):
    policy.now = now - 1
    return policy.begin_request(node, 0)


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
    policy.refresh_due(1)
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
    policy.refresh_due(1)
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
    assert policy.refresh_due(1000) and not policy.refresh_due(1000)
    policy.now = MIN_REFRESH_INTERVAL
    assert not policy.refresh_due(1000), "a large cache is ranked anew less often"
    policy.now = 250
    assert policy.refresh_due(1000)


def test_a_policy_serves_one_cache():
    policy, (node,) = learner(), chain(1)
    made(policy, node)
    with pytest.raises(AssertionError, match="one cache"):
        policy.start(100)


# -- where prompts diverge ------------------------------------------------------------------------------------------


def after(*distances):
    stats = DivergenceStats()
    for distance in distances:
        stats.observe_divergence(distance)
    return stats


def test_one_distance_is_predicted_to_the_token():
    stats = after(*[901] * MIN_DIVERGENCES)
    assert stats.predict(5000, 0, 4) == [4099]
    assert stats.predict(5000, 4099, 4) == [], "that is cached"
    assert stats.predict(900, 0, 4) == [], "the prompt is not so long"


def test_nothing_is_predicted_from_a_few():
    assert after(*[900] * (MIN_DIVERGENCES - 1)).predict(5000, 0, 1) == []
    assert after(*[900] * (MIN_DIVERGENCES_IDLE - 1)).predict(5000, 0, 4) == []


def test_while_memory_is_idle_a_few_are_enough():
    assert after(*[900] * MIN_DIVERGENCES_IDLE).predict(5000, 0, 4) == [4096]


def test_distances_that_scatter_are_served_from_the_grid_below_them():
    distances = [300 + 37 * number for number in range(64)]
    chosen = after(*distances).predict(10_001, 0, 4)
    assert len(chosen) > 1 and all(position % GRID == 0 for position in chosen)
    served = [max((p for p in chosen if p <= 10_001 - d), default=0) for d in distances]
    assert sum(served) / len(served) > 0.9 * sum(10_001 - d for d in distances) / len(distances)


def test_the_first_position_saves_the_most_alone():
    # nine of ten are left near the end: one position there is worth more than one that serves all
    stats = after(*[100] * 90, *[3000] * 10)
    assert stats.predict(10_000, 0, 2) == [9900, 7000]
    assert stats.predict(3064, 0, 2) == [2964], "what saves next to nothing is not named"


def test_only_the_last_branches_count():
    stats = after(*[100] * MAX_DIVERGENCES, *[700] * MAX_DIVERGENCES)
    assert stats.predict(5000, 0, 4) == [4300]


@given(
    st.lists(st.integers(1, 20_000), min_size=MIN_DIVERGENCES, max_size=80),
    st.integers(1, 20_000),
    st.integers(0, 20_000),
    st.integers(1, 6),
)
def test_positions_lie_between_hit_and_end(distances, num_tokens, hit, most):
    chosen = after(*distances).predict(num_tokens, hit, most)
    assert len(chosen) <= most and len(set(chosen)) == len(chosen)
    assert all(hit < position < num_tokens for position in chosen)
