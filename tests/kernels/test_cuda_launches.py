"""Every function of the kernels' contract goes through Triton's own launch path, compiled for an H100 and not run: the
variants that sizes of 1, multiples of 16 and others, and operands that lie anywhere ask for. Neither the interpreter
sees them, nor what is compiled as `cuda_configurations` has it written down."""

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backends import INTERPRETED, ON_GPU

if INTERPRETED or ON_GPU or find_spec("triton") is None:
    pytest.skip("kernels are not launched without a GPU", allow_module_level=True)

import triton
import triton.language as tl

from cairn.kernels import cuda, cuda_exact
from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.contract import Kernels
from cairn.kernels.sampling.metadata import SamplingMetadata, TokenHistory
from cairn.kernels.staging import Staging
from cairn.types import SamplingParams
from doubles.launching_driver import Launch, RefusedLaunch, launches_recorded
from kernels.file_copies import CASES, ENCODED, FileCopy, any_bytes
from kernels.fixed_calls import (
    MIXED,
    code_experts_call,
    code_linear_call,
    conv_call,
    fp8_experts_call,
    fp8_linear_call,
    fresh_sequence,
    gdn_call,
    paged_call,
    ssd_call,
)
from kernels.kernel_calls import OPERATIONS, Call
from kernels.random_batches import RandomBatch, SequenceRows

BF16, F32 = torch.bfloat16, torch.float32

every_backend = pytest.mark.parametrize(
    ("kernels", "dtype"), [(cuda, BF16), (cuda_exact, F32)], ids=["bfloat16", "exact"]
)

DECODES = tuple(SequenceRows(slot, 600 * slot, 1, snapshots=(1,)) for slot in range(8))
VERIFIES = (SequenceRows(5, 70, 4), SequenceRows(3, 2300, 2))
BATCHES = (
    RandomBatch((SequenceRows(2, 77, 1),), ()),
    RandomBatch(DECODES, ()),
    fresh_sequence(1),
    fresh_sequence(16),
    MIXED,
    RandomBatch((), (), verifies=VERIFIES[:1]),
    RandomBatch(DECODES[:1], MIXED.prefills[:1], verifies=VERIFIES),
)
"""One decode, several of which the longest is in several parts, one token of a prompt, 16, all kinds but drafts, and
drafts. Those of a single row are a variant of their own: torch gives the rows of [1, heads, dim] another stride."""

FOLD = RandomBatch((), (), verifies=VERIFIES, is_fold=True)


def launched(call: Call, kernels: Kernels) -> list[Launch]:
    """What a call launches, its operands laid out as layers do it."""
    with launches_recorded() as launches:
        call.copied().run(kernels)
    return launches


def variants_of(launches: Iterable[Launch]) -> dict[str, int]:
    """By kernel, in how many it is compiled."""
    return Counter(kernel for kernel, _ in {(launch.kernel, launch.variant) for launch in launches})


