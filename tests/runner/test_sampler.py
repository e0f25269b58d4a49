"""The draw: its filters, its distribution, and what it does not depend on."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.kernels.sampling import sampler
from cairn.kernels.sampling.logits_processors import LogitsProcessor, TorchTokenCounts
from cairn.kernels.sampling.logprobs import compute_logprobs
from cairn.kernels.sampling.metadata import SamplingMetadata, TokenHistory
from cairn.kernels.sampling.sampler import SampledRows, TorchSampler, logits_processors
from cairn.kernels.staging import Staging
from cairn.runner.logprobs import PromptLogprobs, SampledLogprobs
from cairn.step import Score
from cairn.types import SamplingParams
from runner.staged import staged
from tiers import more


def draw(logits: torch.Tensor, params: SamplingParams, position: int = 0, **fields) -> int:
    (token,) = draw_all(logits[None], [SamplingMetadata(params, position, **fields)])
    return token


def draw_all(logits: torch.Tensor, samples: list[SamplingMetadata]) -> list[int]:
    """A token for each row, in slots of their own."""
    params, positions = [sample.params for sample in samples], [sample.position for sample in samples]
    made = staged(lambda staging: TorchSampler(params, positions, logits.shape[1], staging))
    return made.sample(logits, range(len(samples)), samples, counts_of(samples, logits.shape[1])).tolist()


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """A token for each of the first `count` positions, in one batch: each is the one that it would be alone."""
    return draw_all(logits.expand(count, -1), [SamplingMetadata(params, position) for position in range(count)])


def counts_of(samples: list[SamplingMetadata], vocab_size: int) -> TorchTokenCounts:
    counts = TorchTokenCounts(len(samples), vocab_size)
    for slot, sample in enumerate(samples):
        if sample.history is not None:
            staged(partial(counts.admit, [TokenHistory(slot, *np.split(sample.history, [sample.num_prompt_tokens]))]))()
    return counts


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


@pytest.mark.parametrize("temperature", [0.5, more(1.0), more(2.0)])
def test_tokens_are_drawn_in_proportion_to_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    count = 4000
    params = SamplingParams(temperature=temperature, seed=11)
    found = Counter(draws(logits, params, count))
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
    found = set(draws(logits, params, 300))
    assert found == allowed


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_p=0.25), {0}),
        (SamplingParams(top_p=0.5), {0, 1}),
        (SamplingParams(top_p=0.501), {0, 1, 2}),
        (SamplingParams(top_k=2), {0, 1, 2, 3}),
        (SamplingParams(min_p=1.0), {0, 1, 2, 3}),
    ],
)
def test_filters_where_their_bound_is_met_exactly(params: SamplingParams, allowed: set[int]) -> None:
    """Four tokens of a quarter each: as many as hold the share, no more; what equals the last one stays."""
    logits = torch.zeros(5)
    logits[4] = -torch.inf
    assert set(draws(logits, params, 200)) == allowed


FILTERS = {
    "none": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=1.2, top_k=20),
    "top_k and top_p": SamplingParams(temperature=0.8, top_k=100, top_p=0.9),
    "more than are looked at": SamplingParams(temperature=2.0, top_k=200, top_p=0.95),
    "min_p": SamplingParams(min_p=0.05),
    "small min_p": SamplingParams(min_p=1e-6, top_p=0.99),
    "top_p": SamplingParams(top_p=0.6),
    "large top_p": SamplingParams(temperature=2.0, top_p=0.98),
}


@pytest.mark.parametrize("filters", FILTERS)
def test_over_many_positions_tokens_come_as_often_as_they_should(filters: str) -> None:
    """Chi-square against the softmax of what a sort leaves; tokens of fewer than 8 expected draws are one bin."""
    params, count = FILTERS[filters], 10_000
    logits = torch.randn(400, generator=torch.Generator().manual_seed(4)) * 1.5
    drawn = draws(logits, params, count)
    ranked, order = (logits.double() / params.temperature).sort(descending=True)
    keep = (ranked - ranked[0]).exp() >= params.min_p
    keep[params.top_k or 400 :] = False
    chances = ranked.masked_fill(~keep, -torch.inf).softmax(-1)
    keep &= chances.cumsum(-1) - chances < params.top_p
    chances = torch.zeros(400, dtype=torch.float64).index_copy_(0, order, chances * keep / (chances * keep).sum())
    found = torch.tensor(drawn).bincount(minlength=400)
    assert found[chances == 0].sum() == 0
    rare = count * chances < 8
    pairs = [*zip(found[~rare].tolist(), chances[~rare].tolist(), strict=True)]
    pairs += [(found[rare].sum().item(), chances[rare].sum().item())] if count * chances[rare].sum() >= 8 else []
    deviation = sum((times - count * chance) ** 2 / (count * chance) for times, chance in pairs)
    assert deviation < len(pairs) - 1 + 5 * (2 * len(pairs)) ** 0.5


def any_sample(rng: np.random.Generator, row: int, vocab_size: int) -> SamplingMetadata:
    """Anything that may be asked for, several of them together."""
    tokens = rng.integers(0, vocab_size, 60)

    def pick(*values):
        return values[rng.integers(len(values))]

    params = SamplingParams(
        temperature=pick(0.0, 0.3, 1.0, 1.0, 1.7),
        top_k=pick(0, 0, 1, 20, 63, 64, 127, 128, 300, 10**30),
        top_p=pick(1.0, 1.0, 0.3, 0.9, 0.99),
        seed=int(rng.integers(-(1 << 63), (1 << 63) - 1)),
        min_p=pick(0.0, 0.0, 0.1, 1e-4),
        frequency_penalty=pick(0.0, 0.0, 0.5),
        presence_penalty=pick(0.0, 0.0, -1.0),
        repetition_penalty=pick(1.0, 1.0, 1.2),
        logit_bias=pick((), (), ((int(tokens[0]), 3.0),)),
        allowed_token_ids=pick(None, None, None, tuple(sorted(set(tokens[1:40].tolist())))),
        bad_words=pick((), (), ((int(tokens[2]),), tuple(tokens[58:60].tolist()))),
    )
    allowed = pick(None, None, rng.integers(-(1 << 31), 1 << 31, -(-vocab_size // 32)).astype(np.int32))
    return SamplingMetadata(params, 60 + row, allowed, pick((), tuple(tokens[3:5].tolist())), tokens, 30)


@pytest.mark.parametrize("threads", [1, more(2)])
@pytest.mark.parametrize(("vocab_size", "rounded"), [(40, False), (1000, True), more(1000, False), more(5003, False)])
def test_a_row_s_token_is_the_same_alone_and_in_any_batch(vocab_size: int, rounded: bool, threads: int) -> None:
    rng, before = np.random.default_rng(vocab_size), torch.get_num_threads()
    logits = torch.from_numpy(rng.standard_normal((250, vocab_size)).astype(np.float32) * 3)
    logits = logits.bfloat16().float() if rounded else logits
    samples = [any_sample(rng, row, vocab_size) for row in range(250)]
    try:
        alone = [draw(own, one.params, one.position, **rest(one)) for own, one in zip(logits, samples, strict=True)]
        torch.set_num_threads(threads)
        for size in (2, 7, 100, 250):
            rows = rng.permutation(250)[:size]
            assert draw_all(logits[rows], [samples[row] for row in rows]) == [alone[row] for row in rows]
    finally:
        torch.set_num_threads(before)


def rest(sample: SamplingMetadata) -> dict:
    names = ("allowed_mask", "banned_tokens", "history", "num_prompt_tokens")
    return {name: getattr(sample, name) for name in names}


def test_many_rows_of_a_large_vocabulary_are_drawn_some_at_a_time() -> None:
    """More logits than are worked on together, in all ways at once."""
    logits = torch.randn(40, 151_936, generator=torch.Generator().manual_seed(1)) * 4
    kinds = [*FILTERS.values(), SamplingParams(temperature=0), SamplingParams(frequency_penalty=1.0)]
    told = {"history": np.arange(50), "num_prompt_tokens": 20}
    samples = [SamplingMetadata(kinds[row % len(kinds)], 100 + row, **told) for row in range(40)]
    drawn = draw_all(logits, samples)
    assert drawn[:12] == [draw(logits[row], samples[row].params, 100 + row, **told) for row in range(12)]
    greedy = [row for row, sample in enumerate(samples) if sample.params.temperature == 0]
    assert [drawn[row] for row in greedy] == logits[greedy].argmax(-1).tolist()


def test_rows_without_temperature_or_rules_cost_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args) -> None:
        raise AssertionError("nobody asked for it")

    for name in ("uniform", "penalize", "sample_from_all"):
        monkeypatch.setattr(sampler, name, refuse)
    logits = torch.randn(5, 256)
    for most in (5 * 256, 2 * 256):  # all at once, and some at a time
        monkeypatch.setattr(sampler, "_MAX_GROUP_LOGITS", most)
        assert draw_all(logits, [SamplingMetadata(SamplingParams(temperature=0), 3)] * 5) == logits.argmax(-1).tolist()


def test_of_the_same_greedy_rows_each_step_has_the_same_groups_and_stages_nothing() -> None:
    rows, staging = SampledRows([SamplingParams(temperature=0)] * 3, 256), Staging()
    first, second = (TorchSampler(rows, [position] * 3, 256, staging) for position in (3, 4))
    assert first._groups is second._groups is rows.unstaged and not staging._staged
    drawn = SampledRows([SamplingParams(temperature=0), SamplingParams(temperature=1.0)], 256)
    assert drawn.unstaged is None and TorchSampler(drawn, [3, 3], 256, staging)._groups and staging._staged


@pytest.mark.parametrize("filters", FILTERS)
def test_logits_that_are_no_numbers_give_some_token(filters: str) -> None:
    for bad in (torch.nan, torch.inf):
        logits = torch.randn(70)
        logits[3] = bad
        assert 0 <= draw(logits, FILTERS[filters]) < 70
        assert 0 <= draw(torch.full((70,), bad), FILTERS[filters]) < 70
    assert 0 <= draw(torch.full((3,), -torch.inf), FILTERS[filters]) < 3


def test_logits_are_left_alone() -> None:
    logits = torch.randn(20)
    before = logits.clone()
    draw(logits, SamplingParams(temperature=0.3, top_k=5, top_p=0.5), 1)
    assert torch.equal(logits, before)


# -- transforms --------------------------------------------------------------------------------------------------------


def changed(logits: torch.Tensor, params: SamplingParams = SamplingParams(), **fields) -> torch.Tensor:  # noqa: B008
    sample, logits = SamplingMetadata(params, len(fields.get("history", ())), **fields), logits[None].clone()
    for rule in rules_for(sample, logits.shape[1]):
        rule(logits)
    return logits[0]


def rules_for(sample: SamplingMetadata, vocab_size: int = 70) -> list[LogitsProcessor]:
    counts = counts_of([sample], vocab_size)
    return staged(lambda staging: logits_processors([sample], [0], vocab_size, counts, staging))


def mask_of(tokens, vocab_size: int) -> np.ndarray:
    """Bit by bit, as the layout is written down."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return mask.view(np.int32)


