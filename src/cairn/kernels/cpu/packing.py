"""Rows of weights laid out in panels: what 32 outputs have in one place, side by side.

Rows are read where they lie, which may be a file that is mapped into memory, and each is written once, to where it
stays: those of several weights that become one are not joined before.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.cpu.compiled import BF16, I32, INT, U8, kernel
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.tiles import PANEL
from cairn.kernels.cpu.vectors import LANES, transpose_16

_COPY_RATE = 4
"""Bytes that one thread lays out in a nanosecond."""


def fill_panels(parts: Sequence[Tensor], panels: Tensor) -> None:
    """The rows of `parts`, each [rows, n] of one n, one after the other, into `panels` [panels, lines, 32, ...], of any
    dtypes, contiguous, whose words are what is behind the third dimension, of 1, 2 or 4 bytes. Zeros go to where there
    are no more words of a row, or no more rows."""
    count, lines = panels.shape[:2]
    word, row_bytes = panels.stride(2) * panels.itemsize, parts[0].shape[1] * parts[0].itemsize
    columns, first = -(-row_bytes // word), 0
    for part in parts:
        rows = part.shape[0]
        if row_bytes % word:
            part = F.pad(part, (0, (columns * word - row_bytes) // part.itemsize))
        elif part.stride(1) != 1 or part.stride(0) * part.itemsize % word:
            part = part.contiguous()
        if part.numel():
            arguments = part.data_ptr(), part.stride(0) * part.itemsize // word, first, rows, columns
            num_panels = (first + rows - 1) // PANEL - first // PANEL + 1
            _fill_panels[word](num_panels, part.nbytes // _COPY_RATE, *arguments, panels.data_ptr(), lines)
        first += rows
    panels[:, columns:] = 0
    if first < count * PANEL:
        panels[first // PANEL, :, first % PANEL :] = 0


@kernel({word: (kind, INT, INT, INT, INT, kind, INT) for word, kind in ((4, I32), (2, BF16), (1, U8))})
def _fill_panels(
    begin: int, end: int, source: Any, row: int, first: int, rows: int, columns: int, panels: Any, lines: int
) -> None:
    """Items are the panels that the rows [first, first + rows) are in."""
    for item in range(begin, end):
        panel = first // PANEL + item
        top, bottom = max(first, panel * PANEL), min(first + rows, (panel + 1) * PANEL)
        part = advance(source, (top - first) * row)
        target = advance(panels, panel * lines * PANEL + top - panel * PANEL)
        height = bottom - top
        wide, tall = columns // LANES * LANES, height // LANES * LANES
        for column in range(0, wide, LANES):
            for lane in range(0, tall, LANES):
                square = advance(target, column * PANEL + lane)
                transpose_16(advance(part, lane * row + column), row, square, PANEL)
        for column in range(columns):
            for lane in range(tall if column < wide else 0, height):
                target[column * PANEL + lane] = part[lane * row + column]
