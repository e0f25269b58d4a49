"""Steps that are skipped leave everything as if each had been planned and applied."""

from itertools import product

import pytest
from driver import Driver

from cairn.cache.audit import audit
from cairn.scheduler.request import Phase
from cairn.step import SampledToken
from doubles.step_results import step_result
from tiers import by_run

PROMPTS = [range(100), range(100, 117), [*range(60), *range(500, 530)], range(700, 760), range(900, 980)]
ANSWERS = (150, 90, 40, 200, 130)


def next_tokens(request, number):
    """Every answer counts on from a number of its own."""
    start = 10_000 * request.stats.arrival + len(request.output)
    return list(range(start, start + number))


def played(driver, limit):
    """Turns the scheduler without a runner, skipping at most `limit` steps at once. Returns how many were planned and
    how many skipped, and by request the step in which it was finished."""
    scheduler, planned, skipped, finished = driver.scheduler, 0, 0, {}
    while scheduler.has_work:
        skipped += (num := scheduler.skip_plain_steps(limit, next_tokens))
        audit(driver.cache)
        if num:
            continue
        planned += 1
        plan = scheduler.plan()
        running = {request.slot: request for request in scheduler.state.requests.values() if request.slot >= 0}
        slots = [slot for slot in plan.samples.slots.tolist() if running[slot].phase is Phase.RUNNING]
        sampled = [SampledToken(slot, next_tokens(running[slot], 1)[0]) for slot in slots]
        for progress in scheduler.apply(step_result(plan.step, sampled, advanced=[True] * len(plan.decodes))):
            if progress.finish is not None:
                finished[progress.request.id] = planned + skipped
    return planned, skipped, finished


def nodes(driver):
    stack, found = list(driver.cache.tree.roots.values()), []
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        found.append((node.end, node.raw, node.resident, node.checkpoint is not None))
    return sorted(found)


MODES, SIZES = ("auto", "align", "junction", None), ((400, 8), (400, 2), (60, 8), (34, 3))
SOME = ((400, 8, "auto"), (400, 8, None), (400, 2, "align"), (60, 8, "junction"), (60, 8, "auto"))
SOME += ((34, 3, "align"), (34, 3, None))


@pytest.mark.parametrize(
    ("num_pages", "max_num_seqs", "mode"), by_run(SOME, (), ((*sizes, mode) for sizes, mode in product(SIZES, MODES)))
)
def test_what_comes_of_it_is_the_same(mode, num_pages, max_num_seqs):
    drivers = [Driver(mode, num_pages, max_num_seqs=max_num_seqs) for _ in range(3)]
    outcomes = []
    for driver, limit in zip(drivers, (0, 1 << 60, 7), strict=True):
        for prompt, num_tokens in zip(PROMPTS, ANSWERS, strict=True):
            driver.submit(list(prompt), num_tokens)
        outcomes.append(played(driver, limit))
    for driver, (planned, skipped, finished) in zip(drivers, outcomes, strict=True):
        assert (planned + skipped, finished) == (outcomes[0][0], outcomes[0][2])
        assert driver.scheduler.state.counters == drivers[0].scheduler.state.counters
        assert {name: request.output for name, request in driver.requests.items()} == {
            name: request.output for name, request in drivers[0].requests.items()
        }
        assert nodes(driver) == nodes(drivers[0])
        assert driver.cache.checkpoints.taken == drivers[0].cache.checkpoints.taken
        assert driver.cache.pool.num_free == drivers[0].cache.pool.num_free
    assert outcomes[0][1] == 0 and outcomes[1][0] < outcomes[0][0] / 2 and outcomes[2][1] > 0
    assert (drivers[0].scheduler.state.counters.preemptions > 0) is (num_pages < 60)


def test_nothing_is_skipped_while_something_may_happen():
    driver = Driver("auto", 400, max_num_seqs=2)
    scheduler = driver.scheduler
    assert scheduler.skip_plain_steps(100, next_tokens) == 0, "nobody runs"
    driver.submit(range(100), 300)
    assert scheduler.skip_plain_steps(100, next_tokens) == 0, "it waits"
    played_steps(driver, 1)
    assert scheduler.skip_plain_steps(100, next_tokens) == 0, "its first decode may copy a page"
    played_steps(driver, 1)
    plan = scheduler.plan()
    assert scheduler.skip_plain_steps(100, next_tokens) == 0, "a step is out"
    sampled = (SampledToken(plan.samples.slots.tolist()[0], 7),)
    scheduler.apply(step_result(plan.step, sampled, advanced=[True] * len(plan.decodes)))
    assert scheduler.skip_plain_steps(5, next_tokens) == 5
    assert scheduler.skip_plain_steps(100, next_tokens) == 127 - 100 - 7, "a point of the grid"
    driver.submit(range(500, 600), 300)
    assert scheduler.skip_plain_steps(100, next_tokens) == 0, "another one waits"


def played_steps(driver, number):
    for _ in range(number):
        plan = driver.scheduler.plan()
        sampled = [SampledToken(slot, 7) for slot in plan.samples.slots.tolist()]
        driver.scheduler.apply(step_result(plan.step, sampled, advanced=[True] * len(plan.decodes)))
