"""Rows of weights laid out in panels: what 32 outputs have in one place, side by side.

Rows are read where they lie, which may be a file that is mapped into memory, one after the other or across, and each is
written once, to where it stays: those of several weights that become one are not joined before.

While a model is loaded this is done in the background of the thread that finds the weights, whose Python takes as long
as the loops: rows are waited for, from a disk, where nobody else has to wait.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.cpu.compiled import BF16, I32, INT, U8, Variant, kernel
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.tiles import PANEL
from cairn.kernels.cpu.vectors import LANES, transpose_16

_COPY_RATE = 4
"""Bytes that one thread lays out in a nanosecond."""

_PANELS_AT_A_TIME = 4
"""Of rows side by side: lines that are read are longer than those that are written."""

_LEAST_IN_BACKGROUND, _LARGEST_IN_BACKGROUND = 1 << 19, 4 << 20
"""Bytes of rows that are worth waking another thread, for which those of several matrices are collected, and beyond
which all threads together are faster."""

_MOST_WAITING = 4 << 20
"""Bytes of rows that wait: those that were put in order for this take memory until then."""

_SIGNS: Mapping[int, int] = MappingProxyType({4: -0x7F7F7F80, 1: 0x80})
"""By the bytes of a word, the highest bit of each of its bytes."""


def fill_panels(parts: Sequence[Tensor], panels: Tensor, flips: bool = False) -> None:
    """The rows of `parts`, each [rows, n] of one n, one after the other, into `panels` [panels, lines, 32, ...], of any
    dtypes, contiguous, whose words are what is behind the third dimension, of 1, 2 or 4 bytes. Zeros go to where there
    are no more words of a row, or no more rows. `flips`: the highest bit of each byte is another one then, which makes
    bytes from 0 on of int8."""
    count, lines = panels.shape[:2]
    word, width, itemsize = panels.stride(2) * panels.itemsize, parts[0].shape[1], parts[0].itemsize
    row_bytes, address = width * itemsize, panels.data_ptr()
    columns, first, flipped = -(-row_bytes // word), 0, _SIGNS[word] if flips else 0
    for part in parts:
        rows, (row, step) = part.shape[0], part.stride()
        is_across = row == 1 and itemsize == word and step >= rows > 1
        if row_bytes % word:
            part = F.pad(part, (0, (columns * word - row_bytes) // itemsize))
            row = part.stride(0)
        elif not is_across and (step != 1 or row * itemsize % word):
            part = part.contiguous()
            row = part.stride(0)
        if num_bytes := rows * row_bytes:
            items = (first + rows - 1) // PANEL - first // PANEL + 1
            loop, step = (_fill_across, step) if is_across else (_fill_panels, row * itemsize // word)
            if is_across:
                items = -(-items // _PANELS_AT_A_TIME)
            places = part.data_ptr(), step, first, rows, columns, flipped, address, lines
            packing().run(loop[word], items, num_bytes, places, (part, panels))
        first += rows
    if columns < lines:
        panels[:, columns:] = 0
    if first < count * PANEL:
        panels[first // PANEL, :, first % PANEL :] = 0


class Packing:
    """Loops that lay rows out, at once or on threads in the background."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._collected: list[tuple[Callable[[], None], tuple[Tensor, ...]]] = []
        self._begun: deque[tuple[Future[None], int]] = deque()
        self._num_collected = self._num_bytes = 0

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Inside, rows that were given are laid out on other threads, and nobody may look at panels; at the end all
        are. Each of them has one of the threads, of which there is one less than torch has: with a single one all
        is done at once."""
        threads = torch.get_num_threads() - 1
        if threads < 1 or self._pool is not None:
            yield
            self._finish()
            return
        self._pool = ThreadPoolExecutor(threads, "cairn-packing")
        try:
            yield
            self._finish()
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._begun.clear()
            self._collected, self._num_collected = [], 0
            self._pool, self._num_bytes = None, 0

    def run(self, loop: Variant, items: int, num_bytes: int, places: tuple[int, ...], kept: tuple[Tensor, ...]) -> None:
        """`items` of a loop over so many bytes. `kept`: what is at the places."""
        if self._pool is None or num_bytes > _LARGEST_IN_BACKGROUND:
            loop(items, num_bytes // _COPY_RATE, *places)
            return
        # Without a cost the loop stays on its thread.
        self._collected.append((partial(loop, items, 0, *places), kept))
        self._num_collected += num_bytes
        if self._num_collected >= _LEAST_IN_BACKGROUND:
            self._submit(self._pool)

    def _submit(self, pool: ThreadPoolExecutor) -> None:
        self._wait_for(_MOST_WAITING)
        begun = pool.submit(_run_all, self._collected)
        self._begun.append((begun, self._num_collected))
        self._num_bytes += self._num_collected
        self._collected, self._num_collected = [], 0

    def _finish(self) -> None:
        """Until all is laid out."""
        if self._pool is not None and self._collected:
            self._submit(self._pool)
        self._wait_for(0)

    def cost(self, nanoseconds: int, num_bytes: int) -> int:
        """What a loop that gets so many bytes of rows ready is to be said to take: while others are laid out in the
        background it stays on its thread, which is done before the team is awake, whose cores are not idle."""
        return nanoseconds if self._pool is None or num_bytes > _LARGEST_IN_BACKGROUND else 0

    def _wait_for(self, most: int) -> None:
        """Until there are no more bytes than that."""
        while self._begun and (self._num_bytes > most or self._begun[0][0].done()):
            begun, num_bytes = self._begun.popleft()
            begun.result()
            self._num_bytes -= num_bytes


def _run_all(loops: list[tuple[Callable[[], None], tuple[Tensor, ...]]]) -> None:
    """One after the other. What each works with is there until its end."""
    for number, (loop, _) in enumerate(loops):
        loop()
        loops[number] = loop, ()


@cache
def packing() -> Packing:
    """One for the process."""
    return Packing()


_FILLS: Mapping[Hashable, Any] = MappingProxyType(
    {word: (kind, INT, INT, INT, INT, INT, kind, INT) for word, kind in ((4, I32), (2, BF16), (1, U8))}
)


@kernel(_FILLS)
def _fill_panels(
    begin: int, end: int, source: Any, row: int, first: int, rows: int, columns: int, flipped: int, panels: Any,
    lines: int,
) -> None:  # fmt: skip
    """Items are the panels that the rows [first, first + rows) are in. `flipped`: bits of each word."""
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
        if flipped:
            for column in range(columns):
                for lane in range(height):
                    target[column * PANEL + lane] ^= flipped


@kernel(_FILLS)
def _fill_across(
    begin: int, end: int, source: Any, line: int, first: int, rows: int, columns: int, flipped: int, panels: Any,
    lines: int,
) -> None:  # fmt: skip
    """As `_fill_panels` of rows side by side, each next word of them `line` words on. Items are a few panels."""
    top, bottom = first // PANEL, (first + rows - 1) // PANEL + 1
    for item in range(begin, end):
        begin_panel = top + item * _PANELS_AT_A_TIME
        end_panel = min(bottom, begin_panel + _PANELS_AT_A_TIME)
        for column in range(columns):
            words = advance(source, column * line)
            for panel in range(begin_panel, end_panel):
                low, high = max(first, panel * PANEL), min(first + rows, (panel + 1) * PANEL)
                target = advance(panels, (panel * lines + column) * PANEL + low - panel * PANEL)
                part = advance(words, low - first)
                for lane in range(high - low):
                    target[lane] = part[lane] ^ flipped
