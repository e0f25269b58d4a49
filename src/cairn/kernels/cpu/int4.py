"""Products in four bits: a group of a weight's inputs has a scale and a minimum, a group of a row a scale.

    x = row scale * a, a whole in -127..127,    weight = scale * w + minimum, w whole in 0..15
    x weight^T = sum over groups of  scale * row scale * (a w^T) + minimum * (row scale * sum of a)

A word of a panel has eight inputs, of which a row's are two words; a group's scales and minimums are two words in front
of its own, and so are a row's scale and its sum. a w^T is exact, by VNNI's vpdpbusd, by AVX2's vpmaddubsw, or for many
rows by a matrix unit, and groups are added in their order: a row has the same bits whatever rows it is multiplied with.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.cpu.amx import FACTOR_WORDS, HAS_AMX, INT4_GROUP_WORDS, SPARE_ROWS
from cairn.kernels.cpu.compiled import ELEMENTS, I8, I32, I64, INT, U8, kernel, optional_arg, row_args
from cairn.kernels.cpu.huge_pages import weight_memory
from cairn.kernels.cpu.int8 import OUTPUTS, scale_of, signed_number
from cairn.kernels.cpu.panels import (
    RowPartition,
    as_words,
    goes_across,
    multiply_items,
    partition_rows,
    product_type,
    whole_blocks,
)
from cairn.kernels.cpu.scalars import advance, bits_of, load
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.cpu.tiles import GROUP, HAS_INT4, PANEL, VECTOR_GROUP
from cairn.kernels.cpu.vectors import ROWS_ACROSS, pointer_to, set_address, stack_buffer, transpose_rows
from cairn.kernels.int4 import Int4Weight

_INPUTS_OF_WORD = 8
_ROW_BYTES_OF_WORD = 8


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A weight, or a stack of experts' ones, in four bits.

    `shape`, `dtype`: those of the tensor it was made of. `matrices`: int32 [panels, words, 32] of each expert, one
    after the other in memory. `group`: inputs of a group.
    """

    shape: torch.Size
    dtype: torch.dtype
    matrices: tuple[Tensor, ...]
    group: int
    layout: Literal["panels"] = "panels"

    @property
    def has_tiles(self) -> bool:
        """Whether a matrix unit multiplies with it."""
        return HAS_AMX and self.group == INT4_GROUP_WORDS * _INPUTS_OF_WORD


def pack_int4(weight: Int4Weight) -> PackedInt4:
    """See `Kernels.pack_int4`."""
    if not HAS_INT4:
        raise ConfigError("--quantization int4: this processor has neither AVX2 with FMA nor VNNI; leave it out")
    scales, least, numbers = weight.scales, weight.least(), weight.numbers
    if weight.numbers.dim() == 2:
        scales, least, numbers = scales[None], least[None], numbers[None]
    count, outputs, groups = scales.shape
    panels, words = -(-outputs // PANEL), weight.group // _INPUTS_OF_WORD
    stack = weight_memory().empty((count, panels, groups * (FACTOR_WORDS + words), PANEL), torch.int32)
    step_work().add_weight(stack.nbytes, "int4 panels")
    missing = panels * PANEL - outputs
    for packed, *parts in zip(stack, numbers, scales, least, strict=True):
        matrix, *factors = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in parts)
        halves = matrix.reshape(panels, PANEL, groups, words, 2, 4)
        bytes_of_words = (halves[..., 0, :] | halves[..., 1, :] << 4).contiguous()
        blocks = packed.view(panels, groups, FACTOR_WORDS + words, PANEL)
        for place, factor in enumerate(factors):
            blocks[:, :, place] = factor.contiguous().view(torch.int32).view(panels, PANEL, groups).transpose(1, 2)
        blocks[:, :, FACTOR_WORDS:] = bytes_of_words.view(torch.int32)[..., 0].permute(0, 2, 3, 1)
    return PackedInt4(weight.shape, weight.dtype, stack.unbind(), weight.group)


def multiply_int4(
    x: Tensor, weight: PackedInt4, bias: Tensor | None, expert: int, dtype: torch.dtype | None = None
) -> Tensor:
    """x [n, in] times the transpose of one of the matrices, [n, out] in x's dtype or another one."""
    out = x.new_empty(x.shape[0], weight.shape[-2], dtype=dtype or x.dtype)
    if x.shape[0]:
        group = GROUP if x.shape[0] > VECTOR_GROUP and weight.has_tiles else VECTOR_GROUP
        parts = partition_rows(x.shape[0], 2 * weight.matrices[expert].shape[1], group)
        multiply_int4_panels(x, weight, bias, out, parts, expert=expert)
    return out


