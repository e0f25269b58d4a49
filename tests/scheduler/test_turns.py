"""Who goes before whom: those that would lose what they are going to hit, and nobody is overtaken too often."""

import numpy as np
import pytest
from driver import Driver, alone
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.scheduler import turns
from cairn.scheduler.turns import MAX_BYPASSED
from tiers import more

PROMPT = 320


def prompts(number: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 1000, PROMPT).tolist()) for _ in range(number)]


def order_of(driver: Driver) -> list[str]:
    """Run all that is submitted; the requests in the order in which they were admitted first."""
    order: list[str] = []
    while driver.scheduler.has_work:
        driver.step()
        for name, request in driver.requests.items():
            if request.stats.first_sequence is not None and name not in order:
                order.append(name)
    return order


def one_at_a_time(num_pages: int, **config) -> Driver:
    return Driver(num_pages=num_pages, max_num_seqs=1, max_num_batched_tokens=512, **config)


def test_who_would_lose_its_hit_goes_first():
    """And hits, with a pool that would not have held it."""
    driver = one_at_a_time(80)
    known, *others = prompts(5)
    driver.submit(known, max_tokens=1)
    driver.run()
    names = [driver.submit(prompt, max_tokens=2) for prompt in others]
    last = driver.submit((*known, *range(2000, 2010)), max_tokens=2)
    assert order_of(driver)[1:] == [last, *names]
    assert driver.requests[last].stats.first_sequence.hit == PROMPT
    assert [driver.requests[name].place.num_bypassed for name in names] == [1] * 4
    assert driver.output(last) == alone((*known, *range(2000, 2010)), False, max_tokens=2)


def test_where_nothing_is_lost_they_go_as_they_came():
    driver = one_at_a_time(1000)
    known, *others = prompts(5)
    driver.submit(known, max_tokens=1)
    driver.run()
    names = [driver.submit(prompt, max_tokens=2) for prompt in others]
    names.append(driver.submit((*known, *range(2000, 2010)), max_tokens=2))
    assert order_of(driver)[1:] == names


def test_a_hit_far_back_is_not_in_danger_yet():
    """Those before it lack more than is free, but the last 16 of them do not before the first ones have gone."""
    driver = one_at_a_time(120)
    known, *others = prompts(31)
    driver.submit(known, max_tokens=1)
    driver.run()
    names = [driver.submit(prompt[:20], max_tokens=2) for prompt in others]
    last = driver.submit((*known, *range(2000, 2010)), max_tokens=2)
    order = order_of(driver)[1:]
    assert order[:8] == names[:8] and order[-1] == names[-1]
    assert driver.requests[last].stats.first_sequence.hit == PROMPT


def test_priorities_come_before_hits():
    driver = one_at_a_time(80)
    known, *others = prompts(5)
    driver.submit(known, max_tokens=1)
    driver.run()
    names = [driver.submit(prompt, max_tokens=2, priority=-1) for prompt in others]
    names.append(driver.submit((*known, *range(2000, 2010)), max_tokens=2))
    assert order_of(driver)[1:] == names


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_is_overtaken_more_often_than_that(monkeypatch, bound):
    """One client that always hits, and one whose prompt is new, in a pool that only holds the former's."""
    monkeypatch.setattr(turns, "MAX_BYPASSED", bound)
    driver = one_at_a_time(60)
    (known, other, *new) = prompts(4, seed=1)
    driver.submit(known, max_tokens=1)
    driver.run()
    running = driver.submit(other[:100], max_tokens=30)
    driver.step()
    names = [driver.submit(prompt, max_tokens=2) for prompt in new]
    again = [driver.submit((*known, *range(2000 + 100 * n, 2010 + 100 * n)), max_tokens=2) for n in range(6)]
    order = order_of(driver)
    assert order[:2] == ["r1", running]
    assert max(sum(order.index(later) < order.index(name) for later in again) for name in names) == bound
    assert max(request.place.num_bypassed for request in driver.requests.values()) == bound


MIXES = {
    "seed": st.integers(0, 1 << 16),
    "bound": st.integers(0, 4),
    "pages": st.sampled_from([60, 90, 140]),
    "seqs": st.integers(1, 3),
    "exact": st.booleans(),
}


def check_only_the_order_changes(driver: Driver, rng: np.random.Generator, seed: int, bound: int, draw_names) -> None:
    """Requests that share: each answer is the one that it has alone, and each request is overtaken by as many as the
    bound allows at most. Preempted ones are not admitted for the first time, so they do not count. `draw_names`: the
    number of a request -> what it is submitted with besides its prompt and length."""
    stems, sent = prompts(3, seed), {}
    for number in range(14):
        stem = stems[int(rng.integers(len(stems)))][: int(rng.integers(1, PROMPT))]
        prompt = (*stem, *rng.integers(0, 1000, int(rng.integers(1, 60))).tolist())
        tokens = int(rng.integers(1, 20))
        sent[driver.submit(prompt, max_tokens=tokens, **draw_names(number))] = prompt, tokens
        for _ in range(int(rng.integers(0, 4))):
            if driver.scheduler.has_work:
                driver.step()
    assert sorted(order_of(driver)) == sorted(sent)
    for name, (prompt, tokens) in sent.items():
        assert driver.output(name) == alone(prompt, driver.config.exact, max_tokens=tokens)
        assert driver.requests[name].place.num_bypassed <= bound


@pytest.mark.parametrize("max_examples", [4, more(12)])
def test_it_changes_nothing_but_the_order(max_examples, monkeypatch):
    """In small pools."""

    @settings(max_examples=max_examples, deadline=None)
    @given(**MIXES)
    def check(seed, bound, pages, seqs, exact):
        monkeypatch.setattr(turns, "MAX_BYPASSED", bound)
        driver = Driver(num_pages=pages, max_num_seqs=seqs, max_num_batched_tokens=512, exact=exact)
        check_only_the_order_changes(driver, np.random.default_rng(seed), seed, bound, lambda number: {})

    check()


def test_the_bound_is_what_the_help_says():
    assert MAX_BYPASSED == 16
