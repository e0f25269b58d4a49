"""Checkpoints in codes by the published layouts of compressed-tensors, AutoAWQ, GPTQ, AutoRound, ModelOpt and gpt-oss,
made of plain ones, and what they hold by plain arithmetic."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.fp8_checkpoints import by_row, by_tensor

__all__ = ["FORMATS", "Format", "write_packed"]

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Tensors = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]
"""A weight [out, in] -> its tensors by what comes after the layer's name, and the numbers that they stand for."""


def packed_words(codes: np.ndarray, bits: int) -> Tensor:
    """Neighbours of the last dimension in words of 32 bits, the first one in the lowest bits."""
    count = 32 // bits
    words = sum(codes[..., place::count].astype(np.uint64) << np.uint64(bits * place) for place in range(count))
    return torch.from_numpy(np.ascontiguousarray(words).astype(np.uint32).view(np.int32))


@dataclass(frozen=True)
class Quantized:
    """codes [out, in], scales and zero points [out, groups], the group of each input, and what it all stands for."""

    codes: np.ndarray
    scales: Tensor
    zeros: np.ndarray
    group_of: np.ndarray

    @property
    def wide(self) -> Tensor:
        centred = (self.codes.astype(np.int64) - self.zeros[:, self.group_of]).astype(np.float32)
        return torch.from_numpy(centred * self.scales.float().numpy()[:, self.group_of])


def in_groups(
    weight: Tensor, bits: int, symmetric: bool, shuffled: bool, dtype: torch.dtype, group: int = GROUP
) -> Quantized:
    """With whole numbers from 0 on. `shuffled`: groups of inputs that do not lie together."""
    numbers, inputs = weight.double().numpy(), weight.shape[1]
    group_of = np.arange(inputs) // group
    if shuffled:
        group_of = np.random.default_rng(inputs).permutation(group_of)
    groups, top = inputs // group, 2**bits - 1
    members = np.stack([numbers[:, group_of == each] for each in range(groups)], axis=1)
    low, high = np.minimum(members.min(-1), 0), np.maximum(members.max(-1), 0)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    scales = torch.from_numpy((high - low) / top).to(dtype)
    wide = scales.double().numpy()
    zeros = np.full_like(wide, 2 ** (bits - 1)) if symmetric else np.round(-low / wide).clip(0, top)
    codes = np.round(numbers / wide[:, group_of] + zeros[:, group_of]).clip(0, top)
    return Quantized(codes.astype(np.int64), scales, zeros.astype(np.int64), group_of)


def gptq(bits: int = 4, desc_act: bool = False, version: int = 1) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = in_groups(weight, bits, symmetric=False, shuffled=desc_act, dtype=torch.float16)
        zeros = made.zeros if version == 2 else (made.zeros - 1) & (2**bits - 1)
        return {
            "qweight": packed_words(made.codes, bits).t(),
            "qzeros": packed_words(zeros.T, bits),
            "scales": made.scales.t(),
            "g_idx": torch.from_numpy(made.group_of.astype(np.int32)),
        }, made.wide

    return quantize


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    made = in_groups(weight, 4, symmetric=False, shuffled=False, dtype=torch.float16)

    def ordered(numbers: np.ndarray) -> Tensor:
        words = numbers.T.reshape(numbers.shape[1], -1, 8)[..., list(AWQ_ORDER)]
        return packed_words(words, 4)[..., 0]

    return {"qweight": ordered(made.codes), "qzeros": ordered(made.zeros), "scales": made.scales.t()}, made.wide


def compressed_words(
    bits: int = 4, symmetric: bool = True, shuffled: bool = False, group: int | None = GROUP
) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = in_groups(weight, bits, symmetric, shuffled, torch.bfloat16, group or weight.shape[1])
        tensors = {
            "weight_packed": packed_words(made.codes, bits),
            "weight_scale": made.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed_words(made.zeros.T, bits).t()
        if shuffled:
            tensors["weight_g_idx"] = torch.from_numpy(made.group_of.astype(np.int32))
        return tensors, made.wide

    return quantize


def compressed_bytes(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    numbers = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.float()


def compressed_fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, scales, _ = by_row(weight)
    scales = scales.to(torch.bfloat16)
    return {"weight": stored, "weight_scale": scales}, stored.float() * scales.float()


def fp4_codes(numbers: Tensor) -> np.ndarray:
    """Of the nearest numbers of FP4."""
    return np.abs(numbers.numpy()[..., None] - FP4).argmin(-1)


def fp4_pairs(codes: np.ndarray) -> Tensor:
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8))


