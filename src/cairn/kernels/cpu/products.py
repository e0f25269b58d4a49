"""Products with weights: by dot instructions (`panels`), by oneDNN, or by torch."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cpu.int8 import Int8Weight, int8_product
from cairn.kernels.cpu.onednn import can_reorder, reorder, reordered_product
from cairn.kernels.cpu.panels import has_instructions, product_of_panels, to_panels
from cairn.kernels.cpu.threads import step_work

Layout = Literal["panels", "onednn", "plain"]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight, or a stack of experts' ones, that is multiplied with and not looked into.

    `shape`, `dtype`: those of the tensor it was made of. `matrices`: each [out, in], one for each expert, in `layout`.
    """

    shape: torch.Size
    dtype: torch.dtype
    matrices: tuple[Tensor, ...]
    layout: Layout


AnyWeight = PackedWeight | Int8Weight


def pack(weight: Tensor) -> PackedWeight:
    """See `Kernels.pack`."""
    step_work().packed_bytes += weight.nbytes
    layout = _layout_for(weight.dtype)
    matrices = weight.unbind() if weight.dim() == 3 else (weight,)
    if layout != "plain":
        matrices = tuple((to_panels if layout == "panels" else reorder)(matrix) for matrix in matrices)
    return PackedWeight(weight.shape, weight.dtype, tuple(matrices), layout)


def _layout_for(dtype: torch.dtype) -> Layout:
    if dtype == torch.bfloat16 and has_instructions(dtype):
        return "panels"
    return "onednn" if can_reorder(dtype) else "plain"


def product(
    x: Tensor, weight: AnyWeight, bias: Tensor | None = None, expert: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """x [n, in] times the transpose of one of the matrices, [n, out] in x's dtype or another one."""
    if isinstance(weight, Int8Weight):
        return int8_product(x, weight, bias, expert, dtype)
    matrix = weight.matrices[expert]
    if weight.layout == "plain":
        return F.linear(x, matrix, bias).to(dtype or x.dtype)
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[-2], dtype=dtype)
    if weight.layout == "onednn":
        return reordered_product(x, matrix, bias).to(dtype or x.dtype)
    out = x.new_empty(x.shape[0], weight.shape[-2], dtype=dtype)
    product_of_panels(x, matrix, bias, out)
    return out


def linear(x: Tensor, weight: AnyWeight, bias: Tensor | None, batch: Batch) -> Tensor:
    """See `Kernels.linear`."""
    return product(x, weight, bias)


def lm_head(hidden: Tensor, weight: AnyWeight) -> Tensor:
    """See `Kernels.lm_head`."""
    return product(hidden, weight, dtype=torch.float32)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """See `Kernels.embed`."""
    return weight.index_select(0, tokens)