def numbers(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# -- scans, attention, pages -------------------------------------------------------------------------------------------

SCANS = {
    "conv": (conv_call, (2, 1), (4, 40)),
    "ssd": (ssd_call, (1, 1, 16, 16), (1, 3, 5, 6)),
    "gdn": (gdn_call, (1, 1, 16, 16), (1, 3, 5, 6)),
}

PREFILL_KERNELS = {
    "conv": ("_prefill_kernel", "_update_states_kernel"),
    "ssd": ("_steps_kernel", "_states_kernel", "_snapshots_kernel", "_outputs_kernel"),
    "gdn": ("_chunks_kernel", "_states_kernel", "_snapshots_kernel", "_outputs_kernel"),
}


def scan_kernels(name: str, kernels: Kernels) -> list[str]:
    """Of prefills; of verifies and folds, and those of decodes, which are the same for `cuda_exact`."""
    module = name if name == "conv" else f"{name}_decode"
    decodes = () if kernels is cuda_exact else (f"{module}._decode_kernel",)
    return [*(f"{name}.{kernel}" for kernel in PREFILL_KERNELS[name]), f"{module}._tokens_kernel", *decodes]


@every_backend
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_is_compiled_once_for_all_batches(kernels: Kernels, dtype: torch.dtype, name: str) -> None:
    """Of one head or channel, and of heads that make no multiples of 16."""
    make, *shapes = SCANS[name]
    for shape in shapes:
        batches = (*BATCHES, FOLD)
        found = [launched(make(batch, shape, dtype), kernels) for batch in batches]
        assert all(found)
        several = [
            launch for each, batch in zip(found, batches, strict=True) if batch.num_tokens > 1 for launch in each
        ]
        assert variants_of(several) == dict.fromkeys(scan_kernels(name, kernels), 1)


@every_backend
@pytest.mark.parametrize(
    ("heads", "page_size", "rule"),
    [((1, 1, 16), 1, FULL), ((6, 2, 40), 16, FULL), ((6, 2, 40), 16, AttentionRule(window=500, softcap=50.0))],
    ids=str,
)
def test_attention_is_compiled_for_few_lengths(
    kernels: Kernels, dtype: torch.dtype, heads: tuple[int, int, int], page_size: int, rule: AttentionRule
) -> None:
    """A decode once for sequences in one part, and once for those in several, whatever the batch."""
    launches = list[Launch]()
    for batch in BATCHES:
        for name in ("attention", "write_kv"):
            call = paged_call(name, batch, heads, page_size, dtype, rule=rule, sinks=rule != FULL)
            found = launched(call, kernels)
            assert found
            launches += found if batch.num_tokens > 1 else ()
    once = dict.fromkeys(("attention._prefill_kernel", "attention._combine_kernel", "write_kv._write_kv_kernel"), 1)
    assert variants_of(launches) == {**once, "attention._decode_kernel": 1 if kernels is cuda_exact else 2}


# -- rows --------------------------------------------------------------------------------------------------------------


def row_call(name: str, rows: int, width: int, dtype: torch.dtype) -> Call:
    """Of heads, groups and pairs as many as `width` has room for, at least one."""
    wide, heads = torch.promote_types(dtype, F32), max(1, width // 16)
    x, vector = numbers(rows, width, dtype=dtype), numbers(width)
    operands: dict[str, Any] = {
        "linear": {"x": x, "weight": numbers(3, width, dtype=dtype), "bias": numbers(3, dtype=dtype)},
        "lm_head": {"hidden": x, "weight": numbers(3, width, dtype=dtype)},
        "embed": {"tokens": torch.zeros(rows, dtype=torch.int64), "weight": x},
        "rms_norm": {"x": numbers(rows, heads, width, dtype=dtype), "weight": vector, "eps": 1e-5},
        "add_rms_norm": {"residual": x, "x": x, "weight": vector, "eps": 1e-5},
        "gated_rms_norm": {"x": x.to(wide), "gate": x, "weight": vector, "groups": 1, "eps": 1e-5},
        "rms_norm_then_gate": {
            "x": numbers(rows, heads, width, dtype=wide),
            "gate": numbers(rows, heads * width, dtype=dtype),
            "weight": vector,
            "eps": 1e-5,
        },
        "silu_mul": {"gate": x, "x": x},
        "gelu_mul": {"gate": x, "x": x},
        "softcap": {"x": x.to(wide), "cap": 2.0},
        "sigmoid_mul": {"x": x, "gate": x[:, :1]},
        "squared_relu": {"x": x},
        "rope": {
            "x": numbers(rows, heads, 2 * width + width % 2, dtype=dtype),
            "cos": numbers(rows, width),
            "sin": numbers(rows, width),
        },
    }[name]
    return Call(name, fresh_sequence(rows), operands)


@every_backend
@pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if name not in ("conv", "ssd", "gdn", "attention", "write_kv")]
)
def test_what_has_rows_is_launched(kernels: Kernels, dtype: torch.dtype, name: str) -> None:
    """One row of one number, and of a multiple of 16 of them; several of neither."""
    by_torch = name == "embed" or (name in ("linear", "lm_head") and kernels is cuda)
    for rows, width in ((1, 1), (1, 16), (17, 33)):
        if name.endswith("router"):
            call = router_call(name, rows, experts=width)
        elif name.endswith("experts"):
            call = experts_call(name, rows, width, dtype)
        else:
            call = row_call(name, rows, width, dtype)
        assert bool(launched(call, kernels)) != by_torch


def router_call(name: str, rows: int, experts: int) -> Call:
    operands = {"logits": numbers(rows, experts), "top_k": 1, "normalize": experts > 1}
    if name == "sigmoid_router":
        groups = 3 if experts % 3 == 0 else 1
        operands |= {"correction": numbers(experts), "num_groups": groups, "top_groups": 1, "scale": 1.0}
    return Call(name, fresh_sequence(rows), operands)


