"""The policy `session`: the least served goes first, nobody is bypassed too often, and names bring nothing else."""

import json

import numpy as np
import pytest
from driver import Driver, alone
from hypothesis import given, settings
from test_turns import MIXES, check_only_the_order_changes, one_at_a_time, order_of, prompts

from cairn.engine.contract import EngineConfig
from cairn.scheduler import sessions, turns
from cairn.scheduler.sessions import SESSION_CLASSES, SessionService
from cairn.scheduler.turns import MAX_BYPASSED, MAX_BYPASSED_BY_SESSION
from tiers import more


@pytest.fixture(autouse=True)
def small_levels(monkeypatch):
    """Prompts of these tests are far shorter than those of agents."""
    monkeypatch.setattr(sessions, "FIRST_LEVEL", 512)


def by_session(num_pages: int = 1000, **config):
    return Driver(
        num_pages=num_pages, **{"max_num_seqs": 1, "max_num_batched_tokens": 512, "policy": "session", **config}
    )


def serve_long_session(driver, prompt, **fields) -> None:
    """One that has been served many tokens for prompts that are short."""
    for _ in range(12):
        driver.ask(prompt[:64], max_tokens=100, session="long", **fields)


def test_the_session_that_was_served_least_goes_first():
    driver = by_session()
    first, short, long, other = prompts(4)
    driver.ask(short[:100], session="short")
    serve_long_session(driver, long)
    before = set(driver.requests)
    names = [
        driver.submit(first[:100], max_tokens=2, session="long"),
        driver.submit(other[:100], max_tokens=2, session="long"),
        driver.submit((*short[:100], 1, 2), max_tokens=2, session="short"),
    ]
    assert [name for name in order_of(driver) if name not in before] == [names[2], names[0], names[1]]
    assert [driver.requests[name].place.num_bypassed for name in names] == [1, 1, 0]
    assert driver.output(names[2]) == alone((*short[:100], 1, 2), False, max_tokens=2)


def test_with_fcfs_they_go_as_they_came():
    driver = one_at_a_time(1000)
    first, short, long = prompts(3)
    driver.ask(short[:100], session="short")
    serve_long_session(driver, long)
    before = set(driver.requests)
    names = [driver.submit(first[:100], max_tokens=2, session="long"), driver.submit(short[:100], session="short")]
    assert [name for name in order_of(driver) if name not in before] == names


@pytest.mark.parametrize("name", ["new", ""])
def test_a_name_for_each_request_takes_nobody_elses_turn(name):
    """Whoever names a session per request, or none, goes before requests of its own alone."""
    driver = by_session()
    long, *others = prompts(8)
    serve_long_session(driver, long, client="a")
    before = set(driver.requests)
    waiting = driver.submit(long[:80], max_tokens=2, session="long", client="a")
    flood = [
        driver.submit(prompt[:20], max_tokens=2, session=name and f"{name}{number}", client="b")
        for number, prompt in enumerate(others)
    ]
    own = driver.submit(others[0][:30], max_tokens=2, client="b")
    assert [each for each in order_of(driver) if each not in before] == [waiting, *flood, own]
    assert driver.scheduler.state.counters.bypasses == 0


def test_a_name_for_each_request_is_worth_nothing_to_ones_own_long_prompts():
    """What a prompt has is what its session has been served, whatever it is called."""
    driver = by_session()
    long, short = prompts(2)
    names = [driver.submit((*long, *long), max_tokens=2, session="x1"), driver.submit(short[:99], session="y")]
    assert order_of(driver) == names[::-1]


def test_one_session_for_all_goes_last_within_the_bound():
    driver = by_session()
    long, *others = prompts(4)
    serve_long_session(driver, long)
    for number, prompt in enumerate(others):
        driver.ask(prompt[:40], session=f"s{number}")
    before = set(driver.requests)
    mine = [driver.submit(long[: 70 + n], max_tokens=2, session="long") for n in range(3)]
    theirs = [driver.submit(prompt[:50], max_tokens=2, session=f"s{n}") for n, prompt in enumerate(others)]
    assert [each for each in order_of(driver) if each not in before] == [*theirs, *mine]


