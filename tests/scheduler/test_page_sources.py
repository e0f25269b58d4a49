"""Several sources of pages: whose plan is taken, who follows, and that nobody reads what one may still write to."""

import numpy as np
import pytest
from driver import Driver, alone
from test_fetch import HINTED, PROMISED, Side, named, say

from cairn.cache.audit import audit
from cairn.cache.group_pages import page_numbers
from cairn.scheduler.fetch import MAX_FETCHES, OVERDUE_FACTOR, SLOW_SECONDS
from cairn.scheduler.request import Phase
from cairn.transfer.contract import PagesFree, PullEnded, PullId, Volume
from doubles.page_source import Behaviour, ScriptedSource, write

TEXT = list(range(100, 900))
PROMPT = TEXT[:300]


def stores(count=2, known=PROMPT, seconds=0.0, **arguments):
    """A driver with so many sources, each of which has `known`."""
    driver = Driver(num_pages=arguments.pop("num_pages", 200), **arguments)
    sources = [ScriptedSource(driver.runner, driver.layout, seconds) for _ in range(count)]
    for source in sources:
        source.add(known)
    driver.scheduler.state.transfers.sources += tuple(sources)
    return driver, *sources


def run(driver, limit=300):
    """Until nothing is left, also in the sources."""
    state = driver.scheduler.state
    for _ in range(limit):
        driver.scheduler.poll()
        audit(driver.cache)
        if driver.scheduler.has_work:
            driver.step()
        elif not state.requests and not state.transfers.is_open:
            break
    assert not state.requests and not driver.cache.pinned.pins and not driver.cache.pinned.sequences
    assert driver.cache.clear(), "a page leaked"


def computed(driver, name) -> int:
    return driver.requests[name].stats.num_prompt_computed


def test_what_a_source_has_need_not_be_computed():
    driver, source = stores(1)
    name = driver.submit(PROMPT)
    driver.scheduler.poll()
    request = driver.requests[name]
    assert request.phase is Phase.FETCHING and source.started == [name]
    driver.scheduler.poll()
    assert request.phase is Phase.READY and request.sequence.received == 300
    run(driver)
    assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == 0
    assert driver.scheduler.state.counters.external_hits == 300


def test_of_several_answers_to_a_prompt_the_first_one_fetches_it():
    driver, source = stores(1)
    name = driver.submit(PROMPT, n=3, seed=5)
    driver.scheduler.poll()
    waiting = driver.scheduler.state.waiting
    assert source.started == [name] and not len(waiting.fetches)
    while driver.scheduler.has_work or driver.scheduler.state.requests:
        driver.scheduler.poll()
        assert not len(waiting.fetches)
        if driver.scheduler.has_work:
            driver.step()
    run(driver)
    assert source.started == [name] and not source.declined
    for number, own in enumerate([name, f"{name}.1", f"{name}.2"]):
        assert driver.output(own) == alone(PROMPT, False, seed=5 + number) and not computed(driver, own)


def test_the_plan_that_saves_most_is_carried_out_and_the_others_are_declined():
    driver, slow, far, near = stores(3)
    # a millisecond a token: 300 against 300 - 290, 128 - 1, 300 - 20
    slow.seconds, near.seconds = 0.29, 0.02
    far._known.clear()
    far.add([*TEXT[:128], 1])
    far.seconds = 0.001
    name = driver.submit(PROMPT)
    driver.scheduler.poll()
    assert (slow.started, far.started, near.started) == ([], [], [name])
    run(driver)
    assert slow.declined == far.declined == [name] and not near.declined
    assert driver.output(name) == alone(PROMPT, False)


def test_a_plan_that_takes_longer_than_computing_is_not_carried_out_unless_there_is_but_one_source():
    for count, started in ((1, True), (2, False)):
        driver, *sources = stores(count, seconds=1.0)
        name = driver.submit(PROMPT)
        driver.scheduler.poll()
        assert [bool(source.started) for source in sources] == [started] * count
        assert [source.declined for source in sources] == [[] if started else [name]] * count
        run(driver)
        assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == (0 if started else 300)


def test_what_computing_takes_is_learned():
    driver, source, _ = stores(2, known=TEXT[400:700], seconds=0.1, max_num_batched_tokens=100)
    speed = driver.scheduler.state.transfers.prefill_speed
    before = speed.seconds_per_token
    for number in range(4):
        driver.submit(range(1000 * number, 1000 * number + 320))
        driver.scheduler.poll()
        while driver.scheduler.has_work:
            driver.clock.advance(0.001)
            driver.step()
    assert before / 2 < speed.seconds_per_token < before / 1.5, "four milliseconds for 320 tokens, four times"
    speed.seconds_per_token = 0.1 / 310
    driver.submit(TEXT[400:700])
    driver.scheduler.poll()
    assert not source.started, "computing 300 tokens takes less than a tenth of a second"


