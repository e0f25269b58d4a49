"""Which token lies at a uniform number, whichever way it is looked for: held to a full sort in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from cairn.kernels.sampling import inverse_cdf
from cairn.kernels.sampling.inverse_cdf import (
    BLOCK,
    Draws,
    _weights,
    sample_from_all,
    sample_from_best,
    sample_from_nucleus,
    take_largest,
)
from runner.staged import staged


def draws_of(uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Draws:
    n = len(uniform)
    columns = [np.full(n, value, np.float64) for value in (temperature, top_p, min_p)]
    numbers = np.array(uniform, np.float64)
    return staged(partial(Draws, columns[0], np.full(n, top_k), columns[1], columns[2], numbers))


def rows_of(logits: torch.Tensor, n: int) -> torch.Tensor:
    """n rows of the same logits, filled up to whole blocks."""
    return pad(logits.float(), (0, -len(logits) % BLOCK), value=-torch.inf).expand(n, -1).contiguous()


def ranked(logits: torch.Tensor, temperature: float, top_k: int, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """What min_p and top_k leave, the best first, and how likely each is: by a full sort."""
    values = logits.double().numpy()
    order = np.lexsort((np.arange(len(values)), -values))
    scaled = (values[order] - values.max()) / temperature
    keep = np.isfinite(scaled) & (np.exp(scaled) >= min_p)
    if top_k:
        keep &= values[order] >= values[order[min(top_k, len(order)) - 1]]
    chances = np.exp(scaled[keep])
    return order[keep], chances / chances.sum()


def middles(tokens: np.ndarray, chances: np.ndarray, most: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Some tokens that are likely enough to be told apart, and the middles of their parts of the distribution."""
    chances = chances / chances.sum()
    likely = np.flatnonzero(chances > 1e-4)
    likely = likely[:: len(likely) // most + 1]
    return tokens[likely], (chances.cumsum() - chances / 2)[likely]


KINDS = {
    "spread": lambda noise: noise * 3,
    "flat": lambda noise: noise * 0.3,
    "equals": lambda noise: (noise * 2).round(),
    "few": lambda noise: noise.where(noise > 0.7, torch.tensor(-torch.inf)).index_fill(0, torch.tensor([0]), 1.0),
    "halves": lambda noise: (noise * 3).bfloat16().float(),
}


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(sorted(KINDS)),
    size=st.sampled_from([1, 5, 64, 127, 128, 129, 300, 1000]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 20, 63, 100, 150]),
    min_p=st.sampled_from([0.0, 0.001, 0.13, 1.0]),
    cut=st.none() | st.floats(0, 1),
)
def test_every_way_gives_the_token_of_the_full_sort(seed, kind, size, temperature, top_k, min_p, cut) -> None:
    logits = KINDS[kind](torch.randn(size, generator=torch.Generator().manual_seed(seed)))
    top_k = top_k if top_k < size else 0
    tokens, chances = ranked(logits, temperature, top_k, min_p)
    kept, top_p = len(tokens), 1.0
    if cut is not None:
        # between two sums of the sorted distribution, not on one of them
        last = int(cut * (len(tokens) - 1))
        assume(chances[last] > 1e-4)
        kept, top_p = last + 1, min(float(chances[:last].sum() + chances[last] / 2), 1 - 1e-9)
    filters = {"temperature": temperature, "top_k": top_k, "min_p": min_p, "top_p": top_p}

    expected, uniform = middles(tokens[:kept], chances[:kept])
    rows = rows_of(logits, len(uniform))
    for count in (64, 128):
        if top_k or min_p:
            if top_k < count:
                found = sample_from_best(rows, draws_of(uniform, **filters), count)
                assert found.tolist() == [-1 if len(tokens) >= count else token for token in expected]
        elif top_p < 1:
            found = sample_from_nucleus(rows, draws_of(uniform, **filters), count)
            cut_off = len(tokens) >= count and logits[tokens[kept - 1]] <= logits[tokens[count - 1]]
            assert found.tolist() == [-1 if cut_off else token for token in expected]
    order = tokens[:kept].argsort()
    expected, uniform = middles(tokens[:kept][order], chances[:kept][order])
    found = sample_from_all(rows_of(logits, len(uniform)), draws_of(uniform, **filters))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("kept", [1, 2, 127, 128, 129, 500, 1023, 1024])
