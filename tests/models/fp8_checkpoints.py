"""FP8 checkpoints as they are published, by Qwen, ModelOpt, vLLM and transformers, made of plain ones, and what they
hold by plain arithmetic."""

import json
import shutil
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["by_blocks", "by_row", "by_tensor", "write_fp8_without_blocks", "write_modelopt_fp8", "write_qwen_fp8"]

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def by_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 numbers, factors [blocks, blocks], and what they are together, block by block."""
    rows, columns = (-(-length // BLOCK) for length in weight.shape)
    stored, factors = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    wide = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            factor = weight[block].abs().max() / LARGEST
            stored[block] = (weight[block] / factor).to(torch.float8_e4m3fn)
            factors[row, column] = factor
            wide[block] = stored[block].float() * factor
    return stored, factors, wide


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 numbers, their factor [], and what they are together."""
    factor = weight.abs().max() / LARGEST
    stored = (weight / factor).to(torch.float8_e4m3fn)
    return stored, factor, stored.float() * factor


def by_row(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 numbers, a factor for each row [rows, 1], and what they are together."""
    factors = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    stored = (weight / factors).to(torch.float8_e4m3fn)
    return stored, factors, stored.float() * factors


def _write(plain: Path, out: Path, convert: Callable[[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """A copy of the folder `plain` whose tensors are what `convert` makes of them; returns the plain tensors."""
    weights = _weights(plain)
    shutil.copytree(plain, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stored |= convert(name, tensor)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, out / "model.safetensors")
    return weights


def _wide_copy(plain: Path, out: Path, weights: dict[str, Tensor]) -> None:
    shutil.copytree(plain, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(weights, out / "model.safetensors")


_KEPT = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight", "shared_expert_gate.weight")
"""Qwen3.5's matrices that nobody quantizes."""


def write_qwen_fp8(plain: Path, out: Path, same: Path) -> None:
    """`out`: matrices of the layers in FP8 with a factor for each block. `same`: the same numbers in float32."""
    wide: dict[str, Tensor] = {}

    def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.ndim != 2 or ".layers." not in name or name.endswith(_KEPT):
            wide[name] = tensor
            return {name: tensor}
        stored, factors, wide[name] = by_blocks(tensor)
        return {name: stored, f"{name}_scale_inv": factors}

    _write(plain, out, convert)
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (out / "config.json").write_text(json.dumps(raw))
    _wide_copy(plain, same, wide)


def write_fp8_without_blocks(plain: Path, out: Path, same: Path) -> None:
    """As `write_qwen_fp8`, with one factor a matrix, or for each of its rows, in all shapes and under all names that
    are published, by turns; activations and keys and values have factors, too."""
    wide: dict[str, Tensor] = {}
    forms = cycle(product(("weight_scale", "weight_scale_inv"), ((), (1,), (-1, 1), (-1,))))

    def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.ndim != 2 or ".layers." not in name or name.endswith(_KEPT):
            wide[name] = tensor
            return {name: tensor}
        base, (scale, shape) = name.removesuffix(".weight"), next(forms)
        stored, factors, wide[name] = by_row(tensor) if -1 in shape else by_tensor(tensor)
        of_input = "input_scale" if scale == "weight_scale" else "activation_scale"
        found = {name: stored, f"{base}.{scale}": factors.reshape(shape), f"{base}.{of_input}": torch.tensor(0.25)}
        if base.endswith((".k_proj", ".v_proj")):
            found |= {f"{base[:-7]}.{base[-6]}_scale": torch.tensor(0.5), f"{base}.output_scale": torch.tensor(0.5)}
        return found

    _write(plain, out, convert)
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None}
    (out / "config.json").write_text(json.dumps(raw))
    _wide_copy(plain, same, wide)


def write_modelopt_fp8(plain: Path, out: Path, same: Path) -> None:
    """As `write_qwen_fp8`, with one factor a matrix and those of activations, keys and values; one attention layer is
    left out."""
    wide: dict[str, Tensor] = {}
    left_out = "backbone.layers.3.mixer"  # attention

    def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        base = name.removesuffix(".weight")
        found = {f"{base}.{part}_scale": torch.tensor(0.5) for part in "kv" if name.endswith(f".{part}_proj.weight")}
        plain_ones = name.startswith(left_out) or name.endswith("gate.weight") or ".layers." not in name
        if tensor.ndim != 2 or plain_ones:
            wide[name] = tensor
            return found | {name: tensor}
        stored, factor, wide[name] = by_tensor(tensor)
        return found | {name: stored, f"{base}.weight_scale": factor, f"{base}.input_scale": torch.tensor(0.25)}

    _write(plain, out, convert)
    quantization = {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", *(f"{left_out}.{name}_proj" for name in "qkvo")],
        },
    }
    (out / "hf_quant_config.json").write_text(json.dumps(quantization))
    _wide_copy(plain, same, wide)
