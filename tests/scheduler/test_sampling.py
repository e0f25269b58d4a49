"""What plans say about draws: histories, bans, forms, scores; and whose turn it is."""

import numpy as np
import pytest
from driver import Driver, alone

from cairn.runner.input_batch import InputBatch
from cairn.scheduler.preempt import preempt
from cairn.scheduler.request import ARRIVALS_PER_PRIORITY, Phase
from cairn.step import SAMPLED
from cairn.types import RequestId, SamplingParams

PROMPT = tuple(range(100))
PENALTY = SamplingParams(presence_penalty=0.5)
VOCAB = 50  # of the simulated runner


class OneOf:
    """Only these tokens, by how many there are already."""

    def __init__(self, *allowed) -> None:
        self.allowed_tokens = allowed
        self.asked = []

    def allowed(self, output):
        self.asked.append(tuple(output))
        tokens = self.allowed_tokens[len(output)]
        if tokens is None:
            return None
        mask = np.zeros(2, np.uint32)
        for token in tokens:
            mask[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        return mask.view(np.int32)


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_a_penalty_sees_all_that_came_before_also_side_by_side(ahead, exact):
    driver = Driver(max_in_flight=ahead, exact=exact, max_num_batched_tokens=100)
    names = [driver.submit(range(40 * i, 40 * i + 90), max_tokens=12, sampling=PENALTY, seed=i) for i in range(3)]
    names.append(driver.submit(PROMPT, max_tokens=12, seed=9))
    driver.run()
    for i, name in enumerate(names[:3]):
        prompt = range(40 * i, 40 * i + 90)
        assert driver.output(name) == alone(prompt, exact, max_tokens=12, sampling=PENALTY, seed=i)
    assert driver.output(names[3]) == alone(PROMPT, exact, max_tokens=12, seed=9)
    # the runner of tags mixes the history in: without it the answer would be another
    assert driver.output(names[0]) != alone(range(90), exact, max_tokens=12, seed=0)


def test_a_request_that_needs_its_last_token_is_planned_ahead_like_others_and_drawn_when_it_is_known():
    driver = Driver(max_in_flight=2)
    waits = driver.submit(PROMPT, max_tokens=10, sampling=PENALTY)
    free = driver.submit(range(200, 300), max_tokens=10)
    calls = []
    for name in ("launch", "sample", "collect"):
        call = getattr(driver.runner, name)
        step_of = (lambda plan: plan.step) if name == "launch" else int
        setattr(
            driver.runner,
            name,
            lambda first, *rest, call=call, name=name, step_of=step_of: (
                calls.append((name, step_of(first))),
                call(first, *rest),
            )[1],
        )
    driver.run()
    fed = {slot for plan in driver.plans for slot in plan.decodes.slots[plan.decodes.tokens == SAMPLED].tolist()}
    assert len(fed) == 2
    assert driver.output(waits) == alone(PROMPT, False, max_tokens=10, sampling=PENALTY)
    assert driver.output(free) == alone(range(200, 300), False, max_tokens=10)
    # launched while the one before it is out, drawn when that has been collected
    at = {call: place for place, call in enumerate(calls)}
    ahead = [step for name, step in calls if name == "launch" and 2 < step < 10]
    assert all(at["launch", step] < at["collect", step - 1] < at["sample", step] for step in ahead)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("steps", [2, 3, 6])
@pytest.mark.parametrize("room", [0, 10_000])
def test_a_preempted_request_counts_what_it_had_generated(exact, steps, room):
    driver = Driver(exact=exact)
    name = driver.submit(PROMPT, max_tokens=15, sampling=PENALTY)
    for _ in range(steps):
        driver.step()
    request = driver.requests[name]
    preempt(driver.scheduler.state, request, request, room)
    driver.run()
    assert driver.scheduler.state.counters.preemptions == 1
    if exact:
        assert driver.output(name) == alone(PROMPT, exact, max_tokens=15, sampling=PENALTY)
    batch, samples = InputBatch(8), []
    for plan in driver.plans:
        batch.update(plan)
        for slot, sample in zip(plan.samples.slots.tolist(), batch.sampling_metadata(plan, {}), strict=True):
            samples.append(sample)
            batch.append(np.array([slot]), np.array([driver.output(name)[sample.position - 100]]))
    assert len(samples) == 15
    for sample in samples:
        known = [*PROMPT, *driver.output(name)][: sample.position]
        assert sample.history.tolist() == known and sample.num_prompt_tokens == 100


def test_no_stop_token_comes_before_min_tokens():
    stops = tuple(range(0, VOCAB, 2))
    plain = Driver().ask(PROMPT, max_tokens=30, stop=stops)
    assert len(plain.output) < 10 and plain.outcome.finish_reason == "stop"
    for ahead in (1, 3):
        late = Driver(max_in_flight=ahead).ask(PROMPT, max_tokens=30, stop=stops, min_tokens=10)
        assert all(token % 2 for token in late.output[:10]) and len(late.output) > 10
        assert late.outcome.finish_reason == "stop"


@pytest.mark.parametrize("count", [0, 1, 10])
def test_min_tokens_is_exact(count):
    stops = tuple(token for token in range(VOCAB) if token != 7)
    request = Driver().ask(PROMPT, max_tokens=30, stop=stops, min_tokens=count, seed=3)
    assert request.output[:count] == [7] * count and request.output[count] != 7
    assert (len(request.output), request.outcome.finish_reason) == (count + 1, "stop")


def test_a_form_is_asked_with_the_answer_so_far_and_kept():
    for ahead in (1, 2):
        form = OneOf([3], [31, 32], [33], None, [49])
        request = Driver(max_in_flight=ahead).ask(PROMPT, max_tokens=5, constraint=form)
        assert request.output[0] == 3 and request.output[1] in (31, 32) and request.output[2] == 33
        assert request.output[4] == 49
        assert [len(asked) for asked in form.asked] == [0, 1, 2, 3, 4]
        assert form.asked[-1] == tuple(request.output[:4])


def test_a_form_survives_a_preemption():
    form = OneOf(*([token] for token in range(12)))
    driver = Driver()
    name = driver.submit(PROMPT, max_tokens=12, constraint=form)
    for _ in range(5):
        driver.step()
    request = driver.requests[name]
    preempt(driver.scheduler.state, request, request, 10_000)
    driver.run()
    assert request.output == list(range(12))


# -- scores ------------------------------------------------------------------------------------------------------------


def scored(driver, name):
    scores = driver.requests[name].outcome.prompt_logprobs
    return [(int(part.token_ids[0, 0]), float(part.values[0, 0])) for part in scores]


@pytest.mark.parametrize("mode", ["auto", None])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 300])
def test_every_token_of_a_prompt_is_scored_once_whatever_is_cached(mode, length):
    prompt = [token % VOCAB for token in range(length)]
    driver = Driver(mode, max_num_batched_tokens=100)
    driver.ask(prompt)
    first = driver.submit(prompt, max_tokens=1, prompt_logprobs=2)
    driver.run()
    assert [token for token, _ in scored(driver, first)] == prompt[1:]
    assert driver.requests[first].stats.first_sequence.hit == 0
    assert driver.cache.counters.hits == 0
    fresh = Driver(None)
    name = fresh.submit(prompt, max_tokens=1, prompt_logprobs=2)
    fresh.run()
    assert scored(fresh, name) == scored(driver, first)


