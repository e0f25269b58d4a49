"""Weights of quantized checkpoints: in codes, see `packed_layouts`, or in FP8 (e4m3), dequantized or as stored.

FP8 is stored in these ways:

fp8         With `weight_block_size`, as Qwen and DeepSeek publish it: `weight_scale_inv`, one factor for each such
            block of numbers. Without: one factor for a tensor or for each of its rows, as `weight_scale` (vLLM's
            method of that name) or `weight_scale_inv` (transformers' FineGrainedFP8Config)
modelopt    NVIDIA ModelOpt's: `weight_scale`, one factor for a tensor
compressed-tensors    `weight_scale`, one factor for a tensor, for each of its rows or for each block

Factors of activations, keys and values (`input_scale`, `activation_scale`, `k_scale`, ...) are not used: they are for
those who also compute or cache in FP8 with fixed factors, and rounding less is no other model.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cairn.kernels.fp8 import BLOCK, Fp8Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import StoredRows
from cairn.models.contract import StoredLoader
from cairn.models.decoder_config import StoredQuantization
from cairn.models.sharding import Slice, TensorShard
from cairn.models.weights.gguf.source import PLAIN, describe_blocks
from cairn.models.weights.packed_layouts import PackedLayout
from cairn.models.weights.packed_matrices import (
    Layouts,
    PackedMatrix,
    find_layout,
    layouts_by_name,
    packed_tensors,
    resolve_matrix,
)
from cairn.models.weights.tensor_headers import TensorHeader
from cairn.models.weights.tensor_source import TORCH_DTYPES

FP8: Final = "F8_E4M3"
"""safetensors' name of the one FP8 dtype that is read."""

