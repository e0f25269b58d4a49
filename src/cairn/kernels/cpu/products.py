"""Products with weights: by dot instructions (`panels`), by oneDNN, or by torch, in float32 where the processor has
nothing for bfloat16."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cpu.codes import group_of, multiply_codes, multiply_codes_panels
from cairn.kernels.cpu.int4 import PackedInt4, multiply_int4, multiply_int4_panels
from cairn.kernels.cpu.int8 import Int8Weight, multiply_int8, multiply_int8_panels
from cairn.kernels.cpu.onednn import can_reorder, has_products, reorder, reordered_product
from cairn.kernels.cpu.packed_codes import HAS_CODES, CodedRows, PackedCodes, as_codes, pack_codes
from cairn.kernels.cpu.panels import (
    RowPartition,
    has_panels,
    multiply_panels,
    pack_panels,
    partition_expert_rows,
    partition_rows,
)
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.cpu.tiles import GROUP, VECTOR_GROUP
from cairn.kernels.fp8 import Fp8Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import WeightRows, dequantize_rows, runs_of

logger = logging.getLogger(__name__)

Layout = Literal["panels", "onednn", "float32", "plain"]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight, or a stack of experts' ones, that is multiplied with and not looked into.

    `shape`, `dtype`: those of the tensor it was made of. `matrices`: each [out, in], one for each expert, in `layout`;
    in `float32` they are so while all else is bfloat16.
    """

    shape: torch.Size
    dtype: torch.dtype
    matrices: tuple[Tensor, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class PackedParts:
    """A weight whose rows are those of several, one after the other. `shape`, `dtype`: of the whole."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple["AnyWeight", ...]
    layout: Literal["parts"] = "parts"


AnyWeight = PackedWeight | Int8Weight | PackedInt4 | PackedCodes | CodedRows | PackedParts


def pack(weight: Tensor) -> PackedWeight:
    """See `Kernels.pack`."""
    layout = _layout_for(weight.dtype)
    step_work().add_weight(weight.numel() * packed_dtype(weight.dtype).itemsize, layout)
    matrices = weight.unbind() if weight.dim() == 3 else (weight,)
    if layout == "float32":
        matrices = tuple(matrix.float() for matrix in matrices)
    elif layout == "panels":
        matrices = pack_panels([[matrix] for matrix in matrices])
    elif layout == "onednn":
        matrices = tuple(map(reorder, matrices))
    return PackedWeight(weight.shape, weight.dtype, matrices, layout)


def pack_stored(rows: Sequence[WeightRows]) -> AnyWeight:
    """See `Kernels.pack_stored`. What is in codes stays so, and FP8 where that can be expanded."""
    runs = runs_of([(as_codes(part) or part) if isinstance(part, Fp8Weight) else part for part in rows])
    packed = tuple(map(_pack_run, runs))
    if len(packed) == 1:
        return packed[0]
    shape = torch.Size((sum(part.shape[0] for part in packed), *packed[0].shape[1:]))
    return PackedParts(shape, packed[0].dtype, packed)


def _pack_run(run: Sequence[WeightRows]) -> AnyWeight:
    """Weights of one kind, whose rows are one after the other."""
    codes = [part for part in run if isinstance(part, QuantizedWeight)]
    if codes:
        return pack_codes(codes)
    plain = [dequantize_rows([part]) for part in run]
    if len(plain) == 1 or _layout_for(plain[0].dtype) != "panels":
        return pack(dequantize_rows(plain))
    shape = torch.Size((sum(part.shape[0] for part in plain), plain[0].shape[1]))
    step_work().add_weight(shape.numel() * plain[0].itemsize, "panels")
    return PackedWeight(shape, plain[0].dtype, pack_panels([plain]), "panels")


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """See `Kernels.packed_dtype`."""
    return torch.float32 if _layout_for(dtype) == "float32" else dtype


def lays_out(dtype: torch.dtype) -> bool:
    """See `Kernels.lays_out`."""
    return HAS_CODES and _layout_for(dtype) != "plain"


@cache
def _layout_for(dtype: torch.dtype) -> Layout:
    if dtype == torch.bfloat16 and has_panels(dtype):
        return "panels"
    if not has_products(dtype):
        logger.info("weights of products are kept in float32: this processor has no products in %s", dtype)
        return "float32"
    return "onednn" if can_reorder(dtype) else "plain"


def multiply(
    x: Tensor, weight: AnyWeight, bias: Tensor | None = None, expert: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """x [n, in] times the transpose of one of the matrices, [n, out] in x's dtype or another one."""
    if isinstance(weight, Int8Weight):
        return multiply_int8(x, weight, bias, expert, dtype)
    if isinstance(weight, PackedInt4):
        return multiply_int4(x, weight, bias, expert, dtype)
    if isinstance(weight, PackedCodes | CodedRows):
        return multiply_codes(x, weight, bias, expert, dtype)
    if isinstance(weight, PackedParts):
        return _multiply_parts(x, weight, bias, dtype)
    matrix = weight.matrices[expert]
    if weight.layout == "plain":
        return F.linear(x, matrix, bias).to(dtype or x.dtype)
    if weight.layout == "float32":
        return F.linear(x.float(), matrix, None if bias is None else bias.float()).to(dtype or x.dtype)
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[-2], dtype=dtype)
    if weight.layout == "onednn":
        return reordered_product(x, matrix, bias).to(dtype or x.dtype)
    out = x.new_empty(x.shape[0], weight.shape[-2], dtype=dtype)
    multiply_panels(x, matrix, bias, out, partition_rows(x.shape[0], matrix.shape[1]))
    return out


