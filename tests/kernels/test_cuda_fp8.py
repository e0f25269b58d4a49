"""Products of the CUDA backend with weights that stay in FP8, against the reference on what they stand for; and the
engine on checkpoints in FP8."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cairn.kernels.fp8 import Fp8Weight
from kernels.backends import BACKENDS, DEVICES, INTERPRETED
from kernels.comparison import check_against_reference, close, same_bits
from kernels.fixed_calls import fp8_experts_call, fp8_linear_call, fp8_weight
from kernels.random_batches import RandomBatch, SequenceRows
from models.covered import FP8_ON_GPU

CUDA = next((backend for backend in BACKENDS if backend.__name__ == "cairn.kernels.cuda"), ModuleType("none"))

pytestmark = [
    pytest.mark.skipif(CUDA not in BACKENDS, reason="there is nothing that runs Triton's kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy computes for Triton's interpreter
]

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
SCALES = pytest.mark.parametrize("blocked", [False, True], ids=["a scale a row", "a scale a block"])
BATCH = RandomBatch((), (SequenceRows(2, 0, 1),))


@pytest.fixture(params=["FP8", "bytes"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How kernels read weights: as newer GPUs do, or as those that know no FP8."""
    take_form(monkeypatch, has_fp8=request.param == "FP8")
    return str(request.param)


def take_form(monkeypatch: pytest.MonkeyPatch, *, has_fp8: bool) -> None:
    from cairn.kernels.cuda.device import Limits, limits

    given = limits()
    if has_fp8 and not given.has_fp8:
        pytest.skip("not on this GPU")
    found = Limits(given.multiprocessors, given.shared_memory, has_fp8)
    monkeypatch.setattr(module("fp8"), "limits", lambda: found)


def module(name: str) -> ModuleType:
    return sys.modules[f"cairn.kernels.cuda.{name}"]


def on_device(x: Tensor) -> Tensor:
    return x.to(DEVICES[CUDA])


def weight_of(*shape: int, blocked: bool = False, salt: int = 1) -> Fp8Weight:
    return fp8_weight(BATCH, *shape, dtype=BF16, blocked=blocked, salt=salt).changed(on_device)


# -- dense -----------------------------------------------------------------------------------------------------------


@DTYPES
@SCALES
@pytest.mark.parametrize(("outputs", "inputs"), [(50, 300), (33, 128), (64, 1), (5, 129)])
def test_products(outputs: int, inputs: int, blocked: bool, dtype: torch.dtype) -> None:
    """Two forms of kernels, rows at their border, extents at a block's border and off it."""
    for rows in (1, 2, 3, 17):
        call = fp8_linear_call(rows, (outputs, inputs), dtype, blocked=blocked, bias=rows % 2 == 1)
        check_against_reference(CUDA, call, dtype)


def test_products_of_many_rows() -> None:
    """Several blocks of rows and columns."""
    check_against_reference(CUDA, fp8_linear_call(150, (150, 200), BF16, blocked=True, bias=True), BF16)


@pytest.mark.parametrize("rows", [1, 5])
def test_every_number_is_what_it_stands_for(form: str, rows: int) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F]  # NaN, which no weight is
    weight = Fp8Weight(numbers[:, None].repeat(1, 16), torch.ones(len(numbers), 1), F32).changed(on_device)
    x = torch.zeros(rows, 16)
    x[:, 3] = 1.0
    for dtype in (F32, BF16):
        found = CUDA.linear(on_device(x.to(dtype)), CUDA.pack_stored([weight]), None, None)
        wanted = numbers.view(torch.float8_e4m3fn).float()
        assert torch.equal(found.cpu().float(), wanted.expand(rows, -1)), form


def test_parts_lie_side_by_side() -> None:
    """In FP8 and not, in any order, with a bias."""
    first, last = weight_of(40, 72), weight_of(24, 72, blocked=True, salt=2)
    plain = on_device(torch.randn(9, 72, generator=torch.manual_seed(1)).to(BF16))
    bias = on_device(torch.randn(73, generator=torch.manual_seed(2)).to(BF16))
    for rows in (0, 1, 20):
        x = on_device(torch.randn(rows, 72, generator=torch.manual_seed(3)).to(BF16))
        found = CUDA.linear(x, CUDA.pack_stored([first, plain, last]), bias, None)
        parts = first.dequantize(), plain, last.dequantize()
        wanted = x.double() @ torch.cat([part.double() for part in parts]).t() + bias.double()
        assert found.shape == (rows, 73) and found.dtype == BF16
        close(found, wanted)


# -- experts ---------------------------------------------------------------------------------------------------------


