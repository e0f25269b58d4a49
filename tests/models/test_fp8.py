"""FP8 checkpoints are served as the numbers they hold: bit for bit as a float32 checkpoint of the same numbers."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.check.report import CheckSettings, check
from cairn.errors import ConfigError, ModelError
from cairn.kernels import reference
from cairn.kernels.fp8 import Fp8Weight
from cairn.models.decoder_config import AskedQuantization
from cairn.models.families import FAMILIES
from cairn.models.rank_weights import RankWeights
from cairn.models.registry import open_model
from cairn.models.sharding import TensorShard
from cairn.models.weight_bytes import ByteCounter
from cairn.models.weight_specs import ExpertMatrices, ExpertStacks, ProductSpec, StoredTensor, matrix
from cairn.models.weights.loader import WeightReader, account, read_config
from cairn.models.weights.quantization import Quantization, describe_fp8
from cairn.models.weights.tensor_headers import read_headers
from doubles.thread_ranks import thread_ranks
from engine.test_exactness import TEXT, Loaded
from engine.test_ranks_exactness import LoadedRanks
from models.covered import FP8
from models.decoder_families import Tiny, tiny, write
from models.fp8_checkpoints import (
    by_blocks,
    by_row,
    by_tensor,
    write_fp8_without_blocks,
    write_modelopt_fp8,
    write_qwen_fp8,
)
from models.test_served_int8 import parts_of
from models.tiny_configs import qwen3
from runner.harness import left_of

WRITERS = {
    "qwen3_5": ("qwen3_5", write_qwen_fp8),
    "qwen3_5_moe": ("qwen3_5_moe", write_qwen_fp8),
    "nemotron_h": ("nemotron_h", write_modelopt_fp8),
    "without blocks": ("qwen3_5_moe", write_fp8_without_blocks),
}


@pytest.fixture(scope="module", params=WRITERS)
def pair(request, made_model, tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the same numbers in float32."""
    family, write_fp8 = WRITERS[request.param]
    folder = tmp_path_factory.mktemp(family)
    write_fp8(made_model(family), folder / "fp8", folder / "float32")
    return folder / "fp8", folder / "float32"


def test_every_family_is_here() -> None:
    assert {family for family, _ in WRITERS.values()} == FP8.plain_families


def test_every_tensor_is_accounted_for(pair: tuple[Path, Path]) -> None:
    report = check(pair[0])
    assert report.ok, report.accounting.problems[:3]
    assert report.stored_dtypes["F8_E4M3"] > 10
    assert report.parameters == check(pair[1]).parameters


def test_a_checkpoints_own_quantization_may_be_said(pair: tuple[Path, Path]) -> None:
    """As users of vLLM do with `-q`. What it is not is refused with what to do."""
    method: AskedQuantization = "fp8" if read_config(pair[0])["model_type"].startswith("qwen") else "modelopt"
    other: AskedQuantization = "modelopt" if method == "fp8" else "fp8"
    assert open_model(pair[0], quantization=method).served_quantization is None
    assert check(pair[0], CheckSettings(quantization=method)).settings.quantization == method
    assert open_model(pair[0], quantization="int8").served_quantization == "int8"
    with pytest.raises(
        ConfigError, match=f"--quantization {other}: the checkpoint is in {method}, .*without this flag"
    ):
        open_model(pair[0], quantization=other)
    with pytest.raises(
        ConfigError, match=f"--quantization {method}: the checkpoint is not quantized, .*int8 or int4 can be"
    ):
        open_model(pair[1], quantization=method)


def test_logits_are_those_of_the_same_numbers(pair: tuple[Path, Path]) -> None:
    found, wanted = (Loaded(folder).alone(TEXT[:100]) for folder in pair)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_every_share_is_that_of_the_same_numbers(pair: tuple[Path, Path], size: int) -> None:
    """Cuts fall inside blocks: a rank has 32 or 64 channels of many matrices."""
    ranks = [
        [open_model(folder).build(exact=True, communicator=each) for each in thread_ranks(size)] for folder in pair
    ]
    for found, wanted in zip(*ranks, strict=True):
        assert len(found.linears) == len(wanted.linears)
        assert all(torch.equal(a.weight, b.weight) for a, b in zip(found.linears, wanted.linears, strict=True))


