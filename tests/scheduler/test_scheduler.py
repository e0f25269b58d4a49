"""Plan and apply, with a runner of tags: what is computed, what is not, and in how many steps."""

import numpy as np
import pytest
from driver import Driver, alone

from cairn.cache.checkpoint import Kind
from cairn.cache.reasons import Reason
from cairn.engine.core_report import StepSizes, engine_stats
from cairn.errors import ConfigError, InvalidRequest, Overloaded
from cairn.scheduler.advance import chunk_end
from cairn.scheduler.preempt import preempt
from cairn.scheduler.request import TRANSITIONS, Phase
from cairn.scheduler.scheduler import capacity_tokens
from cairn.scheduler.state import SchedulerConfig
from cairn.step import SAMPLED, StepResult

TEXT = list(range(100, 900))


def test_a_second_identical_prompt_runs_no_forward_pass():
    driver = Driver()
    first = driver.ask(TEXT[:300], max_tokens=1)
    passes = driver.runner.forward_passes
    second = driver.ask(TEXT[:300], max_tokens=1)
    assert driver.runner.forward_passes == passes == 2
    assert second.output == first.output
    assert (second.stats.first_sequence.hit, second.stats.first_sequence.reason, second.stats.num_prompt_computed) == (
        300,
        Reason.NONE,
        0,
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 600])
def test_answers_are_those_of_a_server_without_a_cache(length, exact):
    driver = Driver(exact=exact)
    for _ in range(3):
        assert driver.ask(TEXT[:length], max_tokens=40).output == alone(TEXT[:length], exact, max_tokens=40)


@pytest.mark.parametrize("exact", [False, True])
def test_shared_beginnings_are_not_computed_again(exact):
    driver = Driver(exact=exact)
    driver.ask(TEXT[:500])
    prompt = TEXT[:330] + [7] * 100
    request = driver.ask(prompt)
    assert request.stats.first_sequence.hit == 320 and request.stats.num_prompt_computed == 110
    assert request.output == alone(prompt, exact)


def test_the_answer_is_part_of_the_next_prompt():
    driver = Driver()
    first = driver.ask(TEXT[:100], max_tokens=200)
    prompt = TEXT[:100] + first.output + [3] * 10
    second = driver.ask(prompt)
    # the last token of the answer was sampled but never computed
    assert second.stats.first_sequence.hit == 299 and second.output == alone(prompt, False)
    inside = TEXT[:100] + first.output[:150] + [4] * 10
    assert driver.ask(inside).stats.first_sequence.hit >= 250 - 63


def test_checkpoints_cost_no_step_and_no_forward_pass():
    none, many = Driver(None), Driver("all")
    for driver in (none, many):
        driver.ask(TEXT, max_tokens=3)
    assert many.cache.checkpoints.taken[Kind.BLOCK] == 50
    assert many.runner.forward_passes == none.runner.forward_passes
    assert len(many.plans) == len(none.plans)


def test_chunks_end_on_the_grid_and_budgets_hold():
    driver = Driver(max_num_batched_tokens=100, max_num_seqs=4)
    names = [driver.submit(TEXT[i : i + 333]) for i in range(4)]
    driver.run()
    for plan in driver.plans:
        assert len(plan.decodes) + sum(len(row.tokens) for row in plan.prefills) <= 100
        for row in plan.prefills:
            assert row.end % 64 == 0 or row.slot in plan.samples.slots
    assert all(driver.output(name) == alone(TEXT[i : i + 333], False) for i, name in enumerate(names))


def test_decodes_go_on_while_a_long_prompt_is_prefilled():
    driver = Driver(max_num_batched_tokens=80, max_num_seqs=2)
    first = driver.submit(TEXT[:10], max_tokens=20)
    driver.step()
    driver.submit(TEXT[:700], max_tokens=1)
    for _ in range(5):
        before = len(driver.output(first))
        driver.step()
        assert len(driver.output(first)) == before + 1
    driver.run()


def test_decodes_go_on_behind_a_long_prompt_that_comes_before_them():
    """Its chunks leave a token to each of those behind it, also where they could take all there are."""
    driver = Driver(max_num_batched_tokens=128, max_num_seqs=3)
    behind = [driver.submit(TEXT[i : i + 10], max_tokens=30) for i in range(2)]
    driver.step()
    first = driver.submit(TEXT[:700], max_tokens=1, priority=-1)
    for _ in range(8):
        before = [len(driver.output(name)) for name in behind]
        driver.step()
        assert [len(driver.output(name)) for name in behind] == [length + 1 for length in before]
    assert [request.id for request in driver.scheduler.state.running] == [first, *behind]
    driver.run()


def test_a_tiny_pool_preempts_and_every_answer_is_right():
    for exact in (False, True):
        driver = Driver(num_pages=24, exact=exact)
        prompts = [TEXT[i * 50 : i * 50 + 100 + i] for i in range(6)]
        names = [driver.submit(prompt, max_tokens=100) for prompt in prompts]
        driver.run()
        assert driver.scheduler.state.counters.preemptions > 0
        for name, prompt in zip(names, prompts, strict=True):
            assert driver.output(name) == alone(prompt, exact, max_tokens=100), (exact, name)


