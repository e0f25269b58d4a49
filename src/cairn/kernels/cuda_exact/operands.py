"""Operands by row, laid out in one way whatever the number of rows.

Triton compiles a kernel anew where an operand begins, or its rows lie, at a multiple of 16 (of bytes, of numbers) or
not, and a variant may add numbers up in another order. Parts of a fused product lie as they happen to: torch gives the
rows of [1, heads, dim] another stride than it gives those of [2, heads, dim].
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from torch import Tensor

_ALIGNMENT = 16

Function = TypeVar("Function", bound=Callable[..., Any])


def lay_out_rows(x: Tensor) -> Tensor:
    """x [T, ...] with its rows one after the other, from an aligned place on: itself where it is so, else a copy."""
    if not x.is_contiguous():
        return x.contiguous()
    # A single row is contiguous to torch whatever its stride.
    x = x.view(-1).view(x.shape)
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def with_rows_laid_out(function: Function, *rows: str) -> Function:
    """A function of the contract that gets its operands `rows` laid out by `lay_out_rows`."""
    names = tuple(signature(function).parameters)

    @wraps(function)
    def call(*operands: Any, **named: Any) -> Any:
        given = dict(zip(names, operands, strict=False)) | named
        return function(**{name: lay_out_rows(value) if name in rows else value for name, value in given.items()})

    return cast(Function, call)
