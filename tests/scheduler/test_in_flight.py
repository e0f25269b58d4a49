"""Requests that wait for what another one computes: what is computed at all, for how long they wait, and that nobody
else notices."""

import os
from collections import Counter
from itertools import product

import numpy as np
import pytest
from driver import PLAIN, Driver, alone
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace
from cairn.scheduler import in_flight
from cairn.scheduler.in_flight import MAX_IDLE, MAX_WAITS
from cairn.scheduler.preempt import preempt
from cairn.scheduler.request import Phase
from cairn.types import RequestId
from tiers import first_of, more

MODES = ("auto", "align", "all", "junction")
TEXT = tuple(range(1000))
WORDS = tuple(np.random.default_rng(3).integers(0, 50, 900).tolist())


def prefilled(driver: Driver) -> int:
    return sum(len(row.tokens) for plan in driver.plans for row in plan.prefills)


def shared(driver: Driver) -> tuple[int, int]:
    counters = driver.scheduler.state.counters.shared
    return counters.requests, counters.tokens


def fork(number: int, at: int, length: int) -> tuple[int, ...]:
    """The text's first `at` tokens, and then its own."""
    return (*TEXT[:at], *range(10_000 * (number + 1), 10_000 * (number + 1) + length - at))


def waiting(driver: Driver, name: str) -> bool:
    return driver.requests[name].phase is Phase.WAITING


@pytest.mark.parametrize(
    ("length", "ahead", "exact", "mode"),
    first_of(
        [*((300, 1, False, mode) for mode in MODES), (64, 1, False, "auto"), *((300, 2, True, mode) for mode in MODES)],
        (64, 300),
        (1, 2),
        (False, True),
        MODES,
    ),
)
def test_32_equal_prompts_cost_one_prefill(mode, exact, ahead, length):
    driver = Driver(mode, 4000, exact=exact, max_in_flight=ahead, max_num_seqs=32)
    names = [driver.submit(TEXT[:length], seed=i) for i in range(32)]
    driver.run()
    assert prefilled(driver) == length
    assert shared(driver) == (31, 31 * length)
    assert driver.scheduler.state.counters.computed_prompt_tokens == length
    for i in (0, 1, 31):
        assert driver.output(names[i]) == alone(TEXT[:length], exact, seed=i)
    reasons = driver.cache.counters.reasons
    assert reasons == {Reason.NEVER_SEEN: 1, Reason.NONE: 31}


def test_without_sharing_each_of_them_computes_it():
    driver = Driver("auto", 4000, max_num_seqs=32, max_num_batched_tokens=32 * 300, in_flight_sharing=False)
    for _ in range(32):
        driver.submit(TEXT[:300])
    driver.run()
    assert prefilled(driver) == 32 * 300 and shared(driver) == (0, 0)
    assert driver.cache.counters.reasons[Reason.IN_PROGRESS] == 31


def test_what_one_plan_may_compare_is_there_again_for_the_next(monkeypatch):
    monkeypatch.setattr(in_flight, "MAX_COMPARED", 301)
    driver = Driver()
    for number in range(4):
        prompts = [fork(number, 0, 300)] * 2
        for prompt in prompts:
            driver.submit(prompt)
        driver.run()
        assert shared(driver) == (number + 1, 300 * (number + 1))


def test_fewer_slots_than_equal_prompts():
    driver = Driver(max_num_seqs=3)
    names = [driver.submit(TEXT[:300], seed=i) for i in range(32)]
    driver.run()
    assert prefilled(driver) == 300
    assert driver.output(names[17]) == alone(TEXT[:300], False, seed=17)