@DTYPES
@SCALES
@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated: bool, blocked: bool, dtype: torch.dtype) -> None:
    for rows, sizes, top_k in ((1, (24, 136), 3), (12, (136, 24), 2)):
        call = fp8_experts_call(rows, sizes, dtype, blocked=blocked, gated=gated, top_k=top_k)
        check_against_reference(CUDA, call, dtype)


def test_experts_whose_weights_are_read_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    take_form(monkeypatch, has_fp8=False)
    for rows in (1, 12):
        check_against_reference(CUDA, fp8_experts_call(rows, (72, 40), BF16, blocked=False, gated=True), BF16)


def test_one_stack_may_be_in_fp8_alone() -> None:
    call = fp8_experts_call(6, (72, 40), F32, blocked=False, gated=True)
    operands = dict(call.operands)
    operands["down"] = operands["down"].dequantize()
    check_against_reference(CUDA, type(call)(call.name, call.batch, operands), F32)


# -- products of two in FP8 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ({}, True),
        ({"rows": 255}, False),
        ({"dtype": F32}, False),
        ({"blocked": True, "inputs": 256}, False),
        ({"outputs": 40}, False),
        ({"inputs": 72}, False),
        ({"has_fp8": False}, False),
    ],
    ids=str,
)
def test_which_products_are_of_two_in_fp8(
    given: dict[str, Any], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"rows": 256, "dtype": BF16, "blocked": False, "outputs": 48, "inputs": 64, "has_fp8": True} | given
    take_form(monkeypatch, has_fp8=asked["has_fp8"])
    calls = []
    monkeypatch.setattr(module("fp8"), "_scaled_product", lambda x, *_: calls.append(1) or x.new_empty(x.shape[0], 48))
    monkeypatch.setattr(module("fp8"), "_multiply_into", lambda *_: None)
    weight = weight_of(asked["outputs"], asked["inputs"], blocked=asked["blocked"])
    x = torch.zeros(asked["rows"], asked["inputs"], dtype=asked["dtype"], device=DEVICES[CUDA])
    CUDA.linear(x, CUDA.pack_stored([weight]), None, None)
    assert bool(calls) is is_taken


def test_containers_that_allow_tf32_do_not_get_it() -> None:
    """As TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 of NVIDIA's images leaves it: routers would choose other experts."""
    torch.set_float32_matmul_precision("high")
    try:
        assert torch.backends.cuda.matmul.allow_tf32
        CUDA.warm_up(BF16)
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("biased", [False, True])
def test_torch_takes_a_product_of_two_in_fp8_on_a_gpu(biased: bool) -> None:
    """torch asks tensors without numbers what it asks a GPU's: layouts, scales and multiples of 16. Of a row that is a
    part of a wider one, and of weights that were cut out of one matrix."""
    x = torch.empty(256, 96, dtype=BF16, device="meta")[:, 16:80]
    numbers, scales = torch.empty(96, 64, dtype=torch.uint8, device="meta"), torch.empty(96, 1, device="meta")
    weight = Fp8Weight(numbers[16:64], scales[16:64], BF16)
    bias = torch.empty(48, dtype=BF16, device="meta") if biased else None
    product = module("fp8")._scaled_product(x, weight, bias)
    assert (product.shape, product.dtype) == ((256, 48), BF16)
    with pytest.raises(RuntimeError, match="scal"):
        module("fp8")._scaled_product(x, Fp8Weight(weight.numbers, scales[::2], BF16), bias)


