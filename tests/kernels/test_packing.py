"""Rows in parts are laid out in panels as all of them joined would be, wherever they lie."""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from cairn.errors import EngineDead
from cairn.kernels.cpu import packing as packing_module
from cairn.kernels.cpu.compiled import INT, kernel
from cairn.kernels.cpu.graphs import LoopSequence
from cairn.kernels.cpu.loop_queue import LoopQueue
from cairn.kernels.cpu.packing import PackedLoop, fill_panels, packing
from cairn.kernels.cpu.tiles import PANEL
from cairn.kernels.cpu.transposing import join_codes, order_codes, transpose_words

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


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_rows_laid_out_in_the_background_are_there_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nobody else keeps, more of them than may wait, and some that are too small or too large for it."""
    monkeypatch.setattr(packing_module, "_MOST_WAITING", 1 << 20)
    shapes = [(96, 2048), (33, 40), (200, 1024), (4096, 2048), (64, 4096), (32, 8)]
    made = []
    with packing().in_background():
        for number in range(24):
            rows, columns = shapes[number % len(shapes)]
            drawn = drawn_rows(rows, columns, torch.bfloat16, number)
            across = number % 3 == 0
            panels = torch.full((-(-rows // PANEL), columns, PANEL, 2), 77, dtype=torch.uint8)
            fill_panels([drawn.t().contiguous().t() if across else drawn], panels)
            made.append((number, panels))
            del drawn
    for number, panels in made:
        rows, columns = shapes[number % len(shapes)]
        assert torch.equal(panels, laid_out([drawn_rows(rows, columns, torch.bfloat16, number)], 2, columns))


@pytest.mark.usefixtures("two_threads")
def test_rows_are_laid_out_once_they_are_there() -> None:
    """Those that were given until then."""
    rows, panels = drawn_rows(1024, 1024, torch.bfloat16), torch.zeros(32, 1024, PANEL, 2, dtype=torch.uint8)
    stored, waiting, seen = rows.clone(), list[Callable[[], None]](), list[bool]()

    def fetch() -> None:
        while len(waiting) < 2:
            threading.Event().wait(0.001)
        seen.append(bool((panels != 0).any()))
        rows.copy_(stored)
        for act in waiting:
            act()

    rows.zero_()
    fetching = threading.Thread(target=fetch)
    with packing().in_background(waiting.append):
        fill_panels([rows], panels)
        fill_panels([rows], torch.empty_like(panels))
        fetching.start()
    fetching.join()
    assert seen == [False]
    assert torch.equal(panels, laid_out([stored], 2, 1024))


@pytest.mark.usefixtures("two_threads")
def test_rows_that_do_not_come_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "_PATIENCE", 0.01)
    rows, panels = drawn_rows(1024, 1024, torch.bfloat16), torch.zeros(32, 1024, PANEL, 2, dtype=torch.uint8)
    with pytest.raises(EngineDead, match="no weights"), packing().in_background(lambda act: None):
        fill_panels([rows], panels)
    assert not panels.any()
    fill_panels([rows], panels)
    assert torch.equal(panels, laid_out([rows], 2, 1024))


@pytest.mark.usefixtures("two_threads")
def test_what_fails_in_the_background_is_raised() -> None:
    rows, panels = drawn_rows(128, 2048, torch.bfloat16), torch.empty(4, 2048, PANEL, 2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="_fail failed"), packing().in_background():
        packing().run(PackedLoop(_fail["any"], 1, 0, 1 << 20, (1,), ()))
    fill_panels([rows], panels)
    assert torch.equal(panels, laid_out([rows], 2, 2048))


@kernel({"any": (INT,)})
def _fail(begin: int, end: int, least: int) -> None:
    for item in range(begin, end):
        if item < least:
            raise ValueError("too few")


@pytest.mark.usefixtures("two_threads")
def test_small_rows_share_a_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    add = LoopQueue.add

    def noted(queue: LoopQueue, sequence: LoopSequence) -> int:
        runs.append(sequence.table[1])
        return add(queue, sequence)

    monkeypatch.setattr(LoopQueue, "add", noted)
    made = []
    with packing().in_background():
        for number in range(100):
            rows = drawn_rows(32, 8, torch.bfloat16, number)
            panels = torch.empty(1, 8, PANEL, 2, dtype=torch.uint8)
            fill_panels([rows], panels)
            made.append((rows, panels))
    assert runs == [100]
    for rows, panels in made:
        assert torch.equal(panels, laid_out([rows], 2, 8))


@pytest.mark.usefixtures("two_threads")
def test_the_caller_takes_what_no_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nobody else does here."""
    monkeypatch.setattr(packing_module, "LoopQueue", lambda num_threads: LoopQueue(0))
    drawn = [drawn_rows(1024, 1024, torch.bfloat16, number) for number in range(5)]
    made = [torch.empty(32, 1024, PANEL, 2, dtype=torch.uint8) for _ in drawn]
    with packing().in_background():
        for rows, panels in zip(drawn, made, strict=True):
            fill_panels([rows], panels)
    for rows, panels in zip(drawn, made, strict=True):
        assert torch.equal(panels, laid_out([rows], 2, 1024))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("columns", [64, 5])