def test_the_same_name_of_two_clients_is_two_sessions():
    driver = by_session()
    long, other = prompts(2)
    serve_long_session(driver, long, client="a")
    service = driver.scheduler.state.waiting.sessions
    name = driver.submit(other, session="long", client="b")
    request = driver.requests[name]
    assert not service.knows(request.spec) and service.served(request.spec) == 0


def test_priorities_come_before_sessions():
    driver = by_session()
    long, short = prompts(2)
    driver.ask(short[:50], session="short")
    serve_long_session(driver, long)
    before = set(driver.requests)
    names = [driver.submit(long[:90], session="long", priority=-1), driver.submit(short[:60], session="short")]
    assert [each for each in order_of(driver) if each not in before] == names


@pytest.mark.parametrize("max_examples", [4, more(12)])
def test_nobody_starves_and_nothing_else_changes(max_examples, monkeypatch):
    """Sessions of all kinds in small pools."""

    @settings(max_examples=max_examples, deadline=None)
    @given(**MIXES)
    def check(seed, bound, pages, seqs, exact):
        rng = np.random.default_rng(seed)

        def names(number):
            session = ("", "all", f"only {number}", f"s{number % 3}")[int(rng.integers(4))]
            return {"session": session, "client": "ab"[int(rng.integers(2))]}

        monkeypatch.setattr(turns, "MAX_BYPASSED_BY_SESSION", bound)
        driver = by_session(pages, max_num_seqs=seqs, exact=exact)
        check_only_the_order_changes(driver, rng, seed, bound, names)

    check()


@pytest.mark.parametrize("bound", [0, 1, 5])
def test_one_that_is_always_bypassed_has_its_turn(monkeypatch, bound):
    monkeypatch.setattr(turns, "MAX_BYPASSED_BY_SESSION", bound)
    driver = by_session()
    long, short = prompts(2)
    driver.ask(short[:30], session="short")
    serve_long_session(driver, long)
    running = driver.submit(long[:70], max_tokens=4, session="long")
    driver.step()
    waiting = driver.submit(long[:80], max_tokens=2, session="long")
    for number in range(12):
        driver.submit((*short[:30], number), max_tokens=2, session="short")
    order = order_of(driver)
    assert order.index(waiting) - order.index(running) - 1 == bound == driver.requests[waiting].place.num_bypassed


def test_hits_that_would_be_lost_go_first_among_equals():
    """The policy of `fcfs` among sessions that are about equal."""
    driver = by_session(60)
    known, other, *new = prompts(4, seed=1)
    driver.ask(known, max_tokens=1)
    running = driver.submit(other[:100], max_tokens=30)
    driver.step()
    names = [driver.submit(prompt, max_tokens=2) for prompt in new]
    again = [driver.submit((*known, *range(2000 + 100 * n, 2010 + 100 * n)), max_tokens=2) for n in range(36)]
    order = order_of(driver)
    assert order.index(again[0]) == order.index(running) + 1
    assert [driver.requests[name].place.num_bypassed for name in names] == [MAX_BYPASSED_BY_SESSION] * 2


def test_service_is_bounded_and_fades(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    monkeypatch.setattr(sessions, "HALF_LIFE", 1000)
    driver = by_session()
    specs = [driver.requests[driver.submit([1], session=f"s{n}")].spec for n in range(5)]
    service = SessionService()
    for spec in specs:
        service.add(spec, 100)
    assert len(service) == 3
    assert [service.knows(spec) for spec in specs] == [False, False, True, True, True]
    assert service.served(specs[4]) == 100 > service.served(specs[3]) > service.served(specs[2]) > 0
    service.add(driver.requests[driver.submit([1])].spec, 1000)
    assert service.served(specs[4]) == 50


def test_requests_are_counted_by_how_long_their_sessions_are():
    driver = by_session()
    long, short = prompts(2)
    driver.ask(short[:30], session="short")
    serve_long_session(driver, long)
    service = driver.scheduler.state.waiting.sessions
    assert tuple(service.num_requests) == tuple(service.wait_seconds) == SESSION_CLASSES
    counts = service.num_requests
    assert sum(counts.values()) == 13 and counts["short"] >= 1 and counts["medium"] >= 1


def test_the_bounds_are_what_the_help_says():
    text = json.dumps(EngineConfig.model_json_schema())
    assert f"past {MAX_BYPASSED} others at most" in text
    assert f"nobody is bypassed by more than {MAX_BYPASSED_BY_SESSION} others" in text
