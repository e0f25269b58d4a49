"""Rows in parts are laid out in panels as all of them joined would be, wherever they lie."""

import pytest
import torch
from torch import Tensor

from cairn.kernels.cpu.packing import fill_panels
from cairn.kernels.cpu.tiles import PANEL

DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.int32)


def drawn_rows(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    numbers = torch.randint(256, (rows, columns * dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.uint8).view(dtype)


def laid_out(parts: list[Tensor], word: int, lines: int) -> Tensor:
    """The bytes [panels, lines, 32, word] of all rows, zeros behind the last one and behind a row's last word."""
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    count = -(-len(rows) // PANEL)
    padded = torch.zeros(count * PANEL, lines * word, dtype=torch.uint8)
    padded[: len(rows), : rows.shape[1]] = rows
    return padded.view(count, PANEL, lines, word).transpose(1, 2)


def filled(parts: list[Tensor], word: int, lines: int) -> Tensor:
    count = -(-sum(map(len, parts)) // PANEL)
    panels = torch.full((count, lines, PANEL, word), 77, dtype=torch.uint8)
    fill_panels(parts, panels)
    return panels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heights", [[32], [1], [40, 3, 21], [16, 16, 64], [5, 0, 90]])
def test_parts_are_laid_out_as_one(dtype: torch.dtype, heights: list[int]) -> None:
    """Whose rows begin inside a panel, or inside a vector."""
    for columns in (4, 16, 40):
        parts = [drawn_rows(rows, columns, dtype, seed) for seed, rows in enumerate(heights)]
        word = dtype.itemsize
        assert torch.equal(filled(parts, word, columns + 3), laid_out(parts, word, columns + 3))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 5, 31, 66])
def test_numbers_that_do_not_fill_their_words(dtype: torch.dtype, columns: int) -> None:
    parts = [drawn_rows(rows, columns, dtype, rows) for rows in (33, 50)]
    lines = -(-columns * dtype.itemsize // 4) + 1
    assert torch.equal(filled(parts, 4, lines), laid_out(parts, 4, lines))


@pytest.mark.parametrize("first", [0, 1, 2, 4])
def test_rows_that_are_parts_of_longer_ones(first: int) -> None:
    """At addresses that are multiples of nothing, and with columns that are not side by side."""
    wide = drawn_rows(70, 151, torch.bfloat16)
    for part in (wide[:, first : first + 48], wide[::2, first : first + 48], wide.t()[first : first + 40]):
        lines = -(-part.shape[1] // 2)
        assert torch.equal(filled([part], 4, lines), laid_out([part], 4, lines))
