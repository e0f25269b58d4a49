"""The reference lines against exhaustive search on tiny traces."""

import random
from itertools import product

import numpy as np
import pytest

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.replay.bounds import footprint_bytes, offline_hits, offline_schedule, unlimited_hits
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
    assert offline >= 0.9 * best, "a weak reference line"


def test_a_schedule_keeps_the_rules():
    """Walked through request by request, with the hits of many more requests than can be searched."""
    tight = 0
    for seed, budget in product(range(40, 80), (150, 240, 320, 460, 600, 900)):
        trace = make_trace(random_rows(seed, most=40), UNIT)
        holds = offline_schedule(trace, LAYOUT, budget)
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
        tight += sum(hits.values()) * UNIT < unlimited_hits(trace).sum()
    assert tight > 50


@pytest.mark.long
def test_offline_is_below_the_optimum_on_many_traces():
    found = [check(seed) for seed in range(200, 3000)]
    assert sum(line[0] for line in found) >= 0.9 * sum(line[1] for line in found)


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