def test_what_was_put_off_has_run_before_rows_are_laid_out(columns: int) -> None:
    drawn = drawn_rows(8 * 40, columns, torch.int32)
    joined: list[Tensor] = []
    wanted = transpose_words(drawn)
    panels = torch.full((-(-columns // PANEL), 8 * 40, PANEL, 4), 77, dtype=torch.uint8)
    with packing().in_background():
        put_off = packing().put_off(lambda: joined.append(transpose_words(drawn)))
        assert len(put_off) == 1
        joined[0].fill_(-1)
        packing().together(put_off, lambda: fill_panels(joined, panels))
    assert torch.equal(panels, laid_out([wanted], 4, 8 * 40))


MAKERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "joined": lambda words: join_codes(words, (0, 2, 4, 6, 1, 3, 5, 7)),
        "in order": lambda words: order_codes(words, torch.arange(8 * len(words), dtype=torch.int32).flip(0), 4),
        "bytes in order": lambda words: order_codes(words, torch.arange(4 * len(words), dtype=torch.int32).flip(0), 8),
    }
)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("cut", [None, 32, 20])
@pytest.mark.parametrize("widths", [(64, 160), (96,), (16, 16, 32), (40, 24), (72, 8)])
def test_what_makes_rows_may_write_them_to_where_they_are_laid_out(
    widths: tuple[int, ...], cut: int | None, make: Callable[[Tensor], Tensor]
) -> None:
    """Where they begin with a panel and end with one, and are not in parts."""
    drawn = [drawn_rows(8 * 5, width, torch.int32, width) for width in widths]
    made: list[Tensor] = []

    def make_one(words: Tensor) -> None:
        made.append(make(words))

    def parts() -> list[Tensor]:
        rows = [each.t() for each in made]
        return rows if cut is None else [part for each in rows for part in (each[cut:], each[:cut]) if len(part)]

    for words in drawn:
        make_one(words)
    wanted, lines = [part.clone(memory_format=torch.contiguous_format) for part in parts()], made[0].shape[0] + 3
    panels = torch.full((-(-sum(map(len, wanted)) // PANEL), lines, PANEL, 4), 77, dtype=torch.uint8)
    made.clear()
    with packing().in_background():
        put_off = [loop for words in drawn for loop in packing().put_off(partial(make_one, words))]
        for each in made:
            each.fill_(-1)
        packing().together(put_off, lambda: fill_panels(parts(), panels))
    assert torch.equal(panels, laid_out(wanted, 4, lines))
    if cut is None and all(len(part) % PANEL == 0 for part in wanted):
        assert all((each == -1).all() for each in made)


@pytest.mark.usefixtures("two_threads")
def test_copies_are_there_at_the_end() -> None:
    numbers = drawn_rows(1500, 700, torch.bfloat16)
    with packing().in_background():
        copy = packing().copy(numbers)
    assert torch.equal(copy.view(torch.uint8), numbers.view(torch.uint8)) and copy.data_ptr() != numbers.data_ptr()


@pytest.mark.usefixtures("two_threads")
def test_loops_stay_on_their_thread_while_others_are_laid_out() -> None:
    assert packing().cost(1000) == 1000
    with packing().in_background():
        assert packing().cost(1000) == 0
    assert packing().cost(1000) == 1000
