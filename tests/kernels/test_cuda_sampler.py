"""The CUDA backend's sampler draws the tokens of the one in torch, in few launches and without waiting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.kernels.sampling import sampler as torch_sampler
from cairn.kernels.sampling.logits_processors import TorchTokenCounts
from cairn.kernels.sampling.logprobs import compute_logprobs
from cairn.kernels.sampling.metadata import SamplingMetadata, TokenHistory
from cairn.kernels.sampling.sampler import SampleFrom, TorchSampler, sample_from
from cairn.kernels.staging import Staging
from cairn.types import SamplingParams
from doubles.counted_device import counted_device, on_numbers
from kernels.backends import BACKENDS, DEVICES, INTERPRETED, ON_GPU, name_of

CUDA: Any = next((backend for backend in BACKENDS if name_of(backend) == "cuda"), ModuleType("none"))

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]
if INTERPRETED or ON_GPU:
    from cairn.errors import ConfigError
    from cairn.kernels.cuda import device, processors, sampling
    from cairn.kernels.cuda import sample as sample_kernels

    logprobs = import_module("cairn.kernels.cuda.logprobs")  # the package has a function of that name

CPU = torch.device("cpu")
SMALL_NUCLEUS = 1000
"""In the place of the vocabulary from which on top_p alone looks at the best tokens first."""


@dataclass(frozen=True)
class Step:
    """Logits and what is asked of each row."""

    logits: Tensor
    samples: Sequence[SamplingMetadata]

    def tokens(self, kernels: Any, times: int = 1) -> list[list[int]]:
        """As a backend draws them, that many times one after the other."""
        device = DEVICES.get(kernels, CPU)
        num_rows, vocab_size = self.logits.shape
        counts, staging = kernels.token_counts(num_rows, vocab_size, device), Staging()
        histories = [
            TokenHistory(row, *np.split(sample.history, [sample.num_prompt_tokens]))
            for row, sample in enumerate(self.samples)
            if sample.history is not None and sample.params.has_penalties
        ]
        write = counts.admit(histories, staging) if histories else lambda: None
        params, positions = [one.params for one in self.samples], [one.position for one in self.samples]
        sampler = kernels.sampler(params, positions, vocab_size, staging)
        staging.send(device)
        write()
        logits = self.logits.to(device)
        drawn = [sampler.sample(logits, range(num_rows), self.samples, counts).tolist() for _ in range(times)]
        assert torch.equal(logits.cpu().nan_to_num(), self.logits.nan_to_num()), "the logits have been changed"
        return drawn


class Torch:
    """The truth."""

    token_counts, sampler = TorchTokenCounts, TorchSampler


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> Tensor:
    """Peaked and flat ones, and every third row with many equals."""
    scales = rng.choice([0.3, 1.0, 3.0, 8.0], (rows, 1))
    logits = torch.from_numpy((rng.standard_normal((rows, vocab_size)) * scales).astype(np.float32))
    logits[::3] = logits[::3].mul(4).round().div(4)
    return logits


KINDS = {
    SampleFrom.LARGEST: (SamplingParams(0.0),),
    SampleFrom.FEW: (SamplingParams(0.8, 20, 0.95), SamplingParams(1.3, 1), SamplingParams(1.0, 63, 1.0, min_p=0.01)),
    SampleFrom.MORE: (
        SamplingParams(0.7, 100, 0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(3.0, 0, 0.8, min_p=1e-4),
    ),
    SampleFrom.NUCLEUS: (SamplingParams(0.6, 0, 0.95), SamplingParams(1.7, 0, 0.99)),
    SampleFrom.ALL: (
        SamplingParams(1.0),
        SamplingParams(1.5, 300, 0.9),
        SamplingParams(1.0, 200),
        SamplingParams(2.0, 150, 0.99, min_p=1e-3),
    ),
}


def random_sample(rng: np.random.Generator, params: SamplingParams, row: int, vocab_size: int) -> SamplingMetadata:
    """With any mixture of logits processors, or none."""
    tokens = rng.integers(0, vocab_size, 60)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    params = replace(params, seed=int(rng.integers(-(1 << 63), (1 << 63) - 1)))
    if row % 2:
        return SamplingMetadata(params, 60 + row, None, (), tokens, 30)
    params = replace(
        params,
        frequency_penalty=pick(0.0, 0.5),
        presence_penalty=pick(0.0, -1.0),
        repetition_penalty=pick(1.0, 1.2, 0.7),
        logit_bias=pick((), ((int(tokens[0]), 3.0), (int(tokens[0]) // 2, -100.0))),
        allowed_token_ids=pick(None, None, tuple(tokens[1:40].tolist())),
        bad_words=pick((), ((int(tokens[2]),), tuple(tokens[58:60].tolist()))),
    )
    mask = pick(None, rng.integers(-(1 << 31), 1 << 31, -(-vocab_size // 32)).astype(np.int32))
    return SamplingMetadata(params, 60 + row, mask, pick((), tuple(tokens[3:5].tolist())), tokens, 30)


def random_step(seed: int, rows: int, vocab_size: int) -> Step:
    rng = np.random.default_rng(seed)
    every = [one for kind in KINDS.values() for one in kind]
    samples = [random_sample(rng, every[row % len(every)], row, vocab_size) for row in range(rows)]
    return Step(random_logits(rng, rows, vocab_size), samples)


@pytest.fixture
def small_nucleus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sampler, "_MAX_SORTED_VOCAB", SMALL_NUCLEUS)


@pytest.mark.usefixtures("small_nucleus")
@pytest.mark.parametrize(("seed", "rows", "vocab_size"), [(1, 13, 40), (3, 26, 2200)])
def test_any_mixture_of_parameters_gives_the_tokens_of_the_sampler_in_torch(seed, rows, vocab_size) -> None:
    step = random_step(seed, rows, vocab_size)
    assert step.tokens(CUDA) == step.tokens(Torch)
    if vocab_size > SMALL_NUCLEUS:
        assert {sample_from(sample.params, vocab_size) for sample in step.samples} == {*SampleFrom}


def test_what_was_drawn_is_counted_for_the_next_draw() -> None:
    """Whatever is drawn first does not come again, or more and more easily."""
    history = np.array([3, 3, 7, 2, 2, 2, 9])
    samples = [
        SamplingMetadata(SamplingParams(0.0, frequency_penalty=0.4, repetition_penalty=1.1), 7, None, (), history, 4),
        SamplingMetadata(SamplingParams(1.0, 5, seed=3, presence_penalty=5.0), 7, None, (), history, 7),
        SamplingMetadata(SamplingParams(0.0), 7),
    ]
    step = Step(torch.linspace(-1, 1, 96).repeat(3, 1), samples)
    found = step.tokens(CUDA, times=4)
    assert found == step.tokens(Torch, times=4)
    assert len({drawn[0] for drawn in found}) == 4 and len({drawn[2] for drawn in found}) == 1


GREEDY, EVERY = SamplingParams(0.0), (SamplingParams(1.0), SamplingParams(1.0, 20, 0.9), SamplingParams(1.0, 0, 0.9))


def draw_rows(logits: Tensor, params: Sequence[SamplingParams], **fields: Any) -> list[int]:
    samples = [SamplingMetadata(replace(one, seed=row), row, **fields) for row, one in enumerate(params)]
    (tokens,) = Step(logits.expand(len(params), -1).contiguous(), samples).tokens(CUDA)
    return tokens


def test_the_only_token_that_a_mask_leaves() -> None:
    mask = np.zeros(10, np.int32)
    mask[8] = 1 << 5
    assert draw_rows(torch.randn(300), (GREEDY, *EVERY), allowed_mask=mask) == [261] * 4
    nothing_else = torch.full((300,), -torch.inf)
    nothing_else[261] = -3e38
    assert draw_rows(nothing_else, (GREEDY, *EVERY)) == [261] * 4


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0), SamplingParams(1e-9), GREEDY],
)
def test_parameters_that_leave_the_best_token_alone(params: SamplingParams) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    assert draw_rows(logits, (params,) * 2) == [int(logits.argmax())] * 2


def test_the_lowest_of_equal_largest_in_any_tile() -> None:
    logits = torch.full((3000,), -1.0)
    for tokens in ((130, 300, 2500), (1023, 1024), (2999,)):
        logits[list(tokens)] = logits.max() + 1
        assert draw_rows(logits, (GREEDY,)) == [tokens[0]]


@pytest.mark.parametrize("kept", [1, 129, 1023])
def test_of_equal_tokens_as_many_as_hold_the_share_the_lowest_first(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,300 tokens, of which 1,024 have the same chance, so that every sum is exact."""
    monkeypatch.setattr(torch_sampler, "uniform", lambda seeds, positions: np.array([0.0, 1 - 2.0**-53]))
    logits = torch.full((1300,), -torch.inf)
    likely = torch.randperm(1300, generator=torch.Generator().manual_seed(kept))[:1024].sort().values
    logits[likely] = 5.0
    ends = [int(likely[0]), int(likely[kept - 1])]
    assert draw_rows(logits, (SamplingParams(top_p=kept / 1024),) * 2) == ends
    assert draw_rows(logits, (SamplingParams(top_p=kept / 1024, top_k=300),) * 2) == ends


