"""As `test_cuda_mutants`, for the sampler: fixed draws find what is changed, and pass as the source is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.kernels.sampling import sampler as torch_sampler
from cairn.kernels.sampling.logprobs import compute_logprobs
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.types import SamplingParams
from kernels.backends import BACKENDS, DEVICES, INTERPRETED, ON_GPU
from kernels.test_cuda_mutants import load, source_of
from kernels.test_cuda_sampler import CUDA, Step, Torch

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]
if INTERPRETED or ON_GPU:
    from cairn.kernels.cuda import sampling

HISTORY = np.array([3, 3, 7, 2, 2, 2, 9, 40, 41, 50])


def sample(seed: int, *parameters: float, **fields: object) -> SamplingMetadata:
    """With a history that penalties look at."""
    names = {key: fields.pop(key) for key in ("allowed_mask", "banned_tokens") if key in fields}
    params = SamplingParams(*parameters, seed=seed, **fields)  # type: ignore[arg-type]
    return SamplingMetadata(params, 10, history=HISTORY, num_prompt_tokens=5, **names)  # type: ignore[arg-type]


def step(logits: torch.Tensor, *samples: SamplingMetadata) -> Step:
    return Step(logits, samples)


def flat(rows: int, vocab_size: int = 1500) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(4)) / 2


GREEDY = [sample(0, 0.0)] * 3
EVEN = np.full(3, 0x55555555, np.int32)
SECOND = np.array([0, -1, 0], np.int32)
SMALL = torch.linspace(-2, 2, 96)

STEPS: Mapping[str, Callable[[], tuple[Step, int]]] = {
    "all": lambda: (step(flat(2), *(sample(seed, 1.0) for seed in (1, 2))), 1),
    "best": lambda: (step(flat(2), *(sample(seed, 1.3, 60, 0.9) for seed in (1, 2))), 1),
    "min_p": lambda: (step(flat(2) * 3, *(sample(seed, 1.0, 0, 1.0, min_p=0.1) for seed in (1, 2))), 1),
    "top_p": lambda: (step(flat(2), *(sample(seed, 0.5, 0, 0.5) for seed in (1, 2))), 1),
    "top_k": lambda: (step(flat(2), *(sample(seed, 2.0, 130) for seed in (1, 2))), 1),
    "ties": lambda: (step(flat(2).mul(2).round(), *(sample(seed, 1.0, 0, 0.4) for seed in (1, 2))), 1),
    "nucleus": lambda: (step(flat(2) * 5, *(sample(seed, 1.0, 0, 0.6) for seed in (1, 2))), 1),
    "wide nucleus": lambda: (step(flat(2), *(sample(seed, 1.0, 0, 0.8) for seed in (1, 2))), 1),
    "greedy": lambda: (
        step(torch.eye(3, 1500).roll(1024, 1) + torch.eye(3, 1500).roll(1400, 1), *[sample(0, 0.0)] * 3),
        1,
    ),
    "penalties": lambda: (
        step(
            torch.stack([SMALL.index_fill(0, torch.from_numpy(HISTORY), 2.0), SMALL.flip(0) + 3, -SMALL - 4]),
            sample(1, 0.0, frequency_penalty=0.6),
            sample(1, 0.0, presence_penalty=1.0, repetition_penalty=1.9),
            sample(1, 0.0, repetition_penalty=1.5),
        ),
        4,
    ),
    "lists": lambda: (
        step(
            SMALL.repeat(5, 1),
            sample(1, 0.0, allowed_mask=SECOND),
            sample(1, 0.0, allowed_token_ids=(5, 90, 4), banned_tokens=(90,)),
            sample(1, 0.0, allowed_token_ids=(5,), allowed_mask=EVEN),
            sample(1, 0.0, allowed_token_ids=(90, 5), banned_tokens=(5, 90)),
            sample(1, 0.0, logit_bias=((10, 3.0), (95, -0.5))),
        ),
        1,
    ),
}
"""Draws, and how many of them one after the other."""


@dataclass(frozen=True)
class Mutant:
    """`text` of a module replaced; the step that finds it."""

    name: str
    text: str
    replacement: str
    found_by: str
    module: str = "sample"


MUTANTS = (
    Mutant("the unit behind the drawn one", "(ends <= at)", "(ends < at - sums)", "all"),
    Mutant(
        "a tile's place is the first one's",
        "token = tl.minimum(tile * TILE + place",
        "token = tl.minimum(place",
        "all",
    ),
    Mutant("the temperature is left out", "scaled = (x - best) / temperature", "scaled = x - best", "top_k"),
    Mutant("min_p is left out", "(scaled >= tl.load(least_logs + row)) & ", "", "min_p"),
    Mutant("one token more than top_k", "ranks == k - 1", "ranks == k", "best"),
    Mutant("top_p is left out of the best", "tl.where(is_kept, weights, 0)", "weights", "best"),
    Mutant("the best tokens are the worst", "descending=True", "descending=False", "best"),
    Mutant(
        "the first blocks have the best tokens",
        "is_chosen = _choose(tl.where(blocks",
        "is_chosen = (blocks < 4) & _choose(tl.where(blocks",
        "best",
    ),
    Mutant("the k-th digit is the next one's", "(above >= k)", "(above > k + 3)", "top_k"),
    Mutant(
        "only the first 8 bits of the k-th logit",
        "for level in tl.static_range(4):",
        "for level in tl.static_range(1):",
        "top_k",
    ),
    Mutant(
        "a level of digits is left out",
        "keys = _weight_keys(rates)\n        row_histograms",
        "keys = _weight_keys(rates) | 511\n        row_histograms",
        "top_p",
    ),
    Mutant(
        "top_p's share is of the first tile",
        "(top_p, tl.sum(sums, axis=0))",
        "(top_p, tl.sum(sums, axis=0) // 2)",
        "top_p",
    ),
    Mutant(
        "all that equal the last weight are kept",
        "num_equal = unit // weight + 1",
        "num_equal = unit * 0 + 1024",
        "ties",
    ),
    Mutant(
        "the last of equal weights are kept",
        "tl.cumsum(equal.to(tl.int64), axis=0) <= num_equal",
        "tl.cumsum(equal.to(tl.int64), axis=0, reverse=True) <= num_equal",
        "ties",
    ),
    Mutant(
        "a nucleus is of the best tokens' weights",
        "if kind == NUCLEUS:\n            tiles",
        "if kind == ALL:\n            tiles",
        "nucleus",
    ),
    Mutant(
        "a nucleus is never too wide",
        "unknown = (num_best == BEST) & (end <= bottom)",
        "unknown = (num_best < 0) & (end <= bottom)",
        "wide nucleus",
    ),
    Mutant(
        "the last of equal largest",
        "tl.min(tl.where((x == best) & (columns < vocab), columns, vocab - 1)",
        "tl.max(tl.where((x == best) & (columns < vocab), columns, 0)",
        "greedy",
    ),
    Mutant("the prompt counts as drawn", "times, rate = used >> 1", "times, rate = used", "penalties"),
    Mutant(
        "what is drawn is not counted",
        "tl.store(count, tl.load(count) + 2)",
        "tl.store(count, tl.load(count))",
        "penalties",
    ),
    Mutant(
        "the neighbour's counts",
        "used = tl.load(counts + slot * vocab",
        "used = tl.load(counts + (slot * 0) * vocab",
        "penalties",
    ),
    Mutant("negative logits are divided, too", "tl.where(x > 0, tl.div_rn", "tl.where(x < 1e9, tl.div_rn", "penalties"),
    Mutant("a mask's word before", "mask_words + columns // 32", "mask_words + columns // 64", "lists", "processors"),
    Mutant("a mask's other bits", "& 1 != 0", "& 1 == 0", "lists", "processors"),
    Mutant("what is not listed may come", 'tl.where(is_listed, float("-inf"), x)', "x", "lists", "processors"),
    Mutant(
        "listed tokens come whatever the mask says",
        "if num_listed == 0:",
        "if num_listed < 0:",
        "lists",
        "processors",
    ),
    Mutant(
        "bans hold where nothing else is left",
        "if banned < num_live:",
        "if banned <= num_live:",
        "lists",
        "processors",
    ),
    Mutant("biases are left out", "x + bias", "x", "lists", "processors"),
)


def finds(name: str) -> bool:
    fixed, times = STEPS[name]()
    return fixed.tokens(CUDA, times) != fixed.tokens(Torch, times)


@pytest.fixture(autouse=True)
def small_nucleus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Where top_p alone looks at the best tokens first."""
    name = getattr(request, "param", None)
    monkeypatch.setattr(torch_sampler, "_MAX_SORTED_VOCAB", 1000 if name and "nucleus" in name else 1 << 14)