@pytest.mark.parametrize(
    ("sizes", "exact", "mode"),
    first_of(
        [*(((512, 705), False, mode) for mode in MODES), ((128, 900), True, "auto"), ((8192, 900), True, "auto")],
        [(128, 900), (512, 705), (8192, 900)],
        (False, True),
        MODES,
    ),
)
def test_8_prompts_that_share_a_part_compute_it_once(mode, exact, sizes):
    budget, at = sizes
    driver = Driver(mode, 4000, exact=exact, max_num_seqs=8, max_num_batched_tokens=budget)
    prompts = [fork(i, at, 1000) for i in range(8)]
    names = [driver.submit(prompt) for prompt in prompts]
    driver.run()
    kept = at // 64 * 64 if exact else at
    assert prefilled(driver) == 1000 + 7 * (1000 - kept)
    assert shared(driver) == (7, 7 * kept)
    for name, prompt in zip(names, prompts, strict=True):
        assert driver.output(name) == alone(prompt, exact)


@pytest.mark.parametrize("exact", [False, True])
def test_one_that_waits_for_a_whole_prompt_within_a_longer_one_has_nothing_left_to_compute(exact):
    driver = Driver(exact=exact)
    driver.submit(TEXT)
    name = driver.submit(TEXT[:333])
    driver.run()
    assert driver.requests[name].stats.num_prompt_computed == 0 and prefilled(driver) == 1000
    assert driver.output(name) == alone(TEXT[:333], exact)


@pytest.mark.parametrize(
    ("steps", "ahead", "exact"),
    first_of(
        [*product(range(13), (2,), (False,)), *product((1, 6, 7, 8), (1,), (True,))], range(13), (1, 2), (False, True)
    ),
)
def test_it_may_come_in_any_step_of_the_prefill(exact, ahead, steps):
    driver = Driver(exact=exact, max_in_flight=ahead, max_num_batched_tokens=100)
    driver.submit(TEXT[:700], max_tokens=9)
    for _ in range(steps):
        driver.step()
    same, part = driver.submit(TEXT[:700]), driver.submit(fork(0, 500, 700))
    driver.run()
    # the last 60 tokens are not waited for, when the state before them is there
    assert driver.requests[same].stats.num_prompt_computed in (0, 60)
    assert ahead > 1 or not driver.requests[same].stats.num_prompt_computed
    # who comes when the step at the fork is out already starts at the grid point before it
    assert 200 <= driver.requests[part].stats.num_prompt_computed <= 263
    assert driver.output(same) == alone(TEXT[:700], exact)
    assert driver.output(part) == alone(fork(0, 500, 700), exact)


@pytest.mark.parametrize("steps", range(10))
def test_nobody_waits_for_a_state_that_is_not_going_to_be_there(steps):
    driver = Driver("junction", max_in_flight=3, max_num_batched_tokens=100)
    driver.submit(TEXT[:700], max_tokens=9)
    for _ in range(steps):
        driver.step()
    name, waited = driver.submit(fork(0, 300, 500)), False
    while driver.scheduler.has_work:
        driver.step()
        waited = waited or bool(driver.scheduler.state.in_flight._waits)
    # nothing else is kept, so who has not waited hits nothing, and who has waited has not done so in vain
    assert bool(driver.requests[name].stats.first_sequence.hit) == waited
    assert waited == (steps < 3)


def test_when_a_step_that_is_out_passes_the_fork_the_last_state_before_it_is_waited_for():
    driver = Driver(max_in_flight=2, max_num_batched_tokens=300)
    driver.submit(TEXT[:900])
    driver.step()
    assert [(plan.prefills[0].start, plan.prefills[0].end) for plan in driver.plans] == [(0, 256), (256, 512)]
    name = driver.submit(fork(0, 500, 700))
    driver.run()
    assert driver.requests[name].stats.first_sequence.hit == 448


def test_of_two_leaders_the_one_that_shares_more_is_waited_for():
    # a step computes 64 tokens of each prompt, and the second one passes the first one's by
    driver = Driver("granular", max_num_batched_tokens=300)
    driver.submit((*WORDS[:300], *WORDS[:200]))
    driver.submit(WORDS[:600], prompt_logprobs=0)
    name = driver.submit(WORDS[:600])
    driver.run()
    assert driver.requests[name].stats.first_sequence.hit == 600


