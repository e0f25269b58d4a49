"""The draw: its filters, its distribution, and what it does not depend on."""

from collections import Counter

import pytest
import torch

from cairn.runner.sampler import draw
from cairn.types import SamplingParams


def test_temperature_0_takes_the_lowest_of_the_largest() -> None:
    logits = torch.tensor([0.0, 3.0, -1.0, 3.0, 3.0])
    assert draw(logits, SamplingParams(temperature=0.0, seed=5), 9) == 1


def test_the_same_seed_and_position_draw_the_same_token() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    draws = [draw(logits, SamplingParams(seed=seed), position) for seed in range(8) for position in range(8)]
    again = [draw(logits, SamplingParams(seed=seed), position) for seed in range(8) for position in range(8)]
    assert draws == again
    assert len(set(draws)) > 10
    # (1, 23) and (12, 3) are different places.
    assert draw(logits, SamplingParams(seed=1), 23) != draw(logits, SamplingParams(seed=12), 3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_in_proportion_to_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    count = 4000
    params = SamplingParams(temperature=temperature, seed=11)
    found = Counter(draw(logits, params, position) for position in range(count))
    for token, probability in enumerate((logits / temperature).softmax(-1).tolist()):
        deviation = (count * probability * (1 - probability)) ** 0.5
        assert abs(found[token] - count * probability) < 4 * deviation


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2), {3, 1}),
        (SamplingParams(top_k=1), {3}),
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.5), {3}),  # 0.6 alone is enough
        (SamplingParams(top_p=0.7), {3, 1}),
        (SamplingParams(top_p=1e-9), {3}),
        (SamplingParams(top_p=0.0), {3}),
        (SamplingParams(top_k=3, top_p=0.7), {3, 1}),  # of the three that are left, 0.6 / 0.93
        (SamplingParams(temperature=1e-6), {3}),
    ],
)
def test_filters(params: SamplingParams, allowed: set[int]) -> None:
    logits = torch.tensor([0.05, 0.25, 0.08, 0.6, 0.02]).log()
    found = {draw(logits, params, position) for position in range(300)}
    assert found == allowed


def test_logits_are_left_alone() -> None:
    logits = torch.randn(20)
    before = logits.clone()
    draw(logits, SamplingParams(temperature=0.3, top_k=5, top_p=0.5), 1)
    assert torch.equal(logits, before)
