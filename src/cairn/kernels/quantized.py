"""Weights as quantized checkpoints hold them: codes of four, five or eight bits, with scales for groups of inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from cairn.kernels.int4 import GROUPS, Int4Weight

NumberFormat = Literal["integer", "e2m1", "e4m3"]
"""What a code stands for: itself, less a zero point, or a number of FP4, or, in eight bits, of FP8."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of FP4 by their codes (OCP Microscaling Formats 1.0, section 5.3.3)."""

_NUMBERS_AT_A_TIME = 1 << 20


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight, or a stack of experts' ones, whose inputs have scales in groups of one size.

    weight = number * scale + minimum, in float32, each operation rounded once, and then rounded to the model's dtype.

    `codes`: uint8 [..., out, in], or [..., out, in / 2] where `bits` is 4 or 5, the first of two inputs in the lower
    bits. As files have them they may also be int32 words of four such bytes, the first one lowest, or int8, the lowest
    code -128: see `settled`. `fifths`: the fifth bits of codes that have five, uint8 [..., out, in / 8], the first of
    eight in the lowest.
    `numbers`: what they stand for; of integers `zero` is subtracted, or `zeros`, uint8 [..., out, groups].
    `scales`: [..., out, groups] in any dtype that float() widens: floats, FP8 (e4m3, e8m0), whole numbers of 8 bits.
    `factors`: float32 [..., out, n], one for as many neighbouring groups each, that scales are multiplied with, or
    divided by where `divides`. `minimums`, `minimum_factors`: as scales and factors, never divided; None: 0.
    `order`: int32 or int64 [in], the input that each column of codes is multiplied with; None: its own.
    `dtype`: of the model. `put_off`: what writes numbers that are not there yet, to be called before anybody looks at
    them.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    bits: Literal[4, 5, 8] = 4
    numbers: NumberFormat = "integer"
    zero: int = 0
    zeros: Tensor | None = None
    factors: Tensor | None = None
    divides: bool = False
    minimums: Tensor | None = None
    minimum_factors: Tensor | None = None
    order: Tensor | None = None
    fifths: Tensor | None = None
    put_off: tuple[Callable[[], None], ...] = ()

    @property
    def shape(self) -> torch.Size:
        *outer, width = self.codes.shape
        width *= self.codes.itemsize
        return torch.Size((*outer, width if self.bits == 8 else 2 * width))

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def nbytes(self) -> int:
        parts = [*self._row_tensors().values(), *(() if self.order is None else (self.order,))]
        return sum(part.nbytes for part in parts)

    @property
    def kind(self) -> object:
        """Equal for weights whose rows can be put one after the other, or which can be stacked."""
        tensors = ((name, part.dtype, part.shape[-1]) for name, part in self._row_tensors().items())
        order = None if self.order is None else id(self.order)
        return self.bits, self.numbers, self.zero, self.divides, self.dtype, order, *tensors

    def row_tensors(self) -> dict[str, Tensor]:
        """Those that have a row for each output, by their fields' names."""
        for each in self.put_off:
            each()
        return self._row_tensors()

    def _row_tensors(self) -> dict[str, Tensor]:
        return {name: part for name in _PER_ROW if (part := getattr(self, name)) is not None}

    def changed(self, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """With its rows put into another order, cut or placed elsewhere."""
        return self.with_rows({name: change(part) for name, part in self.row_tensors().items()})

    def with_rows(self, tensors: Mapping[str, Any]) -> "QuantizedWeight":
        """With other tensors as `row_tensors`."""
        return replace(self, **tensors, put_off=())

    def viewed(self, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """As `changed`, by what looks at no number."""
        parts: Mapping[str, Any] = {name: change(part) for name, part in self._row_tensors().items()}
        return replace(self, **parts)

    def settled(self) -> "QuantizedWeight":
        """With codes in bytes from 0 on, and the numbers of each row one after the other: itself, if they are so."""
        parts = self.row_tensors()
        if self.codes.dtype == torch.uint8 and all(part.is_contiguous() for part in parts.values()):
            return replace(self, put_off=()) if self.put_off else self
        whole = self.changed(torch.Tensor.contiguous)
        if self.codes.dtype != torch.int8:
            return replace(whole, codes=whole.codes.view(torch.uint8))
        zeros = None if whole.zeros is None else _from_zero(whole.zeros)
        return replace(whole, codes=_from_zero(whole.codes), zeros=zeros, zero=self.zero + 128)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """On a device."""
        if device == self.codes.device:
            return self
        moved = self.changed(lambda part: part.to(device))
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    def __getitem__(self, place: int | slice | Tensor) -> "QuantizedWeight":
        """An expert's, of a stack, or some rows."""
        if isinstance(place, Tensor):
            return self.changed(lambda part: as_bytes(part)[place].view(part.dtype))
        return self.viewed(lambda part: part[place])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in the model's dtype or another one, rounded to it once."""
        dtype = dtype or self.dtype
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        if out.is_meta:
            return out
        rows, target = self.settled().changed(lambda part: part.flatten(0, -2)), out.view(-1, self.shape[-1])
        # A few rows at a time, so that there is never a copy of the whole in float32.
        step = max(1, _NUMBERS_AT_A_TIME // max(1, self.shape[-1]))
        for begin in range(0, len(target), step):
            part = slice(begin, begin + step)
            values = rows[part]._float_rows()
            if self.order is None:
                target[part] = values.to(dtype)
            else:
                target[part, self.order] = values.to(dtype)
        return out

    @property
    def becomes_int4(self) -> bool:
        """Whether it is a weight in four bits in other words: codes of whole numbers, in groups of one of its sizes,
        with inputs in their own order."""
        return self.bits == 4 and self.numbers == "integer" and self.order is None and self.group in GROUPS

    def as_int4(self) -> Int4Weight:
        """The same numbers as a weight in four bits, if it `becomes_int4`."""
        weight = self.settled()
        scales, minimums, stored = weight.float_scales(), weight.float_minimums(), weight.codes
        below = -scales * (weight.zero if weight.zeros is None else weight.zeros.float())
        least = below if minimums is None else below + minimums
        codes = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)
        return Int4Weight(codes, scales, least, self.dtype)

    def float_scales(self) -> Tensor:
        """float32 [..., out, groups]."""
        return _scaled(self.scales, self.factors, self.divides)

    def float_minimums(self) -> Tensor | None:
        """float32 [..., out, groups]."""
        return None if self.minimums is None else _scaled(self.minimums, self.minimum_factors, divides=False)

    def _float_rows(self) -> Tensor:
        """[rows, in] in float32, columns as they are stored."""
        rows, width = self.shape
        codes = self.codes
        if self.bits != 8:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1)
        codes = codes.reshape(rows, -1, self.group)
        if self.fifths is not None:
            fifths = self.fifths[..., None] >> torch.arange(8, device=codes.device) & 1
            codes = codes | (fifths << 4).view_as(codes)
        if self.numbers == "e2m1":
            values = _e2m1_numbers(codes.device)[codes.int()]
        elif self.numbers == "e4m3":
            values = codes.view(torch.float8_e4m3fn).float()
        else:
            values = codes.float() - (self.zero if self.zeros is None else self.zeros.float()[..., None])
        values.mul_(self.float_scales()[..., None])
        if (minimums := self.float_minimums()) is not None:
            values.add_(minimums[..., None])
        return values.view(rows, width)


def as_bytes(part: Tensor) -> Tensor:
    """What has FP8 as its bytes, of which torch can put parts together and pick some on every device."""
    return part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1 else part


def _from_zero(codes: Tensor) -> Tensor:
    """int8 -> uint8, 128 more."""
    # For the meta device torch imports its compiler, which makes a folder in /tmp.
    return codes.view(torch.uint8) if codes.is_meta else codes.view(torch.uint8) ^ 128


_PER_ROW = ("codes", "scales", "zeros", "factors", "minimums", "minimum_factors", "fifths")


@cache
def _e2m1_numbers(device: torch.device) -> Tensor:
    """Once a device: where steps are captured nothing is copied from the host."""
    return torch.tensor(E2M1, device=device)


def _scaled(scales: Tensor, factors: Tensor | None, divides: bool) -> Tensor:
    wide = scales.float()
    if factors is None:
        return wide
    spread = factors.repeat_interleave(scales.shape[-1] // factors.shape[-1], dim=-1)
    return wide / spread if divides else wide * spread