def experts_call(name: str, rows: int, width: int, dtype: torch.dtype) -> Call:
    """One expert, or three of which each row has two, whose inner width is another number's."""
    experts, top_k, inner = (1, 1, width) if width < 33 else (3, 2, 24)
    gated = name != "experts"
    operands = {
        "x": numbers(rows, width, dtype=dtype),
        "topk_ids": torch.zeros(rows, top_k, dtype=torch.int64),
        "topk_weights": numbers(rows, top_k),
        "gate_up" if gated else "up": numbers(experts, inner * (1 + gated), width, dtype=dtype),
        "down": numbers(experts, width, inner, dtype=dtype),
    }
    if name == "clamped_experts":
        operands |= {"gate_up_bias": numbers(experts, 2 * inner, dtype=dtype), "alpha": 1.7, "limit": 7.0}
        operands["down_bias"] = numbers(experts, width, dtype=dtype) if rows > 1 else None
    return Call(name, fresh_sequence(rows), operands)


@pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])
def test_weights_in_fp8_are_launched(blocked: bool) -> None:
    """A row, or more than two; of one output, and of as many as no block ends with."""
    for rows in (1, 17):
        assert launched(fp8_linear_call(rows, (1, 130), BF16, blocked=blocked, bias=False), cuda)
        assert launched(fp8_linear_call(rows, (48, 256), BF16, blocked=blocked, bias=True), cuda)
        assert launched(fp8_experts_call(rows, (33, 130), BF16, blocked=blocked, gated=True), cuda)


@pytest.mark.parametrize("form", ["activation order", "K-quant, five bits", "NVFP4, divided", "eight bits, groups"])
def test_weights_in_codes_are_launched(form: str) -> None:
    """As those in FP8, and compiled once whatever the rows of a tile."""
    for rows in (1, 17):
        assert launched(code_linear_call(form, rows, (1, 192), BF16, bias=False), cuda)
        assert launched(code_linear_call(form, rows, (48, 256), BF16, bias=True), cuda)
        if form != "activation order":
            assert launched(code_experts_call(form, rows, (64, 192), BF16, gated=True), cuda)
    several = [launched(code_linear_call(form, rows, (48, 256), BF16, bias=True), cuda) for rows in (17, 40, 64)]
    assert variants_of(launch for each in several for launch in each) == {"fp8._many_rows_kernel": 1}


# -- files, pages, tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["bfloat16", "one tensor", "words of 2 bytes"])
def test_copies_of_states_are_launched(case: str) -> None:
    """Of none, of one, and of all in their order: a variant for each direction, and one for what is in its order."""
    states, page_bytes = CASES[case]
    with launches_recorded() as launches:
        for name in ("store_states", "load_states"):
            for entries in ((), (3,), (4, 0, 2), None):
                FileCopy(states, page_bytes, entries).run(cuda, name)
    assert len(launches) == 6 and variants_of(launches) == {"checkpoint_files._files_kernel": 4}


@pytest.mark.parametrize("case", ["two heads a unit, float16", "two heads a unit, int8"])
def test_copies_of_states_that_are_encoded_take_a_second_launch(case: str) -> None:
    """Of none, of one, and of all in their order: a variant for each direction, and one for what is in its order."""
    states, page_bytes = ENCODED[case]
    with launches_recorded() as launches:
        for name in ("store_states", "load_states"):
            for entries in ((), (3,), (4, 0, 2), None):
                FileCopy(states, page_bytes, entries).run(cuda, name)
    assert len(launches) == 12
    assert variants_of(launches) == {"checkpoint_files._files_kernel": 4, "checkpoint_files._heads_kernel": 4}


@pytest.mark.parametrize("page_bytes", [512, 24])
def test_copies_of_pages_are_launched(page_bytes: int) -> None:
    """Of one page and of 17."""
    with launches_recorded() as launches:
        for count in (1, 17):
            index = torch.arange(count)
            cuda.copy_pages(any_bytes(1, 40, page_bytes), index, index + count)
    assert len(launches) == 2 and variants_of(launches) == {"checkpoint_files._pages_kernel": 1}


# -- the sampler -------------------------------------------------------------------------------------------------------

DRAWS = (
    SamplingParams(0.0),
    SamplingParams(0.8, 20, 0.95, 1),
    SamplingParams(1.0, 0, 0.9, 2),
    SamplingParams(1.5, 300, 0.9, 3),
    SamplingParams(1.0, 0, 1.0, 4, 0.02),
    SamplingParams(seed=5, frequency_penalty=1.0, repetition_penalty=1.2),
    SamplingParams(seed=6, logit_bias=((0, 3.0),)),
    SamplingParams(seed=7, allowed_token_ids=(0,)),
    SamplingParams(seed=8, bad_words=((0,),)),
)