def test_a_scored_prompt_enters_the_cache_like_any_other():
    driver = Driver()
    prompt = [token % VOCAB for token in PROMPT]
    driver.ask(prompt, max_tokens=1, prompt_logprobs=0)
    assert driver.ask(prompt, max_tokens=1).stats.first_sequence.hit == 100


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_prompt_preempted_midway_is_scored_anew(steps):
    prompt = [token % VOCAB for token in range(300)]
    driver = Driver(max_num_batched_tokens=100)
    name = driver.submit(prompt, max_tokens=3, prompt_logprobs=0)
    for _ in range(steps):
        driver.step()
    request = driver.requests[name]
    done = bool(request.output)
    preempt(driver.scheduler.state, request, request, 10_000)
    driver.run()
    if not done:
        assert [token for token, _ in scored(driver, name)] == prompt[1:]


def test_logprobs_come_with_the_tokens():
    driver = Driver()
    name = driver.submit(PROMPT, max_tokens=4, logprobs=3)
    told = []
    while driver.scheduler.has_work:
        told += [(progress.tokens, progress.logprobs) for progress in driver.step() if progress.tokens]
    assert [list(tokens) for tokens, _ in told] == [[token] for token in driver.output(name)]
    assert all(one.token_ids.shape == (1, 4) and one.token_ids[0, 0] == tokens[0] for tokens, one in told)
    assert driver.output(name) == alone(PROMPT, False, max_tokens=4)


# -- priorities --------------------------------------------------------------------------------------------------------


def started(driver):
    """Names in the order in which they were admitted."""
    found = []
    while driver.scheduler.has_work:
        driver.step()
        for name, request in driver.requests.items():
            if request.stats.first_sequence is not None and name not in found:
                found.append(name)
    return found


def test_a_smaller_priority_goes_first_and_equals_in_their_order():
    driver = Driver(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5), ("f", -1)):
        driver.submit(PROMPT, name=name, priority=priority, max_tokens=1)
    assert started(driver) == ["d", "f", "a", "c", "b", "e"]


def test_a_priority_is_worth_a_bounded_number_of_arrivals():
    driver = Driver(max_num_seqs=1)
    driver.submit(PROMPT, name="patient", priority=1, max_tokens=1)
    driver.scheduler._arrivals += ARRIVALS_PER_PRIORITY - 2
    driver.submit(PROMPT, name="urgent", priority=0, max_tokens=1)
    driver.scheduler._arrivals += 1
    driver.submit(PROMPT, name="too late", priority=0, max_tokens=1)
    assert started(driver) == ["urgent", "patient", "too late"]


def test_the_one_that_matters_least_is_preempted():
    driver = Driver(num_pages=24, max_num_batched_tokens=400)
    low = driver.submit(range(100), max_tokens=100, priority=7)
    high = driver.submit(range(200, 300), max_tokens=100)
    driver.run()
    assert driver.scheduler.state.counters.preemptions > 0
    assert driver.requests[low].stats.preempted_by and not driver.requests[high].stats.preempted_by
    assert driver.output(low) == alone(range(100), False, max_tokens=100)


def test_a_waiting_request_in_the_middle_of_the_queue_can_be_aborted():
    driver = Driver(max_num_seqs=1)
    for i in range(6):
        driver.submit(PROMPT, name=f"r{i}", priority=i % 2, max_tokens=1)
    driver.scheduler.abort(RequestId("r3"))
    driver.run()
    assert driver.requests["r3"].phase is Phase.FINISHED and not driver.output("r3")
    assert all(driver.output(f"r{i}") for i in (0, 1, 2, 4, 5))
