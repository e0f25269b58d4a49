"""Weights in codes as the CPU's products read them: 32 outputs' words side by side, and their scales; or the rows as
they are stored, where codes cannot be expanded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.amx import HAS_AMX
from cairn.kernels.cpu.compiled import ELEMENTS, INT, U8, kernel
from cairn.kernels.cpu.expanding import E2M1_4, E4M3_8, INTEGER_4, INTEGER_5, INTEGER_8, WORD_OF_FIFTHS
from cairn.kernels.cpu.huge_pages import weight_memory
from cairn.kernels.cpu.packing import fill_panels, packing
from cairn.kernels.cpu.panels import has_panels
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.cpu.tiles import PANEL
from cairn.kernels.fp8 import BLOCK, Fp8Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import join_rows

ABSENT, FLOAT32, FLOAT16, BFLOAT16, TABLE = range(5)
"""What scales are stored in; `TABLE`: bytes, whose numbers a table has."""

_KINDS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
)

_NAN = 127
"""In FP8, of either sign."""

_LOOK_RATE = 8
"""Bytes that one thread looks for it in a nanosecond."""

HAS_CODES = has_panels(torch.bfloat16)
"""Whether codes are expanded for panels here."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Scales or minimums of a stack: bytes [E, panels, groups, 32] in their dtype. `table`: float32 [256], of those of
    a byte. `outer`: float32 [E, panels, n, 32], what they are multiplied with, or divided by."""

    values: Tensor
    kind: int
    table: Tensor | None
    outer: Tensor | None

    @property
    def arguments(self) -> tuple[int, ...]:
        """For a kernel: see `CodeFactors`."""
        table = 0 if self.table is None else self.table.data_ptr()
        outer, num_outer = (0, 0) if self.outer is None else (self.outer.data_ptr(), self.outer.shape[2])
        return self.values.data_ptr(), self.kind, table, outer, num_outer


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight, or a stack of experts' ones, in codes.

    `shape`, `dtype`: those of the tensor that it stands for. `matrices`: int32 [panels, words, 32] of each expert, one
    after the other in memory. `form`: see `expanding`. `fifths`: int32 [E, panels, in / 32, 32] where it has them.
    """

    shape: torch.Size
    dtype: torch.dtype
    matrices: tuple[Tensor, ...]
    form: int
    group: int
    scales: Factors
    divides: bool
    zero: int
    zeros: Tensor | None
    minimums: Factors | None
    order: Tensor | None
    fifths: Tensor | None
    layout: Literal["panels"] = "panels"

    @property
    def words(self) -> int:
        """Of two inputs each, of a row."""
        return self.matrices[0].shape[1] * in_word(self.form) // 2


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A weight, or a stack of experts' ones, that is dequantized in blocks of rows whenever it is multiplied with."""

    weight: QuantizedWeight
    layout: Literal["rows"] = "rows"

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