def draw(params: Sequence[SamplingParams], vocab_size: int, mask: np.ndarray | None) -> None:
    """The steps of a runner: counts of those with penalties, then the draw."""
    staging, history = Staging(), np.zeros(3, np.int64)
    counts = cuda.token_counts(len(params), vocab_size)
    write = counts.admit([TokenHistory(0, history, history[:0])], staging)
    sampler = cuda.sampler(params, [3] * len(params), vocab_size, staging)
    staging.send(torch.device("cpu"))
    write()
    samples = [SamplingMetadata(one, 3, mask, history=history, num_prompt_tokens=3) for one in params]
    sampler.sample(numbers(len(params), vocab_size), range(len(params)), samples, counts)


@pytest.mark.parametrize("vocab_size", [1, 97])
def test_draws_are_launched(vocab_size: int) -> None:
    """Each way alone, and all of them at once, under a mask and without: few variants, whatever is asked for."""
    mask = np.full(-(-vocab_size // 32), -1, np.int32)
    with launches_recorded() as launches:
        for params in (*((one,) for one in DRAWS), DRAWS):
            for given in (None, mask):
                draw(params, vocab_size, given)
    once = (
        *("sample._weigh_kernel", "sample._best_kernel", "sample._filter_kernel"),
        *("processors._copy_kernel", "processors._edit_kernel"),
        *("processors._clear_counts_kernel", "processors._count_tokens_kernel"),
    )
    several = {"sample._summarize_kernel": 2, "sample._pick_kernel": 2, "sample._histogram_kernel": 3}
    assert variants_of(launches) == several | dict.fromkeys(once, 1)


@pytest.mark.parametrize("vocab_size", [1, 97])
def test_log_probabilities_are_launched(vocab_size: int) -> None:
    """None but the token's own, the best, and listed ones, for one row and for some of many: of one variant each."""
    with launches_recorded() as launches:
        for rows in (1, 16, 17):
            logits, tokens = numbers(rows + 1, vocab_size), torch.zeros(rows, dtype=torch.int64)
            cuda.logprobs(logits[:rows], tokens, 0)
            cuda.logprobs(logits, tokens, 1, rows=torch.arange(rows) + 1)
            cuda.logprobs(logits, tokens, 0, tokens[:, None].clone(), torch.arange(rows))
    assert len(launches) == 18 and set(variants_of(launches).values()) == {1}


# -- the double --------------------------------------------------------------------------------------------------------


@triton.jit
def _add_kernel(x, y, number, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y + place, tl.load(x + place) + number)


@triton.jit
def _wide_kernel(x, number):
    tl.store(x, number.to(tl.int64))


@triton.jit
def _product_kernel(x):
    places = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    numbers = tl.load(x + places)
    tl.store(x + places, tl.dot(numbers, numbers))


X = torch.zeros(64)


def given_back() -> Tensor:
    """A tensor whose memory is another's by now."""
    x = torch.zeros(64)
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("grid", "arguments"),
    [
        ((1, 65_536), (X, X, 2)),
        ((2**16, 2**8, 2**8), (X, X, 2)),
        ((-1,), (X, X, 2)),
        ((1.0,), (X, X, 2)),
        ((1,), (torch.zeros(64, device="meta"), X, 2)),
        ((1,), (given_back(), X, 2)),
    ],
    ids=["second axis", "beyond an int", "below 0", "not an integer", "no memory", "given back"],
)
def test_the_driver_refuses_what_cuda_would(grid: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
    with launches_recorded(), pytest.raises(RefusedLaunch):
        _add_kernel[grid](*arguments, SIZE=16)


def test_the_driver_tells_what_is_compiled_anew() -> None:
    """An integer that is 1 is a constant, to which Triton gives no methods; multiples of 16 are a variant, and so is
    what lies off them. More shared memory than there is ends the launch."""
    with launches_recorded() as launches:
        for number, x in ((2, X), (3, X), (32, X), (48, X), (1, X), (2, X[1:])):
            _add_kernel[(1,)](x, X, number, SIZE=16)
        with pytest.raises(triton.CompilationError):
            _wide_kernel[(1,)](X, 1)
    variants = [launch.variant for launch in launches]
    assert [variants.index(one) for one in variants] == [0, 0, 2, 2, 4, 5]


def test_the_driver_refuses_more_shared_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: 1000)
    with launches_recorded(), pytest.raises(triton.runtime.errors.OutOfResources):
        _product_kernel[(1,)](X, num_warps=1)
