"""States to and from checkpoint files, and pages from one place of the pool to another: bytes are moved, so the bound
is the memory, in one launch for all layers, files and kinds of states that a call names.

Bytes go in words of up to eight, two of which a thread takes at once where everything begins at multiples of 16 bytes.
Where a file's bytes lie is in a table: a span is cut where a page ends and into pieces no longer than a tile's row, and
a tile is some pieces of one tensor. All sizes of the kernels are plain arguments that are not specialized, so that one
variant does for hidden states, a layer's snapshots and all layers of a slot.

States that are encoded take a second launch, with the arithmetic of `state_codec`, bit for bit: a program has some
parts of a head that have a scale each, and every number of theirs finds its page by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels import state_codec
from cairn.kernels.checkpoint_files import StateSpan, common_alignment, word_of
from cairn.kernels.cuda.device import power_of_2
from cairn.kernels.state_encoding import SCALE_BYTES, EncodedStates, head_table

_ROW_BYTES = 512
"""Of a tile's row at most: convolution channels of a unit are some hundred bytes, and a row has one piece."""

_TILE_BYTES = 8192
"""64 bytes a thread under way at once. Chosen without a measurement."""

_TILE_NUMBERS = 2048
"""Of a tile of a head. Chosen without a measurement."""

_NUM_WARPS = 4

_MAX_TENSORS = 3

_LEAST_BITS, _INFINITY_BITS = tl.constexpr(state_codec.LEAST_BITS), tl.constexpr(state_codec.INFINITY_BITS)
_HALF_TOP, _HALF_ROUNDING = tl.constexpr(state_codec.HALF_TOP), tl.constexpr(state_codec.HALF_ROUNDING)
_MOST_HALF, _MOST_INT8 = tl.constexpr(state_codec.MOST_HALF), tl.constexpr(state_codec.MOST_INT8)
_ROW_ROUNDING = tl.constexpr(state_codec.ROW_ROUNDING)

_INT8_ROUNDING = tl.constexpr(1.5 * 2**23)
"""Added to a small float32, it leaves the nearest whole number in the lowest bits, the even one of two."""

_SIZES = (
    "num_tiles", "file_pages", "page_words", "first_words", "second_words", "third_words",
    "num_copies",
    "num_heads", "num_blocks", "page_bytes", "entry_numbers", "num_parts", "part_numbers",
)  # fmt: skip

_sized = triton.jit(do_not_specialize=list(_SIZES))