@pytest.mark.parametrize("biased", [False, True])
def test_products_of_two_in_fp8(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch multiplies, on the CPU where there is no GPU: rows of all sizes, each rounded to 4 bits by itself."""
    take_form(monkeypatch, has_fp8=True)
    weight, rows = weight_of(48, 64), 256
    bias = on_device(torch.randn(48, generator=torch.manual_seed(2)).to(BF16)) if biased else None
    sizes = torch.logspace(-6, 4, rows)[:, None]
    x = on_device((torch.randn(rows, 64, generator=torch.manual_seed(3)) * sizes).to(BF16))
    x[7] = 0
    found = CUDA.linear(x, CUDA.pack_stored([weight]), bias, None)
    wide, added = weight.dequantize().double(), 0.0 if bias is None else bias.double()
    # As the device divides, which may be by 1/448: where the largest number is a multiple of 7 many quotients are
    # halfway between two FP8 numbers, and the last digit of a scale decides.
    scales = x.abs().amax(1, keepdim=True).float().div(448).clamp(min=1e-30)
    quantized = (x / scales).to(torch.float8_e4m3fn).double() * scales.double()
    numbers = weight.numbers.view(torch.float8_e4m3fn).double() * weight.scales.double()
    exact = quantized @ numbers.t() + added
    # What torch makes of the rounded numbers, which two roundings of a quotient may choose otherwise now and then.
    most = quantized.abs().amax(1, keepdim=True) * numbers.abs().amax(1)
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-3 * most).all()
    assert (found.double() - exact).norm() <= 4e-3 * exact.norm()
    # Against weights times activations as they are: each activation is off by a sixteenth of itself at most.
    near = x.double() @ wide.t() + added
    assert (
        (found.double() - near).abs() <= 2**-4 * 1.2 * (x.double().abs() @ wide.abs().t()) + 0.02 * near.abs()
    ).all()
    assert found[7].isfinite().all() and torch.equal(found[7], bias if bias is not None else torch.zeros_like(found[7]))
    # Rows do not see each other.
    beside = x.clone()
    beside[::2] = 3e38
    assert same_bits(CUDA.linear(beside, CUDA.pack_stored([weight]), bias, None)[1::2].cpu(), found[1::2].cpu())


# -- the engine --------------------------------------------------------------------------------------------------------


WRITERS = {"qwen3_5_moe": "write_qwen_fp8", "nemotron_h": "write_modelopt_fp8"}

LAYERS = {"qwen3_5_moe": (2, 3), "nemotron_h": (1, 2, 3, 5)}
"""One of each kind: a step of all takes many seconds where kernels are interpreted."""


@pytest.fixture(scope="module", params=FP8_ON_GPU.families)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scale a block, and a scale a tensor; both with experts."""
    pytest.importorskip("tokenizers", reason="the engine needs what `make gpu-wheels` collects")
    from cairn.models.random_weights.make_model import make_model
    from models import fp8_checkpoints

    made = tmp_path_factory.mktemp(request.param)
    make_model(request.param, made / "plain")
    write: Callable[..., None] = getattr(fp8_checkpoints, WRITERS[request.param])
    write(made / "plain", made / "fp8", made / "float32")
    keep_layers(made / "fp8", LAYERS[request.param])
    return made / "fp8"


def keep_layers(folder: Path, kept: tuple[int, ...]) -> None:
    stored = {}
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        before, layers, rest = name.partition(".layers.")
        index, _, part = rest.partition(".")
        if not layers:
            stored[name] = tensor
        elif int(index) in kept:
            stored[f"{before}{layers}{kept.index(int(index))}.{part}"] = tensor
    for file in (*files, *folder.glob("*.index.json")):
        file.unlink()
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["num_hidden_layers"] = len(kept)
    if "layer_types" in raw:
        raw["layer_types"] = [raw["layer_types"][index] for index in kept]
    elif "hybrid_override_pattern" in raw:
        raw["hybrid_override_pattern"] = "".join(raw["hybrid_override_pattern"][index] for index in kept)
    (folder / "config.json").write_text(json.dumps(raw))


def test_the_engine_gives_the_tokens_of_the_cpus(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In float32, in which the same numbers are multiplied, here widened tile by tile, there in the cache."""
    from kernels.test_cuda_engine import TEXT, Engine

    caplog.set_level(logging.WARNING)
    answers, methods = {}, {}
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device)
        # A decode of many layers takes many seconds: one of the two has it.
        answers[device] = engine.ask(TEXT[:9], max_tokens=1 if "qwen" in str(folder) else 2)
        methods[device] = engine.core.info.quantization
        engine.core.close()
    assert answers["cuda"] == answers["cpu"]
    assert methods == dict.fromkeys(("cpu", "cuda"), "fp8" if "qwen" in str(folder) else "modelopt")
    assert "dequantized" not in caplog.text


@pytest.mark.skipif(not INTERPRETED, reason="what lies where is the same on a GPU")
def test_weights_take_a_byte_a_number(folder: Path) -> None:
    """And its scales; no matrix that is stored in FP8 is left out, and sizing says the same."""
    from cairn.models.registry import open_model
    from cairn.models.weights.tensor_headers import read_headers
    from models.test_served_int8 import parts_of

    sizes = {}
    for keeps in (False, True):
        opened = open_model(folder, "bfloat16", keeps="gpu_codes" if keeps else None)
        sizes[keeps] = opened.weight_bytes(read_headers(folder))
    model = opened.build(exact=False, backend="cuda")
    kept = parts_of(model, Fp8Weight)
    numbers, scales = sum(each.numbers.numel() for each in kept), sum(each.scales.numel() for each in kept)
    assert numbers == sum(
        torch.Size(header.shape).numel() for header in read_headers(folder).values() if header.dtype == "F8_E4M3"
    )
    assert sum(each.nbytes for each in kept) == numbers + 4 * scales
    assert sizes[False] - sizes[True] == numbers - 4 * scales