@pytest.mark.parametrize("exact", [False, True])
def test_a_preempted_request_with_a_saved_state_goes_on_from_it(exact):
    driver = Driver(exact=exact)
    name = driver.submit(TEXT[:200], max_tokens=50)
    for _ in range(30):
        driver.step()
    request = driver.requests[name]
    computed = request.num_computed
    preempt(driver.scheduler.state, request, request, 0)
    assert request.phase is Phase.PREEMPTING
    driver.run()
    assert driver.cache.checkpoints.taken[Kind.PREEMPTION] == 1
    assert driver.scheduler.state.counters.recomputed_tokens == 0
    assert request.sequence is None and request.stats.max_computed > computed
    assert request.output == alone(TEXT[:200], exact, max_tokens=50)


@pytest.mark.parametrize("exact", [False, True])
def test_a_preempted_request_without_a_saved_state_computes_again(exact):
    driver = Driver("junction", num_pages=40, exact=exact)
    name = driver.submit(TEXT[:200], max_tokens=50)
    for _ in range(30):
        driver.step()
    request = driver.requests[name]
    preempt(driver.scheduler.state, request, request, 1000)
    assert request.phase is Phase.WAITING
    driver.run()
    assert driver.scheduler.state.counters.recomputed_tokens > 0
    assert request.output == alone(TEXT[:200], exact, max_tokens=50)


@pytest.mark.parametrize("exact", [False, True])
def test_planning_ahead_feeds_tokens_from_the_step_before(exact):
    driver = Driver(exact=exact, max_in_flight=2)
    name = driver.submit(TEXT[:100], max_tokens=30)
    driver.run()
    assert sum(np.count_nonzero(plan.decodes.tokens == SAMPLED) for plan in driver.plans) >= 28
    assert driver.output(name) == alone(TEXT[:100], exact, max_tokens=30)


@pytest.mark.parametrize(("max_tokens", "aborted", "num_saves"), [(1, False, 0), (5, False, 1), (50, True, 0)])
def test_the_state_at_an_answers_end_is_saved_where_there_is_an_answer_that_ended_well(max_tokens, aborted, num_saves):
    driver = Driver()
    name = driver.submit(TEXT[:300], max_tokens=max_tokens)
    while not driver.output(name):
        driver.step()
    if aborted:
        driver.step()
        driver.scheduler.abort(name)
    driver.run()
    assert sum(len(plan.saves) for plan in driver.plans) == num_saves
    assert driver.cache.checkpoints.taken[Kind.ANSWER_END] == num_saves


def test_the_time_of_the_first_token_is_not_that_of_a_later_one():
    driver = Driver()
    name = driver.submit(TEXT[:600], max_tokens=5)
    while driver.scheduler.has_work:
        driver.clock.advance(1)
        driver.step()
    stats = driver.requests[name].stats
    # 600 tokens are three steps of at most 256
    times = (stats.arrival_time, stats.scheduled_time, stats.first_token_time, stats.finished_time)
    assert times == (0, 1, 3, 7)


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_no_token_is_computed_behind_the_last_one_allowed(ahead):
    driver = Driver(max_in_flight=ahead)
    driver.ask(TEXT[:100], max_tokens=10)
    assert sum(len(plan.decodes) for plan in driver.plans) == 9


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_a_finish_seen_late_is_trimmed(ahead):
    plain = alone(TEXT[:100], False, max_tokens=30)
    stop = plain[11]
    driver = Driver(max_in_flight=ahead)
    request = driver.ask(TEXT[:100], max_tokens=30, stop=[stop])
    assert request.output == plain[: plain.index(stop) + 1] and request.outcome.finish_reason == "stop"
    prompt = TEXT[:100] + request.output + [7]
    follow_up = driver.ask(prompt)
    # steps that were out went on with the stop token and behind it: the runner has left the state before it alone
    assert follow_up.stats.first_sequence.hit == 99 + len(request.output)
    assert follow_up.output == alone(prompt, False)


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("after", range(1, 14))
def test_an_abort_while_tokens_are_fed_ahead_keeps_no_state_of_unknown_tokens(ahead, after):
    driver = Driver("align", block_size=8, max_in_flight=ahead)
    name = driver.submit(TEXT[:5], max_tokens=20)
    for _ in range(after):
        driver.step()
    driver.scheduler.abort(name)
    driver.run()
    prompt = TEXT[:5] + driver.output(name)
    assert driver.ask(prompt).output == alone(prompt, False)


@pytest.mark.parametrize("after", range(1, 12))
def test_aborts_at_any_time_leak_nothing_and_keep_what_was_computed(after):
    for ahead in (1, 2):
        driver = Driver(num_pages=60, max_num_batched_tokens=100, max_in_flight=ahead)
        names = [driver.submit(TEXT[i : i + 300], max_tokens=20) for i in range(3)]
        for _ in range(after):
            driver.step()
        for name in names:
            driver.scheduler.abort(name)
        driver.scheduler.abort("unknown")
        driver.run()
        assert all(driver.requests[name].phase is Phase.FINISHED for name in names)
        assert driver.ask(TEXT[:300], max_tokens=20).output == alone(TEXT[:300], False, max_tokens=20)