def test_what_a_link_takes_is_learned():
    driver = Driver(side=(side := Side()))
    taken = []
    for number in range(3):
        prompt = TEXT[100 * number : 100 * number + 90]
        driver.submit(prompt, source=PROMISED)
        driver.scheduler.poll()
        ((key, fetch),) = driver.scheduler.state.transfers.fetching.items()
        taken.append(fetch.plan.seconds)
        driver.clock.advance(1.0)
        write(driver.runner, prompt, fetch.target, 16)
        pull = PullId(key[1])
        say(driver, side, PullEnded(pull, None, 90, 90, Volume(fetch.plan.num_bytes)), PagesFree(pull))
        driver.run()
    # a second each, and the last ones count most
    assert taken[0] < 0.02 and taken[0] + 0.2 < taken[1] < taken[2] - 0.1 < 1.0


@pytest.mark.parametrize("position", [64, 128, 256])
def test_what_one_brings_in_part_another_completes(position):
    driver, first, second = stores(2)
    second.seconds = 0.01
    first.script.append(Behaviour(position=position))
    name = driver.submit(PROMPT)
    driver.scheduler.poll()
    driver.scheduler.poll()
    assert first.started == second.started == [name] and driver.requests[name].phase is Phase.FETCHING
    (fetch,) = second.fetches.values()
    assert fetch.target.pages[0].first_token == position, "what has come is not fetched again"
    run(driver)
    assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == 0
    assert driver.scheduler.state.counters.external_hits == 300


def test_with_the_cache_off_what_has_come_in_part_is_kept():
    driver, first, second = stores(2, mode=None)
    second.seconds = 0.01
    first.script.append(Behaviour(position=256))
    name = driver.submit(PROMPT)
    driver.scheduler.poll()
    driver.scheduler.poll()
    assert driver.requests[name].phase is Phase.READY and second.declined == [name]
    run(driver)
    assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == 44


@pytest.mark.parametrize("late", [0, 5, 40])
def test_after_a_failure_another_follows_while_the_first_may_still_write(late):
    driver, first, second = stores(2)
    second.seconds = 0.01
    first.script.append(Behaviour(failure="the disk is gone", late=late))
    name = driver.submit(PROMPT)
    driver.scheduler.poll()
    (bad,) = first.fetches.values()
    spoiled = {*bad.target.state_pages.tolist(), *page_numbers(bad.target.pages).tolist()}
    driver.scheduler.poll()
    assert second.started == [name]
    if late:
        (good,) = second.fetches.values()
        assert not spoiled & {*good.target.state_pages.tolist(), *page_numbers(good.target.pages).tolist()}
    while driver.scheduler.has_work or driver.requests[name].phase is not Phase.FINISHED:
        driver.scheduler.poll()
        if driver.scheduler.has_work:
            driver.step()
            assert not first.fetches or not spoiled & named(driver)
    run(driver)
    assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == 0


def test_no_more_than_two_are_asked():
    driver, *sources = stores(4)
    for number, source in enumerate(sources):
        source.seconds = 0.01 * number
        source.script.append(Behaviour(failure="gone"))
    name = driver.submit(PROMPT)
    run(driver)
    assert [source.started for source in sources] == [[name]] * MAX_FETCHES + [[]] * 2
    assert [source.declined for source in sources] == [[]] * MAX_FETCHES + [[name]] * 2
    assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == 300


@pytest.mark.parametrize("ignores_abort", [False, True])
def test_an_answer_that_comes_after_its_request_has_gone_is_not_used(ignores_abort):
    driver, source, other = stores(2)
    other.seconds = 0.01
    source.script.append(Behaviour(looks=6, late=3, ignores_abort=ignores_abort))
    name = driver.submit(PROMPT)
    driver.scheduler.poll()
    (fetch,) = source.fetches.values()
    pages = np.concatenate([page_numbers(fetch.target.pages), fetch.target.state_pages])
    driver.scheduler.abort(name)
    assert other.declined == [name]
    again = driver.submit(PROMPT, max_tokens=20)
    while source.fetches:
        assert (driver.cache.pool.counts[pages] == 1).all(), "in quarantine, and nowhere else"
        driver.scheduler.poll()
        if driver.scheduler.has_work:
            driver.step()
    assert not driver.scheduler.state.transfers.quarantine
    run(driver)
    assert driver.output(again) == alone(PROMPT, False, max_tokens=20)