@_sized
def _files_kernel(
    pool, files, entries, first, second, third, tile_tensors, pieces,
    num_tiles, file_pages, page_words, first_words, second_words, third_words,
    STORE: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of one file. `pieces` int32 [4, tiles * ROWS]: of each its page in the file, and in words the place in the
    page, the place in the entry and the length, 0 for none. `first_words`, ...: from an entry of a tensor to the next.
    """
    file = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    if CHOSEN:
        entry = tl.load(entries + file)
    else:
        entry = file.to(tl.int64)
    which = tl.load(tile_tensors + tile)
    tensor = first
    entry_words = first_words
    if which == 1:
        tensor = second
        entry_words = second_words
    if which == 2:
        tensor = third
        entry_words = third_words

    piece = pieces + tile * ROWS + tl.arange(0, ROWS)
    num_pieces = num_tiles * ROWS
    page = tl.load(files + file.to(tl.int64) * file_pages + tl.load(piece))
    in_pool = page * page_words + tl.load(piece + num_pieces)
    in_entry = entry * entry_words + tl.load(piece + 2 * num_pieces)
    length = tl.load(piece + 3 * num_pieces)
    if ALIGNED:
        in_pool = tl.multiple_of(in_pool, 2)
        in_entry = tl.multiple_of(in_entry, 2)
        length = tl.multiple_of(length, 2)
    column = tl.arange(0, COLUMNS)
    mask = column[None, :] < length[:, None]
    paged = pool + (in_pool[:, None] + column[None, :])
    tensor_places = tensor + (in_entry[:, None] + column[None, :])
    if STORE:
        tl.store(paged, tl.load(tensor_places, mask=mask, other=0), mask=mask)
    else:
        tl.store(tensor_places, tl.load(paged, mask=mask, other=0), mask=mask)


@triton.jit
def _in_pool(file_pages, page_bytes, offset, mask):
    """Where byte `offset` of a file with these pages lies in the pool."""
    page = tl.load(file_pages + offset // page_bytes, mask=mask, other=0)
    return page * page_bytes + offset % page_bytes


@_sized
def _heads_kernel(
    pool, pool_halves, files, entries, tensor, heads,
    num_heads, num_blocks, file_pages, page_bytes, entry_numbers, num_parts, part_numbers,
    STORE: tl.constexpr, CHOSEN: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """PARTS of the parts of a head that have a scale each. `heads` int32 [heads, 3]: see `head_table`. `pool`: in
    numbers of 16 bits if HALF, else in bytes. `entry_numbers`: from an entry to the next."""
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % num_heads
    file = tl.program_id(0) // num_blocks // num_heads
    if CHOSEN:
        entry = tl.load(entries + file)
    else:
        entry = file.to(tl.int64)
    pages = files + file.to(tl.int64) * file_pages
    part = block * PARTS + tl.arange(0, PARTS)
    values_at = tl.load(heads + 3 * head + 1)
    head_base = tensor + entry * entry_numbers + tl.load(heads + 3 * head)
    column = tl.arange(0, NUMBERS)
    # A scale may lie in two pages, a half of it may not.
    half = tl.arange(0, 2)
    scale_offset = tl.load(heads + 3 * head + 2) + 4 * part[:, None] + 2 * half[None, :]
    scale_mask = part[:, None] < num_parts + 0 * half[None, :]
    scale_halves = pool_halves + _in_pool(pages, page_bytes, scale_offset, scale_mask) // 2

    if STORE:
        most = tl.zeros([PARTS], tl.int32)
        for start in range(0, part_numbers, NUMBERS):
            mask = (part[:, None] < num_parts) & (start + column[None, :] < part_numbers)
            x = tl.load(head_base + (part[:, None] * part_numbers + start + column[None, :]), mask=mask, other=0.0)
            most = tl.maximum(most, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
        if HALF:
            exponent = tl.minimum(tl.maximum((most + _HALF_ROUNDING) >> 23, _HALF_TOP + 1), 254) - _HALF_TOP
            scale = exponent << 23
        else:
            whole = most.to(tl.float32, bitcast=True)
            scale = tl.div_rn(whole, tl.zeros_like(whole) + _MOST_INT8).to(tl.int32, bitcast=True) + _ROW_ROUNDING
            scale = tl.maximum(scale & -(2 * _ROW_ROUNDING), _LEAST_BITS)
        broken = most >= _INFINITY_BITS
        # 1 where there is nothing to be scaled.
        scale = tl.where((most < _LEAST_BITS) | broken, 0x3F800000, scale)
        stored_scale = tl.where(broken, 0x7FC00000, scale)
        tl.store(scale_halves, (stored_scale[:, None] >> (16 * half[None, :])).to(tl.int16), mask=scale_mask)
        by = scale.to(tl.float32, bitcast=True)
    else:
        parted = tl.load(scale_halves, mask=scale_mask, other=0).to(tl.int32) & 0xFFFF
        by = tl.sum(parted << (16 * half[None, :]), 1).to(tl.float32, bitcast=True)

    for start in range(0, part_numbers, NUMBERS):
        mask = (part[:, None] < num_parts) & (start + column[None, :] < part_numbers)
        place = part[:, None] * part_numbers + start + column[None, :]
        if HALF:
            stored = pool + _in_pool(pages, page_bytes, values_at + 2 * place, mask) // 2
        else:
            stored = pool + _in_pool(pages, page_bytes, values_at + place, mask)
        if STORE:
            x = tl.where(broken[:, None], 0.0, tl.load(head_base + place, mask=mask, other=0.0))
            scaled = tl.div_rn(x, by[:, None] + tl.zeros_like(x))
            if HALF:
                scaled = tl.minimum(tl.maximum(scaled, -_MOST_HALF), _MOST_HALF)
                tl.store(stored, scaled.to(tl.float16).to(tl.int16, bitcast=True), mask=mask)
            else:
                rounded = (scaled + _INT8_ROUNDING).to(tl.int32, bitcast=True)
                tl.store(stored, rounded.to(tl.int8), mask=mask)
        elif HALF:
            values = tl.load(stored, mask=mask, other=0).to(tl.float16, bitcast=True)
            tl.store(head_base + place, values.to(tl.float32) * by[:, None], mask=mask)
        else:
            values = tl.load(stored, mask=mask, other=0)
            tl.store(head_base + place, values.to(tl.float32) * by[:, None], mask=mask)


@_sized
def _pages_kernel(
    pool, targets, sources,
    num_copies, page_words,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Some words of some pages."""
    copy = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = copy < num_copies
    to = tl.load(targets + copy, mask=there, other=0) * page_words
    origin = tl.load(sources + copy, mask=there, other=0) * page_words
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_page = column < page_words
    if ALIGNED:
        to = tl.multiple_of(to, 2)
        origin = tl.multiple_of(origin, 2)
        # Of an argument, a hint is lost.
        in_page = column // 2 < page_words // 2
    mask = there[:, None] & in_page[None, :]
    words = tl.load(pool + (origin[:, None] + column[None, :]), mask=mask, other=0)
    tl.store(pool + (to[:, None] + column[None, :]), words, mask=mask)


@dataclass(frozen=True, slots=True, eq=False)
class StatePieces:
    """What `pack_state_spans` makes here. `alignment`: the bytes that everything begins at a multiple of.
    `tile_tensors` int32 [tiles] and `pieces` int32 [4, tiles * rows]: see `_files_kernel`. `entry_bytes`: of each
    tensor. `states`: what is encoded; `heads` int32 [heads, 3]: see `head_table`."""

    alignment: int
    entry_bytes: tuple[int, ...]
    tile: dict[str, int]
    tile_tensors: Tensor
    pieces: Tensor
    states: EncodedStates | None
    heads: Tensor


def pack_state_spans(
    spans: Sequence[StateSpan], entry_bytes: Sequence[int], pool: Tensor, states: EncodedStates | None = None
) -> StatePieces:
    """See `Kernels.pack_state_spans`."""
    assert len(entry_bytes) <= _MAX_TENSORS, f"{len(entry_bytes)} tensors, {_MAX_TENSORS} are taken"
    alignment = common_alignment(spans, entry_bytes, pool.shape[1])
    size = word_of(alignment).itemsize
    tile = _tile(max(span.num_bytes for span in spans), alignment)
    tables, tile_tensors = [], list[int]()
    for tensor in range(len(entry_bytes)):
        tensor_spans = [span for span in spans if span.tensor == tensor]
        tensor_pieces = [
            piece for span in tensor_spans for piece in _pieces(span, pool.shape[1], size, tile["COLUMNS"])
        ]
        num_tiles = triton.cdiv(len(tensor_pieces), tile["ROWS"])
        table = np.zeros((num_tiles * tile["ROWS"], 4), np.int32)
        table[: len(tensor_pieces)] = np.array(tensor_pieces, np.int32).reshape(-1, 4)
        tables.append(table)
        tile_tensors += [tensor] * num_tiles
    pieces = torch.from_numpy(np.ascontiguousarray(np.concatenate(tables).T)).to(pool.device)
    numbers = torch.tensor(tile_tensors, dtype=torch.int32).to(pool.device)
    table = np.zeros((0, 3), np.int32) if states is None else head_table(states, pool.shape[1]).astype(np.int32)
    heads = torch.from_numpy(table).to(pool.device)
    return StatePieces(alignment, tuple(entry_bytes), tile, numbers, pieces, states, heads)


def _pieces(span: StateSpan, page_bytes: int, size: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """A span as `_files_kernel` takes it, in words of `size` bytes."""
    for page, begin, part in span.pieces(page_bytes):
        num_words, in_page, in_entry = part.num_bytes // size, begin // size, part.offset // size
        for done in range(0, num_words, columns):
            yield page, in_page + done, in_entry + done, min(columns, num_words - done)


def store_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: StatePieces
) -> None:
    """See `Kernels.store_states`."""
    _copy(pool, files, tensors, entries, spans, store=True)


def load_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: StatePieces
) -> None:
    """See `Kernels.load_states`."""
    _copy(pool, files, tensors, entries, spans, store=False)