def test_a_state_is_kept_where_the_two_part_though_the_mode_keeps_none_there():
    driver = Driver("junction", max_num_batched_tokens=68)
    driver.submit(TEXT[:400])
    name = driver.submit(fork(0, 205, 300))
    driver.run()
    assert driver.requests[name].stats.first_sequence.hit == 205
    off = Driver("junction", max_num_batched_tokens=68, in_flight_sharing=False)
    off.submit(TEXT[:400])
    name = off.submit(fork(0, 205, 300))
    off.run()
    assert off.requests[name].stats.first_sequence.hit == 0


def test_several_places_to_part_and_no_more_than_two_off_the_grid():
    driver = Driver("junction", max_num_seqs=8)
    ats = (205, 333, 410, 640, 700)
    driver.submit(TEXT)
    names = [driver.submit(fork(i, at, 800)) for i, at in enumerate(ats)]
    driver.run()
    assert [driver.requests[name].stats.first_sequence.hit for name in names] == [205, 333, 384, 640, 640]


def test_who_shares_with_those_that_wait_waits_for_them_in_turn():
    driver = Driver(max_num_seqs=8)
    b = fork(0, 200, 700)
    c = (*b[:500], *range(50_000, 50_300))
    d = (*c[:700], *range(60_000, 60_100))
    for prompt in (TEXT, b, c, d):
        driver.submit(prompt)
    driver.run()
    assert prefilled(driver) == 1000 + 500 + 300 + 100
    assert shared(driver) == (3, 200 + 500 + 700)


def test_nobody_waits_for_more_than_a_few():
    driver = Driver(max_num_seqs=8, num_pages=4000)
    prompts = [(*TEXT[: 100 * i], *range(10_000 * i, 10_000 * i + 300)) for i in range(1, 8)]
    for prompt in prompts:
        driver.submit(prompt)
    last = driver.submit(TEXT)
    request, past = driver.requests[last], driver.scheduler.state.in_flight._histories
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, len(past[request].leaders) if request in past else 0)
    # each of them shares more with the last than the one before, and computes it when that one has
    assert most == MAX_WAITS
    driver.run()
    assert request.output == alone(TEXT, False)


def test_whose_leaders_fail_one_after_the_other_goes_on_by_itself():
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=66)
    leaders = [driver.submit(TEXT[:900], priority=-1) for _ in range(1)]
    name = driver.submit(TEXT[:900])
    driver.step()
    for _ in range(MAX_WAITS - 1):
        assert waiting(driver, name)
        leaders.append(driver.submit(TEXT[:900], priority=-1))
        driver.scheduler.abort(RequestId(leaders[-2]))
        driver.step()
    assert waiting(driver, name)
    driver.submit(TEXT[:900], priority=-1)
    driver.scheduler.abort(RequestId(leaders[-1]))
    driver.step()
    driver.step()
    driver.run()
    assert len(leaders) == MAX_WAITS and driver.output(name) == alone(TEXT[:900], False)


@pytest.mark.parametrize("mode", ["auto", "junction"])
@pytest.mark.parametrize("steps", [1, 2, 6, 7, 8, *map(more, (3, 4, 5, 9, 10, 11))])
def test_a_leader_that_is_aborted_leaves_it_to_the_next(mode, steps):
    driver = Driver(mode, max_num_batched_tokens=100)
    names = [driver.submit(TEXT[:700], seed=i) for i in range(4)]
    for _ in range(steps):
        driver.step()
    computed = driver.requests[names[0]].num_computed
    driver.scheduler.abort(RequestId(names[0]))
    if computed < 700:
        driver.step()
        assert driver.requests[names[1]].phase is Phase.RUNNING
        assert waiting(driver, names[2]) and waiting(driver, names[3])
    driver.run()
    # without a state on its way what the first had computed is computed once more, by one of the three
    assert prefilled(driver) <= 700 + (63 if mode == "auto" else computed % 700)
    for i, name in enumerate(names[1:], 1):
        assert driver.output(name) == alone(TEXT[:700], False, seed=i)


