"""No program reads what another one of its launch writes, and no thread what another one of its program has written
without a barrier between: what the interpreter hides in all other tests. Kernels that do are found."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.types import SamplingParams
from kernels.backends import BACKENDS, DEVICES, INTERPRETED, name_of
from kernels.drafts import RECURRENT, Drafts, call_of
from kernels.fixed_calls import fp8_experts_call, fresh_sequence, small_call
from kernels.test_cuda_mutants import CALLS, backend_with, load, source_of
from kernels.test_cuda_sampler import Step
from kernels.test_cuda_sampler_mutants import STEPS
from kernels.test_verify_and_fold import MIXED as MIXED_WITH_VERIFIES

if not INTERPRETED:
    pytest.skip("kernels are not interpreted", allow_module_level=True)

from cairn.kernels import cuda_exact
from cairn.kernels.cuda import sampling
from kernels.races import Race, RaceDetector

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

CUDA = next(backend for backend in BACKENDS if name_of(backend) == "cuda")
BF16 = torch.bfloat16


@pytest.fixture
def detector() -> Iterator[RaceDetector]:
    with pytest.MonkeyPatch.context() as patch:
        yield RaceDetector(patch)


@pytest.mark.parametrize("name", CALLS)
def test_programs_of_a_launch_may_come_in_any_order(name: str, detector: RaceDetector) -> None:
    for call in CALLS[name]():
        call.copied().run(CUDA)
    assert detector.num_launches


@pytest.mark.parametrize("name", ["conv", "ssd", "gdn"])
def test_scans_in_bfloat16(name: str, detector: RaceDetector) -> None:
    call = small_call(name, fresh_sequence(70, snapshots=(3, 64, 66)))
    operands = {
        key: value.to(BF16) if key in ("x", "b", "c", "q", "k", "v", "dt", "beta") else value
        for key, value in call.operands.items()
    }
    replace(call, operands=operands).copied().run(CUDA)
    assert detector.num_launches > 1


@pytest.mark.parametrize("name", [*RECURRENT, "attention", "write_kv"])
def test_verifies_and_folds(name: str, detector: RaceDetector) -> None:
    call = call_of(name, MIXED_WITH_VERIFIES, torch.float32)
    call.copied().run(CUDA)
    if name in RECURRENT:
        lengths = tuple(sequence.num_tokens for sequence in MIXED_WITH_VERIFIES.verifies)
        Drafts(call, lengths).fold([tuple({1, length}) for length in lengths]).copied().run(CUDA)
    assert detector.num_launches


@pytest.mark.parametrize("rows", [1, 9])
def test_experts_that_are_not_in_fp8(rows: int, detector: RaceDetector) -> None:
    call = fp8_experts_call(rows, (40, 24), torch.float32, blocked=False, gated=True)
    plain = {key: call.operands[key].dequantize() for key in ("gate_up", "down")}
    replace(call, operands={**call.operands, **plain}).copied().run(CUDA)
    assert detector.num_launches == (2 if rows == 1 else 4)


def test_what_goes_row_by_row(detector: RaceDetector) -> None:
    x, gate = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(4))
    weight, heads = torch.ones(48), x.view(5, 3, 16)
    CUDA.add_rms_norm(gate.clone(), x, weight, 1e-6)
    CUDA.gated_rms_norm(x, gate, weight, 2, 1e-6)
    CUDA.rms_norm_then_gate(heads, gate, weight[:16], 1e-6)
    CUDA.rope(heads, gate[:, :4], gate[:, 4:8])
    CUDA.silu_mul(x, gate)
    CUDA.gelu_mul(x, gate)
    CUDA.softcap(x, 2.0)
    CUDA.softmax_router(x, 4, True)
    CUDA.sigmoid_router(x, weight, 4, 4, 2, True, 1.0)
    cuda_exact.linear(x, gate, None, None)
    assert detector.num_launches == 10


LONG_LISTS = SamplingParams(0.0, allowed_token_ids=tuple(range(200)), bad_words=tuple((token,) for token in range(150)))


def steps() -> Mapping[str, tuple[Step, int]]:
    """Weights are added up by their digits, because more tokens are left than are listed; lists of more tokens than are
    looked at together; no listed token that the mask allows."""
    logits = torch.randn(1, 1500, generator=torch.Generator().manual_seed(4)) / 4
    mask = np.full(47, -1, np.int32)
    mask[:7] = 0
    of_all = SamplingMetadata(SamplingParams(1.0, 1000, 0.9, seed=3), 10)
    return {
        **{name: make() for name, make in STEPS.items()},
        "wide top_p": (Step(logits, [of_all]), 1),
        "long lists": (Step(logits, [SamplingMetadata(LONG_LISTS, 10)]), 1),
        "nothing listed is left": (Step(logits, [SamplingMetadata(LONG_LISTS, 10, mask)]), 1),
    }


@pytest.mark.parametrize("name", [*STEPS, "wide top_p", "long lists", "nothing listed is left"])
def test_the_sampler(name: str, detector: RaceDetector) -> None:
    step, times = steps()[name]
    step.tokens(CUDA, times)
    assert detector.num_launches >= 2


def test_log_probabilities(detector: RaceDetector) -> None:
    logits = torch.randn(2, 1500, generator=torch.Generator().manual_seed(4))
    CUDA.logprobs(logits, torch.tensor([3, 1499]), 20)
    assert detector.num_launches == 2


MUTANTS: Mapping[str, tuple[str, str, str]] = {
    "a window is stored while others read it": ("conv", "tl.debug_barrier()", "pass"),
    "parts of a head overlap": ("ssd", "dim, size = part * BP +", "dim, size = part * (BP // 2) +"),
    "all parts of a sequence go to one place": ("attention", "rows = rows * tl.num_programs(0) + split", "rows = rows"),
    "states are written by every sequence": (
        "gdn",
        "live = states + tl.load(slots + sequence).to(tl.int64) * slot_stride + inside",
        "live = states + tl.load(slots + sequence).to(tl.int64) * 0 + inside",
    ),
    "rows are written twice": ("write_kv", "tl.program_id(0) * BLOCK +", "tl.program_id(0) * (BLOCK // 2) +"),
}
"""A module, a text in it, and what stands there instead."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_race_is_found(name: str, detector: RaceDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, text, replacement = MUTANTS[name]
    assert text in source_of(module)
    backend = backend_with(tmp_path, module, lambda source: source.replace(text, replacement))
    monkeypatch.setitem(DEVICES, backend, DEVICES[CUDA])
    with pytest.raises(Race):
        for call in CALLS[module]():
            call.copied().run(backend)


@pytest.mark.parametrize(
    ("text", "replacement", "name"),
    [
        ("tl.debug_barrier()", "pass", "best"),
        ('tl.atomic_add(row_histograms + LEVEL * BINS + digits, _weights(rates), mask=matches, sem="relaxed")',
         "tl.store(row_histograms + LEVEL * BINS + digits, _weights(rates), mask=matches)", "wide top_p"),
    ],
    ids=["a list is read while others write it", "weights are added without atomics"],
)  # fmt: skip
def test_a_race_of_the_sampler_is_found(
    text: str, replacement: str, name: str, detector: RaceDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text in source_of("sample")
    changed = load(tmp_path, "sample", source_of("sample").replace(text, replacement))
    monkeypatch.setattr(sampling, "sample_kernels", changed)
    step, times = steps()[name]
    with pytest.raises(Race):
        step.tokens(CUDA, times)
