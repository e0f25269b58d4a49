"""Counts of used tokens: kept from token to token they are what the whole history gives."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.kernels.sampling.logits_processors import TorchTokenCounts, penalize
from cairn.kernels.sampling.metadata import TokenHistory
from cairn.types import SamplingParams
from runner.staged import staged

VOCAB = 31
PARAMS = SamplingParams(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3)


def penalties(counts: TorchTokenCounts, *slots: int) -> list[list[float]]:
    logits = torch.linspace(-2, 2, VOCAB).repeat(len(slots), 1)
    staged(partial(penalize, range(len(slots)), [PARAMS] * len(slots), slots, counts))(logits)
    return logits.tolist()


def anew(prompt: list[int], answer: list[int]) -> list[float]:
    counts = TorchTokenCounts(1, VOCAB)
    staged(partial(counts.admit, [TokenHistory(0, np.array(prompt, np.int64), np.array(answer, np.int64))]))()
    return penalties(counts, 0)[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-2, VOCAB - 1)), max_size=60), st.data())
def test_appended_tokens_count_as_those_of_an_admitted_history(events, data) -> None:
    """InputBatch are admitted again and again, and those that are known get tokens, several in one call."""
    counts, known = TorchTokenCounts(3, VOCAB), {}
    for slot, token in events:
        if slot not in known or token < 0:
            prompt, answer = (data.draw(st.lists(st.integers(low, VOCAB - 1), max_size=5)) for low in (-3, 0))
            staged(
                partial(counts.admit, [TokenHistory(slot, np.array(prompt, np.int64), np.array(answer, np.int64))])
            )()
            known[slot] = prompt, answer
        else:
            slots = sorted(known)
            tokens = [(token + 7 * other) % VOCAB for other in slots]
            staged(partial(counts.append, slots))(torch.tensor(tokens))
            for other, drawn in zip(slots, tokens, strict=True):
                known[other][1].append(drawn)
    slots = sorted(known)
    if slots:
        assert penalties(counts, *slots) == [anew(*known[slot]) for slot in slots]


def test_histories_may_be_long() -> None:
    """Longer than what there is room for at first, by a prompt and by an answer."""
    counts, rng = TorchTokenCounts(2, 5000), np.random.default_rng(1)
    prompt, answer = np.arange(3000), rng.integers(0, 50, 1500)
    staged(partial(counts.admit, [TokenHistory(1, np.arange(2), answer[:3])]))()
    staged(partial(counts.admit, [TokenHistory(0, prompt, answer[:0])]))()
    for token in answer:
        staged(partial(counts.append, [0]))(torch.tensor([token]))
    rows, tokens, times = staged(partial(counts.used, [1, 0], [True, False]))()
    assert rows.tolist() == [0] * 5 + [1] * 1500
    assert tokens.tolist() == [0, 1, *answer[:3], *answer]
    assert times[5:].tolist() == np.bincount(answer)[answer].tolist()


def test_what_was_never_admitted_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="never admitted"):
        penalties(TorchTokenCounts(2, VOCAB), 1)
