"""Quantized checkpoints. Two forms are read, both with FP8 (e4m3) weights, which are dequantized or stay as they are:

fp8         Qwen's and DeepSeek's: `weight_scale_inv`, one factor for each block of 128 x 128 numbers
            (transformers' FineGrainedFP8Config; `quantization_config` of config.json)
modelopt    NVIDIA ModelOpt's FP8: `weight_scale`, one factor for a tensor; `input_scale`, `k_scale` and `v_scale` are
            for those who also compute or cache in FP8 (`hf_quant_config.json`, or `quantization_config`)
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from cairn.errors import ModelError
from cairn.kernels.fp8 import BLOCK, Fp8Weight
from cairn.models.config_schema import Fields
from cairn.models.contract import Fp8Loader
from cairn.models.sharding import Slice, TensorShard
from cairn.models.weights.tensor_headers import TensorHeader, read_json

MODELOPT_FILE = "hf_quant_config.json"
MAX_BLOCK = 1 << 16

FP8: Final = "F8_E4M3"
"""safetensors' name of the one FP8 dtype that is read."""

_WEIGHT = ".weight"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quantization:
    """`block`: the rows and columns of a weight that have one factor; None where all of it has one."""

    block: tuple[int, int] | None

    @property
    def method(self) -> Literal["fp8", "modelopt"]:
        """Its name in config.json and in vLLM's flag."""
        return "modelopt" if self.block is None else "fp8"

    @property
    def can_stay(self) -> bool:
        """Whether there are products with weights in this form."""
        return self.block is None or self.block[1] == BLOCK

    @property
    def scale(self) -> str:
        """The last part of a factor's name; what is before it is the weight's."""
        return "weight_scale" if self.block is None else "weight_scale_inv"


def read_quantization(folder: Path, raw: Mapping[str, object]) -> Quantization | None:
    """From config.json's fields and, where they say nothing, from hf_quant_config.json. None: not quantized.

    Raises ModelError that names the field of a quantization that is not read.
    """
    fields = raw.get("quantization_config")
    if fields is None:
        path = folder / MODELOPT_FILE
        return _modelopt(MODELOPT_FILE, read_json(path).get("quantization")) if path.exists() else None
    if not isinstance(fields, Mapping):
        raise ModelError(f"config.json: quantization_config must be an object, not {type(fields).__name__}")
    method = fields.get("quant_method")
    if method == "modelopt":
        return _modelopt("config.json: quantization_config", fields)
    if method != "fp8":
        raise ModelError(f"config.json: quant_method {method!r} is not read; known: fp8, modelopt")
    Fields(fields).only("fmt", "e4m3")
    block = Fields(fields).integers("weight_block_size", 1, MAX_BLOCK)
    if len(block) != 2:
        raise ModelError(f"config.json: weight_block_size must be two numbers, as [128, 128], not {list(block)}")
    return Quantization((block[0], block[1]))


def _modelopt(where: str, fields: object) -> Quantization:
    algorithm = fields.get("quant_algo") if isinstance(fields, Mapping) else None
    if algorithm != "FP8":
        raise ModelError(f"{where}: quant_algo {algorithm!r} is not read; known: FP8")
    return Quantization(None)


def find_scale(headers: Mapping[str, TensorHeader], name: str, quantization: Quantization | None) -> str | None:
    """The name of the tensor with the factors of a stored FP8 weight, or None where there is none."""
    header = headers[name]
    if quantization is None or header.dtype != FP8 or not name.endswith(_WEIGHT) or len(header.shape) != 2:
        return None
    scale = f"{name.removesuffix(_WEIGHT)}.{quantization.scale}"
    return scale if scale in headers else None


def used_tensors(
    headers: Mapping[str, TensorHeader], expected: Iterable[str], quantization: Quantization | None
) -> set[str]:
    """The stored tensors that are `expected`, or factors of such ones."""
    used = set()
    for name in headers.keys() & set(expected):
        used.add(name)
        if quantization is None or not name.endswith(_WEIGHT):
            continue
        base, scale = name.removesuffix(_WEIGHT), find_scale(headers, name, quantization)
        if scale is not None:
            used |= {scale, f"{base}.input_scale"} if quantization.block is None else {scale}
        # Those of keys and values are there whether the projection is quantized or not.
        if base.endswith((".k_proj", ".v_proj")):
            used.add(f"{base}.{base[-6]}_scale")
    return used & headers.keys()


