"""States to and from checkpoint files: what is copied as it is by torch's index operations, and states that are encoded
head by head, in one pass over the memory: a head's numbers stay in the core's cache between looking for the largest one
and writing them where they go.

The arithmetic is that of `state_codec`, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor

from cairn.kernels import checkpoint_files
from cairn.kernels.checkpoint_files import StateSpan
from cairn.kernels.cpu.compiled import F32, I64, INT, Variant, exact_jit, intrinsic, jit, kernel, record
from cairn.kernels.cpu.scalars import advance, bits_of, float_of, load, narrow_half, widen_half
from cairn.kernels.state_codec import (
    HALF_ROUNDING,
    HALF_TOP,
    INFINITY_BITS,
    LEAST_BITS,
    MOST_HALF,
    MOST_INT8,
    ROW_ROUNDING,
)
from cairn.kernels.state_encoding import SCALE_BYTES, EncodedStates, head_table

_U8 = types.CPointer(types.uint8)
_U16 = types.CPointer(types.uint16)
_NUMBERS_PER_NS = 2

_ROUNDING = np.float32(1.5 * 2**23)
"""Added to a small float32, it leaves the nearest whole number in the lowest bits, the even one of two."""

_ONE, _MOST_INT8, _MOST_HALF = np.float32(1), np.float32(MOST_INT8), np.float32(MOST_HALF)


class _Copies(NamedTuple):
    """Files of `file_pages` pages of a pool, and entries of a tensor, which are `entry_stride` numbers apart; without
    `has_entries` a file's entry has its number. `heads`: of each of `num_heads` its place in an entry, in numbers, and
    in a file, in bytes, those of its numbers and of its scales. A head has `parts` parts of `numbers` numbers with a
    scale each."""

    pool: Any
    page_bytes: int
    files: Any
    file_pages: int
    tensor: Any
    entry_stride: int
    entries: Any
    has_entries: int
    heads: Any
    num_heads: int
    parts: int
    numbers: int


_COPIES = record(_Copies, _U8, INT, I64, INT, F32, INT, I64, INT, I64, INT, INT, INT)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCopies:
    """What `pack_state_spans` makes here. `copies`: of what is not encoded; `heads`: see `_Copies`. `store`, `load`:
    what encodes and decodes, compiled."""

    copies: checkpoint_files.IndexedCopies
    states: EncodedStates | None
    heads: Tensor
    store: Variant | None = None
    load: Variant | None = None


def pack_state_spans(
    spans: Sequence[StateSpan], entry_bytes: Sequence[int], pool: Tensor, states: EncodedStates | None = None
) -> EncodedCopies:
    """See `Kernels.pack_state_spans`."""
    copies = checkpoint_files.pack_state_spans(spans, entry_bytes, pool)
    if states is None:
        return EncodedCopies(copies, None, torch.zeros(0, dtype=torch.int64))
    heads, encoding = torch.from_numpy(head_table(states, pool.shape[1]).flatten()), states.encoding.name
    return EncodedCopies(copies, states, heads, _STORES[encoding][None], _LOADS[encoding][None])


def store_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: EncodedCopies
) -> None:
    """See `Kernels.store_states`."""
    checkpoint_files.store_states(pool, files, tensors, entries, spans.copies)
    if spans.store is not None:
        _run(spans.store, pool, files, tensors, entries, spans)


def load_states(
    pool: Tensor, files: Tensor, tensors: Sequence[Tensor], entries: Tensor | None, spans: EncodedCopies
) -> None:
    """See `Kernels.load_states`."""
    checkpoint_files.load_states(pool, files, tensors, entries, spans.copies)
    if spans.load is not None:
        _run(spans.load, pool, files, tensors, entries, spans)


def _run(
    convert: Variant,
    pool: Tensor,
    files: Tensor,
    tensors: Sequence[Tensor],
    entries: Tensor | None,
    spans: EncodedCopies,
) -> None:
    states, num_heads = spans.states, len(spans.heads) // 3
    assert states is not None
    if not len(files):
        return
    tensor = tensors[states.tensor]
    files, entries = files.contiguous(), None if entries is None else entries.contiguous()
    parts = states.scale_bytes // SCALE_BYTES
    numbers = states.rows * states.columns
    count = len(files) * num_heads
    convert(
        *(count, count * numbers // _NUMBERS_PER_NS),
        *(pool.data_ptr(), pool.shape[1], files.data_ptr(), files.shape[1], tensor.data_ptr(), tensor.stride(0)),
        *(files.data_ptr() if entries is None else entries.data_ptr(), entries is not None),
        *(spans.heads.data_ptr(), num_heads, parts, numbers // parts),
    )


# -- the memory --------------------------------------------------------------------------------------------------------


@intrinsic
def _as_halves(typingctx: Any, pointer: Any) -> Any:
    """The same place, of numbers of 16 bits."""
    return _U16(_U8), lambda context, builder, _, args: builder.bitcast(args[0], ir.IntType(16).as_pointer())


@jit
def _at(c: Any, file: int, offset: int) -> Any:
    """Byte `offset` of a file."""
    page = c.files[file * c.file_pages + offset // c.page_bytes]
    return advance(c.pool, page * c.page_bytes + offset % c.page_bytes)


@jit
def _left(c: Any, offset: int) -> int:
    """Bytes from `offset` to the end of its page."""
    left: int = c.page_bytes - offset % c.page_bytes
    return left


@jit
def _entry(c: Any, file: int, head: int) -> Any:
    """The numbers of a head in the entry of a file."""
    entry = c.entries[file] if c.has_entries else file
    return advance(c.tensor, entry * c.entry_stride + c.heads[3 * head])


@jit
def _store_scale(c: Any, file: int, offset: int, scale: Any) -> None:
    """In halves: it may lie in two pages."""
    bits = bits_of(scale)
    _as_halves(_at(c, file, offset))[0] = np.uint16(bits & np.uint32(0xFFFF))
    _as_halves(_at(c, file, offset + 2))[0] = np.uint16(bits >> np.uint32(16))


@jit
def _load_scale(c: Any, file: int, offset: int) -> Any:
    low, high = _as_halves(_at(c, file, offset))[0], _as_halves(_at(c, file, offset + 2))[0]
    return float_of(np.uint32(np.uint32(low) | np.uint32(np.uint32(high) << np.uint32(16))))


@intrinsic
def _magnitude(typingctx: Any, x: Any) -> Any:
    """uint32 with the bits of a float32 but for its sign."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.and_(builder.bitcast(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 0x7FFFFFFF))

    return types.uint32(types.float32), code


