"""Products with weights [out, in], by cuBLAS through torch; weights stay as they are. Of FP8 and of codes: see `fp8`.

float32 products, which routers have in every dtype, are exact ones: `warm_up` sees to it that torch does not use TF32.
"""

from collections.abc import Set

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.batch import Batch
from cairn.kernels.contract import Weight
from cairn.kernels.cuda.fp8 import multiply, pack_stored
from cairn.kernels.int4 import LEVELS, Int4Weight
from cairn.kernels.quantized import QuantizedWeight

_WIDE_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")
"""Whether torch gives a product's float32 sums out before they are rounded; it does so on CUDA only."""


def pack_int4(weight: Int4Weight) -> Weight:
    """See `Kernels.pack_int4`. As codes, two a byte, with activations as they are."""
    pairs = weight.numbers[..., ::2] | weight.numbers[..., 1::2] << 4
    zero = LEVELS // 2 if weight.minimums is None else 0
    return pack_stored([QuantizedWeight(pairs, weight.scales, weight.dtype, zero=zero, minimums=weight.minimums)])


def pack_int8(weight: Tensor) -> Tensor:
    """See `Kernels.pack_int8`. There are none."""
    raise ConfigError("--quantization int8: there are no int8 products on GPUs yet; leave it out")


def warm_up(
    dtype: torch.dtype | None = None, operations: Set[str] | None = None, state_dtype: torch.dtype = torch.float32
) -> int:
    """See `Kernels.warm_up`. Kernels are compiled when they are first launched, and Triton keeps them on disk."""
    # NVIDIA's containers have TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1: 11 bits of each float32 operand.
    torch.set_float32_matmul_precision("highest")
    return 0


def linear(x: Tensor, weight: Weight, bias: Tensor | None, batch: Batch) -> Tensor:
    """See `Kernels.linear`."""
    return multiply(x, weight, bias)


def lm_head(hidden: Tensor, weight: Weight) -> Tensor:
    """See `Kernels.lm_head`."""
    if not isinstance(weight, Tensor):
        return multiply(hidden, weight, None, torch.float32)
    if _WIDE_PRODUCTS and hidden.is_cuda and hidden.dtype != torch.float32:
        logits: Tensor = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return logits
    return F.linear(hidden, weight).float()
