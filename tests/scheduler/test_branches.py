"""Several answers to one prompt: computed once, shared page by page, and each the answer that it would be alone."""

from dataclasses import replace
from itertools import product

import pytest
from driver import Driver, alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.errors import InvalidRequest, Overloaded
from cairn.scheduler.preempt import preempt
from cairn.scheduler.request import Phase
from cairn.types import RequestId
from tiers import first_of

PROMPT = tuple(range(100))


def prefilled(driver: Driver) -> int:
    return sum(len(row.tokens) for plan in driver.plans for row in plan.prefills)


def names(name: str, n: int) -> list[str]:
    return [name, *(f"{name}.{i}" for i in range(1, n))]


@pytest.mark.parametrize(
    ("n", "ahead", "exact", "mode"),
    first_of(
        [
            *product((2, 7), (1, 2), (False, True), ["auto"]),
            (4, 2, False, "auto"),
            (4, 1, True, None),
            (7, 2, False, None),
            (4, 2, True, "align"),
        ],
        (2, 4, 7),
        (1, 2),
        (False, True),
        ("auto", None, "align"),
    ),
)
def test_the_prompt_is_computed_once_and_each_answer_is_its_own(mode, exact, ahead, n):
    driver = Driver(mode, exact=exact, max_in_flight=ahead)
    name = driver.submit(PROMPT, max_tokens=9, n=n, seed=5)
    driver.run()
    answers = [driver.output(own) for own in names(name, n)]
    assert answers == [alone(PROMPT, exact, max_tokens=9, seed=5 + i) for i in range(n)]
    assert len({tuple(answer) for answer in answers}) == n
    assert prefilled(driver) == len(PROMPT)
    counters = driver.scheduler.state.counters
    assert (counters.prompt_tokens, counters.computed_prompt_tokens) == (100, 100)
    assert driver.cache.counters.queries == 100


def test_a_prompt_of_whole_pages_is_shared_without_a_copy():
    driver = Driver()
    driver.submit(PROMPT[:96], max_tokens=20, n=4)
    driver.run()
    assert not any(plan.copies for plan in driver.plans)
    assert prefilled(driver) == 96


def test_no_state_is_kept_for_answers_that_nobody_wants_any_more():
    driver = Driver(None, max_num_batched_tokens=68)
    name = driver.submit(PROMPT, n=3)
    driver.step()
    for own in names(name, 3)[1:]:
        driver.scheduler.abort(RequestId(own))
    driver.run()
    assert not any(plan.snapshots for plan in driver.plans)
    assert driver.output(name) == alone(PROMPT, False)


def test_what_is_held_for_the_last_prompt_gives_way_first():
    driver = Driver(max_num_seqs=2)
    prompts = [driver.submit(PROMPT[number:], max_tokens=50, n=2) for number in range(2)]
    driver.step()
    driver.step()
    parallel_sampling = driver.scheduler.state.parallel_sampling
    waiting = [driver.requests[names(name, 2)[1]] for name in prompts]
    assert [parallel_sampling.has_pinned_prompt(request) for request in waiting] == [True, True]
    assert parallel_sampling.release_last()
    assert [parallel_sampling.has_pinned_prompt(request) for request in waiting] == [True, False]
    driver.run()


def test_only_the_last_page_of_a_prompt_is_copied():
    driver = Driver()
    driver.submit(PROMPT, max_tokens=20, n=4)
    driver.run()
    copies = [copy for plan in driver.plans for copy in plan.copies]
    # 100 tokens end in the seventh page; the leader goes on in the page itself
    assert len(copies) == 3 and len({copy.source for copy in copies}) == 1
    assert len({copy.target for copy in copies}) == 3


def test_all_branches_share_the_full_pages_while_they_run():
    driver = Driver()
    name = driver.submit(PROMPT, max_tokens=30, n=4)
    for _ in range(6):
        driver.step()
    sequences = [driver.requests[own].sequence for own in names(name, 4)]
    full = {tuple(sequence.tables[0].pages[:6].tolist()) for sequence in sequences}
    assert len(full) == 1
    assert len({int(sequence.tables[0].pages[6]) for sequence in sequences}) == 4
    driver.run()