def pack_codes(parts: Sequence[QuantizedWeight]) -> PackedCodes | CodedRows:
    """See `Kernels.pack_stored`. `parts`: of one kind, their rows one after the other; or a single stack."""
    weight, num_bytes = parts[0], sum(part.nbytes for part in parts)
    form = _form_of(weight)
    # Groups begin with a word, of fifth bits as well.
    whole = WORD_OF_FIFTHS if form == INTEGER_5 else in_word(form)
    fits = weight.shape[-1] % whole == 0 and (weight.group % whole == 0 or weight.scales.shape[-1] == 1)
    if not HAS_CODES or not fits or weight.dtype not in ELEMENTS:
        step_work().add_weight(num_bytes, "rows")
        (joined,) = join_rows(parts)
        assert isinstance(joined, QuantizedWeight)
        settled = joined.settled()
        return CodedRows(settled.changed(torch.clone) if joined is weight and HAS_CODES else settled)
    *outer, outputs, inputs = *weight.shape[:-2], sum(part.shape[-2] for part in parts), weight.shape[-1]
    unit = 32 if HAS_AMX else whole
    words = -(-inputs // unit) * unit // in_word(form)
    step_work().add_weight(num_bytes, "codes panels")
    put_off: dict[Any, None] = dict.fromkeys(each for part in parts for each in part.put_off)
    shape = torch.Size((*outer, outputs, inputs))
    return packing().together(put_off, lambda: _lay_out(parts, form, shape, words))


def _lay_out(parts: Sequence[QuantizedWeight], form: int, shape: torch.Size, words: int) -> PackedCodes:
    """`words`: of a row."""
    weight = parts[0]
    below_zero = weight.codes.dtype == torch.int8
    return PackedCodes(
        shape=shape,
        dtype=weight.dtype,
        matrices=_stack_panels([part.codes for part in parts], torch.int32, words, below_zero).unbind(),
        form=form,
        group=weight.group,
        scales=_pack_factors([part.scales for part in parts], [part.factors for part in parts]),
        divides=weight.divides,
        zero=weight.zero + 128 * below_zero,
        zeros=None
        if weight.zeros is None
        else _stack_panels([part.zeros for part in parts], torch.uint8, flips=below_zero),
        minimums=None
        if weight.minimums is None
        else _pack_factors([part.minimums for part in parts], [part.minimum_factors for part in parts]),
        order=weight.order,
        fifths=None if weight.fifths is None else _stack_panels([part.fifths for part in parts], torch.int32),
    )


def in_word(form: int) -> int:
    """Inputs of a word of codes."""
    return 8 if form <= INTEGER_5 else 4


def _form_of(weight: QuantizedWeight) -> int:
    if weight.numbers == "integer":
        return {4: INTEGER_4, 5: INTEGER_5, 8: INTEGER_8}[weight.bits]
    return E2M1_4 if weight.numbers == "e2m1" else E4M3_8


def as_codes(weight: Fp8Weight) -> QuantizedWeight | None:
    """A weight in FP8 as one in codes; None where blocks do not divide its inputs, or where a number is none, which
    nothing here expands."""
    fits = not weight.is_blocked or weight.shape[-1] % BLOCK == 0
    if not fits or _has_nan(weight.numbers):
        return None
    return QuantizedWeight(weight.numbers, weight.scales, weight.dtype, bits=8, numbers="e4m3")


def _has_nan(numbers: Tensor) -> bool:
    """Whether any of these bytes is one in FP8."""
    rows = numbers.reshape(-1, numbers.shape[-1]).contiguous()
    has_nan = torch.zeros(1, dtype=torch.uint8)
    cost = packing().cost(rows.numel() // _LOOK_RATE)
    _find_nan["bytes"](len(rows), cost, rows.data_ptr(), rows.shape[1], has_nan.data_ptr())
    return bool(has_nan)


@kernel({"bytes": (U8, INT, U8)})
def _find_nan(begin: int, end: int, numbers: Any, width: int, has_nan: Any) -> None:
    """Items are rows."""
    for item in range(begin, end):
        row, most = advance(numbers, item * width), np.uint8(0)
        for j in range(width):
            size = np.uint8(row[j] & np.uint8(_NAN))
            most = size if size > most else most
        if most == _NAN:
            has_nan[0] = np.uint8(1)


def _pack_factors(values: Sequence[Tensor | None], outer: Sequence[Tensor | None]) -> Factors:
    dtype = _some(values)[0].dtype
    table = _table_of(dtype) if dtype.itemsize == 1 else None
    packed = _stack_panels(values, torch.uint8 if table is not None else dtype)
    return Factors(packed, _KINDS.get(dtype, TABLE), table, _stack_panels(outer) if _some(outer) else None)


@cache
def _table_of(dtype: torch.dtype) -> Tensor:
    """The numbers of all bytes."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _stack_panels(
    parts: Sequence[Tensor | None], dtype: torch.dtype | None = None, lines: int | None = None, flips: bool = False
) -> Tensor:
    """The rows [..., out, n] of all parts, in words of their dtype or another one -> [E, panels, lines, 32]. `lines`:
    None for as many as there are words of a row. `flips`: see `fill_panels`."""
    given = _some(parts)
    *outer, _, width = given[0].shape
    matrices = [list(each) for each in zip(*given, strict=True)] if outer else [given]
    dtype, num_bytes = dtype or given[0].dtype, width * given[0].itemsize
    panels = -(-sum(part.shape[-2] for part in given) // PANEL)
    lines = num_bytes // dtype.itemsize if lines is None else lines
    stack = weight_memory().empty((len(matrices), panels, lines, PANEL), dtype)
    for packed, rows in zip(stack.unbind(), matrices, strict=True):
        fill_panels(rows, packed, flips)
    return stack


def _some(parts: Sequence[Tensor | None]) -> list[Tensor]:
    return [part for part in parts if part is not None]