@pytest.mark.parametrize(
    ("mutant", "small_nucleus"),
    [pytest.param(each, each.found_by, id=f"{each.module}: {each.name}") for each in MUTANTS],
    indirect=["small_nucleus"],
)
def test_a_mutant_is_found(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(mutant.module)
    assert mutant.text in source, f"{mutant.module} no longer has {mutant.text!r}"
    changed = load(tmp_path, mutant.module, source.replace(mutant.text, mutant.replacement))
    monkeypatch.setattr(sampling, {"sample": "sample_kernels"}.get(mutant.module, mutant.module), changed)
    assert finds(mutant.found_by)


@pytest.mark.parametrize(
    ("text", "replacement"),
    [
        ("(x > token_logit)", "(x >= token_logit)"),
        ("sums * tl.exp(maxima - best)", "sums"),
        ("tl.load(base + token) - best - total", "tl.load(base + token) - best"),
        ("tl.load(listed + row * num_listed", "tl.load(listed"),
        ("base = logits + tl.load(rows + row) * stride", "base = logits + row * stride"),
    ],
)
def test_a_mutant_of_log_probabilities_is_found(text: str, replacement: str, tmp_path: Path) -> None:
    source = source_of("logprobs")
    assert text in source
    changed = load(tmp_path, "logprobs", source.replace(text, replacement))
    logits, rows, tokens = flat(3, 1100), torch.tensor([2, 0]), torch.tensor([1050, 7])
    listed = torch.tensor([[3, 4], [5, 1030]])
    place = DEVICES[CUDA]
    found = changed.logprobs(*(each.to(place) for each in (logits, tokens)), 0, listed.to(place), rows.to(place))
    wanted = compute_logprobs(logits, tokens, 0, listed, rows)
    assert not (
        torch.allclose(found.values.cpu(), wanted.values, atol=1e-5)
        and torch.equal(found.ranks.cpu(), wanted.ranks)
        and torch.equal(found.token_ids.cpu(), wanted.token_ids)
    )


@pytest.mark.parametrize(("name", "small_nucleus"), [(name, name) for name in STEPS], indirect=["small_nucleus"])
def test_the_source_as_it_is_passes(name: str) -> None:
    assert not finds(name)
