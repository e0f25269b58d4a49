"""How published checkpoints store matrices in codes: which tensors stand for one, and how their bits are read.

In `integer_layouts` and `fp4_layouts`:

CompressedIntegers   compressed-tensors, pack-quantized: `weight_packed`, words of neighbouring inputs
CompressedBytes      compressed-tensors, int-quantized: `weight` in int8
AwqWords             AutoAWQ, version gemm: `qweight` [in, words of 8 outputs in an order of their own]
GptqWords            GPTQ and AutoRound: `qweight` [words of inputs, out], and `g_idx`, the group of each input
Fp4Bytes             NVFP4 of compressed-tensors and ModelOpt, and MXFP4 of compressed-tensors: two inputs a byte
Mxfp4Blocks          gpt-oss: all experts' `_blocks` and `_scales`

A matrix is known by its tensor's name as if it were not quantized, `x.weight`, or that of a stack of experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from cairn.kernels.quantized import QuantizedWeight
from cairn.models.weights.tensor_headers import TensorHeader

PART = ".weight"
FLOATS = ("BF16", "F16", "F32")
Bits = Literal[4, 8]
WHOLE = -1
"""Of a group's size: all inputs."""

Read = Callable[[str, tuple[slice, ...]], Tensor]
"""A part of the tensor of this role, with one slice a dimension, as it is stored."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a tensor has to be like: one of these shapes, and one of these dtypes by safetensors' names. `optional`:
    whether it may be missing."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Coding:
    """The shape of a matrix, or of a stack, its bits, and the inputs of a group."""

    shape: tuple[int, ...]
    bits: Bits
    group: int

    @property
    def outputs(self) -> int:
        return self.shape[-2]

    @property
    def inputs(self) -> int:
        return self.shape[-1]

    @property
    def groups(self) -> int:
        return self.inputs // self.group

    @property
    def in_word(self) -> int:
        """Numbers of a word of 32 bits."""
        return 32 // self.bits


@dataclass(frozen=True, slots=True)
class PackedLayout(ABC):
    """`format`: its name for people. `bits`, `sizes`: those that matrices may have, and of groups, `WHOLE` among
    them."""

    format: str
    bits: tuple[Bits, ...] = (4,)
    sizes: tuple[int, ...] = (WHOLE,)

    key: ClassVar[str]
    key_dtypes: ClassVar[tuple[str, ...]]
    num_dims: ClassVar[int] = 2
    """Of a matrix's shape."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Roles of tensors that may be there and are not needed."""

    def stored_name(self, name: str, role: str) -> str | None:
        """Of a matrix's tensor of a role; None for a name that such a matrix does not have."""
        return f"{name.removesuffix(PART)}.{role}" if name.endswith(PART) else None

    def is_used_by(self, headers: Mapping[str, TensorHeader], name: str) -> bool:
        """Whether a matrix is stored so."""
        key = self.stored_name(name, self.key)
        return key is not None and key in headers and headers[key].dtype in self.key_dtypes

    def matrix_name(self, stored: str) -> str | None:
        """Of which matrix the stored tensor has the codes; None for another one."""
        return stored.removesuffix(f".{self.key}") + PART if stored.endswith(f".{self.key}") else None

    @abstractmethod
    def wanted(self, coding: Coding) -> Mapping[str, Wanted]:
        """The tensors by role, the one with the codes first."""

    @abstractmethod
    def units(self, coding: Coding, roles: Sequence[str]) -> tuple[int, int]:
        """Outputs and inputs at multiples of which the matrix can be cut, given the roles that are there."""

    @abstractmethod
    def read(
        self, read: Read, coding: Coding, place: tuple[slice, ...], roles: Sequence[str], dtype: torch.dtype
    ) -> QuantizedWeight:
        """The part at a place that is cut there. Raises ModelError for numbers that cannot be."""


def codings(layout: PackedLayout, shape: tuple[int, ...]) -> Iterator[Coding]:
    """Those that a matrix of this shape may have. None where no size of groups divides its inputs."""
    for bits in layout.bits:
        for size in layout.sizes:
            group = shape[-1] if size == WHOLE else size
            if group and shape[-1] % group == 0 and shape[-1] % (32 // bits if bits == 4 else 1) == 0:
                yield Coding(shape, bits, group)


def divided(part: slice, size: int) -> slice:
    """In units of so many, of which the last one may be cut."""
    return slice(part.start // size, -(-part.stop // size))
