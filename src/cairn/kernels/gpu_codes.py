"""Which weights in codes there are products with on GPUs. Importable without a GPU and without Triton."""

import logging
from functools import cache

import torch

from cairn.kernels.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

LEAST_GROUP = 16
"""Inputs of a weight in codes that have one scale."""

SCALE_DTYPES = frozenset(
    (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
)
"""Of scales of codes."""


def why_no_codes(weight: QuantizedWeight) -> str | None:
    """Why there are no products with codes of this form, in words; None where there are."""
    group = weight.group
    if weight.scales.shape[-1] > 1 and (group < LEAST_GROUP or group & (group - 1)):
        return f"groups of {group} inputs, which are no power of two of at least {LEAST_GROUP}"
    for dtype in (weight.scales.dtype, *(() if weight.minimums is None else (weight.minimums.dtype,))):
        if dtype not in SCALE_DTYPES:
            return f"scales in {str(dtype).removeprefix('torch.')}"
    if weight.minimums is not None and weight.minimums.dtype.itemsize == 1 and weight.minimums.is_floating_point():
        return "minimums in FP8"
    factors, others = weight.factors, weight.minimum_factors
    if factors is not None and others is not None and factors.shape != others.shape:
        return "factors of scales and of minimums for unlike groups"
    if weight.order is not None and len(weight.shape) > 2:
        return "experts whose inputs are in activation order"
    return None


@cache
def warn_dequantized(reason: str) -> None:
    """Once a process and reason."""
    logger.warning("quantized weights are dequantized: there are no products on GPUs with %s", reason)
