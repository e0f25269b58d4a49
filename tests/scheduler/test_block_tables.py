"""Plans tell the runner of pages once: what it knows by then is what the requests have, and a driver notices else."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from driver import Driver, alone, layout

from cairn.cache.layout import AttentionGroup
from cairn.scheduler.preempt import preempt
from cairn.step import Admit, StepPlan, TableUpdate
from cairn.types import SamplingParams
from doubles.simulated_runner import BlockTables

PROMPT = tuple(range(100))


def test_tables_are_what_plans_have_said():
    tables = BlockTables((AttentionGroup("full", 16), AttentionGroup("wide", 64)), num_slots=3, max_pages=8)
    assert [table.shape for table in tables.tables] == [(4, 8), (4, 8)]

    def pages(*numbers):
        return np.array(numbers, np.int32)

    tables.apply(StepPlan(1, admits=(Admit(2, (pages(5, 6, 7), pages(8)), SamplingParams()),)))
    assert [own.tolist() for own in tables.pages_of(2, 40)] == [[5, 6, 7], [8]]
    updates = (TableUpdate(2, 0, 2, pages(9, 10)), TableUpdate(2, 1, 1, pages(11)))
    tables.apply(StepPlan(2, table_updates=updates))
    assert [own.tolist() for own in tables.pages_of(2, 65)] == [[5, 6, 9, 10, 0], [8, 11]]
    # the slot's next request has fewer pages, and none of what lies behind them is its own
    tables.apply(StepPlan(3, admits=(Admit(2, (pages(1), pages(2)), SamplingParams()),)))
    assert [own.tolist() for own in tables.pages_of(2, 16)] == [[1], [2]]
    assert not tables.tables[0][[0, 1, 3]].any()


def test_pages_are_told_of_once():
    """An admit has all pages of the prompt; a step that needs no page tells of none."""
    driver = Driver()
    driver.ask(PROMPT, max_tokens=60)
    admits = [admit for plan in driver.plans for admit in plan.admits]
    updates = [update for plan in driver.plans for update in plan.table_updates]
    assert [len(admit.tables[0]) for admit in admits] == [7]
    # 100 tokens of prompt and 59 that are fed again end in the tenth page
    assert [(update.first, len(update.pages)) for update in updates] == [(7, 1), (8, 1), (9, 1)]


def test_a_plan_is_no_larger_for_a_longer_context():
    sizes = set()
    for length in (100, 1000, 3200):
        driver = Driver(num_pages=1000, max_num_batched_tokens=4096)
        driver.ask(range(length), max_tokens=30, sampling=SamplingParams(presence_penalty=0.5))
        decodes = [plan for plan in driver.plans if len(plan.decodes)]
        assert not any(plan.admits for plan in decodes)
        sizes.add((len(decodes), sum(len(update.pages) for plan in decodes for update in plan.table_updates)))
    assert len(sizes) <= 2 and {size for size, _ in sizes} == {29}
    assert max(pages for _, pages in sizes) <= 2


def test_a_copy_on_write_tells_of_the_last_page_anew():
    driver = Driver()
    driver.ask(PROMPT, max_tokens=1)
    name = driver.submit(PROMPT, max_tokens=3)
    driver.run()
    (admit,) = (admit for plan in driver.plans[1:] for admit in plan.admits)
    (update,) = (update for plan in driver.plans[1:] for update in plan.table_updates)
    (copy,) = (copy for plan in driver.plans for copy in plan.copies)
    assert (update.first, update.pages.tolist()) == (6, [copy.target])
    assert admit.tables[0][6] == copy.source
    assert driver.output(name) == alone(PROMPT, False, max_tokens=3)


def test_who_is_preempted_is_admitted_again():
    driver = Driver()
    name = driver.submit(PROMPT, max_tokens=20)
    for _ in range(5):
        driver.step()
    request = driver.requests[name]
    preempt(driver.scheduler.state, request, request, 10_000)
    driver.run()
    assert [len(plan.admits) for plan in driver.plans if plan.admits] == [1, 1]
    assert driver.output(name) == alone(PROMPT, False, max_tokens=20)


def without_update(plan):
    return msgspec.structs.replace(plan, table_updates=())


def one_too_early(plan):
    return msgspec.structs.replace(
        plan, table_updates=tuple(msgspec.structs.replace(own, first=own.first - 1) for own in plan.table_updates)
    )


def one_too_late(plan):
    return msgspec.structs.replace(
        plan, table_updates=tuple(msgspec.structs.replace(own, first=own.first + 1) for own in plan.table_updates)
    )


def without_last_page(plan):
    short = (replace(own, tables=tuple(pages[:-1] for pages in own.tables)) for own in plan.admits)
    return msgspec.structs.replace(plan, admits=tuple(short))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("fault", [without_update, one_too_early, one_too_late, without_last_page])
def test_a_fault_in_what_plans_tell_of_pages_is_noticed(fault, twice):
    """`twice`: the fault is in a copy on write, where tables do not grow."""
    driver = Driver()
    if twice:
        driver.ask(PROMPT, max_tokens=1)
    launch, changed = driver.runner.launch, []

    def tampered(plan):
        changed.append(bool(plan.table_updates or plan.admits))
        launch(fault(plan))

    driver.runner.launch = tampered
    driver.submit(PROMPT, max_tokens=5 if twice else 60)
    with pytest.raises((AssertionError, ValueError), match=r"slot 0|table update of slot"):
        driver.run()
    assert any(changed)


def test_all_pages_of_all_groups_are_told_of():
    """Whatever is admitted, shared, grown and copied in a mix: the driver compares after every plan."""
    driver = Driver(num_pages=60, max_num_seqs=3, max_num_batched_tokens=100, max_in_flight=2)
    driver.layout = layout()
    for number in range(12):
        driver.submit(range(number % 3 * 1000, number % 3 * 1000 + 90 + number), max_tokens=30, n=1 + number % 3)
    compared = []
    check = driver.check_tables
    driver.check_tables = lambda pages: compared.append(len(pages)) or check(pages)
    driver.run()
    assert max(compared) == 3 and len(compared) == len(driver.plans)