def test_numbers_that_are_none_are_never_drawn_and_what_is_infinite_is() -> None:
    for params in (GREEDY, *EVERY):
        logits = torch.full((70,), torch.nan)
        assert 0 <= draw_rows(logits, (params,))[0] < 70
        logits[5] = -2e38
        assert draw_rows(logits, (params,)) == [5]
        logits[[9, 11]] = torch.inf
        assert draw_rows(logits, (params,)) == [9]
        assert 0 <= draw_rows(torch.full((3,), -torch.inf), (params,))[0] < 3


def test_a_row_s_token_is_the_same_alone() -> None:
    step = random_step(7, 4, 300)
    (tokens,) = step.tokens(CUDA)
    for row in (1, 2):
        alone = Step(step.logits[row : row + 1], step.samples[row : row + 1])
        assert alone.tokens(CUDA) == [[tokens[row]]]


# -- launches, waiting, memory ----------------------------------------------------------------------------------------


class Opened:
    """A kernel for tensors of the counted device, which counts its launches."""

    def __init__(self, kernel: Any, name: str, launches: list[str]) -> None:
        self._kernel, self._name, self._launches = kernel, name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self._launches.append(self._name)
        return on_numbers(self._kernel[grid])


PLAIN_MIXES = {
    "greedy": ((GREEDY,), 2),
    "temperature": ((GREEDY, SamplingParams(0.7)), 3),
    "top_k": ((GREEDY, SamplingParams(0.7, 20)), 5),
    "everything": ((GREEDY, *EVERY, SamplingParams(1.0, 200, 0.9)), 8),
}


