"""The reference lines against exhaustive search on tiny traces."""

import random
from itertools import product

import numpy as np
import pytest
from benchmarks.offline_ledger import Hold, Ledger, Spans
from benchmarks.offline_line import offline_hits, offline_schedule
from benchmarks.offline_schedule import STEPS, Schedule, nodes_of

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.replay.bounds import Paths, footprint_bytes, unlimited_hits
from replay.brute_force import best_hit_units, held_bytes, make_trace, seen_units, whole

UNIT = 4
LAYOUT = CacheLayout(UNIT, 40, 1, (AttentionGroup("full", UNIT),), 0, 100, 1)
"""A unit of keys and values has 40 bytes, a checkpoint 100."""


def random_rows(seed, most=6):
    """Few ids and short paths, so that nearly everything is shared somewhere."""
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.randint(3, most)):
        if rows and draw.random() < 0.5:
            path, answer = draw.choice(rows)
            start = (path + answer)[: draw.randint(1, len(path + answer))]
        else:
            start = []
        path = (start + [draw.randint(0, 2) for _ in range(draw.randint(1, 2))])[:4]
        answer = [draw.randint(0, 2) for _ in range(draw.randint(0, 1))]
        rows.append((path, answer))
    return rows


def check(seed):
    """Returns offline, the optimum and unlimited, in tokens."""
    trace = make_trace(random_rows(seed), UNIT)
    budget = random.Random(seed + 1).choice((0, 139, 140, 180, 240, 280, 320, 380, 460, 600, 10_000))
    offline, unlimited = offline_hits(trace, LAYOUT, budget), unlimited_hits(trace)
    best = best_hit_units(trace, 40, 100, budget) * UNIT
    assert unlimited.tolist() == [units * UNIT for units in seen_units(trace)]
    assert (offline <= unlimited).all()
    assert offline.sum() <= best <= unlimited.sum()
    return int(offline.sum()), best, int(unlimited.sum())


def test_offline_is_below_the_optimum_and_the_optimum_below_unlimited():
    found = [check(seed) for seed in range(120)]
    offline, best, unlimited = (sum(line) for line in zip(*found, strict=True))
    assert best < unlimited, "no budget was ever tight"
    assert offline >= 0.96 * best, "a weak reference line"


def keeps_the_rules(trace, holds, budget):
    """Walks through the requests one by one. Returns the units that are hit."""
    hits = {hold.end: hold.node.end for hold in holds}
    assert len(hits) == len(holds)
    lines = [whole(request) for request in trace.requests]
    for hold in holds:
        position = hold.node.end
        assert 0 <= hold.start < hold.end and position <= len(trace.requests[hold.end].path)
        assert len(lines[hold.start]) >= position
        assert lines[hold.start][:position] == lines[hold.end][:position]
        assert hits.get(hold.start, 0) <= position, "held since a request that did not pass there"
    for now in range(len(lines)):
        held = {lines[hold.end][: hold.node.end] for hold in holds if hold.start <= now < hold.end}
        assert held_bytes(held, 40, 100) <= budget
    return sum(hits.values())


def tight_schedules(seeds):
    """How many of the schedules, of many more requests than can be searched, leave something unhit."""
    tight = 0
    for seed, budget in product(seeds, (150, 240, 320, 460, 600, 900)):
        trace = make_trace(random_rows(seed, most=40), UNIT)
        hit = keeps_the_rules(trace, offline_schedule(trace, LAYOUT, budget), budget)
        tight += hit * UNIT < unlimited_hits(trace).sum()
    return tight


@pytest.mark.more
def test_a_schedule_keeps_the_rules():
    assert tight_schedules(range(40, 48)) > 10


@pytest.mark.long
def test_many_schedules_keep_the_rules():
    assert tight_schedules(range(48, 100)) > 65


