"""Requests that wait for another one's prefill, with real models: what is computed, and that every bit is the same."""

import numpy as np
import pytest
import torch

from engine.test_exactness import OTHER, TEXT, TOLERANCE, Engine, Loaded, assert_same
from tiers import first_of, more

LENGTH = 200


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3", pytest.param("qwen3_5", marks=pytest.mark.long)])
def loaded(request, made_model) -> Loaded:
    return Loaded(made_model(request.param))


def computed(engine: Engine) -> int:
    return engine.scheduler.state.counters.computed_prompt_tokens


@pytest.mark.parametrize("ahead", [2, more(1)])
def test_32_equal_prompts_cost_one_prefill_and_give_one_answer(loaded, ahead):
    engine = Engine(loaded, budget=128, ahead=ahead)
    numbers = [engine.submit(TEXT[:LENGTH]) for _ in range(32)]
    engine.run()
    assert computed(engine) == LENGTH
    shared = engine.scheduler.state.counters.shared
    assert (shared.requests, shared.tokens) == (3, 3 * LENGTH)  # as many as there are slots; the others come later
    for number in numbers:
        assert_same(engine.logits[number], loaded.alone(TEXT[:LENGTH]))


@pytest.mark.parametrize(
    ("mode", "shared"), first_of([("auto", 181), ("junction", 128)], ("auto", "junction"), (128, 181))
)
def test_prompts_that_share_a_part_compute_it_once_bit_for_bit(loaded, mode, shared):
    engine = Engine(loaded, mode, budget=100)
    prompts = [TEXT[:shared] + OTHER[20 * i : 20 * i + 40 + i] for i in range(4)]
    numbers = [engine.submit(prompt) for prompt in prompts]
    engine.run()
    kept = shared // loaded.grid * loaded.grid
    assert computed(engine) == sum(map(len, prompts)) - 3 * kept
    for number, prompt in zip(numbers, prompts, strict=True):
        assert_same(engine.logits[number], loaded.alone(prompt))


def test_a_prompt_within_a_longer_one_that_ends_off_the_grid(loaded):
    engine = Engine(loaded, budget=100)
    engine.submit(TEXT[:300])
    number = engine.submit(TEXT[:150])
    engine.run()
    # without a state to restore, the last token's logits come from computing it
    assert computed(engine) == 300 + (loaded.grid == 1)
    assert_same(engine.logits[number], loaded.alone(TEXT[:150]))


@pytest.mark.parametrize("shared", [128, 181])
def test_the_default_numerics_share_to_the_token(loaded, shared):
    engine = Engine(loaded, exact=False, budget=100)
    prompts = [TEXT[:shared] + OTHER[20 * i : 20 * i + 40] for i in range(4)]
    numbers = [engine.submit(prompt, max_tokens=1) for prompt in prompts]
    engine.run()
    assert computed(engine) == shared + 4 * 40
    for number, prompt in zip(numbers, prompts, strict=True):
        (found,), (expected,) = engine.logits[number], loaded.alone(prompt, 1, exact=False)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.more
def test_random_arrivals_are_bit_for_bit_those_of_a_server_alone(loaded):
    draw = np.random.default_rng(5)
    engine = Engine(loaded, num_pages=60, budget=100, ahead=2)
    asked = []
    for _ in range(14):
        at, own = int(draw.choice([0, 64, 100, 128, 190])), int(draw.choice([1, 20, 64]))
        start = int(draw.integers(0, 3)) * 50
        prompt = TEXT[:at] + OTHER[start : start + own]
        asked.append((engine.submit(prompt), prompt))
        for _ in range(int(draw.integers(0, 3))):
            if engine.scheduler.has_work:
                engine.step()
    engine.run()
    for number, prompt in asked:
        assert_same(engine.logits[number], loaded.alone(prompt))