def test_one_that_waits_is_aborted():
    driver = Driver(max_num_batched_tokens=100)
    names = [driver.submit(TEXT[:700], seed=i) for i in range(3)]
    driver.step()
    assert waiting(driver, names[1])
    driver.scheduler.abort(RequestId(names[1]))
    driver.run()
    assert prefilled(driver) == 700 and driver.output(names[2]) == alone(TEXT[:700], False, seed=2)
    sharing = driver.scheduler.state.in_flight
    assert not sharing._histories and not sharing._waits and not sharing._leaders


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("steps", range(1, 8))
def test_a_leader_that_is_preempted_is_waited_for_no_longer(exact, steps):
    driver = Driver(exact=exact, max_num_batched_tokens=100)
    names = [driver.submit(TEXT[:700], seed=i) for i in range(3)]
    for _ in range(steps):
        driver.step()
    leader = driver.requests[names[0]]
    preempt(driver.scheduler.state, leader, leader, 10_000)
    assert leader.phase is Phase.WAITING
    sharing = driver.scheduler.state.in_flight
    while driver.scheduler.has_work:
        driver.step()
        # nor waited for a second time, when it runs again
        assert all(wait.leader is not leader for wait in sharing._waits.values())
    for i, name in enumerate(names):
        assert driver.output(name) == alone(TEXT[:700], exact, seed=i)
    assert prefilled(driver) <= 3 * 700


@pytest.mark.parametrize(
    ("mode", "exact", "num_pages"),
    first_of(
        [("auto", False, 24), ("auto", True, 30), ("all", True, 24), ("all", False, 47)],
        ("auto", "all"),
        (False, True),
        (24, 30, 47, 60),
    ),
)
def test_a_pool_that_is_too_small(num_pages, exact, mode):
    driver = Driver(mode, num_pages, exact=exact, max_num_batched_tokens=100)
    prompts = [fork(i, 200, 300) for i in range(4)] + [TEXT[:310]] * 4
    names = [driver.submit(prompt, max_tokens=20) for prompt in prompts]
    driver.run()
    for name, prompt in zip(names, prompts, strict=True):
        assert driver.output(name) == alone(prompt, exact, max_tokens=20)
    assert driver.cache.clear(), "a page leaked"


def test_no_room_for_the_state_and_nobody_waits():
    # 16 tokens a page and 3 pages a state: the prompt and its answer leave a page
    driver = Driver("junction", num_pages=21, max_num_batched_tokens=68)
    first, second = driver.submit(TEXT[:300]), driver.submit(fork(0, 260, 290))
    driver.step()
    assert waiting(driver, second) and not driver.scheduler.state.in_flight._waits
    driver.run()
    assert driver.output(first) == alone(TEXT[:300], False)
    assert driver.output(second) == alone(fork(0, 260, 290), False)


def first_steps(driver: Driver, names: list[str]) -> list[int]:
    """In which step each request began."""
    begun: dict[str, int] = {}
    while driver.scheduler.has_work:
        driver.step()
        for name in names:
            if driver.requests[name].stats.first_sequence is not None:
                begun.setdefault(name, len(driver.plans))
    driver.run()
    return [begun[name] for name in names]


@pytest.mark.parametrize(
    ("num_pages", "slots"), first_of([(70, 2), (70, 3), (1000, 2), (1000, 8)], (70, 1000), (2, 3, 4, 8))
)
def test_those_behind_come_in_no_later_and_the_slots_of_those_that_wait_are_not_taken(slots, num_pages):
    begun = {}
    for on in (False, True):
        driver = Driver(
            "auto", num_pages, max_num_seqs=slots, max_num_batched_tokens=200, max_waiting=99, in_flight_sharing=on
        )
        equal = [driver.submit(TEXT[:400], max_tokens=30) for _ in range(2)]
        others = [driver.submit(range(5000 + 500 * i, 5000 + 500 * i + 90), max_tokens=30) for i in range(4)]
        begun[on] = first_steps(driver, [*equal, *others])
    # one that waits ends later, and who has its slot then begins later
    late = max(0, begun[True][1] - begun[False][1]) if slots == 2 else 0
    assert all(on <= off + late for on, off in zip(begun[True][2:], begun[False][2:], strict=True))
    # nobody of the others has a slot that would be its own
    if slots == 2:
        assert begun[True][1] < begun[True][2]


