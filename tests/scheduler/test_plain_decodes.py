"""Decodes with nothing but a token to them go a short way through the scheduler; what comes of it is the same."""

from itertools import product

import pytest
from driver import Driver

from cairn.scheduler import advance, plan_builder
from cairn.step import TokenMask
from cairn.types import SamplingParams
from tiers import by_run

PROMPTS = [range(100), range(100, 117), [*range(60), *range(500, 530)]]
BLOCK, DECODES = 16, 200


def decode_rows(plan):
    columns = plan.decodes.slots, plan.decodes.positions, plan.decodes.kv_write_from
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def records(plan):
    """What a plan says, in whatever order its rows are."""
    slots = plan.decodes.slots.tolist() + [row.slot for row in plan.prefills]
    columns = plan.samples.slots, plan.samples.positions, plan.samples.bans_stop_tokens
    return {
        "decodes": decode_rows(plan),
        "prefills": [(row.slot, row.start, row.end) for row in plan.prefills],
        "snapshots": sorted((slots[each.row], each.position, each.pages.tolist()) for each in plan.snapshots),
        "tables": sorted((each.slot, each.first, each.pages.tolist()) for each in plan.table_updates),
        "samples": sorted(zip(*(column.tolist() for column in columns), strict=True)),
        "saves": sorted((each.slot, each.pages.tolist()) for each in plan.saves),
    }


def run(num_pages, max_in_flight, mode, **config):
    driver = Driver(mode, num_pages, BLOCK, max_in_flight=max_in_flight, **config)
    for number, prompt in enumerate(PROMPTS):
        driver.submit(list(prompt), DECODES, seed=number, stop=(3, 17) if number == 1 else (), min_tokens=5)
    driver.run()
    preemptions = driver.scheduler.state.counters.preemptions
    return [records(plan) for plan in driver.plans], [driver.output(f"r{number}") for number in (1, 2, 3)], preemptions


SOME = ((400, 1, "auto"), (400, 2, None), (400, 3, "junction"), (400, 2, "align"))
SOME += ((30, 1, "align"), (30, 2, "auto"), (30, 3, None), (30, 2, "junction"), (30, 3, "auto"))


@pytest.mark.parametrize(
    ("num_pages", "max_in_flight", "mode"),
    by_run(SOME, (), product((400, 30), (1, 2, 3), ("auto", "align", "junction", None))),
)
def test_plans_are_the_same_as_by_the_long_way(monkeypatch, num_pages, max_in_flight, mode):
    plans, answers, preemptions = run(num_pages, max_in_flight, mode)
    assert (preemptions > 0) is (num_pages == 30), "preemption is a part of this"
    monkeypatch.setattr(advance, "_plain_until", lambda state, request, start: 0)
    long_plans, long_answers, _ = run(num_pages, max_in_flight, mode)
    assert answers == long_answers
    assert plans == long_plans


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_few_decodes_go_the_long_way(max_in_flight):
    driver = Driver("auto", 400, BLOCK, max_in_flight=max_in_flight)
    driver.submit(range(100), DECODES)
    num_plain = num_decodes = 0
    while driver.scheduler.has_work:
        while driver.pipeline.can_launch:
            plan = driver.pipeline.launch()
            num_plain += len(driver.scheduler._plans[-1].plain)
            num_decodes += len(plan.decodes)
        driver.pipeline.collect()
    # one point of the grid in 64, and the first decode, which may copy a page; one that lacks a page is plain with it
    assert num_decodes == DECODES - 1
    assert num_decodes - num_plain <= DECODES // 64 + 2


def test_a_step_of_plain_decodes_alone_makes_no_records_of_them(monkeypatch):
    driver = Driver("auto", 400, BLOCK)
    for number, prompt in enumerate(PROMPTS):
        driver.submit(list(prompt), DECODES, seed=number)
    for _ in range(10):
        driver.step()
    made, num_steps = [], 0
    for module, name in ((plan_builder, "ScheduledSequence"), (plan_builder, "TableUpdate"), (advance, "make_room")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), made))
    while driver.scheduler.has_work:
        before = len(made)
        plan = driver.pipeline.launch()
        builder = driver.scheduler._plans[-1]
        if not builder.scheduled and not plan.table_updates:
            num_steps += 1
            assert len(made) == before and len(builder.plain) == len(plan.decodes) and builder.plain.rows is None
            assert plan.samples_rows and not driver.scheduler.masks()
        driver.pipeline.collect()
    assert made and num_steps > DECODES // 2


def counted(call, made):
    def calling(*arguments, **named):
        made.append(call)
        return call(*arguments, **named)

    return calling


class Anything:
    """A constraint that allows all."""

    def __init__(self) -> None:
        self.asked = 0

    def allowed(self, output) -> TokenMask | None:
        self.asked += 1


@pytest.mark.parametrize("fields", [{"constraint": Anything()}, {"sampling": SamplingParams(presence_penalty=1.0)}])
def test_what_needs_the_token_before_is_not_plain(fields):
    """With two steps in flight its draw has to wait for the one before it."""
    driver = Driver("auto", 400, BLOCK, max_in_flight=2)
    driver.submit(range(100), 40, **fields)
    while driver.scheduler.has_work:
        driver.step()
        assert not any(builder.plain for builder in driver.scheduler._plans)


@pytest.mark.parametrize("mode", ["auto", None])
def test_the_runner_says_how_far_a_sequence_has_come(mode):
    """Of an answer that ends with a stop token steps are out that know nothing of it: what they did is the runner's
    word, so a sequence stands before its stop token."""
    driver = Driver(mode, 200, BLOCK, max_in_flight=3)
    results, collect = [], driver.runner.collect

    def collected(step):
        results.append(collect(step))
        return results[-1]

    driver.runner.collect = collected
    answer = driver.output(driver.submit(list(range(40)), 30))
    driver.run()
    stop, results[:] = answer[11], []
    end = answer.index(stop) + 1
    request = driver.ask(list(range(40)), max_tokens=30, stop=(stop,))
    assert request.output == answer[:end] and request.num_computed == 40 + end - 1
    advanced = [step.advanced[0] for step in results if len(step.advanced)]
    assert advanced.count(True) == end - 1 and advanced.count(False) > 0 and not any(advanced[end - 1 :])
