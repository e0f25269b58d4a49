"""Rows of weights laid out in panels: what 32 outputs have in one place, side by side.

Rows are read where they lie, which may be a file that is mapped into memory, one after the other or across, and each is
written once, to where it stays: those of several weights that become one are not joined before.

While a model is loaded this is done in the background of the thread that finds the weights, whose Python takes as long
as the loops: rows are waited for, from a disk, where nobody else has to wait.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.errors import EngineDead
from cairn.kernels.cpu.compiled import BF16, I32, INT, U8, Variant, kernel
from cairn.kernels.cpu.graphs import LoopSequence
from cairn.kernels.cpu.loop_queue import LoopQueue
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.tiles import PANEL
from cairn.kernels.cpu.vectors import LANES, transpose_16
from cairn.kernels.weight_rows import WhenThere, memory_of

Result = TypeVar("Result")

_COPY_RATE = 4
"""Bytes that one thread lays out in a nanosecond."""

_PANELS_AT_A_TIME = 8
"""Of rows side by side: lines that are read are longer than those that are written."""

_COPIED_AT_A_TIME = 1 << 20
"""Bytes."""

_LEAST_IN_BACKGROUND = 1 << 20
"""Bytes of rows that are worth waking another thread, for which those of several matrices are collected."""

_MOST_WAITING = 4 << 20
"""Bytes of rows that wait: those that were put in order for this take memory until then."""

_FILE_SHARE = 16
"""So many bytes of rows that lie in files count as one that waits."""

_PATIENCE, _PAUSE = 900.0, 50e-6
"""Seconds that the caller waits for rows at most, and between two looks."""

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
        if (maker := packing().maker_of(part)) is not None:
            moved = None if flips else maker.into(part, panels, first)
            if moved is not None:
                packing().run(moved, in_file=True)
                first += rows
                continue
            packing().run(maker)
        is_across = row == 1 and itemsize == word and step >= rows > 1
        if row_bytes % word:
            packing().look()
            part = F.pad(part, (0, (columns * word - row_bytes) // itemsize))
            row = part.stride(0)
        elif not is_across and (step != 1 or row * itemsize % word):
            packing().look()
            part = part.contiguous()
            row = part.stride(0)
        if num_bytes := rows * row_bytes:
            items = (first + rows - 1) // PANEL - first // PANEL + 1
            loop, step = (_fill_across, step) if is_across else (_fill_panels, row * itemsize // word)
            if is_across:
                items = -(-items // _PANELS_AT_A_TIME)
            places = part.data_ptr(), step, first, rows, columns, flipped, address, lines
            cost = num_bytes // _COPY_RATE
            packing().run(PackedLoop(loop[word], items, cost, num_bytes, places, (part, panels)))
        first += rows
    cleared = 0 if columns < lines else first // PANEL
    if cleared < count:
        # Whoever writes to new memory waits for its pages.
        cost = (count - cleared) * lines * PANEL * word // _COPY_RATE
        taken = address, cleared, first, columns, lines, word
        packing().run(PackedLoop(_clear["bytes"], count - cleared, cost, 0, taken, (panels,)))


@dataclass(slots=True, eq=False)
class PackedLoop:
    """`items` of a loop over so many bytes, with what it takes. `kept`: what is at these places. `target`: int32
    [n, m], what it writes, if the last three places say where: an address, and how many words lines, and 32 words of a
    line, are apart."""

    loop: Variant
    items: int
    cost: int
    num_bytes: int
    places: tuple[int, ...]
    kept: tuple[object, ...]
    target: Tensor | None = None

    def __call__(self) -> None:
        self.loop(self.items, packing().cost(self.cost), *self.places)

    def into(self, part: Tensor, panels: Tensor, first: int) -> "PackedLoop | None":
        """The same, whose columns, which are the rows `part`, are those from the `first` on of panels
        [panels, lines, 32] of words; None where these are not all that it writes, or not whole panels."""
        target, lines = self.target, panels.shape[1]
        if target is None or part.data_ptr() != target.data_ptr() or part.shape != target.shape[::-1]:
            return None
        if first % PANEL or part.shape[0] % PANEL:
            return None
        places = panels.data_ptr() + first * lines * target.itemsize, PANEL, lines * PANEL
        kept = *self.kept[1:], panels
        return PackedLoop(self.loop, self.items, self.cost, target.nbytes, (*self.places[:-3], *places), kept)


class _Batch(NamedTuple):
    """Loops in a queue under a number, with the rows that they need, of which so many bytes wait."""

    number: int
    sequence: LoopSequence
    loops: list[PackedLoop]
    num_waiting: int


_ALL = -1
"""Fewer bytes than ever wait."""


class Packing:
    """Loops that lay rows out, at once or on threads in the background."""

    def __init__(self) -> None:
        self._queue: LoopQueue | None = None
        self._when_there: WhenThere = lambda act: act()
        self._put_off: list[PackedLoop] | None = None
        self._collected: list[PackedLoop] = []
        self._batches: deque[_Batch] = deque()
        self._num_collected = self._num_kept = self._num_waiting = 0
        self._are_together = False
        self._makers: dict[int, PackedLoop] = {}

    @contextmanager
    def in_background(self, when_there: WhenThere = lambda act: act()) -> Iterator[None]:
        """Inside, rows that were given are laid out on other threads, and nobody may look at panels; at the end all
        are. Each of them has one of the threads, of which there is one less than torch has, as the caller is one too
        where it would wait: with a single one all is done at once. `when_there`: is told of all loops, which run once
        there is what they read."""
        threads = torch.get_num_threads() - 1
        if threads < 1 or self._queue is not None:
            yield
            return
        self._queue, self._when_there = LoopQueue(threads), when_there
        try:
            yield
            self._submit()
            self._wait_for(_ALL)
        finally:
            self._queue.close()
            self._collected = []
            self._batches.clear()
            self._num_collected = self._num_kept = self._num_waiting = 0
            self._queue, self._are_together = None, False

    def put_off(self, read: Callable[[], object]) -> tuple[PackedLoop, ...]:
        """The loops that would get rows ready in `read`, where others are laid out in the background: nobody may look
        at the rows before they have run. Elsewhere they do at once."""
        self._put_off = None if self._queue is None else []
        try:
            read()
            return tuple(self._put_off or ())
        finally:
            self._put_off = None

    def get_ready(self, loop: PackedLoop) -> None:
        """At once, or later: see `put_off`."""
        if self._put_off is None:
            loop()
        else:
            self._put_off.append(loop)

    def copy(self, source: Tensor) -> Tensor:
        """Contiguous numbers, in memory of their own, where they are at the end of `in_background`."""
        out = torch.empty_like(source)
        places = source.data_ptr(), out.data_ptr(), _COPIED_AT_A_TIME, source.nbytes
        items, cost = -(-source.nbytes // _COPIED_AT_A_TIME), source.nbytes // _COPY_RATE
        self.run(PackedLoop(_copy["bytes"], items, cost, source.nbytes, places, (source, out)))
        return out

    def together(self, put_off: Collection[PackedLoop], lay_out: Callable[[], Result]) -> Result:
        """`lay_out`, whose loops take what these have made, and stay on one thread with them."""
        self._are_together = bool(put_off) and self._queue is not None
        for each in put_off:
            if each.target is None:
                self.run(each)
            else:
                self._makers[memory_of(each.target)] = each
        try:
            return lay_out()
        finally:
            self._are_together = False
            self._makers.clear()
            self._submit(_LEAST_IN_BACKGROUND)

    def maker_of(self, part: Tensor) -> PackedLoop | None:
        """The loop that would make what a part is in, which has not been told to run yet; once."""
        return self._makers.pop(memory_of(part), None) if self._makers else None

    def run(self, loop: PackedLoop, in_file: bool = False) -> None:
        """Now or in the background. `in_file`: what it reads lies in a file."""
        if self._queue is None:
            loop()
            return
        self._collected.append(loop)
        self._num_collected += loop.num_bytes
        is_kept = self._are_together and not in_file
        self._num_kept += loop.num_bytes if is_kept else loop.num_bytes // _FILE_SHARE
        if not self._are_together:
            self._submit(_LEAST_IN_BACKGROUND)

    def look(self) -> None:
        """What loops that are together make is wanted now."""
        if self._are_together:
            self._submit()
            self._wait_for(_ALL)

    def _submit(self, least: int = 0) -> None:
        """If loops over so many bytes were collected."""
        if self._queue is not None and self._collected and self._num_collected >= least:
            self._wait_for(_MOST_WAITING)
            loops = self._collected
            sequence = LoopSequence([each.loop.later(each.items, *each.places) for each in loops])
            self._batches.append(_Batch(self._queue.add(sequence), sequence, loops, self._num_kept))
            self._num_waiting += self._num_kept
            self._collected, self._num_collected, self._num_kept = [], 0, 0
            self._when_there(self._queue.give)

    def cost(self, nanoseconds: int) -> int:
        """What a loop is to be said to take: while others are in the background it stays on its thread, which is done
        before the team is awake, whose cores are not idle."""
        return nanoseconds if self._queue is None else 0

    def _wait_for(self, most: int) -> None:
        """Until there are no more bytes than that: meanwhile the caller takes what no thread has begun. Raises
        EngineDead when there is nothing to take for too long, and RuntimeError where a loop failed."""
        deadline = 0.0
        while self._batches and self._queue is not None:
            if self._queue.is_done(self._batches[0].number):
                self._drop_first(self._queue)
                deadline = 0.0
            elif self._num_waiting <= most:
                return
            elif self._queue.run_next():
                deadline = 0.0
            else:
                now = time.monotonic()
                deadline = deadline or now + _PATIENCE
                if now > deadline:
                    raise EngineDead(f"no weights that are waited for have been read within {_PATIENCE:g} s")
                time.sleep(_PAUSE)

    def _drop_first(self, queue: LoopQueue) -> None:
        """What is done."""
        first = self._batches.popleft()
        self._num_waiting -= first.num_waiting
        if (failed := queue.failed(first.number)) is not None:
            raise RuntimeError(f"{first.sequence.name(failed)} failed")


@kernel({"bytes": (U8, U8, INT, INT)})
def _copy(begin: int, end: int, source: Any, target: Any, size: int, num_bytes: int) -> None:
    """Items are `size` bytes, but for the last one."""
    for j in range(begin * size, min(end * size, num_bytes)):
        target[j] = source[j]


@kernel({"bytes": (U8, INT, INT, INT, INT, INT)})
def _clear(begin: int, end: int, panels: Any, start: int, rows: int, columns: int, lines: int, word: int) -> None:
    """Zeros to where there is none of so many rows and columns. Items are panels, from the one called `start` on."""
    for item in range(begin, end):
        panel = start + item
        height = min(max(rows - panel * PANEL, 0), PANEL)
        for line in range(lines):
            target = advance(panels, (panel * lines + line) * PANEL * word)
            for j in range(height * word if line < columns else 0, PANEL * word):
                target[j] = np.uint8(0)


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
                if high - low == PANEL:
                    # A loop of a length that is known takes two thirds of the time.
                    for lane in range(PANEL):
                        target[lane] = part[lane] ^ flipped
                else:
                    for lane in range(high - low):
                        target[lane] = part[lane] ^ flipped
