"""Products of the CUDA backend with weights that stay in codes: weights bit for bit as they are dequantized, products
against the reference; and the engine on checkpoints in codes."""

import logging
import sys
from collections.abc import Iterable
from itertools import cycle, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.kernels.int4 import quantize_int4
from cairn.kernels.quantized import QuantizedWeight
from kernels.backends import BACKENDS, BF16, DEVICES, F32, INTERPRETED
from kernels.comparison import check_against_reference, close
from kernels.fixed_calls import code_experts_call, code_linear_call, fp8_weight
from kernels.random_batches import RandomBatch, SequenceRows
from kernels.test_cuda_rows import clamped
from kernels.test_quantized import FORMS, drawn_weight
from models.covered import GGUF_ON_GPU, PACKED_ON_GPU

CUDA = next((backend for backend in BACKENDS if backend.__name__ == "cairn.kernels.cuda"), ModuleType("none"))

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy computes for Triton's interpreter
]

DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def in_dtypes(name: str, cases: Iterable[Any], first: torch.dtype) -> Any:
    """Each case in both dtypes; where kernels are interpreted in one of them in turn."""
    cases = list(cases)
    both = [*product(cases, (F32, BF16))]
    in_turn = [*zip(cases, cycle((first, BF16 if first is F32 else F32)), strict=False)]
    return pytest.mark.parametrize((name, "dtype"), in_turn if INTERPRETED else both, ids=str)


def on_device(x: Tensor) -> Tensor:
    return x.to(DEVICES[CUDA])


def numbers_of(weight: QuantizedWeight, dtype: torch.dtype, rows: slice) -> Tensor:
    """Columns of a weight as products with rows that have a single 1 read them, [rows, out]."""
    packed = CUDA.pack_stored([weight.to(DEVICES[CUDA])])
    assert isinstance(packed, QuantizedWeight)
    single = torch.eye(weight.shape[1], dtype=dtype)[rows]
    return CUDA.linear(on_device(single), packed, None, None).cpu()


# -- weights, bit for bit ----------------------------------------------------------------------------------------------


@in_dtypes("form", FORMS, F32)
def test_weights_have_the_bits_of_dequantized_ones(form: str, dtype: torch.dtype) -> None:
    """Outputs and inputs that no tile ends with; by kernels of many rows and of few."""
    weight = drawn_weight(41, 192, dtype=dtype, **FORMS[form])
    wanted = weight.dequantize().t()
    assert torch.equal(numbers_of(weight, dtype, slice(None)), wanted)
    for rows in (slice(63, 65), slice(191, 192)):
        assert torch.equal(numbers_of(weight, dtype, rows), wanted[rows])


@DTYPES
@pytest.mark.parametrize("group", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("form", ["zeros", "K-quant", "NVFP4"])
def test_groups_of_all_sizes(form: str, group: int, dtype: torch.dtype) -> None:
    """Smaller and larger than a tile, and one a row."""
    weight = drawn_weight(9, 512, dtype=dtype, **FORMS[form] | {"group": group})
    wanted = weight.dequantize().t()
    for rows in (slice(0, 512, 37), slice(200, 512, 300)):
        assert torch.equal(numbers_of(weight, dtype, rows), wanted[rows])


@pytest.mark.parametrize("scales", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int8], ids=str)
def test_every_byte_is_the_scale_that_it_stands_for(scales: torch.dtype) -> None:
    """NaN among them."""
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.full((256, 8), 0x11, dtype=torch.uint8)
    weight = QuantizedWeight(codes, every.view(scales), F32)
    wanted = weight.dequantize()
    for rows in (1, 3):
        found = CUDA.linear(on_device(torch.eye(16)[:rows]), CUDA.pack_stored([weight.to(DEVICES[CUDA])]), None, None)
        # Where a scale is NaN so is the product with 0.
        assert torch.equal(found.cpu().nan_to_num(7), wanted.t()[:rows].nan_to_num(7))


def test_codes_of_fp8_may_be_nan() -> None:
    every = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    weight = QuantizedWeight(every, torch.ones(256, 1), F32, bits=8, numbers="e4m3")
    found = numbers_of(weight, F32, slice(5, 6))
    assert torch.equal(found.nan_to_num(7)[0], weight.dequantize()[:, 5].nan_to_num(7)) and found.isnan().sum() == 2


# -- products ----------------------------------------------------------------------------------------------------------


