"""gpt-oss as it is published: experts in MXFP4, whose matrices lie the other way round than where they are plain."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cairn.check.report import CheckSettings, check
from cairn.errors import ModelError
from cairn.kernels.cpu.codes import HAS_CODES, PackedCodes
from cairn.kernels.cpu.int4 import PackedInt4
from cairn.kernels.cpu.int8 import Int8Weight
from cairn.models.families import FAMILIES
from cairn.models.registry import open_model
from cairn.models.weight_bytes import ByteCounter
from cairn.models.weight_specs import ExpertStacks
from doubles.thread_ranks import thread_ranks
from kernels.test_int4 import NEEDS_INT4
from models.covered import MXFP4_STACKS
from models.decoder_families import Tiny, TinyDriver, logits_of, prompt, published, tiny, write
from models.packed_checkpoints import mxfp4
from models.published_families import GPT_OSS, GPT_OSS_120B
from models.test_check import ITEM_BYTES, write_checkpoint
from models.test_served_int8 import parts_of
from models.tiny_configs import gpt_oss

RAW = gpt_oss(hidden_size=64, intermediate_size=64)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
STACKS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.fixture(scope="module", params=MXFP4_STACKS.families)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tiny]:
    """A checkpoint in MXFP4, and the same numbers as a plain one has them."""
    assert request.param == RAW["model_type"]
    folder, plain = tmp_path_factory.mktemp("gpt_oss"), tiny(RAW, 7)
    stored, wide = dict(plain.weights), dict(plain.weights)
    for name in [name for name in stored if name.endswith(STACKS)]:
        stored[f"{name}_blocks"], stored[f"{name}_scales"], numbers = mxfp4(stored.pop(name).transpose(1, 2))
        wide[name] = numbers.transpose(1, 2).contiguous()
    write(Tiny({**RAW, "quantization_config": MXFP4}, {}), folder)
    save_file({name: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors")
    return folder, Tiny(RAW, wide)


def answer(models: list[Any], family: Tiny, tokens: list[int]) -> Tensor:
    """Logits behind a prompt and a step more."""
    driver = TinyDriver(family, models, False)
    sequence = driver.sequence(0, len(tokens))
    driver.run(driver.row(sequence, tokens[:-1]))
    (logits,) = driver.run(driver.row(sequence, tokens[-1:], decode=True))
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_in_four_bits(pair: tuple[Path, Tiny], dtype: Any) -> None:
    """Also a rank's share of them; answers are those of the same numbers."""
    folder, plain = pair
    opened, tokens = open_model(folder, dtype, keeps="codes"), prompt(40, 1)
    report = check(folder, CheckSettings(dtype=dtype))
    assert report.ok, report.accounting.problems[:3]
    assert report.accounting.forms == {"MXFP4, 4 bits, groups of 32": 6}
    wanted = answer([plain.model(False, dtype=opened.dtype)], plain, tokens)
    for size in (1, 2):
        models = [opened.build(exact=False, communicator=each) for each in thread_ranks(size)]
        assert len(parts_of(models[0], PackedCodes)) == (6 if HAS_CODES else 0)
        assert (answer(models, plain, tokens) - wanted).abs().max() <= (1e-5 if dtype == "float32" else 0.05)


def test_transformers_gives_the_same(pair: tuple[Path, Tiny]) -> None:
    """It dequantizes the blocks into matrices with their inputs first, which `published` reads."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, plain = pair

    for name, each in load_file(folder / "model.safetensors").items():
        if name.endswith("_blocks"):
            scales = load_file(folder / "model.safetensors")[name.replace("_blocks", "_scales")]
            theirs = convert_moe_packed_tensors(each, scales, dtype=torch.float32)
            assert torch.equal(theirs, plain.weights[name.removesuffix("_blocks")])
    tokens = prompt(40, 1)
    wanted = logits_of(published(plain), tokens, wide=False)[-1]
    found = answer([open_model(folder, "float32", keeps="codes").build(exact=False)], plain, tokens)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@NEEDS_INT4
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_what_plain_experts_take_is_what_is_counted(tmp_path: Path, quantization: Any) -> None:
    """Though their matrices lie with their inputs first."""
    write(tiny(RAW, 7), tmp_path)
    opened = open_model(tmp_path, "float32", quantization)
    model = opened.build(exact=False, backend="reference" if quantization is None else None)
    if quantization is None:
        found = sum(part.nbytes for part in parts_of(model, Tensor) if part.dim() == 3)
        assert found == 3 * 3 * 6 * 64 * 64 * 4
    else:
        kind = Int8Weight if quantization == "int8" else PackedInt4
        stacks = [part.shape for part in parts_of(model, kind) if len(part.shape) == 3]
        assert stacks == [(6, 128, 64), (6, 64, 64)] * 3
    weights = opened.family.spec(opened.config).weights(0, 1)
    (stack, *_) = (weight for weight in weights if isinstance(weight, ExpertStacks))
    counter = ByteCounter(opened.family, torch.float32, quantization, None, None)
    by_number = {None: 4, "int8": 1, "int4": 0.5 + 8 / 64}[quantization]
    by_output = 8 if quantization == "int8" else 0
    biases = 4 * 6 * (128 + 64)
    assert counter.count(stack) == biases + 3 * 6 * 64 * 64 * by_number + 6 * (128 + 64) * by_output


@pytest.mark.parametrize("missing", ["experts.gate_up_proj_scales", "experts.down_proj_bias", "self_attn.sinks"])
def test_what_is_missing_is_named(pair: tuple[Path, Tiny], tmp_path: Path, missing: str) -> None:

    stored = load_file(pair[0] / "model.safetensors")
    del stored[next(name for name in stored if name.endswith(missing))]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((pair[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"{missing} .*is missing"):
        open_model(tmp_path).build(exact=False)


@pytest.mark.parametrize(
    ("raw", "parameters"), [(GPT_OSS, 20_914_757_184), (GPT_OSS_120B, 116_829_156_672)], ids=["20b", "120b"]
)
def test_published_shapes(raw: dict[str, Any], parameters: int, tmp_path: Path, bfloat16_products: None) -> None:
    """From headers alone, and without a dtype in config.json: what serving takes is what the files have."""
    family = FAMILIES["gpt_oss"]
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in family.tensors(family.parse(raw)).items():
        if name.endswith(STACKS):
            experts, inputs, outputs = shape
            headers[f"{name}_blocks"] = ("U8", (experts, outputs, inputs // 32, 16))
            headers[f"{name}_scales"] = ("U8", (experts, outputs, inputs // 32))
        else:
            headers[name] = ("BF16", shape)
    write_checkpoint(tmp_path, raw, headers, num_shards=3)
    report = check(tmp_path)
    assert report.ok, report.accounting.problems[:3]
    assert (report.parameters, report.dtype) == (parameters, "bfloat16")
    assert report.accounting.forms == {"MXFP4, 4 bits, groups of 32": 2 * raw["num_hidden_layers"]}
    file_bytes = sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in headers.values())
    # A router is float32.
    assert 0 <= report.weight_bytes - file_bytes < 0.003 * file_bytes
    assert report.max_model_len == 131072
    assert report.layout.bytes_per_token == raw["num_hidden_layers"] * 2 * 8 * 64 * 2