def test_a_hit_whose_file_does_not_fit_beside_the_prompt_is_given_up():
    driver = Driver(num_pages=30)
    driver.ask(TEXT[:200], max_tokens=1)
    prompt = TEXT[:200] + [5] * 260
    assert capacity_tokens(driver.layout, 30, 0) == 464
    assert driver.ask(prompt, max_tokens=4).output == alone(prompt, False, max_tokens=4)


def test_what_can_never_run_is_refused():
    driver = Driver(num_pages=30, max_model_len=2000)
    with pytest.raises(InvalidRequest, match="empty"):
        driver.submit([])
    with pytest.raises(InvalidRequest, match="--kv-cache-memory-bytes"):
        driver.submit(TEXT[:461], max_tokens=4)
    with pytest.raises(InvalidRequest, match="--max-model-len"):
        Driver(max_model_len=100).submit(TEXT[:99], max_tokens=2)
    driver.submit(TEXT[:460], max_tokens=4, name="same")
    with pytest.raises(InvalidRequest, match="in use"):
        driver.submit(TEXT[:10], name="same")
    driver.run()


def test_a_full_queue_is_refused_and_the_rest_is_served():
    driver = Driver(max_waiting=2)
    driver.submit(TEXT[:10])
    driver.submit(TEXT[:11])
    with pytest.raises(Overloaded, match="2 requests"):
        driver.submit(TEXT[:12])
    driver.run()


def test_impossible_settings_name_the_flag():
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=71)
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        SchedulerConfig(max_num_seqs=0)


def test_results_out_of_order_are_our_bug():
    driver = Driver()
    driver.submit(TEXT[:10])
    driver.scheduler.plan()
    with pytest.raises(AssertionError, match="step 7"):
        driver.scheduler.apply(StepResult(7))


def test_phases_follow_the_table():
    driver = Driver()
    request = driver.ask(TEXT[:10])
    for phase in Phase:
        with pytest.raises(AssertionError, match="finished"):
            request.set_phase(phase)
    assert set(TRANSITIONS) == set(Phase)


@pytest.mark.parametrize(
    ("start", "limit", "budget", "end"),
    [(0, 100, 200, 100), (0, 100, 99, 64), (0, 100, 63, 0), (64, 1000, 100, 128), (70, 1000, 64, 128), (70, 90, 5, 70)],
)
def test_chunk_ends(start, limit, budget, end):
    assert chunk_end(start, limit, budget) == end


def test_what_fits_a_pool_really_fits():
    for num_pages in (10, 30, 57):
        driver = Driver(num_pages=num_pages)
        longest = capacity_tokens(driver.layout, num_pages, 0)
        prompt = list(np.arange(longest - 4))
        for _ in range(2):
            driver.ask(prompt, max_tokens=4)


@pytest.mark.parametrize("num_pages", [150, 220, 300])
def test_a_prompt_comes_in_only_when_all_of_it_has_room(num_pages):
    driver = Driver(num_pages=num_pages, max_num_seqs=8, max_num_batched_tokens=256)
    names = [driver.submit(range(10_000 * i, 10_000 * i + 1000), max_tokens=20) for i in range(12)]
    driver.run()
    counters = driver.scheduler.state.counters
    assert (counters.preemptions, counters.recomputed_tokens) == (0, 0)
    assert all(len(driver.output(name)) == 20 for name in names)


def test_a_prompt_that_waits_for_room_costs_nobody_what_is_cached():
    driver = Driver(num_pages=100)
    driver.ask(range(300), max_tokens=1)
    driver.submit(range(5000, 5600), max_tokens=200)
    driver.step()
    waits = driver.submit(range(9000, 10_000), max_tokens=1)
    before = dict(driver.cache.checkpoints.evicted)
    for _ in range(5):
        driver.step()
    assert driver.requests[waits].phase is Phase.WAITING
    assert dict(driver.cache.checkpoints.evicted) == before
    driver.run()
    assert driver.output(waits) == alone(range(9000, 10_000), False, max_tokens=1)


def test_the_tokens_that_are_still_to_be_prefilled_are_told():
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=1024)

    def pending():
        state = driver.scheduler.state
        return engine_stats(
            state, None, None, StepSizes(), forward_passes=0, audits=0, request_log_dropped=0
        ).pending_prefill_tokens

    prompt = list(range(2, 3002))
    driver.submit(prompt, max_tokens=3, name="a")
    assert pending() == 3000
    driver.step()
    assert pending() == 3000 - driver.scheduler.state.requests["a"].num_computed
    driver.submit(prompt, max_tokens=3, name="b")
    driver.run()
    assert pending() == 0
    # half of what was asked so far has been computed, so half of what waits is expected to be
    share = driver.scheduler.state.counters.computed_prompt_tokens / 6000
    assert 0.5 <= share < 0.6
    driver.submit(list(range(5000, 6000)), max_tokens=3, name="c")
    assert pending() == round(1000 * share)
