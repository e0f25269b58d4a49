"""What the cache learns of reuse: hazards by age, records and their ghosts, and where prompts are left."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cache.branches import LEAST, LEAST_IDLE, WINDOW, BranchDistances
from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.hazard import BINS, MAX_HITS, HazardTable
from cairn.cache.reuse import LEAST_INTERVAL, Lineage, ReuseBook
from cairn.cache.tree import Node
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


def made(book, node, kind=Kind.PROMPT_END, turn=0):
    return book.made(node, kind, Origin.GRID, Lineage(turn, 1000))


def test_a_ghost_is_used_as_if_it_were_there_and_comes_back_with_what_it_knew():
    book, (node,) = ReuseBook(8), chain(1)
    first = made(book, node)
    book.now = 5
    book.dropped(first, None)
    assert node.reuse is first and book.num_ghosts == 1
    book.now = 7
    book.used(first)
    assert first.hits == 1
    again = made(book, node)
    assert again.hits == 1 and node.reuse is again and book.num_ghosts == 0 and first.slot == -1
    assert book.records() == [again]


def test_ghosts_are_bounded_the_longest_gone_go_first():
    book, nodes = ReuseBook(3), chain(5)
    records = [made(book, node) for node in nodes]
    for record in records:
        book.dropped(record, None)
    assert book.num_ghosts == 3 and [node.reuse for node in nodes] == [None, None, *records[2:]]
    assert len(book.records()) == 3
    book.forget(records[4])
    assert nodes[4].reuse is None and book.num_ghosts == 2


def test_what_is_left_above_takes_over_the_chance_of_what_has_gone():
    book, (above, below) = ReuseBook(8), chain(2)
    upper, lower = made(book, above), made(book, below)
    for now in range(1, 200, 4):
        # the deeper one is used again and again, the other never
        book.now = now
        book.used(lower)
    book.look(1)
    alone, wanted = book.chance(upper), book.chance(lower)
    assert wanted > 4 * alone
    book.dropped(lower, upper)
    assert book.chance(upper) == pytest.approx(alone + wanted)
    back = made(book, below)
    assert book.chance(upper) == pytest.approx(alone), "it is there again"
    book.dropped(back, upper)
    book.forget(back)
    assert book.chance(upper) == pytest.approx(alone), "nobody remembers it"


def test_a_chance_that_was_taken_over_is_handed_on():
    book, (top, middle, below) = ReuseBook(8), chain(3)
    records = [made(book, node) for node in (top, middle, below)]
    for now in range(1, 200, 4):
        book.now = now
        book.used(records[2])
    book.look(1)
    wanted = book.chance(records[2])
    book.dropped(records[2], records[1])
    book.dropped(records[1], records[0])
    assert book.chance(records[0]) > wanted


def test_a_branch_makes_another_class_and_never_fewer():
    book, (node,) = ReuseBook(8), chain(1)
    record = made(book, node)
    before = record.kind_of_use()
    child = Node(node, KEYS, node.end, node.end + 1)
    node.adopt(child)
    book.changed(record)
    assert record.kind_of_use() != before and record.branches == 1
    node.disown(child)
    book.changed(record)
    assert record.branches == 1, "that it was gone on from stays true"


def test_it_learns_when_enough_requests_have_come():
    book, (node,) = ReuseBook(8), chain(1)
    made(book, node)
    assert book.look(1000) and not book.look(1000)
    book.now = LEAST_INTERVAL
    assert not book.look(1000), "a large cache is ranked anew less often"
    book.now = 250
    assert book.look(1000)


# -- where prompts are left ------------------------------------------------------------------------------------------


def after(*distances):
    branches = BranchDistances()
    for distance in distances:
        branches.left(distance)
    return branches


def test_one_distance_is_foretold_to_the_token():
    branches = after(*[901] * LEAST)
    assert branches.positions(5000, 0, 4) == [4099]
    assert branches.positions(5000, 4099, 4) == [], "that is cached"
    assert branches.positions(900, 0, 4) == [], "the prompt is not so long"


def test_nothing_is_foretold_from_a_few():
    assert after(*[900] * (LEAST - 1)).positions(5000, 0, 1) == []
    assert after(*[900] * (LEAST_IDLE - 1)).positions(5000, 0, 4) == []


def test_while_memory_is_idle_a_few_are_enough():
    assert after(*[900] * LEAST_IDLE).positions(5000, 0, 4) == [4096]


def test_distances_that_scatter_are_served_from_the_grid_below_them():
    distances = [300 + 37 * number for number in range(64)]
    chosen = after(*distances).positions(10_001, 0, 4)
    assert len(chosen) > 1 and all(position % GRID == 0 for position in chosen)
    served = [max((p for p in chosen if p <= 10_001 - d), default=0) for d in distances]
    assert sum(served) / len(served) > 0.9 * sum(10_001 - d for d in distances) / len(distances)


def test_the_first_position_saves_the_most_alone():
    # nine of ten are left near the end: one position there is worth more than one that serves all
    branches = after(*[100] * 90, *[3000] * 10)
    assert branches.positions(10_000, 0, 2) == [9900, 7000]
    assert branches.positions(3064, 0, 2) == [2964], "what saves next to nothing is not named"


def test_only_the_last_branches_count():
    branches = after(*[100] * WINDOW, *[700] * WINDOW)
    assert branches.positions(5000, 0, 4) == [4300]


@given(
    st.lists(st.integers(1, 20_000), min_size=LEAST, max_size=80),
    st.integers(1, 20_000),
    st.integers(0, 20_000),
    st.integers(1, 6),
)
def test_positions_lie_between_hit_and_end(distances, num_tokens, hit, most):
    chosen = after(*distances).positions(num_tokens, hit, most)
    assert len(chosen) <= most and len(set(chosen)) == len(chosen)
    assert all(hit < position < num_tokens for position in chosen)