def test_those_behind_go_on_while_it_waits():
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=300)
    driver.submit(TEXT[:280])
    driver.submit(TEXT[:280])
    short = driver.submit([7, 8, 9])
    driver.step()
    assert driver.output(short)


def test_pages_are_put_by_for_one_that_waits():
    # of 46 pages the leader has 19 and 3 for the state it is asked for; the one that waits is going to need 16. A step
    # computes 64 tokens of a prompt, so there are always tokens left for somebody else
    driver = Driver("granular", num_pages=46, max_num_batched_tokens=300, max_num_seqs=4)
    driver.submit(TEXT[:300], max_tokens=2)
    held = driver.submit(fork(0, 260, 500), max_tokens=2)
    small, large = driver.submit(range(5000, 5100), max_tokens=2), driver.submit(range(6000, 6200), max_tokens=9)
    driver.step()
    assert waiting(driver, held) and driver.scheduler.state.in_flight._waits
    assert driver.requests[small].phase is Phase.RUNNING
    while waiting(driver, held):
        assert waiting(driver, large)
        driver.step()
    driver.run()
    assert driver.requests[held].stats.first_sequence.hit == 260
    assert driver.output(held) == alone(fork(0, 260, 500), False, max_tokens=2)


@pytest.mark.parametrize("length", [1, 2, 63])
def test_short_prompts_wait_for_nobody(length):
    driver = Driver(max_num_seqs=32, max_num_batched_tokens=32 * 63)
    names = [driver.submit(TEXT[:length], seed=i, max_tokens=1) for i in range(32)]
    driver.step()
    assert all(len(driver.output(name)) == 1 for name in names)
    assert shared(driver) == (0, 0)


def test_less_than_a_chunk_more_than_is_cached_is_not_waited_for():
    driver = Driver(max_num_batched_tokens=600)
    driver.ask(TEXT[:200], max_tokens=1)
    driver.submit(TEXT[:263])
    name = driver.submit(TEXT[:263])
    driver.step()
    assert driver.requests[name].phase is Phase.RUNNING
    driver.run()


def test_nobody_waits_for_one_that_is_behind_what_is_cached():
    driver = Driver(max_num_batched_tokens=300)
    driver.ask(WORDS[:640], max_tokens=1)
    # all of it has to be computed, from the start
    driver.submit(WORDS[:900], prompt_logprobs=0)
    name = driver.submit(WORDS[:900])
    while driver.scheduler.has_work:
        driver.step()
        assert not driver.scheduler.state.in_flight._waits
    assert driver.requests[name].stats.num_prompt_computed <= 260
    assert driver.output(name) == alone(WORDS[:900], False)


def test_prompt_logprobs_wait_for_nobody_and_serve_others():
    driver = Driver(max_num_batched_tokens=300)
    first = driver.submit(WORDS[:600], prompt_logprobs=0)
    second = driver.submit(WORDS[:600], prompt_logprobs=0)
    third = driver.submit(WORDS[:600])
    driver.run()
    computed = [driver.requests[name].stats.num_prompt_computed for name in (first, second, third)]
    assert computed == [600, 600, 0]


def test_other_namespaces_share_nothing():
    driver = Driver(max_num_batched_tokens=300)
    for salt in (None, "a", "b"):
        driver.submit(TEXT[:500], namespace=Namespace(cache_salt=salt))
    driver.submit(TEXT[:500], namespace=Namespace("adapter"))
    while driver.scheduler.has_work:
        driver.step()
        assert not driver.scheduler.state.in_flight._waits
    assert prefilled(driver) == 4 * 500 and shared(driver) == (0, 0)