@pytest.mark.skipif(not INTERPRETED, reason="the device that counts has its numbers on the host")
def test_a_fixed_number_of_launches_and_nothing_that_the_host_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, copies = counted_device()
    launches: list[str] = []
    for module in (sample_kernels, processors, logprobs):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Opened(getattr(module, name), name, launches))
    monkeypatch.setitem(DEVICES, CUDA, device)

    def step(samples: Sequence[SamplingMetadata]) -> tuple[int, tuple[int, int], Tensor]:
        staging, slots = Staging(), range(len(samples))
        counts = CUDA.token_counts(len(samples), 64, device)
        write = counts.admit([TokenHistory(slot, np.arange(3), np.arange(2)) for slot in slots], staging)
        sampler = CUDA.sampler([one.params for one in samples], [9] * len(samples), 64, staging)
        staging.send(device)
        write()
        logits = torch.zeros(len(samples), 64).to(device)
        launches.clear()
        copies.take()
        tokens = sampler.sample(logits, slots, samples, counts)
        return len(launches), copies.take(), tokens

    for params, num_launches in PLAIN_MIXES.values():
        found, moved, tokens = step([SamplingMetadata(one, 9) for one in params])
        assert (found, moved) == (num_launches, (0, 0)) and tokens.shape == (len(params),)
    rules = replace(EVERY[2], repetition_penalty=1.1, logit_bias=((3, 1.0),))
    mask = np.array([-1, 3], np.int32)
    found, moved, _ = step([SamplingMetadata(rules, 9, mask, (1, 2)), SamplingMetadata(GREEDY, 9, mask)])
    assert (found, moved) == (sampling.MAX_LAUNCHES, (1, 0))
    found, moved, tokens = step([SamplingMetadata(GREEDY, 9, mask), SamplingMetadata(GREEDY, 9)])
    assert (found, moved) == (3, (1, 0))
    launches.clear()
    on_device = torch.zeros(2, 64).to(device)
    CUDA.logprobs(on_device, tokens, 5, None, tokens)
    CUDA.logprobs(on_device, tokens, 5)
    assert (len(launches), copies.take()) == (4, (1, 0))


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 32_000), (256, 151_936), (7, 262_144)])
def test_no_more_memory_is_taken_than_is_counted(num_rows: int, vocab_size: int) -> None:
    step = sampling._Step(torch.empty(num_rows, vocab_size, device="meta"), num_rows)
    tensors = [value for value in vars(step).values() if isinstance(value, Tensor)]
    taken = sum(each.nbytes for each in (*tensors, *step.state[:2])) - step._logits.nbytes
    taken += num_rows * -(-vocab_size // 32) * 4 + CUDA.token_counts(5, vocab_size, torch.device("meta")).times.nbytes
    scored = 64 * vocab_size * 4
    assert taken <= CUDA.sampling_bytes(num_rows, vocab_size, 5) <= 1.1 * (taken + scored * (num_rows < 64)) + (2 << 20)


def test_a_vocabulary_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 524287 tokens, and the model has 524288"):
        CUDA.token_counts(1, 1 << 19, torch.device("meta"))


def test_a_mask_that_does_not_fit_is_refused() -> None:
    for mask in (np.zeros(2, np.int32), np.ones(1, np.int32)):
        with pytest.raises(ValueError, match="mask"):
            draw_rows(torch.zeros(40), (GREEDY,), allowed_mask=mask)


# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "num_top", "num_listed"),
    [(40, 0, None), (40, 99, None), (2200, 7, None), (2200, 128, None), (2200, 3, 2), (2200, 3, 200)],
)
def test_log_probabilities_are_those_of_torch(vocab_size: int, num_top: int, num_listed: int | None) -> None:
    device, generator = DEVICES.get(CUDA, CPU), torch.Generator().manual_seed(num_top)
    logits = (torch.randn(4, vocab_size, generator=generator) * 3).to(device)
    logits[1, : vocab_size // 2] = -torch.inf
    rows, tokens = torch.tensor([3, 1], device=device), torch.tensor([vocab_size - 1, 30], device=device)
    tokens[1] = logits[1].argmax()
    listed = None
    if num_listed is not None:
        listed = torch.randint(vocab_size // 2, vocab_size, (2, num_listed), generator=generator).to(device)
    found = CUDA.logprobs(logits, tokens, num_top, listed, rows)
    wanted = compute_logprobs(logits, tokens, num_top, listed, rows)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-6, atol=5e-6)
    assert torch.equal(found.ranks, wanted.ranks)
    likely = wanted.values > -torch.inf  # which of those that may not come are told of is nobody's matter
    assert torch.equal(found.token_ids[likely], wanted.token_ids[likely])
    if num_top < 99:
        whole = CUDA.logprobs(logits[rows], tokens, num_top, listed)
        assert all(map(torch.equal, found, whole))


def test_masks_and_lists_go_through_the_same_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is 1, or no multiple of 16, for the first time is compiled for while requests wait."""
    numbers: dict[str, set[tuple[int, ...]]] = {"_copy_kernel": set(), "_edit_kernel": set()}

    class Recorder:
        def __init__(self, name: str) -> None:
            self._kernel, self._name = getattr(processors, name), name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*operands: Any, **more: Any) -> None:
                fixed = [name not in device.VARYING for name in self._kernel.arg_names]
                found = [each for each, known in zip(operands, fixed, strict=False) if known and isinstance(each, int)]
                numbers[self._name].add(tuple(found))
                self._kernel[grid](*operands, **more)

            return launch

    for name in numbers:
        monkeypatch.setattr(processors, name, Recorder(name))
    mask, biased = np.full(4, -1, np.int32), SamplingParams(0.0, logit_bias=((3, 1.0),))
    for sample in (SamplingMetadata(biased, 5), SamplingMetadata(biased, 5, mask), SamplingMetadata(biased, 5, mask)):
        Step(torch.zeros(1, 128), [sample]).tokens(CUDA)
    assert {name: len(found) for name, found in numbers.items()} == {"_copy_kernel": 1, "_edit_kernel": 1}
