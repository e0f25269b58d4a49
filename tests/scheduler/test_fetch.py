"""Pages from another server: what is asked for, and that nobody gets a page that may still be written to."""

import numpy as np
import pytest
from driver import Driver, alone

from cairn.cache.reasons import Reason
from cairn.scheduler.request import Phase, Source
from cairn.transfer.contract import PagesFree, PullEnded, PullId

TEXT = list(range(100, 900))
PROMISED = Source("p", "127.0.0.1", 5, "there", b"n" * 16)
HINTED = Source("p", "127.0.0.1", 5)


class Side:
    """The connector in a test's hands: what was asked of it, and what it says next."""

    def __init__(self):
        self.wants, self.aborted, self.news = {}, [], []

    def has_room(self, num_pages):
        return True

    def pull(self, want):
        pull = PullId(len(self.wants) + 1)
        self.wants[pull] = want
        return pull

    def abort(self, pull):
        self.aborted.append(pull)

    def events(self):
        news, self.news = self.news, []
        return news


def fetching(source=PROMISED, length=200, num_pages=60, known=0, **config):
    """A driver that fetches a prompt, of which it knows the beginning already, and how the request is called."""
    driver, side = Driver(num_pages=num_pages, **config), Side()
    driver.scheduler.books.transfers.side = side
    if known:
        driver.ask(TEXT[:known], max_tokens=1)
    name = driver.submit(TEXT[:length], source=source)
    driver.scheduler.poll()
    assert driver.requests[name].phase is Phase.FETCHING
    return driver, side, name


def pages_of(want):
    return np.concatenate([want.pages, want.checkpoint])


def say(driver, side, *news):
    side.news += news
    driver.scheduler.poll()


def named(plan):
    """Every page that a plan has written to."""
    written = [copy.target for copy in plan.copies]
    for file in (*plan.saves, *plan.keeps):
        written += file.pages.tolist()
    for row in plan.rows:
        written += row.pages[0][max(row.start, row.kv_write_from) // 16 :].tolist()
    return set(written)


def only_this_pull_is_left(driver):
    books = driver.scheduler.books
    return not books.requests and not driver.cache.leases and len(driver.cache.holds) == 1


@pytest.mark.parametrize(("known", "first"), [(0, 0), (100, 96), (128, 128)])
def test_what_is_not_here_is_asked_for_from_the_page_that_begins_it(known, first):
    _, side, _ = fetching(known=known)
    (want,) = side.wants.values()
    assert (want.start, len(want.pages), len(want.checkpoint)) == (first, 13 - first // 16, 3)
    assert (want.request_id, want.nonce, want.release_only) == ("there", b"n" * 16, False)


@pytest.mark.parametrize("source", [PROMISED, HINTED])
@pytest.mark.parametrize("known", [0, 100])
def test_nobody_gets_the_pages_of_a_pull_that_failed_before_the_link_lets_go_of_them(source, known):
    driver, side, name = fetching(source, known=known)
    ((pull, want),) = side.wants.items()
    say(driver, side, PullEnded(pull, "the other server is gone"))
    assert driver.requests[name].phase is Phase.WAITING
    others = [driver.submit(range(1000 * i, 1000 * i + 300), max_tokens=20) for i in range(1, 6)]
    driver.plans.clear()
    while driver.scheduler.has_work:
        driver.step()
        assert (driver.cache.pool.counts[pages_of(want)] == 1).all()
    assert not set(pages_of(want).tolist()) & set().union(*map(named, driver.plans))
    assert only_this_pull_is_left(driver) and not driver.cache.clear()
    say(driver, side, PagesFree(pull))
    assert not driver.cache.holds and driver.cache.clear()
    assert driver.output(name) == alone(TEXT[:200], False)
    assert all(len(driver.output(other)) == 20 for other in others)


def test_nobody_gets_the_pages_of_a_pull_whose_request_was_aborted():
    driver, side, name = fetching()
    ((pull, want),) = side.wants.items()
    driver.scheduler.abort(name)
    assert side.aborted == [pull] and only_this_pull_is_left(driver)
    assert (driver.cache.pool.counts[pages_of(want)] == 1).all()
    assert not driver.cache.clear()
    # nothing comes of it any more
    say(driver, side, PullEnded(pull, None, 200, 200))
    assert only_this_pull_is_left(driver)
    say(driver, side, PagesFree(pull))
    assert not driver.cache.holds and driver.cache.clear()


def test_what_has_come_is_free_of_the_pull_and_is_used():
    driver, side, name = fetching()
    ((pull, _),) = side.wants.items()
    say(driver, side, PullEnded(pull, None, 200, 200), PagesFree(pull))
    request = driver.requests[name]
    assert request.phase is Phase.READY and request.lease.hit == request.lease.received == 200
    assert not driver.cache.holds and driver.scheduler.books.counters.external_hits == 200


def test_a_failure_may_be_the_end_of_a_promise_and_never_of_a_hint():
    for source, phase in ((PROMISED, Phase.FINISHED), (HINTED, Phase.WAITING)):
        driver, side, name = fetching(source, on_load_failure="fail")
        (pull,) = side.wants
        side.news.append(PullEnded(pull, "the other server is gone"))
        failed = driver.scheduler.poll()
        request = driver.requests[name]
        assert request.phase is phase and [news.request for news in failed] == [request] * (source is PROMISED)
        assert driver.scheduler.books.counters.failed_pulls == (source is PROMISED)
        say(driver, side, PagesFree(pull))
        driver.run()
        if source is PROMISED:
            assert request.finish == "error" and "127.0.0.1:5: the other server is gone" in request.failure


def test_no_more_is_fetched_at_a_time_than_can_run():
    driver, side, _ = fetching(max_num_seqs=2)
    for start in (200, 400):
        driver.submit(TEXT[start : start + 64], source=PROMISED)
    driver.scheduler.poll()
    assert len(side.wants) == 2
    # those that have come wait for a slot, too
    say(driver, side, PullEnded(PullId(1), None, 200, 200), PagesFree(PullId(1)))
    assert len(side.wants) == 2
    driver.scheduler.plan()
    driver.scheduler.poll()
    assert len(side.wants) == 3


def test_a_promise_that_is_not_needed_is_given_back_at_once():
    driver, side = Driver(), Side()
    driver.scheduler.books.transfers.side = side
    driver.ask(TEXT[:200], max_tokens=1)
    name = driver.submit(TEXT[:200], source=PROMISED)
    driver.scheduler.poll()
    (want,) = side.wants.values()
    assert want.release_only and want.checkpoint is None and not len(want.pages)
    hinted = driver.submit(TEXT[:200], source=HINTED)
    while driver.scheduler.has_work:
        driver.scheduler.poll()
        driver.step()
    assert len(side.wants) == 1 and driver.requests[name].first.reason is Reason.NONE
    assert driver.requests[hinted].first.hit == 200