def test_with_the_cache_off_nobody_waits():
    driver = Driver(None, max_num_batched_tokens=600)
    for _ in range(3):
        driver.submit(TEXT[:500])
    driver.run()
    assert prefilled(driver) == 1500 and shared(driver) == (0, 0)


def test_several_answers_to_prompts_that_are_equal():
    driver = Driver(max_num_seqs=6)
    names = [driver.submit(TEXT[:500], n=3, seed=10 * i) for i in range(3)]
    driver.run()
    assert prefilled(driver) == 500
    for i, name in enumerate(names):
        for branch, own in enumerate((name, f"{name}.1", f"{name}.2")):
            assert driver.output(own) == alone(TEXT[:500], False, seed=10 * i + branch)


def test_a_leader_that_does_not_get_on_is_given_up():
    driver = Driver(max_num_batched_tokens=80, max_num_seqs=4)
    leader, name = driver.submit(TEXT), driver.submit(TEXT)
    driver.step()
    sharing = driver.scheduler.state.in_flight
    for _ in range(2):
        # plans without a row of the leader
        for _ in range(MAX_IDLE):
            sharing.refresh()
            assert sharing._waits
        driver.step()
    for _ in range(MAX_IDLE):
        sharing.refresh()
    sharing.refresh()
    assert not sharing._waits
    while waiting(driver, name):
        driver.step()
    # not twice for the same one: it begins while the other is in prefill, or behind it
    assert sharing._histories[driver.requests[name]].leaders == {driver.requests[leader].stats.arrival}
    assert not sharing._waits
    driver.run()
    assert driver.output(name) == alone(TEXT, False)


def test_one_that_is_urgent_does_not_wait_for_one_that_waits():
    driver = Driver(max_num_batched_tokens=68, max_num_seqs=1)
    driver.submit(range(5000, 5300))
    low = driver.submit(TEXT[:500], priority=1)
    high = driver.submit(TEXT[:500], priority=-1)
    driver.run()
    requests = driver.requests
    assert requests[high].stats.num_prompt_computed == 500 and requests[low].stats.num_prompt_computed == 0


def test_answers_are_not_held_up_by_one_that_waits():
    driver = Driver(max_num_batched_tokens=80, max_num_seqs=4)
    first = driver.submit([1, 2, 3], max_tokens=30)
    driver.step()
    driver.submit(TEXT[:500])
    driver.submit(TEXT[:500])
    for _ in range(7):
        before = len(driver.output(first))
        driver.step()
        assert len(driver.output(first)) == before + 1
    driver.run()