def _multiply_parts(x: Tensor, weight: PackedParts, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype or x.dtype)
    end = 0
    for part in weight.parts:
        begin, end = end, end + part.shape[0]
        out[:, begin:end] = multiply(x, part, None if bias is None else bias[begin:end], dtype=dtype)
    return out


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows in the order of their experts. `order`: int64 [n], which row of x each one is; None: x's own. `ends`: int64
    [experts], where each expert's rows end. `num_rows`: of all of them."""

    order: Tensor | None
    ends: Tensor
    num_rows: int
    _parts: dict[int, RowPartition] = field(default_factory=dict)

    def parts(self, group: int = GROUP) -> RowPartition:
        """How they are cut for `panels`, into groups of so many at most."""
        if group not in self._parts:
            self._parts[group] = partition_expert_rows(self.ends, self.num_rows, group)
        return self._parts[group]


def multiply_experts(x: Tensor, weight: AnyWeight, rows: ExpertRows, bias: Tensor | None = None) -> Tensor:
    """Each row times the transpose of its expert's matrix, plus its expert's bias [E, out]: [rows, out] in x's
    dtype."""
    out = x.new_empty(rows.num_rows, weight.shape[-2])
    if not rows.num_rows:
        return out
    if weight.layout == "panels":
        if isinstance(weight, Int8Weight):
            multiply_int8_panels(x, weight, bias, out, rows.parts(), rows.order)
        elif isinstance(weight, PackedInt4):
            multiply_int4_panels(x, weight, bias, out, rows.parts(VECTOR_GROUP), rows.order)
        elif isinstance(weight, PackedCodes):
            multiply_codes_panels(x, weight, bias, out, rows.parts(group_of(x.dtype)), rows.order)
        else:
            multiply_panels(x, weight.matrices[0], bias, out, rows.parts(), rows.order)
        return out
    if rows.order is not None:
        x = x.index_select(0, rows.order)
    begin = 0
    for expert, end in enumerate(rows.ends.tolist()):
        if end > begin:
            out[begin:end] = multiply(x[begin:end], weight, None if bias is None else bias[expert], expert)
        begin = end
    return out


def linear(x: Tensor, weight: AnyWeight, bias: Tensor | None, batch: Batch) -> Tensor:
    """See `Kernels.linear`."""
    return multiply(x, weight, bias)


def lm_head(hidden: Tensor, weight: AnyWeight) -> Tensor:
    """See `Kernels.lm_head`."""
    return multiply(hidden, weight, dtype=torch.float32)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """See `Kernels.embed`."""
    return weight.index_select(0, tokens)