def test_without_parameters_nothing_is_done() -> None:
    assert not rules_for(SamplingMetadata(SamplingParams(), 5, history=np.arange(5)))
    assert not rules_for(SamplingMetadata(SamplingParams(0.5, 3, 0.5, 7, 0.1), 5, history=np.arange(5)))


@pytest.mark.parametrize("vocab_size", [5, 32, 33, 64, 97])
def test_only_allowed_tokens_come(vocab_size: int) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3))
    allowed = {1, vocab_size - 1, vocab_size // 2}
    found = {draw(logits, SamplingParams(seed=seed), allowed_mask=mask_of(allowed, vocab_size)) for seed in range(200)}
    assert found == allowed


def test_bit_31_is_a_token_like_any_other() -> None:
    assert draw(torch.zeros(40), SamplingParams(temperature=0), allowed_mask=mask_of([31], 40)) == 31


@pytest.mark.parametrize("mask", [np.zeros(2, np.int32), np.zeros(3, np.int32), np.ones(1, np.int32)])
def test_a_mask_that_allows_nothing_or_does_not_fit_is_refused(mask: np.ndarray) -> None:
    with pytest.raises(ValueError, match="mask"):
        draw(torch.zeros(40), SamplingParams(temperature=0), allowed_mask=mask)


def test_banned_tokens_do_not_come_unless_nothing_else_may() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    greedy = SamplingParams(temperature=0)
    assert draw(logits, greedy, banned_tokens=(0,)) == 1
    assert draw(logits, greedy, banned_tokens=(0, 1)) == 2
    assert draw(logits, greedy, banned_tokens=(0,), allowed_mask=mask_of([0], 3)) == 0


def test_only_listed_tokens_come_unless_none_of_them_may() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    params = SamplingParams(allowed_token_ids=(1, 3))
    assert changed(logits, params).tolist() == [-torch.inf, 2.0, -torch.inf, 0.0]
    assert {draw(logits, SamplingParams(seed=seed, allowed_token_ids=(1, 3))) for seed in range(100)} == {1, 3}
    greedy = SamplingParams(temperature=0, allowed_token_ids=(1, 3))
    assert draw(logits, greedy, banned_tokens=(1,)) == 3 and draw(logits, greedy, banned_tokens=(1, 3)) == 1
    # the form goes first
    assert (
        draw(logits, greedy, allowed_mask=mask_of([0, 3], 4)) == 3
        and draw(logits, greedy, allowed_mask=mask_of([2], 4)) == 2
    )
    assert draw(logits, SamplingParams(temperature=0, allowed_token_ids=(3,), bad_words=((3,),))) == 3


@pytest.mark.parametrize(
    ("words", "answer", "banned"),
    [
        (((5,),), [], {5}),
        (((5,),), [5, 5], {5}),
        (((4, 5),), [], set()),
        (((4, 5),), [4], {5}),
        (((4, 5),), [4, 6], set()),
        (((4, 5), (4, 6), (7,)), [1, 4], {5, 6, 7}),
        (((4, 4, 5),), [4], set()),
        (((4, 4, 5),), [4, 4], {5}),
        (((4, 4, 5), (4, 5), (1, 4, 4, 2)), [1, 4, 4], {2, 5}),
        (((1, 2, 3),), [2], set()),
        (((2, 3),), [1, 2], {3}),
    ],
)
def test_the_last_token_of_a_bad_word_may_not_follow_the_others(words, answer, banned) -> None:
    params = SamplingParams(bad_words=words)
    assert params.needs_history == any(len(word) > 1 for word in words)
    # what the prompt ends with is no part of a word
    prompt = [4, 1, 2, 4]
    seen = {"history": np.array(prompt + answer), "num_prompt_tokens": 4} if params.needs_history else {}
    left = changed(torch.zeros(9), params, **seen)
    assert set(torch.nonzero(left == -torch.inf).flatten().tolist()) == banned


def test_a_bad_word_comes_where_nothing_else_may() -> None:
    params = SamplingParams(temperature=0, bad_words=((0,), (1,)))
    assert draw(torch.tensor([3.0, 2.0, 1.0]), params) == 2
    assert draw(torch.tensor([3.0, 2.0, 1.0]), params, allowed_mask=mask_of([0, 1], 3)) == 0
    assert draw(torch.tensor([3.0, 2.0, 1.0]), params, banned_tokens=(2,)) == 2


def test_logit_bias_is_added() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    assert changed(logits, SamplingParams(logit_bias=((0, -100.0), (2, 0.5)))).tolist() == [-97.0, 2.0, 1.5]


def test_a_repetition_penalty_looks_at_prompt_and_answer_and_not_at_how_often() -> None:
    logits = torch.tensor([2.0, -2.0, 4.0, 1.0])
    history = np.array([0, 0, -7, 1, 1, 2])
    params = SamplingParams(repetition_penalty=2.0)
    assert changed(logits, params, history=history, num_prompt_tokens=4).tolist() == [1.0, -4.0, 2.0, 1.0]


@pytest.mark.parametrize("repetition", [1e-300, 1e-40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_of_next_to_nothing_lets_no_token_come_that_may_not(repetition: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=repetition)
    told = {"allowed_mask": mask_of([2], 4), "history": np.array([0, 1, 3]), "num_prompt_tokens": 2}
    assert draw(torch.tensor([1.0, -1.0, 0.5, 2.0]), params, **told) == 2
    assert changed(torch.tensor([1.0, -1.0, 0.5, 2.0]), params, **told | {"allowed_mask": None}).isfinite().all()


def test_frequency_and_presence_look_at_the_answer_alone() -> None:
    logits = torch.zeros(4)
    history = np.array([0, 0, 1, 1, 1, 2])
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    assert changed(logits, params, history=history, num_prompt_tokens=2).tolist() == [0.0, -1.75, -0.75, 0.0]
    assert changed(logits, params, history=history[:2], num_prompt_tokens=2).tolist() == [0.0] * 4


def test_a_penalty_without_what_it_looks_at_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        draw(torch.zeros(4), SamplingParams(presence_penalty=1.0), 3)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.1, 5),
    st.lists(st.integers(0, 30), max_size=20),
    st.integers(0, 20),
)
def test_transforms_are_what_a_loop_over_the_vocabulary_says(seed, frequency, presence, repetition, history, split):
    logits = torch.randn(31, generator=torch.Generator().manual_seed(seed))
    split = min(split, len(history))
    params = SamplingParams(
        frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition, logit_bias=((3, 1.5),)
    )
    found = changed(logits, params, history=np.array(history, np.int64), num_prompt_tokens=split)
    for token, value in enumerate(logits.tolist()):
        value += 1.5 * (token == 3)
        if token in history:
            value = value / repetition if value > 0 else value * repetition
        count = history[split:].count(token)
        assert found[token].item() == pytest.approx(value - frequency * count - presence * (count > 0), abs=1e-4)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(min_p=0.5), {3}),
        (SamplingParams(min_p=0.3), {3, 1}),  # 0.25 / 0.6 is above, 0.08 / 0.6 is not
        (SamplingParams(min_p=0.1), {3, 1, 2}),
        (SamplingParams(min_p=1.0), {3}),
        (SamplingParams(min_p=0.1, top_k=2), {3, 1}),
    ],
)
def test_min_p(params: SamplingParams, allowed: set[int]) -> None:
    logits = torch.tensor([0.05, 0.25, 0.08, 0.6, 0.02]).log()
    assert set(draws(logits, params, 300)) == allowed