def test_what_does_not_come_in_time_is_computed():
    driver, source, other = stores(2, seconds=0.05)
    other.seconds = 0.06
    source.script.append(Behaviour(looks=10**6))
    name = driver.submit(PROMPT)
    plain = driver.submit(TEXT[500:600], max_tokens=10)
    driver.scheduler.poll()
    while driver.scheduler.has_work:
        driver.scheduler.poll()
        driver.step()
    assert driver.output(plain) == alone(TEXT[500:600], False, max_tokens=10), "nobody waits for it"
    # computing was to take 0.3 s
    driver.clock.advance(0.3 * OVERDUE_FACTOR - 0.01)
    driver.scheduler.poll()
    assert driver.requests[name].phase is Phase.FETCHING
    driver.clock.advance(0.02)
    driver.scheduler.poll()
    assert driver.requests[name].phase is Phase.WAITING and other.declined == [name]
    run(driver)
    assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == 300


def test_a_slow_source_gives_way_to_who_lacks_its_pages():
    driver, source = stores(1, num_pages=40)
    source.script.append(Behaviour(looks=10**6))
    name = driver.submit(PROMPT)
    driver.scheduler.poll()
    plain = driver.submit(TEXT[300:700], priority=-1)
    driver.clock.advance(SLOW_SECONDS)
    run(driver)
    for own, text in ((name, PROMPT), (plain, TEXT[300:700])):
        assert driver.output(own) == alone(text, False)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_where_a_promise_that_is_broken_ends_the_request_no_other_source_follows(policy):
    driver, first, second = stores(2, on_load_failure=policy)
    first.promised, second.seconds = True, 0.01
    first.script.append(Behaviour(failure="gone"))
    name = driver.submit(PROMPT)
    run(driver)
    request = driver.requests[name]
    assert driver.scheduler.state.counters.failed_pulls == 1
    if policy == "fail":
        assert request.outcome.finish_reason == "error" and "the double: gone" in request.outcome.failure
        assert second.declined == [name] and not second.started
    else:
        assert driver.output(name) == alone(PROMPT, False) and second.started == [name]


@pytest.mark.parametrize(("seconds", "pulled"), [(0.0, False), (0.29, True)])
def test_a_lease_is_given_back_when_another_source_has_brought_it_all(seconds, pulled):
    driver = Driver(side=(side := Side()))
    source = ScriptedSource(driver.runner, driver.layout, seconds)
    source.add(PROMPT)
    driver.scheduler.state.transfers.sources += (source,)
    name = driver.submit(PROMPT, source=PROMISED)
    driver.scheduler.poll()
    driver.scheduler.poll()
    (spec,) = side.specs.values()
    assert spec.release_only is not pulled and bool(source.started) is not pulled
    if pulled:
        say(driver, side, PullEnded(PullId(1), "the other server is gone"), PagesFree(PullId(1)))
        driver.scheduler.poll()
        assert source.started == [name]
    run(driver)
    assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == 0


def test_what_a_server_sends_in_part_is_used_where_a_store_is_too_slow_for_the_rest():
    driver = Driver(side=(side := Side()))
    source = ScriptedSource(driver.runner, driver.layout, 0.25)
    source.add(PROMPT)
    driver.scheduler.state.transfers.sources += (source,)
    name = driver.submit(PROMPT, source=HINTED)
    driver.scheduler.poll()
    ((pull, spec),) = side.specs.items()
    (fetch,) = driver.scheduler.state.transfers.fetching.values()
    assert (fetch.plan.position, fetch.plan.promised) == (256, False)
    write(driver.runner, PROMPT[:192], fetch.target, 16)  # as a link would
    say(driver, side, PullEnded(pull, None, 192, 192), PagesFree(pull))
    assert not source.started, "0.25 s for 108 tokens are too long"
    assert driver.requests[name].phase is Phase.READY and len(spec.keys) == 300
    run(driver)
    assert driver.output(name) == alone(PROMPT, False) and computed(driver, name) == 108


def test_where_a_state_has_come_before_the_end_of_what_is_here_its_last_page_is_copied():
    driver, source = stores(1, known=[1], mode="align")
    driver.ask(TEXT[:100])
    source.add(TEXT[:98])
    prompt = [*TEXT[:100], *range(5000, 5060)]
    name = driver.submit(prompt)
    driver.scheduler.poll()
    sequence = driver.requests[name].sequence
    assert driver.requests[name].phase is Phase.FETCHING and (sequence.hit, sequence.matched) == (96, 100)
    driver.scheduler.poll()
    assert (sequence.hit, sequence.matched) == (98, 100)
    run(driver)
    assert driver.output(name) == alone(prompt, False) and computed(driver, name) == 62
