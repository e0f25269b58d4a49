"""Pages from another server: what is asked for, and that nobody gets a page that may still be written to."""

from dataclasses import replace

import numpy as np
import pytest
from driver import Driver, alone

from cairn.cache.group_pages import page_numbers
from cairn.cache.reasons import Reason
from cairn.scheduler.fetch import requeue_youngest_fetched
from cairn.scheduler.request import Phase
from cairn.transfer.contract import KvSource, PagesFree, PullEnded, PullId
from cairn.types import SamplingParams

TEXT = list(range(100, 900))
PROMISED = KvSource("p", "127.0.0.1", 5, "there", b"n" * 16)
HINTED = KvSource("p", "127.0.0.1", 5)


class Side:
    """The connector in a test's hands: what was asked of it, and what it says next."""

    def __init__(self):
        self.specs, self.aborted, self.news = {}, [], []

    def fits(self, num_pages):
        return True

    def pull(self, spec):
        pull = PullId(len(self.specs) + 1)
        self.specs[pull] = spec
        return pull

    def abort(self, pull):
        self.aborted.append(pull)

    def events(self):
        news, self.news = self.news, []
        return news


def fetching(source=PROMISED, length=200, num_pages=60, known=0, **config):
    """A driver that fetches a prompt, of which it knows the beginning already, and how the request is called."""
    driver = Driver(side=(side := Side()), num_pages=num_pages, **config)
    if known:
        driver.ask(TEXT[:known], max_tokens=1)
    name = driver.submit(TEXT[:length], source=source)
    driver.scheduler.poll()
    assert driver.requests[name].phase is Phase.FETCHING
    return driver, side, name


def pages_of(spec):
    return np.concatenate([page_numbers(spec.pages), spec.checkpoint])


def say(driver, side, *news):
    side.news += news
    driver.scheduler.poll()