def test_no_transform_touches_the_logits_it_is_given() -> None:
    logits = torch.randn(40)
    before = logits.clone()
    params = SamplingParams(0.7, 5, 0.9, 1, 0.01, 1.0, 1.0, 2.0, ((1, 5.0),))
    told = {
        "allowed_mask": mask_of(range(30), 40),
        "banned_tokens": (2,),
        "history": np.array([1, 2, 3]),
        "num_prompt_tokens": 1,
    }
    for one in (params, SamplingParams(temperature=0)):
        draw(logits, one, 3, **told)
    assert torch.equal(logits, before)


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_a_softmax_with_ranks() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([7, int(logits[1].argmax()), int(logits[2].argmin())])
    told = compute_logprobs(logits, tokens, 4)
    expected = logits.double().log_softmax(-1)
    for row in range(3):
        order = expected[row].argsort(descending=True).tolist()
        assert told.token_ids[row].tolist() == [int(tokens[row]), *order[:4]]
        assert told.values[row] == pytest.approx(expected[row][told.token_ids[row]].numpy(), abs=1e-5)
        assert told.ranks[row] == order.index(int(tokens[row])) + 1
    assert told.ranks[1] == 1 and told.ranks[2] == 50
    assert compute_logprobs(logits, tokens, 0).token_ids.tolist() == tokens[:, None].tolist()
    assert compute_logprobs(logits, tokens, 99).token_ids.shape == (3, 51)