def test_a_prompt_that_is_wholly_cached_starts_all_its_branches_at_once():
    driver = Driver()
    driver.ask(PROMPT)
    passes = driver.runner.forward_passes
    name = driver.submit(PROMPT, max_tokens=1, n=4, seed=3)
    driver.run()
    assert driver.runner.forward_passes == passes
    assert [driver.output(own) for own in names(name, 4)] == [
        alone(PROMPT, False, max_tokens=1, seed=3 + i) for i in range(4)
    ]


def test_more_branches_than_slots_start_as_slots_come_free():
    driver = Driver(max_num_seqs=2)
    name = driver.submit(PROMPT, max_tokens=5, n=9)
    other = driver.submit(range(200, 250))
    driver.run()
    assert prefilled(driver) == 150
    assert all(len(driver.output(own)) == 5 for own in (*names(name, 9),))
    assert driver.output(other) == alone(range(200, 250), False)


@pytest.mark.parametrize("mode", ["auto", None])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_one_branch_is_aborted_and_the_others_do_not_notice(mode, steps, victim):
    driver = Driver(mode, max_num_seqs=3)
    name = driver.submit(range(300), max_tokens=6, n=4)
    for _ in range(steps):
        driver.step()
    all_names = names(name, 4)
    driver.scheduler.abort(RequestId(all_names[victim]))
    driver.run()
    for i, own in enumerate(all_names):
        if i != victim:
            assert driver.output(own) == alone(range(300), False, max_tokens=6, seed=i)
    # a leader that goes before its prompt is computed leaves it to the next one, which may have to start over
    assert prefilled(driver) <= 2 * 300


@pytest.mark.parametrize("steps", range(6))
def test_all_branches_are_aborted(steps):
    driver = Driver(max_num_seqs=2)
    name = driver.submit(range(300), max_tokens=6, n=4)
    for _ in range(steps):
        driver.step()
    for own in names(name, 4):
        driver.scheduler.abort(RequestId(own))
    driver.run()
    assert driver.cache.clear(), "a page leaked"
    assert driver.scheduler.state.num_waiting == 0


@pytest.mark.parametrize("mode", ["auto", None])
@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_a_preempted_leader_still_leads(mode, steps):
    driver = Driver(mode, max_num_batched_tokens=68)
    name = driver.submit(range(200), max_tokens=40, n=3)
    for _ in range(steps):
        driver.step()
    leader = driver.requests[name]
    preempt(driver.scheduler.state, leader, leader, 10_000)
    assert leader.phase is Phase.WAITING
    driver.run()
    for i, own in enumerate(names(name, 3)):
        assert driver.output(own) == alone(range(200), False, max_tokens=40, seed=i)
    assert driver.scheduler.state.counters.preemptions == 1


def test_what_is_held_for_branches_gives_way_to_what_runs():
    # 16 tokens a page, 3 pages a state: the prompt and its answer fill the pool to the last page
    driver = Driver(None, num_pages=14, max_num_seqs=1)
    name = driver.submit(range(100), max_tokens=100, n=2)
    driver.run()
    for i, own in enumerate(names(name, 2)):
        assert driver.output(own) == alone(range(100), False, max_tokens=100, seed=i)
    # it was computed twice, and is one prompt all the same
    counters = driver.scheduler.state.counters
    assert (counters.computed_prompt_tokens, counters.prompt_tokens, driver.cache.counters.queries) == (200, 100, 100)
    assert sum(driver.cache.counters.reasons.values()) == 1


def test_what_is_held_for_branches_gives_way_to_one_that_comes_before_them():
    # the other one is larger than what is left beside the prompt, and its turn comes first
    driver = Driver(None, num_pages=14, max_num_seqs=1)
    name = driver.submit(range(100), max_tokens=3, n=2)
    driver.step()
    urgent = driver.submit(range(200, 390), max_tokens=3, priority=-1)
    driver.run()
    for own, prompt, seed in ((name, range(100), 0), (f"{name}.1", range(100), 1), (urgent, range(200, 390), 0)):
        assert driver.output(own) == alone(prompt, False, max_tokens=3, seed=seed)