def test_of_equal_tokens_as_many_as_hold_the_share_the_lowest_first(kept: int) -> None:
    """1,024 tokens of the same chance, so that every sum is exact."""
    rows, uniform = rows_of(torch.zeros(1024), 2), [0.0, 1 - 2.0**-53]
    assert sample_from_all(rows, draws_of(uniform, top_p=kept / 1024)).tolist() == [0, kept - 1]
    if kept < 1024:
        assert sample_from_all(rows, draws_of(uniform, top_p=kept / 1024 + 2.0**-30)).tolist() == [0, kept]
    # which of them are the lowest is not known from 128 of them
    assert sample_from_nucleus(rows, draws_of(uniform, top_p=kept / 1024), 128).tolist() == [-1, -1]
    few = rows_of(torch.zeros(64), 2)
    assert sample_from_nucleus(few, draws_of(uniform, top_p=0.5), 128).tolist() == [0, 31]


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_the_ends_of_the_distribution_are_its_first_and_last_token(size: int) -> None:
    """Neither what fills up the last block nor a token that may not come is ever drawn."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
    logits[2:5] = -torch.inf
    logits[size - 3 : size - 1] = -torch.inf
    logits[0] = logits[-1] = 1.0
    rows, uniform = rows_of(logits, 2), [0.0, 1 - 2.0**-53]
    assert sample_from_all(rows, draws_of(uniform)).tolist() == [0, size - 1]
    assert sample_from_all(rows, draws_of(uniform, min_p=1e-9)).tolist() == [0, size - 1]


def test_the_last_place_is_a_token_s_where_the_chances_add_up_to_more_than_one() -> None:
    """A third is rounded up in float32."""
    rows, uniform = rows_of(torch.tensor([0.0, 0.0, -torch.inf, 0.0, -torch.inf]), 1), [1 - 2.0**-53]
    assert sample_from_all(rows, draws_of(uniform)).tolist() == [3]
    assert sample_from_all(rows, draws_of(uniform, top_p=0.9)).tolist() == [3]
    assert sample_from_nucleus(rows, draws_of(uniform, top_p=0.9), 64).tolist() == [3]


def test_weights_are_whole_and_their_sum_is_exact() -> None:
    """Then it is the same in whatever order they are added, so no batch and no device makes another."""
    noise = torch.randn(100_000, generator=torch.Generator().manual_seed(8)) * 3
    weights = _weights(rows_of(noise, 2), draws_of([0.5, 0.5], 0.7)).double()
    assert torch.equal(weights, weights.floor()) and abs(weights.sum(-1) / 2.0**50 - 1).max() < 1e-4
    total = sum(int(weight) for weight in weights[0].tolist())
    assert total < 2**53 and total == weights[0].sum().item() == weights[0].flip(0).cumsum(0)[-1].item()


def test_the_lowest_of_equal_largest_in_any_block() -> None:
    logits = torch.full((4, 3 * BLOCK), -1.0)
    for row, tokens in enumerate([(0, 5), (127, 128), (130, 300), (383,)]):
        logits[row, list(tokens)] = 2.0
    assert take_largest(logits, draws_of([0.0] * 4)).tolist() == [0, 127, 130, 383]


@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), -float("inf")])
def test_numpy_and_torch_take_the_same_largest(special: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal logits, and what is no number: whatever the number of threads."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randint(-3, 3, (40, 4 * BLOCK), generator=generator).float()
    if special is not None:
        logits[torch.rand(logits.shape, generator=generator) < 0.01] = special
        logits[0] = special
    taken = []
    for threads in (0, torch.get_num_threads()):
        monkeypatch.setattr(inverse_cdf, "_NUMPY_THREADS", threads)
        taken.append(take_largest(logits, draws_of([0.0] * 40)).tolist())
    assert taken[0] == taken[1]


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-30, 1e-6])
def test_next_to_no_temperature_takes_the_largest(temperature: float) -> None:
    rows = rows_of(torch.tensor([0.0, -torch.inf, 3.0, 2.999, -1e30]), 3)
    for more in ({}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.9}):
        draws = draws_of([0.0, 0.5, 0.999], temperature=temperature, **more)
        assert sample_from_all(rows, draws).tolist() == [2, 2, 2]
    assert sample_from_best(rows, draws_of([0.0, 0.5, 0.999], temperature, top_k=3), 64).tolist() == [2, 2, 2]
    assert sample_from_nucleus(rows, draws_of([0.0, 0.5, 0.999], temperature, top_p=0.9), 64).tolist() == [2, 2, 2]


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_any_temperature_leaves_out_what_may_not_come(temperature: float) -> None:
    rows = rows_of(torch.tensor([0.0, -torch.inf, 3.0, 2.999, -1e3]), 4)
    draws = draws_of([0.1, 0.3, 0.6, 0.9], temperature)
    assert sample_from_all(rows, draws).tolist() == [0, 2, 3, 4]
    ranks = sample_from_best(rows, draws_of([0.1, 0.3, 0.6, 0.9], temperature, min_p=0.5), 64)
    assert ranks.tolist() == [2, 3, 0, 4]