PROMPTS = st.tuples(
    st.sampled_from([0, 1, 50, 64, 65, 130, 200, 333]), st.integers(0, 2), st.sampled_from([1, 40, 100])
)
MIX = {
    "mode": st.sampled_from(["auto", "auto", "align", "all", "granular", "junction"]),
    "exact": st.booleans(),
    "ahead": st.sampled_from([1, 2, 3]),
    "num_pages": st.sampled_from([40, 60, 100, 1000]),
    "slots": st.sampled_from([1, 2, 4, 8]),
    "budget": st.sampled_from([80, 200, 1000]),
    "requests": st.lists(
        st.tuples(PROMPTS, st.sampled_from([1, 3, 40]), st.integers(0, 4), st.integers(-1, 8), st.integers(-1, 1)),
        min_size=2,
        max_size=9,
    ),
}
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def played(on, mode, exact, ahead, num_pages, slots, budget, requests) -> tuple[Driver, dict[str, tuple]]:
    config = {"max_num_seqs": slots, "max_num_batched_tokens": budget, "max_in_flight": ahead}
    driver = Driver(mode, num_pages, exact=exact, in_flight_sharing=on, **config)
    expected = {}
    for (at, number, own), max_tokens, pause, fate, priority in requests:
        prompt = fork(number, at, at + own)
        salt = Namespace(cache_salt="s") if fate == 2 else PLAIN
        n = 2 if fate == 3 else 1
        name = driver.submit(prompt, max_tokens, namespace=salt, priority=priority, n=n)
        expected[name] = (prompt, max_tokens)
        for _ in range(pause):
            if driver.scheduler.has_work:
                driver.step()
        if fate == 0:
            driver.scheduler.abort(RequestId(name))
            expected.pop(name)
    # 64 tokens a step at least, what is preempted and what is waited for included
    driver.run(limit=400 + 40 * sum(len(prompt) // 64 + max_tokens for prompt, max_tokens in expected.values()))
    return driver, expected


def check_mix(**mix):
    driver, expected = played(True, **mix)
    for name, (prompt, max_tokens) in expected.items():
        assert driver.output(name) == alone(prompt, mix["exact"], max_tokens=max_tokens), name
    counted = driver.cache.counters
    assert counted.queries == counted.hits + counted.lost.total(), "a prompt token has no reason"
    sharing = driver.scheduler.state.in_flight
    assert not sharing._histories and not sharing._waits and not sharing._leaders
    assert driver.cache.clear(), "a page leaked"
    # one that is aborted has computed more by then if it did not have to begin at the start, and what `align` keeps
    # depends on where steps happen to end
    aborts = any(fate == 0 for *_, fate, _ in mix["requests"])
    if mix["num_pages"] == 1000 and mix["mode"] != "align" and not aborts:
        assert prefilled(driver) <= prefilled(played(False, **mix)[0])


@pytest.mark.more
@example(
    mode="all",
    exact=True,
    ahead=2,
    num_pages=1000,
    slots=8,
    budget=80,
    requests=[((64, 1, 1), 3, 0, 3, -1), ((65, 2, 100), 40, 1, 3, 1), ((200, 2, 100), 1, 3, 0, -1)],
)
@settings(max_examples=60, **COMMON)
@given(**MIX)
def test_random_mixes_end_with_the_right_answers_and_compute_no_more_than_without(**mix):
    check_mix(**mix)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=int(os.environ.get("CAIRN_LONG_EXAMPLES", "5000")), **COMMON)
@given(**MIX)
def test_many_more_mixes(**mix):
    check_mix(**mix)


def test_what_waiting_has_saved_is_counted_once():
    driver = Driver()
    driver.submit(TEXT[:300])
    name = driver.submit(TEXT[:300], max_tokens=30)
    while len(driver.output(name)) < 9:
        driver.step()
    preempt(driver.scheduler.state, driver.requests[name], driver.requests[name], 10_000)
    driver.run()
    assert driver.scheduler.state.counters.preemptions == 1 and shared(driver) == (1, 300)


def test_equal_prompts_in_a_burst_are_counted_once_each():
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=100)
    names = [driver.submit(TEXT[:400]) for _ in range(4)]
    driver.run()
    counters = driver.cache.counters
    assert counters.queries == 1600 and counters.hits == 1200
    assert counters.reasons == Counter({Reason.NONE: 3, Reason.NEVER_SEEN: 1})
    assert [driver.requests[name].stats.num_prompt_computed for name in names] == [400, 0, 0, 0]


def test_who_waits_for_another_request_is_told_apart_from_who_waits_for_room():
    """A prompt is computed in chunks: two wait to share it, and two answers to another prompt for the first one."""
    driver = Driver(max_num_seqs=3, max_num_batched_tokens=68)
    state = driver.scheduler.state
    driver.submit(TEXT[:300], max_tokens=8)
    driver.step()
    for _ in range(2):
        driver.submit(TEXT[:300])
    driver.submit(fork(1, 0, 50), n=3)
    driver.step()
    assert len(state.running) == 1
    assert state.num_deferred == 2 + 2 and state.num_waiting == 2 + 3
    seen = set()
    while state.requests:
        driver.step()
        assert 0 <= state.num_deferred <= state.num_waiting
        seen.add((state.num_deferred, state.num_waiting))
    assert (0, 0) in seen and any(deferred < num for deferred, num in seen)