@jit
def _find_most(x: Any, count: int) -> Any:
    """The bits of the largest magnitude: NaN is above infinity."""
    most = np.uint32(0)
    for j in range(count):
        bits = _magnitude(load(x, j))
        most = bits if bits > most else most
    return most


# -- float16 -----------------------------------------------------------------------------------------------------------


@exact_jit
def _half_scale(most: Any) -> Any:
    """See `state_codec`."""
    exponent = (np.int64(most) + np.int64(HALF_ROUNDING)) >> np.int64(23)
    exponent = min(max(exponent, np.int64(HALF_TOP + 1)), np.int64(254)) - np.int64(HALF_TOP)
    return float_of(np.uint32(exponent << np.int64(23)))


@exact_jit
def _halve_all(x: Any, count: int, inverse: Any, out: Any) -> None:
    for j in range(count):
        scaled = x[j] * inverse
        scaled = scaled if scaled > -_MOST_HALF else -_MOST_HALF
        out[j] = narrow_half(scaled if scaled < _MOST_HALF else _MOST_HALF)


@exact_jit
def _double_all(values: Any, count: int, scale: Any, out: Any) -> None:
    for j in range(count):
        out[j] = widen_half(values[j]) * scale


@kernel({None: (_COPIES,)})
def _store_halves(begin: int, end: int, c: Any) -> None:
    """Items are heads of files."""
    for item in range(begin, end):
        file, head = item // c.num_heads, item % c.num_heads
        x, offset = _entry(c, file, head), c.heads[3 * head + 1]
        most = _find_most(x, c.numbers)
        scale = _half_scale(most) if most >= np.uint32(LEAST_BITS) else _ONE
        is_broken = most >= np.uint32(INFINITY_BITS)
        done = 0
        while done < c.numbers:
            count = min(_left(c, offset) // 2, c.numbers - done)
            out = _as_halves(_at(c, file, offset))
            if is_broken:
                for j in range(count):
                    out[j] = np.uint16(0)
            else:
                _halve_all(advance(x, done), count, _ONE / scale, out)
            done, offset = done + count, offset + 2 * count
        _store_scale(c, file, c.heads[3 * head + 2], np.float32(np.nan) if is_broken else scale)


@kernel({None: (_COPIES,)})
def _load_halves(begin: int, end: int, c: Any) -> None:
    """Items are heads of files."""
    for item in range(begin, end):
        file, head = item // c.num_heads, item % c.num_heads
        x, offset = _entry(c, file, head), c.heads[3 * head + 1]
        scale = _load_scale(c, file, c.heads[3 * head + 2])
        done = 0
        while done < c.numbers:
            count = min(_left(c, offset) // 2, c.numbers - done)
            _double_all(_as_halves(_at(c, file, offset)), count, scale, advance(x, done))
            done, offset = done + count, offset + 2 * count


# -- int8 --------------------------------------------------------------------------------------------------------------


@exact_jit
def _row_scale(most: Any) -> Any:
    """See `state_codec`."""
    bits = np.int64(bits_of(np.float32(float_of(most) / _MOST_INT8))) + np.int64(ROW_ROUNDING)
    return float_of(np.uint32(max(bits & np.int64(~(2 * ROW_ROUNDING - 1)), np.int64(LEAST_BITS))))


@exact_jit
def _round_all(x: Any, count: int, scale: Any, out: Any) -> None:
    for j in range(count):
        out[j] = np.uint8(bits_of(x[j] / scale + _ROUNDING))


@intrinsic
def _signed(typingctx: Any, byte: Any) -> Any:
    """float32 of an int8 that is given as uint8."""
    return types.float32(types.uint8), lambda context, builder, _, args: builder.sitofp(args[0], ir.FloatType())


@exact_jit
def _scale_all(values: Any, count: int, scale: Any, out: Any) -> None:
    for j in range(count):
        out[j] = _signed(values[j]) * scale


@kernel({None: (_COPIES,)})
def _store_int8(begin: int, end: int, c: Any) -> None:
    """Items are heads of files."""
    for item in range(begin, end):
        file, head = item // c.num_heads, item % c.num_heads
        x, offset = _entry(c, file, head), c.heads[3 * head + 1]
        for part in range(c.parts):
            row = advance(x, part * c.numbers)
            most = _find_most(row, c.numbers)
            scale = _row_scale(most) if most >= np.uint32(LEAST_BITS) else _ONE
            is_broken = most >= np.uint32(INFINITY_BITS)
            done = 0
            while done < c.numbers:
                count = min(_left(c, offset), c.numbers - done)
                out = _at(c, file, offset)
                if is_broken:
                    for j in range(count):
                        out[j] = np.uint8(0)
                else:
                    _round_all(advance(row, done), count, scale, out)
                done, offset = done + count, offset + count
            place = c.heads[3 * head + 2] + part * SCALE_BYTES
            _store_scale(c, file, place, np.float32(np.nan) if is_broken else scale)


@kernel({None: (_COPIES,)})
def _load_int8(begin: int, end: int, c: Any) -> None:
    """Items are heads of files."""
    for item in range(begin, end):
        file, head = item // c.num_heads, item % c.num_heads
        x, offset = _entry(c, file, head), c.heads[3 * head + 1]
        for part in range(c.parts):
            scale = _load_scale(c, file, c.heads[3 * head + 2] + part * SCALE_BYTES)
            done = 0
            while done < c.numbers:
                count = min(_left(c, offset), c.numbers - done)
                _scale_all(_at(c, file, offset), count, scale, advance(x, part * c.numbers + done))
                done, offset = done + count, offset + count


_STORES: Mapping[str, Any] = MappingProxyType({"float16": _store_halves, "int8": _store_int8})
_LOADS: Mapping[str, Any] = MappingProxyType({"float16": _load_halves, "int8": _load_int8})