def nvfp4(codes: str, factor: str, divides: bool) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = weight.reshape(weight.shape[0], -1, 16)
        most = groups.abs().amax(-1) / 6
        whole = most.max() / 448
        factors = (1 / whole if divides else whole).float()
        scales = (most / whole).to(torch.float8_e4m3fn)
        wide_scales = scales.float() / factors if divides else scales.float() * factors
        made = fp4_codes(groups / wide_scales.clamp(min=1e-9)[..., None])
        wide = torch.from_numpy(FP4[made]) * wide_scales[..., None]
        tensors = {codes: fp4_pairs(made.reshape(weight.shape)), "weight_scale": scales}
        shape = (1,) if divides else ()
        tensors |= {factor: factors.reshape(shape), "input_global_scale" if divides else "input_scale": torch.ones(1)}
        return tensors, wide.reshape(weight.shape)

    return quantize


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [..., groups, 16], scales [..., groups], and what they stand for."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.log2(groups.abs().amax(-1).clamp(min=1e-20)).floor().clamp(-100, 100) - 2
    made = fp4_codes(groups / torch.exp2(exponents)[..., None])
    wide = torch.from_numpy(FP4[made]) * torch.exp2(exponents)[..., None]
    return fp4_pairs(made), (exponents + 127).to(torch.uint8), wide.reshape(weight.shape)


def compressed_mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    blocks, scales, wide = mxfp4(weight)
    return {"weight_packed": blocks.flatten(-2), "weight_scale": scales}, wide


def modelopt_fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, factor, wide = by_tensor(weight)
    return {"weight": stored, "weight_scale": factor, "input_scale": torch.tensor(0.25)}, wide


MODELOPT_NVFP4 = nvfp4("weight", "weight_scale_2", divides=False)
COMPRESSED_NVFP4 = nvfp4("weight_packed", "weight_global_scale", divides=True)


def compressed(form: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """The config of one group of layers. `activations`: how others round them before their products."""
    numbers = {"num_bits": 4, "type": "int", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": numbers, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


@dataclass(frozen=True)
class Format:
    """`config`: quantization_config. `quantize`: of a layer's matrix by its number, counted over the model.
    `stacks`: experts of a layer as two tensors of blocks, and all else plain. `in_file`: whether the config is that of
    hf_quant_config.json. `fp8`: which matrices are not in codes."""

    config: Mapping[str, Any]
    quantize: tuple[Quantize, ...] = ()
    stacks: bool = False
    in_file: bool = False
    fp8: Literal["none", "some", "all"] = "none"


def in_config_groups(*configs: dict[str, Any]) -> dict[str, Any]:
    """Several formats in one checkpoint."""
    groups = [{**each["config_groups"]["group_0"], "format": each["format"]} for each in configs]
    return {**configs[0], "format": "mixed-precision", "config_groups": {f"group_{i}": g for i, g in enumerate(groups)}}


_GROUPS = {"strategy": "group", "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
_BY_TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
_INT8 = compressed("int-quantized", {**_BY_TOKEN, "type": "int"}, num_bits=8, strategy="channel")
_FP8 = compressed("float-quantized", {**_BY_TOKEN, "type": "float"}, num_bits=8, type="float", strategy="channel")
_NVFP4 = compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16)

FORMATS: Mapping[str, Format] = {
    "W4A16": Format(compressed("pack-quantized", **_GROUPS), (compressed_words(),)),
    "W4A16 asymmetric": Format(
        compressed("pack-quantized", symmetric=False, **_GROUPS), (compressed_words(symmetric=False),)
    ),
    "W4A16 actorder": Format(
        compressed("pack-quantized", actorder="group", symmetric=False, **_GROUPS),
        (compressed_words(symmetric=False, shuffled=True),),
    ),
    "W8A16": Format(compressed("pack-quantized", num_bits=8, strategy="channel"), (compressed_words(8, group=None),)),
    "W8A8": Format(_INT8, (compressed_bytes,)),
    "compressed FP8": Format(_FP8, (compressed_fp8,), fp8="all"),
    "compressed NVFP4": Format(_NVFP4, (COMPRESSED_NVFP4,)),
    "compressed MXFP4": Format(compressed("mxfp4-pack-quantized", type="float", **_GROUPS), (compressed_mxfp4,)),
    "mixed": Format(
        in_config_groups(_NVFP4, _FP8, _INT8), (COMPRESSED_NVFP4, compressed_fp8, compressed_bytes), fp8="some"
    ),
    "AWQ": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, (awq,)
    ),
    "GPTQ": Format({**_GPTQ, "bits": 4}, (gptq(),)),
    "GPTQ 8 bits": Format({**_GPTQ, "bits": 8}, (gptq(8),)),
    "GPTQ desc_act": Format({**_GPTQ, "bits": 4, "desc_act": True}, (gptq(desc_act=True),)),
    "GPTQ version 2": Format({**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, (gptq(version=2),)),
    "AutoRound": Format(
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_gptq"},
        (gptq(),),
    ),
    "ModelOpt NVFP4": Format(
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}, (MODELOPT_NVFP4,), in_file=True
    ),
    "MIXED_PRECISION": Format(
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}},
        },
        (MODELOPT_NVFP4, modelopt_fp8),
        in_file=True,
        fp8="some",
    ),
    "MXFP4": Format({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, stacks=True),
}
"""By names for tests."""