def multiply_int4_panels(
    x: Tensor,
    weight: PackedInt4,
    bias: Tensor | None,
    out: Tensor,
    parts: RowPartition,
    order: Tensor | None = None,
    expert: int = 0,
) -> None:
    """As `multiply_panels`, with the weight's matrices from `expert` on, x and the bias in bfloat16 or float32."""
    panels, by_tiles = weight.matrices[expert], parts.group > VECTOR_GROUP
    words = panels.shape[1]
    numbers = torch.empty(out.shape[0] + SPARE_ROWS, _ROW_BYTES_OF_WORD * words, dtype=torch.int8)
    _quantize_groups[x.dtype](
        parts.groups.shape[0], numbers.numel() // 4, parts.groups.data_ptr(), *optional_arg(order), *row_args(x),
        numbers.data_ptr(), x.shape[1], weight.group, by_tiles,
    )  # fmt: skip
    items, cost = parts.segments.shape[0] * panels.shape[0], parts.cost(panels)
    block = FACTOR_WORDS + weight.group // _INPUTS_OF_WORD
    operands = parts.segments.data_ptr(), panels.shape[0], numbers.data_ptr(), panels.data_ptr(), words, block
    multiply = _multiply_int4_tiles if by_tiles else _multiply_int4
    multiply[x.dtype, out.dtype](items, cost, *operands, *optional_arg(bias), out.data_ptr(), out.shape[1])


@kernel({dtype: (I32, I64, INT, x, INT, I8, INT, INT, INT) for dtype, x in ELEMENTS.items()})
def _quantize_groups(
    begin: int, end: int, groups: Any, order: Any, has_order: int, x: Any, row: int, out: Any, inputs: int, group: int,
    by_tiles: int,
) -> None:  # fmt: skip
    """In groups of rows, as `panels` has them, words of all rows side by side: of each group of inputs its scale, its
    sum, two that are not used, and the numbers; for tiles every second word of a row side by side, and then the others.
    A scale is NaN where one of its numbers is."""
    buffer, table = np.zeros(max(GROUP, ROWS_ACROSS) * group, np.int8), np.empty(ROWS_ACROSS, np.int64)
    numbers, rows, scales = pointer_to(buffer), pointer_to(table), stack_buffer(GROUP)
    for i in range(ROWS_ACROSS):
        set_address(rows, i, advance(numbers, i * group))
    num_groups, num_words = inputs // group, group // 4
    step = 2 * FACTOR_WORDS + num_words
    for item in range(begin, end):
        first, count = np.int64(groups[2 * item]), np.int64(groups[2 * item + 1])
        # What all rows' numbers of a group of inputs become lies together, in the first cache.
        for place in range(num_groups):
            target = as_words(advance(out, (first * num_groups + place * count) * step * 4))
            for i in range(count):
                source = advance(x, (order[first + i] if has_order else first + i) * row)
                scales[i] = scale_of(advance(source, place * group), group)
            for i in range(count):
                source = advance(x, (order[first + i] if has_order else first + i) * row)
                part, mine = advance(source, place * group), advance(numbers, i * group)
                factor, total = np.float32(1) / scales[i], np.int32(0)
                for j in range(group):
                    number = signed_number(load(part, j) * factor)
                    total = np.int32(total + number)
                    mine[j] = np.int8(number)
                target[i] = np.int32(bits_of(scales[i]))
                target[count + i] = np.int32(bits_of(scales[i] * np.float32(total)))
            lines, done = advance(target, 2 * FACTOR_WORDS * count), 0
            if goes_across(count) and not by_tiles:
                # Behind the last line there is the next group's, which is yet to be written.
                done = num_words // ROWS_ACROSS * ROWS_ACROSS if place + 1 < num_groups else whole_blocks(num_words)
                for word in range(0, done, ROWS_ACROSS):
                    transpose_rows(rows, word, advance(lines, word * count), count)
            for i in range(count):
                words = as_words(advance(numbers, i * group))
                if by_tiles:
                    line = advance(lines, i * INT4_GROUP_WORDS)
                    for word in range(INT4_GROUP_WORDS):
                        line[word] = words[2 * word]
                        line[INT4_GROUP_WORDS * count + word] = words[2 * word + 1]
                else:
                    for word in range(done, num_words):
                        lines[word * count + i] = words[word]
    table[0] = 0
    buffer[0] = 0


@kernel(
    {(dtype, out): (product_type(I8, I32, ELEMENTS[dtype], ELEMENTS[out]),) for dtype, out in OUTPUTS}, needs=HAS_INT4
)
def _multiply_int4(begin: int, end: int, p: Any) -> None:
    multiply_items(begin, end, p)


@kernel(
    {(dtype, out): (product_type(U8, I32, ELEMENTS[dtype], ELEMENTS[out]),) for dtype, out in OUTPUTS}, needs=HAS_AMX
)
def _multiply_int4_tiles(begin: int, end: int, p: Any) -> None:
    multiply_items(begin, end, p)
