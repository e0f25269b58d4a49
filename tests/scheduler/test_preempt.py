"""Who gives way when pages run short, how often, and what is saved of it."""

import numpy as np
import pytest
from driver import Driver

from cairn.scheduler.preempt import make_room, preempt
from cairn.scheduler.queue import WaitingQueue
from cairn.scheduler.request import ARRIVALS_PER_PRIORITY, Phase, Request, RequestStats, Spec
from cairn.types import RequestId, SamplingParams


def running(*lengths, num_pages=400, **config):
    """A driver of which so many requests run, none of them in a step that is out."""
    driver = Driver(num_pages=num_pages, **config)
    names = [
        driver.submit(range(1000 * i, 1000 * i + length), max_tokens=100) for i, length in enumerate(lengths, start=1)
    ]
    while not all(driver.output(name) for name in names):
        driver.step()
    return driver, [driver.requests[name] for name in names]


def fill(driver, but=0):
    """Somebody else has all pages that are free, or may be, but so many."""
    driver.cache.clear()
    pages = driver.cache.pool.allocate(driver.cache.pool.num_free - but)
    driver.cache.pin(pages)
    driver.cache.pool.release(pages)


def make_room_for(driver, request):
    return make_room(driver.scheduler.state, request, request.sequence.num_tokens + 32)


def test_the_youngest_gives_way_first():
    driver, (first, second, third) = running(40, 40, 40)
    fill(driver)
    assert make_room_for(driver, first) is not None
    assert [request.phase for request in (first, second, third)] == [Phase.RUNNING, Phase.RUNNING, Phase.WAITING]


def test_nobody_gives_way_twice_to_the_same_one_and_the_youngest_of_all_gives_way_itself():
    driver, (first, second) = running(40, 40)
    second.stats.preempted_by.add(first.id)
    fill(driver)
    assert make_room_for(driver, first) is None
    assert first.phase is second.phase is Phase.RUNNING
    assert make_room_for(driver, second) is None
    assert (first.phase, second.phase) == (Phase.RUNNING, Phase.WAITING)


def test_what_a_step_names_does_not_give_way():
    driver, (first, second) = running(40, 40)
    fill(driver)
    second.num_in_flight = 1
    assert make_room_for(driver, first) is None and second.phase is Phase.RUNNING


def test_one_that_is_alone_goes_back_once_for_each_time_it_has_come_further():
    driver, (request,) = running(40)
    driver.cache.extend = lambda sequence, num_tokens, step_end=None: None
    sequence = request.sequence
    assert make_room_for(driver, request) is None and request.phase is Phase.WAITING
    assert request.stats.sent_back_at == sequence.num_tokens
    state = driver.scheduler.state
    driver.cache.pinned.open(
        sequence := state.cache.lookups.find(0, None, request.spec.namespace, sequence.keys, "", None)
    )
    state.waiting.remove(request)
    state.running.put(request)
    request.sequence, request.phase = sequence, Phase.RUNNING
    with pytest.raises(AssertionError, match="does not fit an empty pool"):
        make_room_for(driver, request)
    sequence.append(7)
    assert make_room_for(driver, request) is None and request.phase is Phase.WAITING


@pytest.mark.parametrize(("length", "saved"), [(47, False), (48, True)])
def test_a_state_is_saved_that_is_smaller_than_what_was_computed(length, saved):
    """A file is three pages, and a page 16 tokens."""
    driver, (request,) = running(length)
    driver.step()
    assert request.num_computed == length + 1 and len(request.sequence.tables[0].pages) == 3 + saved
    preempt(driver.scheduler.state, request, request, 0)
    assert (request.phase is Phase.PREEMPTING) == saved


@pytest.mark.parametrize(("free", "saved"), [(7, False), (8, True)])
def test_a_state_is_saved_where_the_one_that_preempts_leaves_room_for_it(free, saved):
    driver, (first, second) = running(100, 100)
    fill(driver, but=free)
    preempt(driver.scheduler.state, second, first, 5)
    assert (second.phase is Phase.PREEMPTING) == saved


def test_what_is_shared_with_the_tree_does_not_count_for_a_state():
    driver, _ = running(100)
    driver.run()
    name = driver.submit([*range(1000, 1096), *range(10)], max_tokens=100)
    driver.step()
    driver.step()
    request = driver.requests[name]
    assert request.sequence.matched == 96 and len(request.sequence.tables[0].pages) == 7
    preempt(driver.scheduler.state, request, request, 0)
    assert request.phase is Phase.WAITING


def test_nobody_comes_in_with_the_step_that_has_sent_one_back():
    driver, (first, second) = running(40, 40, max_num_seqs=2)
    fill(driver)
    name = driver.submit(range(10), priority=-1)
    while second.phase is Phase.RUNNING:
        assert driver.requests[name].phase is Phase.WAITING
        driver.step()
    # there are a slot and pages now, but what was freed belongs to those that run
    assert (first.phase, driver.requests[name].phase) == (Phase.RUNNING, Phase.WAITING)
    driver.step()
    assert driver.requests[name].phase is Phase.RUNNING


def test_turns_that_tie_are_told_apart_by_arrival():
    def request(arrival, priority):
        spec = Spec(
            request_id=RequestId(f"r{arrival}"),
            prompt=np.arange(1),
            sampling=SamplingParams(),
            max_tokens=1,
            priority=priority,
        )
        return Request(spec, RequestStats(0.0, arrival))

    # one step of priority is worth so many arrivals
    late, early = request(1, 1), request(1 + ARRIVALS_PER_PRIORITY, 0)
    queue = WaitingQueue(10)
    for one in (early, late):
        queue.put(one)
    assert list(queue.plain) == [late, early]
    queue.remove(early)
    assert list(queue.plain) == [late]