_IN_LAYER = re.compile(r"^.*?layers\.\d+\.")
_KEPT = re.compile(r"(in_proj_[ab]|mlp\.gate|mixer\.gate|shared_expert_gate|k_norm|conv1d)\.weight$")
"""Matrices that nobody quantizes."""


def write_packed(plain: Path, out: Path, same: Path, form: Format) -> None:
    """`out`: the matrices of the layers in codes. `same`: the same numbers in float32."""
    weights = {name: tensor for path in plain.glob("*.safetensors") for name, tensor in load_file(path).items()}
    stored: Tensors = {}
    wide: Tensors = {}
    count = 0
    for name, tensor in sorted(weights.items()):
        if tensor.ndim != 2 or ".layers." not in name or _KEPT.search(name) or form.stacks:
            stored[name] = wide[name] = tensor
            continue
        tensors, wide[name] = form.quantize[count % len(form.quantize)](tensor)
        stored |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in tensors.items()}
        count += 1
    if form.stacks:
        _stack_experts(weights, stored, wide)
    config = dict(form.config)
    # As published: other readers go by these lists of layers, whatever the tensors say.
    plain_names = [name for name, each in stored.items() if each.ndim == 2 and weights.get(name) is each]
    if "config_groups" in config:
        config["ignore"] = sorted(name.removesuffix(".weight") for name in plain_names)
    elif config.get("quant_method") == "awq":
        config["modules_to_not_convert"] = sorted({name.split(".")[-2] for name in plain_names})
    elif config.get("quant_method") == "gptq":
        inner = {_IN_LAYER.sub("", name.removesuffix(".qweight")) for name in stored if name.endswith(".qweight")}
        config["modules_in_block_to_quantize"] = [sorted(inner)]
    raw = json.loads((plain / "config.json").read_text())
    for folder, tensors in ((out, stored), (same, wide)):
        shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    if form.in_file:
        (out / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    else:
        (out / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))


def _stack_experts(weights: Tensors, stored: Tensors, wide: Tensors) -> None:
    """As Qwen3.5 has them, gates over ups."""
    layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:
        places = range(sum(name.startswith(f"{layer}.experts.") for name in weights) // 3)
        matrices = {
            part: [weights[f"{layer}.experts.{n}.{part}_proj.weight"] for n in places]
            for part in ("gate", "up", "down")
        }
        gate_up = torch.stack([torch.cat(pair) for pair in zip(matrices["gate"], matrices["up"], strict=True)])
        for part, stack in (("gate_up_proj", gate_up), ("down_proj", torch.stack(matrices["down"]))):
            name = f"{layer}.experts.{part}"
            stored[f"{name}_blocks"], stored[f"{name}_scales"], wide[name] = mxfp4(stack)
        for name in [name for name in stored if re.match(re.escape(layer) + r"\.experts\.\d", name)]:
            del stored[name], wide[name]