def test_two_ranks_serve_it(pair: tuple[Path, Path]) -> None:
    loaded = [LoadedRanks(open_model(folder), 2) for folder in pair]
    found, wanted = (each.alone(TEXT[:100]) for each in loaded)
    for each in loaded:
        for engine in each.engines:
            engine.runner.close()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_it_can_be_served_in_bfloat16(pair: tuple[Path, Path]) -> None:
    found, wanted = (open_model(folder, "bfloat16").build(exact=False, backend="reference") for folder in pair)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(found.linears, wanted.linears, strict=True))


def test_other_factors_are_other_weights(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(pair[0], folder)
    before = open_model(folder).transfer_facts()
    assert before == open_model(pair[0]).transfer_facts()
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith(("weight_scale", "weight_scale_inv")))
    weights[name] = weights[name] * 2
    save_file(weights, folder / "model.safetensors")
    after = open_model(folder).transfer_facts()
    assert {key for key in before if before[key] != after[key]} == {"weights"}


# -- tensors by themselves ---------------------------------------------------------------------------------------------


BLOCKS = Quantization("fp8", (128, 128))
WITHOUT_BLOCKS = Quantization("fp8")
MODELOPT = Quantization("modelopt")


@pytest.mark.parametrize(
    ("quantization", "quantize", "shape"),
    [
        (MODELOPT, by_tensor, (1,)),
        (BLOCKS, by_blocks, (3, 2)),
        (WITHOUT_BLOCKS, by_tensor, ()),
        (WITHOUT_BLOCKS, by_tensor, (1, 1)),
        (WITHOUT_BLOCKS, by_row, (300,)),
        (WITHOUT_BLOCKS, by_row, (300, 1)),
        # transformers' block size, where config.json says none
        (WITHOUT_BLOCKS, by_blocks, (3, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_inside_blocks(
    tmp_path: Path, quantization: Quantization, quantize: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = torch.randn(300, 200, generator=torch.manual_seed(1)) * torch.linspace(0.1, 9, 200)
    stored, factors, wide = quantize(weight * torch.linspace(0.2, 3, 300)[:, None])
    scale = f"a.{quantization.scale_names[-1]}"
    save_file({"a.weight": stored, scale: factors.reshape(shape)}, tmp_path / "model.safetensors")
    runs = [((0, 300),), ((5, 40), (120, 140), (299, 300)), ((127, 129),), ((256, 300), (0, 1)), ((7, 7),)]
    shards = [
        None,
        *(TensorShard(0, run) for run in runs),
        TensorShard(1, ((0, 64),)),
        TensorShard(1, ((100, 150), (3, 9))),
    ]
    with WeightReader(tmp_path, dtype, (), quantization) as reader:
        for shard in shards:
            found = reader.load("a.weight", (300, 200), shard)
            assert found.dtype == dtype and found.is_contiguous()
            assert torch.equal(found, left_of(wide, shard).to(dtype)), shard


@pytest.mark.parametrize(
    ("quantization", "shape"),
    [
        (MODELOPT, ()),
        (BLOCKS, (3, 3)),
        (Quantization("fp8", (64, 128)), (5, 3)),
        (WITHOUT_BLOCKS, (1,)),
        (WITHOUT_BLOCKS, (300,)),
        (WITHOUT_BLOCKS, (300, 1)),
        (WITHOUT_BLOCKS, (3, 3)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_as_stored_stands_for_the_same_numbers(
    tmp_path: Path,
    quantization: Quantization,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.randn(300, 300, generator=torch.manual_seed(1)) * torch.linspace(0.1, 9, 300)
    stored = by_tensor(weight)[0]
    factors, is_blocked = torch.rand(shape, generator=torch.manual_seed(2)) + 0.1, shape[1:] == (3,)
    scale = f"a.{quantization.scale_names[0]}"
    save_file({"a.weight": stored, scale: factors, "b.weight": weight}, tmp_path / "model.safetensors")
    kept = [
        None,
        TensorShard(0, ((5, 40), (120, 140), (299, 300))),
        TensorShard(0, ((7, 7),)),
        TensorShard(1, ((128, 256),)),
        TensorShard(1, ((128, 256), (0, 128), (256, 300))),
    ]
    with WeightReader(tmp_path, dtype, (), quantization) as reader:
        described = describe_fp8(reader.headers, quantization, dtype)
        for shard in kept:
            found, told = (load("a.weight", (300, 300), shard) for load in (reader.load_fp8, described))
            assert found is not None and told is not None and found.dtype == dtype
            assert torch.equal(found.dequantize(), reader.load("a.weight", (300, 300), shard)), shard
            assert (told.shape, told.scales.shape, told.nbytes) == (found.shape, found.scales.shape, found.nbytes)
        assert not caplog.text
        for cut in (((0, 64),), ((100, 300),), ((256, 300), (0, 128))):
            for load in (reader.load_fp8, described):
                caplog.clear()
                assert (load("a.weight", (300, 300), TensorShard(1, cut)) is None) is is_blocked
                assert ("a.weight is cut inside blocks" in caplog.text) is is_blocked
        for name in ("b.weight", "c.weight"):
            assert reader.load_fp8(name, (300, 300)) is None and described(name, (300, 300)) is None
        with pytest.raises(ModelError, match=r"a.weight has shape \[300, 300\]"):
            reader.load_fp8("a.weight", (300, 299))


def test_a_model_of_weights_that_stay_in_fp8_is_the_same(pair: tuple[Path, Path], caplog: Any) -> None:
    """Joined, reordered and stacked as they are stored: the reference dequantizes them after that."""
    models = []
    for keeps in (False, True):
        opened = open_model(pair[0], "bfloat16", keeps="gpu_codes" if keeps else None)
        assert opened.served_quantization == (opened.quantization.method if keeps and opened.quantization else None)
        models.append(opened.build(exact=False, backend="reference"))
    found, wanted = (parts_of(model, torch.Tensor) for model in models)
    assert len(found) == len(wanted) > 30
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert "dequantized" not in caplog.text
    facts = [
        open_model(pair[0], "bfloat16", keeps="gpu_codes" if keeps else None).transfer_facts()
        for keeps in (False, True)
    ]
    assert facts[0] == facts[1]


def test_a_server_takes_a_byte_a_number(pair: tuple[Path, Path], bfloat16_products: None) -> None:
    plain, on_cpu = (check(folder, CheckSettings(dtype="bfloat16")) for folder in (pair[1], pair[0]))
    on_gpu = check(pair[0], CheckSettings(dtype="bfloat16", gpu_memory_bytes=1 << 30))
    assert plain.settings.quantization is None and on_gpu.settings.quantization in ("fp8", "modelopt")
    assert on_cpu.weight_bytes == on_gpu.weight_bytes
    numbers = sum(math.prod(header.shape) for header in read_headers(pair[0]).values() if header.dtype == "F8_E4M3")
    saved = plain.weight_bytes - on_gpu.weight_bytes
    assert 0.95 * numbers < saved < numbers
    in_int8 = check(pair[0], CheckSettings(dtype="bfloat16", quantization="int8", gpu_memory_bytes=1 << 30))
    assert in_int8.settings.quantization == "int8"


def test_other_blocks_are_dequantized_and_that_is_logged(
    made_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = json.loads((made_model("qwen3_5") / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert open_model(tmp_path).served_quantization is None and not caplog.text
    assert open_model(tmp_path, keeps="gpu_codes").served_quantization is None
    assert "weights are dequantized: there are no products with factors for blocks of (128, 64)" in caplog.text


@pytest.mark.parametrize("gated_heads", [0, 2])
def test_what_is_not_all_in_fp8(gated_heads: int, caplog: pytest.LogCaptureFixture) -> None:
    """Side by side as they are; dequantized where experts are stacked."""
    first = Fp8Weight(torch.arange(32, dtype=torch.uint8).view(8, 4), torch.rand(8, 1), torch.bfloat16)
    plain = torch.randn(2, 4).to(torch.bfloat16)

    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> torch.Tensor:
        return plain if shape == (2, 4) else torch.zeros(shape, dtype=torch.bfloat16)

    def load_stored(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Fp8Weight | None:
        return first if name.startswith("a") else None

    weights = RankWeights(load, reference, torch.device("cpu"), None, load_stored)
    parts = (matrix("a", (8, 4)), matrix("b", (2, 4)))
    product = ProductSpec(parts, gated_heads=gated_heads)
    linear = weights.product(product)
    whole = torch.cat([first.dequantize(), plain])
    # Two rows of a head's query, two of its gate.
    order = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7] if gated_heads else list(range(10))
    assert torch.equal(linear.weight, whole[order]) and linear.shape == (10, 4)
    assert "dequantized" not in caplog.text
    counter = ByteCounter(FAMILIES["qwen3"], torch.bfloat16, "fp8", load_stored, None)
    assert counter.count(product) == plain.nbytes + first.nbytes
    ups = ((matrix("a", (8, 4)),), (matrix("b", (8, 4)),))
    experts = ExpertMatrices(ups, (matrix("a", (8, 4)), matrix("a", (8, 4))))
    stack, _ = weights.experts(experts)
    assert counter.count(experts) == 2 * 2 * 32 + 2 * first.nbytes
    assert torch.equal(stack[0], first.dequantize()) and stack.shape == (2, 8, 4)
    assert caplog.text.count("quantized weights are dequantized") == 1


@pytest.mark.parametrize("runs", [(), ((1, 3), (5, 7))])
def test_stacked_experts_are_cut_in_their_stack(tmp_path: Path, runs: tuple[tuple[int, int], ...]) -> None:
    gate_up = torch.randn(5, 8, 16, generator=torch.manual_seed(2))
    save_file({"x.experts.gate_up_proj": gate_up}, tmp_path / "model.safetensors")
    with WeightReader(tmp_path, torch.float32) as reader:
        weights = RankWeights(reader.load, reference, torch.device("cpu"))
        stored = StoredTensor("x.experts.gate_up_proj", tuple(gate_up.shape), runs, 1)
        found, _ = weights.stacks(ExpertStacks(stored, stored))
        assert torch.equal(found, left_of(gate_up, TensorShard(1, runs) if runs else None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "quip"}, "quantization_config.quant_method 'quip' is not read; known: auto-round, awq"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size must be absent or two numbers"),
        (
            {"quant_method": "fp8", "weight_block_size": []},
            r"quantization_config.weight_block_size must be absent or two",
        ),
        ({"quant_method": "fp8", "activation_scheme": "sometimes"}, "quantization_config.activation_scheme is 'somet"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size must be an integer in 1"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fmt is 'e5m2'"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
            "quantization_config.quant_algo 'NVFP4_AWQ' is not read; known: FP8, NVFP4",
        ),
        ("fp8", "quantization_config must be an object, not str"),
    ],
)
def test_what_is_not_read_is_refused(made_model, tmp_path: Path, given: Any, message: str) -> None:
    raw = json.loads((made_model("qwen3_5") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": given}))
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path)


def test_modelopts_own_file_is_held_to_the_same(made_model, tmp_path: Path) -> None:
    shutil.copy(made_model("qwen3_5") / "config.json", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4_AWQ"}}))
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantization.quant_algo 'NVFP4_AWQ' is not read"):
        open_model(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert open_model(tmp_path).quantization == MODELOPT


@pytest.mark.parametrize(
    ("shape", "dtype", "problem"),
    [
        ((), torch.float32, None),
        ((32, 1), torch.bfloat16, None),
        ((32,), torch.float16, None),
        ((2,), torch.float32, r"weight_scale F32 \[2\] instead of F32 \[\], \[32\] or \[32, 1\]"),
        ((1, 32), torch.float32, r"weight_scale F32 \[1, 32\] instead of F32"),
        ((32, 1), torch.int8, r"weight_scale I8 \[32, 1\] instead of F32"),
        (None, torch.float32, "weight is F8_E4M3, but its weight_scale or weight_scale_inv is missing"),
    ],
)
def test_check_and_server_agree_on_factors(
    tmp_path: Path, shape: tuple[int, ...] | None, dtype: torch.dtype, problem: str | None
) -> None:
    plain = tiny(qwen3(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}))
    weights, name = dict(plain.weights), "model.layers.1.self_attn.o_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    if shape is not None:
        weights[f"{name}_scale"] = torch.ones(shape).to(dtype)
    write(Tiny(plain.raw, weights), tmp_path)
    problems = check(tmp_path).accounting.problems
    if problem is None:
        assert not problems
        open_model(tmp_path).build(exact=False, backend="reference")
    else:
        assert re.search(problem, problems[0])
        with pytest.raises(ModelError, match=problem):
            open_model(tmp_path).build(exact=False, backend="reference")


def test_factors_under_both_names_are_refused(tmp_path: Path) -> None:
    stored, factor, _ = by_tensor(torch.randn(8, 4, generator=torch.manual_seed(1)))
    both = {"a.weight": stored, "a.weight_scale": factor, "a.weight_scale_inv": factor.clone()}
    save_file(both, tmp_path / "model.safetensors")
    found = account(read_headers(tmp_path), {"a.weight": (8, 4)}, quantization=WITHOUT_BLOCKS)
    assert found.problems == ("model.safetensors: a.weight_scale_inv is not part of this architecture",)