def find_scale_problem(headers: Mapping[str, TensorHeader], name: str, quantization: Quantization | None) -> str | None:
    """What is wrong with the factors of a stored FP8 tensor, in a sentence, or None."""
    if quantization is None:
        return f"is {FP8}, but config.json has no quantization_config that says how it is scaled"
    if not name.endswith(_WEIGHT):
        return f"is {FP8}, which only matrices named .weight are read as"
    scale = find_scale(headers, name, quantization)
    if scale is None:
        return f"is {FP8}, but its {quantization.scale} is missing"
    header = headers[scale]
    shapes: tuple[tuple[int, ...], ...] = ((), (1,))
    if quantization.block is not None:
        shapes = (tuple(-(-n // size) for n, size in zip(headers[name].shape, quantization.block, strict=True)),)
    if header.shape in shapes and header.dtype in ("F32", "BF16"):
        return None
    return f"is {FP8} with {quantization.scale} {header.dtype} {list(header.shape)} instead of F32 {list(shapes[0])}"


def dequantize(values: Tensor, scale: Tensor, rows: slice, columns: slice, block: tuple[int, int] | None) -> Tensor:
    """values: float8 [rows, columns] at these places of a weight; scale: its factors, all of them -> float32.

    A cut may begin and end inside a block.
    """
    wide = values.float()
    if wide.is_meta:
        return wide
    if block is None:
        return wide.mul_(scale.float().reshape(()))
    of_row = torch.arange(rows.start, rows.stop, device=values.device) // block[0]
    of_column = torch.arange(columns.start, columns.stop, device=values.device) // block[1]
    return wide.mul_(scale.float()[of_row][:, of_column])


def find_scale_columns(
    name: str, shape: tuple[int, ...], shard: TensorShard | None, quantization: Quantization
) -> tuple[Slice, ...] | None:
    """Which columns of a weight's factors belong to a shard of it that stays in FP8. None for a cut inside a block,
    which is logged."""
    if quantization.block is None:
        return ((0, 1),)
    width, size = shape[1], quantization.block[1]
    cuts = shard.slices if shard is not None and shard.dim == 1 else ((0, width),)
    is_whole = [begin % size == 0 and (end % size == 0 or end == width) for begin, end in cuts]
    # A block that the weight's end cuts short can only be the last one.
    if not all(is_whole) or any(end % size for _, end in cuts[:-1]):
        logger.warning("%s is cut inside blocks of %d columns with one factor: it is dequantized", name, size)
        return None
    return tuple((begin // size, -(-end // size)) for begin, end in cuts)


def describe_fp8(
    headers: Mapping[str, TensorHeader], quantization: Quantization | None, dtype: torch.dtype
) -> Fp8Loader:
    """As `WeightReader.load_fp8`, of tensors without memory, on the meta device."""

    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Fp8Weight | None:
        if quantization is None or name not in headers or find_scale(headers, name, quantization) is None:
            return None
        if (columns := find_scale_columns(name, shape, shard, quantization)) is None:
            return None
        numbers = torch.empty(shape if shard is None else shard.shape(shape), dtype=torch.uint8, device="meta")
        num_scales = sum(end - begin for begin, end in columns)
        return Fp8Weight(numbers, torch.empty(numbers.shape[0], num_scales, device="meta"), dtype)

    return load


def row_scales(
    scale: Tensor, rows: tuple[Slice, ...], columns: tuple[Slice, ...], block: tuple[int, int] | None
) -> Tensor:
    """The factors of an FP8 weight -> those of each of these rows, float32 [rows, columns of `find_scale_columns`]."""
    of_row = torch.cat([torch.arange(*each) for each in rows])
    if block is None:
        return scale.float().reshape(1, 1).repeat(len(of_row), 1)
    of_column = torch.cat([torch.arange(*each) for each in columns])
    return scale.float()[of_row // block[0]][:, of_column]