def test_mending_keeps_the_rules_and_never_loses():
    gained = 0
    for seed, budget in product(range(300, 312), (240, 460, 900)):
        trace = make_trace(random_rows(seed, most=60), UNIT)
        schedule = Schedule(trace, LAYOUT, budget, unlimited_hits(trace) // UNIT)
        schedule.fill_all()
        draw, units = random.Random(seed), keeps_the_rules(trace, schedule.chosen.values(), budget)
        for _ in range(60):
            gain = schedule.mend(draw)
            now = keeps_the_rules(trace, schedule.chosen.values(), budget)
            assert now == units + gain == sum(schedule.hits) and gain >= 0
            units = now
            gained += gain
        assert schedule.complete == (units * UNIT == unlimited_hits(trace).sum())
    assert gained > 0


def test_the_line_is_the_same_each_time_and_says_how_far_it_is():
    trace, told = make_trace(random_rows(50, most=40), UNIT), []
    first = offline_hits(trace, LAYOUT, 300, told.append)
    assert np.array_equal(first, offline_hits(trace, LAYOUT, 300))
    assert told == sorted(told) and told[-1] == STEPS and len(told) > 2


def test_the_ledger_against_a_recount():
    """Holds come and go at random; what is undone has left nothing behind."""
    draw, undone = random.Random(7), 0
    for seed in range(30):
        trace, paths = make_trace(random_rows(seed, most=30), UNIT), Paths()
        for request in trace.requests:
            paths.add(request.path, request.answer)
        number = len(trace.requests)
        ledger, at = Ledger(number, 40, 100), {}

        def recount(at=at, number=number):
            used = np.zeros(number)
            for now in range(number):
                held = [(node, hold) for node, holds in at.items() for hold in holds if hold.start <= now < hold.end]
                nodes, runs = {node for node, _ in held}, set()
                for node in nodes:
                    while node.parent is not None:
                        runs.add(node)
                        node = node.parent
                used[now] = 100 * len(nodes) + 40 * sum(node.num_tokens for node in runs)
            return used

        for _ in range(12):
            before, kept = ledger.used.copy(), {node: list(holds) for node, holds in at.items()}
            ledger.begin()
            gone = [node for node, holds in at.items() if holds and draw.random() < 0.3]
            for node in gone:
                at[node].pop(draw.randrange(len(at[node])))
            ledger.shrink(gone, at)
            assert np.array_equal(ledger.used, recount())
            for _ in range(3):
                request = draw.choice(trace.requests)
                node = draw.choice(nodes_of(paths, request))
                start = draw.randrange(number - 1)
                hold = Hold(node, start, draw.randint(start + 1, number - 1))
                more = ledger.more(hold)
                ledger.enter(hold, more)
                at.setdefault(node, []).append(hold)
                assert np.array_equal(ledger.used, recount())
            if draw.random() < 0.5:
                ledger.undo()
                at.clear()
                at.update(kept)
                assert np.array_equal(ledger.used, before)
                undone += 1
            else:
                ledger.keep()
        assert np.array_equal(ledger.used, recount())
    assert undone > 50


def test_spans_against_a_set():
    draw = random.Random(1)
    for _ in range(200):
        spans, covered = Spans(), set()
        for _ in range(draw.randint(1, 8)):
            start = draw.randint(0, 20)
            end = draw.randint(start + 1, 24)
            gaps = spans.gaps(start, end)
            assert {t for low, high in gaps for t in range(low, high)} == set(range(start, end)) - covered
            spans.add(start, end)
            covered |= set(range(start, end))
            assert {t for low, high in spans.pairs() for t in range(low, high)} == covered
            assert all(end < start for (_, end), (start, _) in zip(spans.pairs(), spans.pairs()[1:], strict=False))


@pytest.mark.long
def test_offline_is_below_the_optimum_on_many_traces():
    found = [check(seed) for seed in range(200, 3000)]
    assert sum(line[0] for line in found) >= 0.96 * sum(line[1] for line in found)


def test_a_budget_for_everything_gives_unlimited():
    for seed in range(40):
        trace = make_trace(random_rows(seed), UNIT)
        assert np.array_equal(offline_hits(trace, LAYOUT, 1 << 30), unlimited_hits(trace))


def test_the_future_decides_what_is_held():
    # room for one path: [1 1] is asked for again at once, [2 2] comes twice as often in between
    trace = make_trace([([1, 1], []), ([2, 2], []), ([2, 2], []), ([2, 2], []), ([1, 1], [])], UNIT)
    room = held_bytes([(1, 1)], 40, 100)
    assert offline_hits(trace, LAYOUT, room).tolist() == [0, 0, 8, 8, 0]
    assert offline_hits(trace, LAYOUT, 2 * room).tolist() == [0, 0, 8, 8, 8]
    assert offline_hits(trace, LAYOUT, room - 1).tolist() == [0, 0, 0, 0, 0]


def test_a_state_below_a_hit_is_there_only_if_it_was_held():
    # the third request hits [1 2 3], so it does not pass [1]; the fourth can have [1] only from the second on
    trace = make_trace([([1, 9], []), ([1, 2, 3], []), ([1, 2, 3], []), ([1, 7], [])], UNIT)
    for budget in range(0, 500, 20):
        assert offline_hits(trace, LAYOUT, budget).sum() <= best_hit_units(trace, 40, 100, budget) * UNIT
    assert offline_hits(trace, LAYOUT, 320).tolist() == [0, 4, 12, 4]


def test_shared_tokens_count_once():
    trace = make_trace([([1, 2, 3], []), ([1, 2, 4], []), ([1, 2, 3], []), ([1, 2, 4], [])], UNIT)
    budget = held_bytes([(1, 2), (1, 2, 3), (1, 2, 4)], 40, 100)
    assert budget == 4 * 40 + 3 * 100
    assert offline_hits(trace, LAYOUT, budget).tolist() == [0, 8, 12, 12]


def test_footprint():
    trace = make_trace([([1, 2], [3]), ([1, 2, 3, 4], [5]), ([2], [])], UNIT)
    assert footprint_bytes(trace, LAYOUT) == 6 * 40 + 3 * 100