_WEIGHT = ".weight"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method`: its name in config.json and in vLLM's flag. `block`: the rows and columns of every weight in FP8 that
    have one factor; None where each weight's factors tell by their shape. `layouts`: how matrices are stored in codes,
    if any are."""

    method: StoredQuantization
    block: tuple[int, int] | None = None
    layouts: Layouts = ()

    @property
    def has_codes(self) -> bool:
        """Whether any matrices may be stored in codes."""
        return bool(self.layouts) or self.method == "gguf"

    @property
    def can_stay(self) -> bool:
        """Whether there are products with weights in FP8 in this form."""
        return self.block is None or self.block[1] == BLOCK

    @property
    def scale_names(self) -> tuple[str, ...]:
        """What factors may be called; what is before that in a tensor's name is the weight's."""
        if self.method != "fp8":
            return ("weight_scale",)
        return ("weight_scale_inv",) if self.block is not None else ("weight_scale", "weight_scale_inv")

    def block_of(self, shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The rows and columns of a weight of this shape that have one factor, where its factors have that one. None
        for factors of no such form."""
        rows, columns = shape
        if self.block is not None:
            return self.block if scale_shape == _grid(shape, self.block) else None
        if scale_shape in ((), (1,), (1, 1)):
            return rows, columns
        if self.method != "modelopt" and scale_shape in ((rows,), (rows, 1)):
            return 1, columns
        # transformers' own size, where config.json is silent about it.
        return (BLOCK, BLOCK) if self.method == "fp8" and scale_shape == _grid(shape, (BLOCK, BLOCK)) else None


@dataclass(frozen=True, slots=True)
class StoredScale:
    """The factors of a stored weight: the `name` of their tensor, and `block`, the rows and columns that have one; None
    where their shape is wrong."""

    name: str
    block: tuple[int, int] | None


def logical_names(headers: Mapping[str, TensorHeader], quantization: Quantization | None) -> set[str]:
    """The names of all tensors, and of matrices in codes as if they were not."""
    return headers.keys() | find_layouts(headers, quantization).keys()


def find_layouts(headers: Mapping[str, TensorHeader], quantization: Quantization | None) -> dict[str, PackedLayout]:
    """How matrices in codes are stored, by their names."""
    return {} if quantization is None else layouts_by_name(headers, quantization.layouts)


def find_matrix(
    headers: Mapping[str, TensorHeader], name: str, shape: tuple[int, ...], quantization: Quantization | None
) -> PackedMatrix | str | None:
    """A matrix in codes, or what is wrong with its tensors; None for a tensor that is stored otherwise."""
    layout = None if quantization is None else find_layout(headers, name, quantization.layouts)
    return None if layout is None else resolve_matrix(headers, name, shape, layout)


def name_form(
    headers: Mapping[str, TensorHeader], name: str, shape: tuple[int, ...], quantization: Quantization | None
) -> str | None:
    """In which quantized form a tensor is stored, in words; None where it is not, or is wrong."""
    header = headers.get(name)
    if header is not None and header.num_bytes is not None:
        return None if header.dtype in PLAIN else header.dtype
    matrix = find_matrix(headers, name, shape, quantization)
    if matrix is None:
        return "FP8" if find_scale(headers, name, quantization) is not None else None
    return None if isinstance(matrix, str) else matrix.form


def find_scale(headers: Mapping[str, TensorHeader], name: str, quantization: Quantization | None) -> StoredScale | None:
    """The factors of a stored FP8 weight, or None where there are none."""
    header = headers.get(name)
    if (
        quantization is None
        or header is None
        or header.dtype != FP8
        or not name.endswith(_WEIGHT)
        or len(header.shape) != 2
    ):
        return None
    for scale in (f"{name.removesuffix(_WEIGHT)}.{each}" for each in quantization.scale_names):
        if scale in headers:
            return StoredScale(scale, quantization.block_of(header.shape, headers[scale].shape))
    return None


def used_tensors(
    headers: Mapping[str, TensorHeader],
    expected: Iterable[str],
    quantization: Quantization | None,
    layouts: Mapping[str, PackedLayout] | None = None,
) -> set[str]:
    """The stored tensors that are `expected`, or factors of such ones. `layouts`: `find_layouts` of them."""
    used, layouts = set(), find_layouts(headers, quantization) if layouts is None else layouts
    for name in (headers.keys() | layouts.keys()) & set(expected):
        used.add(name)
        if quantization is None:
            continue
        if (layout := layouts.get(name)) is not None:
            used.update(packed_tensors(headers, name, layout))
        if not name.endswith(_WEIGHT):
            continue
        base = name.removesuffix(_WEIGHT)
        if layout is None and (scale := find_scale(headers, name, quantization)) is not None:
            used |= {scale.name, f"{base}.input_scale", f"{base}.activation_scale"}
        # Those of keys and values are there whether the projection is quantized or not.
        if base.endswith((".k_proj", ".v_proj")):
            of_cache = f"{base[-6]}_scale"
            used |= {f"{base}.{of_cache}", f"{base}.output_scale", f"{base[: -len('.k_proj')]}.{of_cache}"}
    return used & headers.keys()


def find_scale_problem(headers: Mapping[str, TensorHeader], name: str, quantization: Quantization | None) -> str | None:
    """What is wrong with the factors of a stored FP8 tensor, in a sentence, or None."""
    if quantization is None:
        return f"is {FP8}, but config.json has no quantization_config that says how it is scaled"
    if not name.endswith(_WEIGHT):
        return f"is {FP8}, which only matrices named .weight are read as"
    scale = find_scale(headers, name, quantization)
    if scale is None:
        return f"is {FP8}, but its {' or '.join(quantization.scale_names)} is missing"
    header, shape = headers[scale.name], headers[name].shape
    if scale.block is not None and header.dtype in ("F32", "BF16", "F16"):
        return None
    wanted = "[]" if quantization.block is None else str(list(_grid(shape, quantization.block)))
    if quantization.block is None and quantization.method != "modelopt":
        wanted = f"[], [{shape[0]}] or [{shape[0]}, 1]"
    short = scale.name.rpartition(".")[2]
    return f"is {FP8} with {short} {header.dtype} {list(header.shape)} instead of F32 {wanted}"


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Blocks down and across a weight."""
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


def dequantize(
    values: Tensor, scale: Tensor, rows: slice, columns: slice, shape: tuple[int, ...], block: tuple[int, int]
) -> Tensor:
    """values: float8 [rows, columns] at these places of a weight of this `shape`; scale: its factors, all of them ->
    float32.

    A cut may begin and end inside a block.
    """
    wide = values.float()
    if wide.is_meta:
        return wide
    factors = scale.float().reshape(_grid(shape, block))
    factors = factors[torch.arange(rows.start, rows.stop, device=values.device) // block[0]]
    if factors.shape[1] > 1:
        factors = factors[:, torch.arange(columns.start, columns.stop, device=values.device) // block[1]]
    return wide.mul_(factors)


def find_scale_columns(
    name: str, shape: tuple[int, ...], shard: TensorShard | None, block: tuple[int, int]
) -> tuple[Slice, ...] | None:
    """Which columns of a weight's factors belong to a shard of it that stays in FP8. None for a cut inside a block,
    which is logged."""
    width, size = shape[1], block[1]
    if size >= width:
        return ((0, 1),)
    cuts = shard.slices if shard is not None and shard.dim == 1 else ((0, width),)
    is_whole = [begin % size == 0 and (end % size == 0 or end == width) for begin, end in cuts]
    # A block that the weight's end cuts short can only be the last one.
    if not all(is_whole) or any(end % size for _, end in cuts[:-1]):
        logger.warning("%s is cut inside blocks of %d columns with one factor: it is dequantized", name, size)
        return None
    return tuple((begin // size, -(-end // size)) for begin, end in cuts)


def describe_fp8(
    headers: Mapping[str, TensorHeader], quantization: Quantization | None, dtype: torch.dtype
) -> StoredLoader:
    """As `WeightReader.load_fp8`, of tensors without memory, on the meta device."""

    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> Fp8Weight | None:
        scale = find_scale(headers, name, quantization) if name in headers else None
        if scale is None or scale.block is None or quantization is None or not quantization.can_stay:
            return None
        if (columns := find_scale_columns(name, shape, shard, scale.block)) is None:
            return None
        numbers = torch.empty(shape if shard is None else shard.shape(shape), dtype=torch.uint8, device="meta")
        num_scales = sum(end - begin for begin, end in columns)
        return Fp8Weight(numbers, torch.empty(numbers.shape[0], num_scales, device="meta"), dtype)

    return load


def describe_codes(
    headers: Mapping[str, TensorHeader], quantization: Quantization | None, dtype: torch.dtype
) -> StoredLoader:
    """As `WeightReader.load_codes`, of tensors without memory, on the meta device."""

    def read_part(name: str, part: tuple[slice, ...]) -> Tensor:
        shape = [each.stop - each.start for each in part]
        return torch.empty(shape, dtype=TORCH_DTYPES[headers[name].dtype], device="meta")

    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> QuantizedWeight | None:
        header = headers.get(name)
        if header is not None and header.num_bytes is not None:
            return describe_blocks(header.shape, header.dtype, header.num_bytes, shard, dtype)
        matrix = find_matrix(headers, name, shape, quantization)
        if matrix is None or isinstance(matrix, str):
            return None
        return matrix.read_shard(read_part, shard, dtype)

    return load


def describe_stored(
    headers: Mapping[str, TensorHeader], quantization: Quantization | None, dtype: torch.dtype
) -> StoredLoader:
    """As `WeightReader.load_stored`, of tensors without memory, on the meta device."""
    load_codes, load_fp8 = (describe(headers, quantization, dtype) for describe in (describe_codes, describe_fp8))

    def load(name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> StoredRows | None:
        codes = load_codes(name, shape, shard)
        return codes if codes is not None else load_fp8(name, shape, shard)

    return load


def row_scales(
    scale: Tensor,
    rows: tuple[Slice, ...],
    columns: tuple[Slice, ...],
    shape: tuple[int, ...],
    block: tuple[int, int],
) -> Tensor:
    """The factors of an FP8 weight of this `shape` -> those of each of these rows, float32 [rows, columns of
    `find_scale_columns`]."""
    factors = scale.float().reshape(_grid(shape, block))
    if rows != ((0, shape[0]),):
        factors = factors[torch.cat([torch.arange(*each) for each in rows]) // block[0]]
    elif block[0] > 1:
        factors = factors.repeat_interleave(block[0], 0)[: shape[0]]
    if columns == ((0, factors.shape[1]),):
        return factors
    return factors[:, torch.cat([torch.arange(*each) for each in columns])]