@in_dtypes("form", FORMS, BF16)
def test_products(form: str, dtype: torch.dtype) -> None:
    """Two forms of kernels, rows at their border, with a bias and without."""
    for rows, outputs, inputs in ((1, 33, 320), (2, 5, 64), (3, 50, 320), (17, 64, 64)):
        call = code_linear_call(form, rows, (outputs, inputs), dtype, bias=rows % 2 == 1)
        check_against_reference(CUDA, call, dtype)


def test_products_of_many_rows() -> None:
    """Several blocks of rows and columns."""
    check_against_reference(CUDA, code_linear_call("NVFP4", 150, (150, 192), BF16, bias=True), BF16)


@in_dtypes("form", FORMS, F32)
def test_with_a_prompt_codes_become_a_plain_weight(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["cairn.kernels.cuda.fp8"], "_EXPANDED_ROWS", 4)
    calls: list[Any] = []
    monkeypatch.setattr(sys.modules["cairn.kernels.cuda.fp8"], "_many_rows_kernel", calls)
    weight = drawn_weight(41, 704, dtype=dtype, **FORMS[form])
    wanted = weight.dequantize().t()
    assert torch.equal(numbers_of(weight, dtype, slice(None)), wanted)
    check_against_reference(CUDA, code_linear_call(form, 5, (33, 320), dtype, bias=True), dtype)


@in_dtypes("form", ["zeros", "K-quant, five bits", "eight bits", "NVFP4", "MXFP4"], BF16)
@pytest.mark.parametrize("gated", [True, False])
def test_experts(form: str, gated: bool, dtype: torch.dtype) -> None:
    for rows, sizes, top_k in ((1, (64, 192), 3), (12, (192, 64), 2)):
        check_against_reference(CUDA, code_experts_call(form, rows, sizes, dtype, gated=gated, top_k=top_k), dtype)


@DTYPES
def test_experts_of_gpt_oss(dtype: torch.dtype) -> None:
    """With biases and a clamp, in MXFP4; few tokens and more."""
    for rows, sizes, top_k in ((1, (64, 192), 3), (12, (192, 64), 2)):
        call = code_experts_call("MXFP4", rows, sizes, dtype, gated=True, top_k=top_k)
        check_against_reference(CUDA, clamped(call), dtype)


def test_one_stack_may_be_in_codes_alone() -> None:
    call = code_experts_call("NVFP4", 6, (64, 192), F32, gated=True)
    operands = dict(call.operands)
    operands["down"] = operands["down"].dequantize()
    check_against_reference(CUDA, type(call)(call.name, call.batch, operands), F32)


def test_parts_lie_side_by_side() -> None:
    """Of several kinds, in any order, each with inputs in an order of its own."""
    first, ordered = (drawn_weight(40, 64, seed=seed, **FORMS["activation order"]) for seed in (1, 2))
    other = drawn_weight(24, 64, **FORMS["NVFP4"])
    fp8 = fp8_weight(RandomBatch((), (SequenceRows(2, 0, 1),)), 8, 64, dtype=BF16, blocked=False, salt=1)
    plain = torch.randn(9, 64, generator=torch.manual_seed(1)).to(BF16)
    rows: list[Any] = [first, plain, other, fp8, ordered]
    bias = torch.randn(121, generator=torch.manual_seed(2)).to(BF16)
    whole = torch.cat([part if isinstance(part, Tensor) else part.dequantize() for part in rows]).double()
    for count in (0, 1, 20):
        x = torch.randn(count, 64, generator=torch.manual_seed(3)).to(BF16)
        packed = CUDA.pack_stored([part.to(DEVICES[CUDA]) for part in rows])
        found = CUDA.linear(on_device(x), packed, on_device(bias), None)
        assert found.shape == (count, 121) and found.dtype == BF16
        close(found.cpu(), x.double() @ whole.t() + bias.double())


@pytest.mark.parametrize("rows", [1, 20])
def test_logits_are_not_rounded(rows: int) -> None:
    weight = drawn_weight(300, 64, **FORMS["K-quant, five bits"])
    x = torch.randn(rows, 64, generator=torch.manual_seed(3)).to(BF16)
    found = CUDA.lm_head(on_device(x), CUDA.pack_stored([weight.to(DEVICES[CUDA])]))
    assert found.dtype == F32
    close(found.cpu(), x.double() @ weight.dequantize().double().t(), tolerance=1e-6)