def test_parked_branches_count_as_waiting_and_against_the_bound():
    driver = Driver(max_waiting=4)
    driver.submit(PROMPT, n=3)
    assert driver.scheduler.state.num_waiting == 3
    with pytest.raises(Overloaded):
        driver.submit(PROMPT, n=2)
    driver.submit(PROMPT)
    with pytest.raises(InvalidRequest) as caught:
        driver.submit(PROMPT, n=5)
    assert caught.value.param == "n"
    driver.run()
    assert driver.scheduler.state.num_waiting == 0


def test_an_id_of_a_branch_that_is_in_use_takes_nothing():
    driver = Driver()
    driver.submit(PROMPT, name="a.1")
    with pytest.raises(InvalidRequest):
        driver.submit(PROMPT, name="a", n=2)
    assert set(driver.scheduler.state.requests) == {"a.1"}
    driver.run()


@pytest.mark.parametrize(("name", "max_tokens", "field"), [("a.1", 4, "request_id"), ("b", 1 << 20, "max_tokens")])
def test_what_comes_together_is_taken_together_or_not_at_all(name, max_tokens, field):
    asked = Driver()
    asked.submit(PROMPT, name="a", n=2)
    group = [asked.requests[own].spec for own in ("a", "a.1")]
    driver, other = Driver(), replace(group[0], request_id=RequestId("b"))
    with pytest.raises(InvalidRequest) as caught:
        driver.scheduler.submit_together([group, [replace(other, request_id=RequestId(name), max_tokens=max_tokens)]])
    assert caught.value.param == field and not driver.scheduler.state.requests
    driver.scheduler.submit_together([group, [other]])
    assert set(driver.scheduler.state.requests) == {"a", "a.1", "b"}


def test_branches_wait_outside_of_the_queue_until_their_prompt_is_computed():
    driver = Driver(max_num_batched_tokens=68)
    name = driver.submit(range(300), n=3)
    other = driver.submit(range(400, 420))
    driver.step()
    assert [driver.requests[own].phase for own in names(name, 3)] == [Phase.RUNNING, Phase.WAITING, Phase.WAITING]
    assert driver.requests[other].phase is Phase.WAITING
    while not driver.requests[name].output:
        driver.step()
    rows = [row for plan in driver.plans for row in plan.prefills]
    assert sum(row.end - row.start for row in rows if row.tokens[0] < 300) == 300
    driver.run()


MIX = {
    "mode": st.sampled_from(["auto", "align", "all", "junction", None]),
    "exact": st.booleans(),
    "ahead": st.sampled_from([1, 2, 3]),
    "num_pages": st.sampled_from([30, 40, 60, 400]),
    "slots": st.sampled_from([1, 2, 4]),
    "requests": st.lists(
        st.tuples(
            st.sampled_from([1, 16, 64, 65, 130, 200]),
            st.sampled_from([1, 3, 40]),
            st.integers(1, 5),
            st.integers(0, 5),
            st.integers(-1, 6),
        ),
        min_size=1,
        max_size=5,
    ),
}


@pytest.mark.more
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**MIX)
def test_random_mixes_of_branches(mode, exact, ahead, num_pages, slots, requests):
    config = {"max_in_flight": ahead, "max_num_seqs": slots, "max_num_batched_tokens": 100}
    driver = Driver(mode, num_pages, exact=exact, **config)
    expected = {}
    for length, max_tokens, n, pause, fate in requests:
        name = driver.submit(range(length), max_tokens, n=n)
        for i, own in enumerate(names(name, n)):
            expected[own] = (length, max_tokens, i)
        for _ in range(pause):
            if driver.scheduler.has_work:
                driver.step()
        if 0 <= fate < n:
            driver.scheduler.abort(RequestId(names(name, n)[fate]))
            del expected[names(name, n)[fate]]
    driver.run()
    for own, (length, max_tokens, seed) in expected.items():
        assert driver.output(own) == alone(range(length), exact, max_tokens=max_tokens, seed=seed), own
    assert driver.cache.clear(), "a page leaked"
