"""Who waits, as `GET /cache` shows it."""

import json

import msgspec
import pytest
from driver import Driver
from test_turns import PROMPT, prompts

from cairn.cache.view import MAX_WAITING_SHOWN
from cairn.scheduler.queue_view import queue_view


def one_at_a_time(num_pages: int, **config) -> Driver:
    return Driver(num_pages=num_pages, max_num_seqs=1, max_num_batched_tokens=512, **config)


def test_an_empty_queue():
    view = queue_view(one_at_a_time(100, policy="session").scheduler.state)
    assert (view.policy, view.waiting, view.bypasses, view.requests) == ("session", 0, 0, [])


def test_what_each_is_going_to_hit_and_what_is_kept_for_it():
    driver = one_at_a_time(80)
    known, *others = prompts(4)
    driver.submit(known, max_tokens=1)
    driver.run()
    driver.submit(others[0][:100], max_tokens=20)
    driver.step()
    driver.clock.advance(3)
    driver.submit(others[1], max_tokens=2)
    driver.submit(others[2], max_tokens=2, priority=2, session="s")
    driver.submit((*known, *range(2000, 2010)), max_tokens=2)
    driver.clock.advance(2)
    driver.step()
    view = queue_view(driver.scheduler.state)
    assert (view.policy, view.waiting) == ("fcfs", 3)
    first, second, last = view.requests
    assert [each.prompt for each in view.requests] == [PROMPT, PROMPT + 10, PROMPT]
    assert [each.hit for each in view.requests] == [0, PROMPT, 0]
    least = driver.layout.pages_per_checkpoint * driver.layout.page_bytes
    assert least < second.kept_bytes <= least + driver.layout.pages_for(PROMPT) * driver.layout.page_bytes
    assert first.kept_bytes == last.kept_bytes == 0
    assert (second.age, second.priority, last.priority) == (2, 0, 2)
    assert {(each.session, each.waits_for) for each in view.requests} == {("short", "turn")}


def test_who_went_before_whom():
    driver = one_at_a_time(80)
    known, *others = prompts(6)
    driver.submit(known, max_tokens=1)
    driver.run()
    for prompt in others:
        driver.submit(prompt, max_tokens=2)
    driver.submit((*known, *range(2000, 2010)), max_tokens=2)
    driver.step()
    view = queue_view(driver.scheduler.state)
    assert [each.bypassed for each in view.requests] == [1] * 5 and view.bypasses == 5


def test_an_endangered_hit_is_shown():
    driver = one_at_a_time(80)
    known, *others = prompts(4)
    driver.submit(known, max_tokens=1)
    driver.run()
    driver.submit(others[0], max_tokens=8)
    driver.step()
    for prompt in others[1:]:
        driver.submit(prompt, max_tokens=2)
    driver.submit((*known, *range(2000, 2010)), max_tokens=2)
    driver.step()
    view = queue_view(driver.scheduler.state)
    assert [each.endangered for each in view.requests] == [False, False, True]


def test_one_that_waits_for_another_ones_prefix():
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=128)
    (common,) = prompts(1)
    driver.submit(common)
    driver.step()
    driver.submit((*common, 1, 2, 3))
    driver.step()
    assert [each.waits_for for each in queue_view(driver.scheduler.state).requests] == ["prefix"]


@pytest.mark.parametrize("number", [MAX_WAITING_SHOWN, MAX_WAITING_SHOWN + 7])
def test_the_number_of_rows_is_bounded(number):
    driver = one_at_a_time(100)
    for seed in range(number):
        driver.submit([seed] * 10, session=f"s{seed}")
    view = queue_view(driver.scheduler.state)
    assert view.waiting == number and len(view.requests) == MAX_WAITING_SHOWN
    assert not any(f'"s{seed}"' in json.dumps(msgspec.to_builtins(view)) for seed in range(number))
