"""Products with weights, by oneDNN and with weights in the layout that it multiplies with.

Laid out once, they go through at the speed of the memory where there are few rows. torch has the two operations for
its own compiler and promises nobody that they stay: where they fail, the weight remains as it is.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cpu.heights import height_of
from cairn.kernels.cpu.int8 import Int8Weight, int8_product
from cairn.kernels.cpu.threads import step_work

logger = logging.getLogger(__name__)

_ROWS: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 1})
"""How many rows the layout is chosen for; it serves any number. float32 stays with torch's own products, which are as
fast."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight, or a stack of experts' ones, that is multiplied with and not looked into.

    `shape`, `dtype`: those of the tensor it was made of. `matrices`: each [out, in], one for each expert, in oneDNN's
    layout if `reordered`, whose memory no other operation can read.
    """

    shape: torch.Size
    dtype: torch.dtype
    matrices: tuple[Tensor, ...]
    reordered: bool


AnyWeight = PackedWeight | Int8Weight


def pack(weight: Tensor) -> PackedWeight:
    """See `Kernels.pack`."""
    step_work().packed_bytes += weight.nbytes
    matrices = weight.unbind() if weight.dim() == 3 else (weight,)
    reordered = can_reorder(weight.dtype)
    if reordered:
        matrices = tuple(_reorder(matrix) for matrix in matrices)
    return PackedWeight(weight.shape, weight.dtype, tuple(matrices), reordered)


@cache
def can_reorder(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU multiplies with weights in oneDNN's layout, and comes to the same result."""
    if dtype not in _ROWS:
        return False
    weight = torch.linspace(-1, 1, 48 * 32).view(48, 32).to(dtype)
    x, bias = torch.linspace(-1, 1, 3 * 32).view(3, 32).to(dtype), torch.linspace(-1, 1, 48).to(dtype)
    try:
        packed = _reorder(weight)
        close = torch.allclose(_reordered_product(x, packed, bias), F.linear(x, weight, bias), rtol=0.02, atol=0.02)
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.warning("weights stay in torch's own layout, in which products of few rows are slower: %s", error)
        return False
    if not close:
        logger.warning("weights stay in torch's own layout: oneDNN's gives other results here")
    return close


def _reorder(matrix: Tensor) -> Tensor:
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), _ROWS[matrix.dtype])
    return reordered


def _reordered_product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")
    return result


def product(x: Tensor, weight: AnyWeight, bias: Tensor | None = None, expert: int = 0) -> Tensor:
    """x [n, in] times the transpose of one of the matrices, [n, out]."""
    if isinstance(weight, Int8Weight):
        return int8_product(x, weight, bias, expert)
    if not weight.reordered:
        return F.linear(x, weight.matrices[expert], bias)
    rows = x.shape[0]
    if not rows:
        return x.new_empty(0, weight.shape[-2])
    height = height_of(rows)
    if height != rows:
        padded = x.new_zeros(height, x.shape[1])
        padded[:rows] = x
        x = padded
    return _reordered_product(x, weight.matrices[expert], bias)[:rows]


def linear(x: Tensor, weight: AnyWeight, bias: Tensor | None, batch: Batch) -> Tensor:
    """See `Kernels.linear`."""
    return product(x, weight, bias)


def lm_head(hidden: Tensor, weight: AnyWeight) -> Tensor:
    """See `Kernels.lm_head`."""
    if isinstance(weight, Int8Weight):
        return int8_product(hidden, weight, None, 0, torch.float32)
    return product(hidden, weight).float()


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """See `Kernels.embed`."""
    return weight.index_select(0, tokens)