def _copy(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: StatePieces, *, store: bool
) -> None:
    if not len(files):
        return
    word, num_tiles = word_of(spans.alignment), len(spans.tile_tensors)
    for tensor, distance in zip(tensors, spans.entry_bytes, strict=True):
        # Of one entry torch has no stride to hold to.
        assert len(tensor) == 1 or tensor.stride(0) * tensor.itemsize == distance, "entries lie as they were said to"
    words = [_first_word(tensor, word) for tensor in tensors]
    distances = [distance // word.itemsize for distance in spans.entry_bytes]
    missing = _MAX_TENSORS - len(tensors)
    _files_kernel[(num_tiles * len(files),)](
        *(pool.view(word), files, files if entries is None else entries, *words, *words[:1] * missing),
        *(spans.tile_tensors, spans.pieces),
        *(num_tiles, files.stride(0), pool.shape[1] // word.itemsize, *distances, *distances[:1] * missing),
        STORE=store,
        CHOSEN=entries is not None,
        ALIGNED=spans.alignment % 16 == 0,
        **spans.tile,
        num_warps=_NUM_WARPS,
    )
    if spans.states is not None:
        _convert(pool, files, tensors[spans.states.tensor], entries, spans.states, spans.heads, store=store)


def _convert(
    pool: Tensor,
    files: Tensor,
    tensor: Tensor,
    entries: Tensor | None,
    states: EncodedStates,
    heads: Tensor,
    *,
    store: bool,
) -> None:
    """What is encoded; `heads` as in `StatePieces`."""
    halves, is_half = pool.view(torch.int16), states.encoding.value_bytes == 2
    parts = states.scale_bytes // SCALE_BYTES
    numbers = states.rows * states.columns // parts
    tile = _heads_tile(parts, numbers)
    num_blocks = triton.cdiv(parts, tile["PARTS"])
    _heads_kernel[(len(files) * len(heads) * num_blocks,)](
        *(halves if is_half else pool.view(torch.int8), halves),
        *(files, files if entries is None else entries, tensor, heads),
        *(len(heads), num_blocks, files.stride(0), pool.shape[1], tensor.stride(0), parts, numbers),
        STORE=store,
        CHOSEN=entries is not None,
        HALF=is_half,
        **tile,
        num_warps=_NUM_WARPS,
    )


def _first_word(tensor: Tensor, word: torch.dtype) -> Tensor:
    """Where a kernel begins to count the words of a tensor, whatever lies between its entries."""
    return tensor.as_strided((max(1, word.itemsize // tensor.itemsize),), (1,)).view(word)


def copy_pages(pool: Tensor, targets: Tensor, sources: Tensor) -> None:
    """See `Kernels.copy_pages`."""
    page_bytes = pool.shape[1]
    words = pool.view(word_of(page_bytes))
    tile = _pages_tile(page_bytes)
    grid = (triton.cdiv(len(targets), tile["ROWS"]), triton.cdiv(words.shape[1], tile["COLUMNS"]))
    _pages_kernel[grid](
        *(words, targets, sources, len(targets), words.shape[1]),
        ALIGNED=page_bytes % 16 == 0,
        **tile,
        num_warps=_NUM_WARPS,
    )


def _tile(span_bytes: int, alignment: int) -> dict[str, int]:
    """Of files whose longest span has so many bytes."""
    size = word_of(alignment).itemsize
    columns = power_of_2(min(span_bytes, _ROW_BYTES) // size)
    return {"ROWS": _TILE_BYTES // (columns * size), "COLUMNS": columns}


def _heads_tile(parts: int, numbers: int) -> dict[str, int]:
    """Of heads with so many parts of so many numbers."""
    columns = min(power_of_2(numbers), _TILE_NUMBERS)
    return {"PARTS": min(power_of_2(parts), _TILE_NUMBERS // columns), "NUMBERS": columns}


def _pages_tile(page_bytes: int) -> dict[str, int]:
    """Of pages that are copied."""
    size = word_of(page_bytes).itemsize
    columns = min(power_of_2(page_bytes // size), _TILE_BYTES // size)
    return {"ROWS": _TILE_BYTES // (columns * size), "COLUMNS": columns}
