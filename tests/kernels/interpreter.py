"""Triton's interpreter, made right in bfloat16: it computes on its 16 bits as if they were an integer (triton#11584),
and cuts float32 off where a GPU rounds it to the nearest even."""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def mend_bfloat16() -> None:
    """Products and sums of bfloat16 go by way of float32 and are rounded back, as on a GPU."""
    cut = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(np.uint32)
        nearest = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        quiet = ((bits >> 16) | 0x40).astype(np.uint16)
        return np.where(np.isnan(bits.view(np.float32)), quiet, nearest).reshape(np.shape(data))

    interpreter._convert_float = rounded
    builder, handle, convert = interpreter.InterpreterBuilder, interpreter.TensorHandle, rounded
    dot, binary = builder.create_dot, builder.binary_op

    def widened(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        return handle(convert(value.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if getattr(left.dtype.scalar, "name", "") != "bf16":
            return binary(self, left, right, operation)
        out = binary(self, widened(left), widened(right), operation)
        if out.data.dtype != np.float32:
            return out
        return handle(convert(out.data, tl.float32, tl.bfloat16, None).view(np.uint16), tl.bfloat16)

    builder.create_dot = lambda self, a, b, c, *rest: dot(self, widened(a), widened(b), c, *rest)
    builder.binary_op = binary_op


def chain_products(patch: pytest.MonkeyPatch) -> None:
    """Float32 products as they are without tensor cores: a number is a chain of its terms in their order, whatever else
    is multiplied. numpy's have other bits at another place, and in other shapes."""
    handle, dot = interpreter.TensorHandle, interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
        if a.dtype.scalar != tl.float32:
            return dot(self, a, b, c, *rest)
        total = c.data.copy()
        for left, right in zip(np.moveaxis(a.data, -1, 0), np.moveaxis(b.data, -2, 0), strict=True):
            total += left[..., :, None] * right[..., None, :]
        return handle(total, c.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