@DTYPES
def test_four_bits_that_are_made_at_load(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 192, generator=torch.manual_seed(1)).to(dtype)
    made = quantize_int4(on_device(weight))
    packed = CUDA.pack_int4(made)
    assert isinstance(packed, QuantizedWeight) and packed.codes.nbytes == 20 * 192
    wide = made.dequantize(F32).cpu()
    close(packed.dequantize(F32).cpu(), wide, tolerance=1e-6)
    for rows in (1, 9):
        x = torch.randn(rows, 192, generator=torch.manual_seed(2)).to(dtype)
        found = CUDA.linear(on_device(x), packed, None, None)
        close(found.cpu(), x.double() @ packed.dequantize().cpu().double().t())


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        (drawn_weight(8, 36, 12, zero=8), "groups of 12 inputs"),
        (drawn_weight(8, 64, 8, zero=8), "groups of 8 inputs"),
        (drawn_weight(8, 64, scales=torch.float64, zero=8), "scales in float64"),
    ],
    ids=str,
)
def test_what_there_are_no_products_with_is_dequantized(
    weight: QuantizedWeight, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning that names it, once."""
    sys.modules["cairn.kernels.gpu_codes"].__dict__["warn_dequantized"].cache_clear()
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        packed = CUDA.pack_stored([weight])
        assert torch.equal(packed, weight.dequantize())
    assert [named in message for message in caplog.messages] == [True]


# -- the engine --------------------------------------------------------------------------------------------------------


def engines_agree(folder: Path, max_tokens: int, caplog: pytest.LogCaptureFixture, **settings: Any) -> Any:
    """In float32, in which the same numbers are multiplied, here tile by tile, there in the cache."""
    from kernels.test_cuda_engine import TEXT, Engine

    caplog.set_level(logging.WARNING)
    answers = {}
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device, **settings)
        answers[device] = engine.ask(TEXT[:9], max_tokens=max_tokens)
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]
    assert "dequantized" not in caplog.text


LAYERS = {"qwen3_5_moe": (2, 3), "qwen3_5": (2, 3), "lfm2": (1, 2)}
"""One of each kind: a step of all takes many seconds where kernels are interpreted."""


@pytest.mark.parametrize(("family", "name"), [*zip(PACKED_ON_GPU.families, ("mixed", "MXFP4"), strict=True)])
def test_the_engine_gives_the_tokens_of_the_cpus(
    family: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NVFP4, FP8 and int8 in one product, and stacks of experts; and sizing says what is there."""
    pytest.importorskip("tokenizers", reason="the engine needs what `make gpu-wheels` collects")
    from cairn.models.random_weights.make_model import make_model
    from kernels.test_cuda_fp8 import keep_layers
    from models.packed_checkpoints import FORMATS, write_packed

    make_model(family, tmp_path / "plain")
    write_packed(tmp_path / "plain", tmp_path / "codes", tmp_path / "same", FORMATS[name])
    keep_layers(tmp_path / "codes", LAYERS[family])
    engines_agree(tmp_path / "codes", 1, caplog)
    if INTERPRETED:  # what lies where is the same on a GPU
        check_bytes(tmp_path / "codes", None)
        check_bytes(tmp_path / "same", "int4")


def check_bytes(folder: Path, quantization: Any) -> None:
    """What is there is what sizing has counted."""
    from cairn.models.registry import open_model
    from cairn.models.weights.tensor_headers import read_headers
    from kernels.test_int8 import bytes_of
    from models.test_served_int8 import parts_of

    opened = open_model(folder, "bfloat16", quantization, keeps="gpu_codes")
    model = opened.build(exact=False, backend="cuda", device=DEVICES[CUDA])
    assert len(parts_of(model, QuantizedWeight)) > 3
    taken = bytes_of(*{part.data_ptr(): part for part in parts_of(model, Tensor)}.values())
    assert opened.weight_bytes(read_headers(folder)) == pytest.approx(taken, rel=0.01)


@pytest.mark.parametrize("family", GGUF_ON_GPU.families)
def test_the_engine_reads_gguf(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Embedding and output in codes as well."""
    pytest.importorskip("gguf", reason="the engine needs what `make gpu-wheels` collects")
    from cairn.models.random_weights.make_model import make_model
    from kernels.test_cuda_fp8 import keep_layers
    from models.gguf_files import write_gguf

    make_model(family, tmp_path / "plain")
    keep_layers(tmp_path / "plain", LAYERS[family])
    engines_agree(write_gguf(tmp_path / "plain", tmp_path / "codes.gguf", "Q5_K"), 1, caplog)