def test_logprobs_of_drawn_tokens_are_each_row_s_own() -> None:
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(2))
    tokens, tops = [row % 40 for row in range(150)], [(None, 0, 3, 3, 60)[row % 5] for row in range(150)]
    parts = staged(partial(SampledLogprobs, tops)).compute(logits, torch.tensor(tokens))
    told = {row: [array[i].tolist() for array in found] for rows, found in parts for i, row in enumerate(rows)}
    assert sorted(told) == [row for row, top in enumerate(tops) if top is not None]
    for row, found in told.items():
        one = compute_logprobs(logits[row : row + 1], torch.tensor(tokens[row : row + 1]), tops[row])
        assert found == [array[0].tolist() for array in one]
    assert staged(partial(SampledLogprobs, [None, None])).compute(logits[:2], torch.tensor([1, 2])) == []


def test_rows_may_list_the_tokens_that_are_told_of() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    tokens, tops = torch.tensor([5, 6, 7, 8, 9, 10]), [2, 2, None, 0, 5, 2]
    lists = [(3, 39), (), (4,), (0, 1), (7,), (9, 2)]
    parts = staged(partial(SampledLogprobs, tops, token_ids=lists)).compute(logits, tokens)
    assert sorted(rows for rows, _ in parts) == [[0, 3, 5], [1], [4]]
    values = logits.log_softmax(-1)
    for rows, found in parts:
        for i, row in enumerate(rows):
            others = list(lists[row]) or values[row].topk(2).indices.tolist()
            assert found.token_ids[i].tolist() == [int(tokens[row]), *others]
            assert torch.equal(found.values[i], values[row][found.token_ids[i].long()])
            assert int(found.ranks[i]) == int((values[row] > values[row][tokens[row]]).sum()) + 1


def test_prompts_are_scored_a_share_at_a_time() -> None:
    weight, hidden = torch.randn(8, 20), torch.randn(150, 8)
    sizes = []

    def logits(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return part @ weight

    targets = np.arange(140) % 20
    parts = list(staged(partial(PromptLogprobs, Score(targets, 2))).compute(hidden, logits))
    assert sizes == [64, 64, 12]
    whole = compute_logprobs(hidden[:140] @ weight, torch.from_numpy(targets), 2)
    assert np.concatenate([part.token_ids for part in parts]).tolist() == whole.token_ids.tolist()
    assert np.concatenate([part.values for part in parts]) == pytest.approx(whole.values, abs=1e-4)
