"""Which functions of the kernel contract a model's layers call, read off their code, so that no layer has to list them.

A layer is a dataclass whose fields lead to other layers and whose methods call `self.kernels.NAME(...)`, or a
`KernelFunction`.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from cairn.kernels.contract import Kernels

OPERATIONS: frozenset[str] = frozenset(name for name in vars(Kernels) if not name.startswith("_"))
"""Functions of the contract."""


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """The one function of the contract that is called `name`, for layers that may have any of several."""

    kernels: Kernels
    name: str

    def __call__(self, *operands: Any) -> Tensor:
        """As that function."""
        result: Tensor = getattr(self.kernels, self.name)(*operands)
        return result


def names_in(code: CodeType) -> Iterator[str]:
    """Global names and attributes that a function mentions, those of functions written inside it, too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def operations_of(layer: object) -> Set[str]:
    """The operations that a dataclass of layers may call in a forward pass, by its own methods or by those of the
    dataclasses in its fields and in tuples there."""
    operations: set[str] = set()
    seen: set[int] = set()
    left = [layer]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, tuple):
            left += each
        elif is_dataclass(each) and not isinstance(each, type):
            operations |= {each.name} if isinstance(each, KernelFunction) else _operations_of_class(type(each))
            left += [getattr(each, field.name) for field in fields(each)]
    return operations


@cache
def _operations_of_class(kind: type) -> frozenset[str]:
    methods = [
        value.fget if isinstance(value, property) else value for base in kind.__mro__ for value in vars(base).values()
    ]
    code = [method.__code__ for method in methods if isinstance(method, FunctionType)]
    return frozenset(name for each in code for name in names_in(each) if name in OPERATIONS)