def named(driver):
    """Every page that the plan that was run last has written to."""
    plan = driver.plans[-1]
    written = [copy.target for copy in plan.copies]
    for file in (*plan.saves, *plan.snapshots):
        written += file.pages.tolist()
    rows = [(slot, start, start + 1, write_from) for slot, start, _, write_from in plan.decodes]
    rows += [(row.slot, row.start, row.end, row.kv_write_from) for row in plan.prefills]
    for slot, start, end, write_from in rows:
        written += driver.runner.tables.pages_of(slot, end)[0][max(start, write_from) // 16 :].tolist()
    return set(written)


def only_this_pull_is_left(driver):
    state = driver.scheduler.state
    return not state.requests and not driver.cache.pinned.sequences and len(driver.cache.pinned.pins) == 1


@pytest.mark.parametrize(("known", "first"), [(0, 0), (100, 96), (128, 128)])
def test_what_is_not_here_is_asked_for_from_the_page_that_begins_it(known, first):
    _, side, _ = fetching(known=known)
    (spec,) = side.specs.values()
    assert (spec.start, len(page_numbers(spec.pages)), len(spec.checkpoint)) == (first, 13 - first // 16, 3)
    assert (spec.source, spec.release_only) == (PROMISED, False)


@pytest.mark.parametrize("source", [PROMISED, HINTED])
@pytest.mark.parametrize("known", [0, 100])
def test_nobody_gets_the_pages_of_a_pull_that_failed_before_the_link_lets_go_of_them(source, known):
    driver, side, name = fetching(source, known=known)
    ((pull, spec),) = side.specs.items()
    say(driver, side, PullEnded(pull, "the other server is gone"))
    assert driver.requests[name].phase is Phase.WAITING
    others = [driver.submit(range(1000 * i, 1000 * i + 300), max_tokens=20) for i in range(1, 6)]
    written = set()
    while driver.scheduler.has_work:
        driver.step()
        assert (driver.cache.pool.counts[pages_of(spec)] == 1).all()
        written |= named(driver)
    assert written and not set(pages_of(spec).tolist()) & written
    assert only_this_pull_is_left(driver) and not driver.cache.clear()
    say(driver, side, PagesFree(pull))
    assert not driver.cache.pinned.pins and driver.cache.clear()
    assert driver.output(name) == alone(TEXT[:200], False)
    assert all(len(driver.output(other)) == 20 for other in others)


def test_nobody_gets_the_pages_of_a_pull_whose_request_was_aborted():
    driver, side, name = fetching()
    ((pull, spec),) = side.specs.items()
    driver.scheduler.abort(name)
    assert side.aborted == [pull] and only_this_pull_is_left(driver)
    assert (driver.cache.pool.counts[pages_of(spec)] == 1).all()
    assert not driver.cache.clear()
    # nothing comes of it any more
    say(driver, side, PullEnded(pull, None, 200, 200))
    assert only_this_pull_is_left(driver)
    say(driver, side, PagesFree(pull))
    assert not driver.cache.pinned.pins and driver.cache.clear()


def test_what_has_come_is_free_of_the_pull_and_is_used():
    driver, side, name = fetching()
    ((pull, _),) = side.specs.items()
    say(driver, side, PullEnded(pull, None, 200, 200), PagesFree(pull))
    request = driver.requests[name]
    assert request.phase is Phase.READY and request.sequence.hit == request.sequence.received == 200
    assert not driver.cache.pinned.pins and driver.scheduler.state.counters.external_hits == 200


def test_a_failure_may_be_the_end_of_a_promise_and_never_of_a_hint():
    for source, phase in ((PROMISED, Phase.FINISHED), (HINTED, Phase.WAITING)):
        driver, side, name = fetching(source, on_load_failure="fail")
        (pull,) = side.specs
        side.news.append(PullEnded(pull, "the other server is gone"))
        failed = driver.scheduler.poll()
        request = driver.requests[name]
        assert request.phase is phase and [news.request for news in failed] == [request] * (source is PROMISED)
        assert driver.scheduler.state.counters.failed_pulls == (source is PROMISED)
        say(driver, side, PagesFree(pull))
        driver.run()
        if source is PROMISED:
            assert (
                request.outcome.finish_reason == "error"
                and "127.0.0.1:5: the other server is gone" in request.outcome.failure
            )


def test_no_more_is_fetched_at_a_time_than_can_run():
    driver, side, _ = fetching(max_num_seqs=2)
    for start in (200, 400):
        driver.submit(TEXT[start : start + 64], source=PROMISED)
    driver.scheduler.poll()
    assert len(side.specs) == 2
    # those that have come wait for a slot, too
    say(driver, side, PullEnded(PullId(1), None, 200, 200), PagesFree(PullId(1)))
    assert len(side.specs) == 2
    driver.scheduler.plan()
    driver.scheduler.poll()
    assert len(side.specs) == 3


def test_a_promise_that_is_not_needed_is_given_back_at_once():
    driver = Driver(side=(side := Side()))
    driver.ask(TEXT[:200], max_tokens=1)
    name = driver.submit(TEXT[:200], source=PROMISED)
    driver.scheduler.poll()
    (spec,) = side.specs.values()
    assert spec.release_only and spec.checkpoint is None and not spec.pages
    hinted = driver.submit(TEXT[:200], source=HINTED)
    while driver.scheduler.has_work:
        driver.scheduler.poll()
        driver.step()
    assert len(side.specs) == 1 and driver.requests[name].stats.first_sequence.reason is Reason.NONE
    assert driver.requests[hinted].stats.first_sequence.hit == 200


@pytest.mark.parametrize(("known", "end"), [(192, None), (200, 200)])
def test_a_server_that_can_add_nothing_is_not_asked(known, end):
    driver = Driver(side=(side := Side()))
    driver.ask(TEXT[:known], max_tokens=1)
    prompt = [*TEXT[:known], 1, 2, 3]
    name = driver.submit(prompt, source=replace(HINTED, end=end))
    driver.scheduler.poll()
    assert not side.specs and driver.requests[name].phase is Phase.WAITING
    # one token more there may be worth it
    other = driver.submit(prompt, source=replace(HINTED, end=known + 1))
    driver.scheduler.abort(name)
    driver.scheduler.poll()
    assert len(side.specs) == 1 and driver.requests[other].phase is Phase.FETCHING


def two_that_have_come(position, priority=0):
    """Two requests whose pages have come, in the order of their submission, beside one that runs; one slot is free."""
    driver = Driver(side=(side := Side()), max_num_seqs=2)
    driver.submit(TEXT[700:710], max_tokens=50)
    driver.scheduler.poll()
    driver.step()
    names = [driver.submit(TEXT[i : i + 90], source=PROMISED, priority=priority * (i > 0)) for i in (0, 200)]
    driver.scheduler.poll()
    pulls = {spec.keys[0]: pull for pull, spec in side.specs.items()}
    for start in (0, 200):
        pull = pulls[TEXT[start]]
        say(driver, side, PullEnded(pull, None, position, position), PagesFree(pull))
    assert [driver.requests[name].phase for name in names] == [Phase.READY] * 2
    return driver, names


@pytest.mark.parametrize("position", [90, 64])
def test_of_those_that_have_come_the_one_whose_turn_it_is_goes_first(position):
    driver, names = two_that_have_come(position, priority=-1)
    driver.scheduler.plan()
    assert [driver.requests[name].phase for name in names] == [Phase.READY, Phase.RUNNING]


def test_of_those_that_have_come_the_youngest_gives_way():
    driver, names = two_that_have_come(90)
    assert requeue_youngest_fetched(driver.scheduler.state)
    assert [driver.requests[name].phase for name in names] == [Phase.READY, Phase.WAITING]
    assert requeue_youngest_fetched(driver.scheduler.state) and not requeue_youngest_fetched(driver.scheduler.state)


def test_what_has_to_be_computed_here_is_fetched_from_nowhere():
    driver = Driver(side=(side := Side()))
    driver.submit(TEXT[:200], source=PROMISED, prompt_logprobs=0)
    driver.scheduler.poll()
    (spec,) = side.specs.values()
    assert spec.release_only


def test_what_adds_nothing_to_what_is_here_is_not_used():
    driver, side, name = fetching(HINTED, known=128)
    (pull,) = side.specs
    # keys and values for more, but the state of less than is here
    say(driver, side, PullEnded(pull, None, 192, 64), PagesFree(pull))
    assert driver.requests[name].phase is Phase.WAITING
    driver.run()
    assert driver.requests[name].stats.first_sequence.hit == 128 and driver.scheduler.state.counters.external_hits == 0


@pytest.mark.parametrize("failure", [None, "gone"])
def test_what_is_here_already_was_not_asked_of_others(failure):
    driver, side, _ = fetching(known=128)
    (pull,) = side.specs
    say(driver, side, PullEnded(pull, failure, 200, 200), PagesFree(pull))
    counters = driver.scheduler.state.counters
    assert (counters.external_queries, counters.external_hits) == (72, 72 if failure is None else 0)


@pytest.mark.parametrize("source", [PROMISED, HINTED])
def test_a_prompt_that_does_not_fit_beside_its_file_is_computed_in_shares(source):
    driver = Driver(side=(side := Side()), num_pages=30)
    name = driver.submit(TEXT[:460], source=source)
    driver.scheduler.poll()
    assert [spec.release_only for spec in side.specs.values()] == [True] * (source is PROMISED)
    driver.run()
    assert driver.output(name) == alone(TEXT[:460], False)


def test_a_fetch_that_waits_for_room_costs_nobody_what_is_cached():
    driver = Driver(side=(side := Side()), num_pages=60)
    running = driver.submit(range(5000, 5720), max_tokens=20)
    driver.scheduler.poll()
    while not driver.output(running):
        driver.step()
    # 13 pages and a file of 3: the pages alone would have room
    assert 13 <= 60 - driver.cache.pinned.num_pages() < 16
    name = driver.submit(TEXT[:200], source=PROMISED)
    before = dict(driver.cache.checkpoints.evicted)
    driver.scheduler.poll()
    assert driver.requests[name].phase is Phase.WAITING and not side.specs
    assert dict(driver.cache.checkpoints.evicted) == before


def test_one_that_has_come_does_not_take_the_slot_of_one_that_is_held_back_and_comes_before_it():
    driver = Driver(side=(side := Side()), max_num_seqs=2, max_num_batched_tokens=100)
    driver.submit(TEXT[:700])
    driver.step()
    fetched = driver.submit(range(5000, 5100), source=PROMISED)
    driver.scheduler.poll()
    waits = driver.submit(TEXT[:700], priority=-1)
    driver.step()
    assert driver.scheduler.state.in_flight.num_before(driver.requests[fetched]) == 1
    say(driver, side, PullEnded(PullId(1), None, 100, 100), PagesFree(PullId(1)))
    driver.scheduler.plan()
    assert [driver.requests[name].phase for name in (fetched, waits)] == [Phase.READY, Phase.WAITING]


def test_an_empty_plan_does_not_stop_those_that_run_while_others_are_fetched():
    driver = Driver(side=(side := Side()), max_in_flight=2)
    # each of its tokens has to be known before the next one is planned, so every second plan is empty
    running = driver.submit(TEXT[:50], max_tokens=10, sampling=SamplingParams(repetition_penalty=1.5))
    driver.step()
    driver.submit(range(5000, 5100), source=PROMISED)
    driver.scheduler.poll()
    assert len(side.specs) == 1
    for _ in range(40):
        if driver.scheduler.has_work:
            driver.step()
    assert len(driver.output(running)) == 10
