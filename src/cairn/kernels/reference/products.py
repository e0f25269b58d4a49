"""Matrix products row by row."""

import torch
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.contract import Weight
from cairn.kernels.reference.elementwise import widen
from cairn.kernels.reference.int8 import multiply
from cairn.kernels.staging import Staging


def warm_up(dtype: torch.dtype | None = None) -> int:
    """See `Kernels.warm_up`. Nothing is compiled."""
    return 0


def pack(weight: Tensor) -> Weight:
    """See `Kernels.pack`."""
    return weight


def prepare(host: HostBatch, staging: Staging) -> object:
    """See `Kernels.prepare`."""
    return None


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """See `Kernels.embed`."""
    out = weight.new_empty(len(tokens), weight.shape[1])
    for row, token in enumerate(tokens.tolist()):
        out[row] = weight[token]
    return out


def linear(x: Tensor, weight: Weight, bias: Tensor | None, batch: Batch) -> Tensor:
    """See `Kernels.linear`."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    for row in range(x.shape[0]):
        product = multiply(weight, widen(x[row]))
        out[row] = product if bias is None else product + bias
    return out


def lm_head(hidden: Tensor, weight: Weight) -> Tensor:
    """See `Kernels.lm_head`."""
    wide = widen(hidden)
    out = torch.empty(hidden.shape[0], weight.shape[0], dtype=wide.dtype)
    for row in range(hidden.shape[0]):
        out[row] = multiply(weight, wide[row])
    return out
