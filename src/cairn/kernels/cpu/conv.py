"""Causal depthwise convolution with a time-major state: channels innermost, a block of them at a time."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cpu.compiled import ELEMENTS, F32, INT, exact_jit, jit, kernel, optional_arg, record, row_args
from cairn.kernels.cpu.recurrence import (
    begin_steps,
    check_states,
    copy,
    empty,
    end_of_snapshots,
    first_snapshot,
    has_verifies,
    room_for_state,
    scratch_state,
    sequence_arguments,
    sequences_type,
    store_snapshots,
    with_contiguous_rows,
)
from cairn.kernels.cpu.scalars import ZERO, advance, load, load_apart, store, store_apart
from cairn.kernels.cpu.scalars import silu as silu_of
from cairn.kernels.cpu.vectors import stack_buffer

BLOCK = 1024
"""Channels that are summed up before the next ones: weights, and what two rows are made of, stay in the core's first
cache."""

ROWS = 32
"""Rows of a prefill that a thread takes at once."""


class _Operands(NamedTuple):
    """x [T, channels] and weight [width, channels] of the convolution, and its result."""

    x: Any
    x_row: int
    weight: Any
    bias: Any
    has_bias: int
    out: Any
    width: int
    channels: int
    silu: int


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: Batch, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """See `Kernels.conv`."""
    host = batch.host
    width, channels = weight.shape
    check_states(states, (width - 1, channels), x.dtype)
    out = empty(*x.shape)
    snapshots = torch.empty((host.num_snapshots, width - 1, channels), dtype=states.dtype)
    x = with_contiguous_rows(x)
    operands = *row_args(x), weight.data_ptr(), *optional_arg(bias), out.data_ptr(), width, channels, silu
    sequences = sequence_arguments(batch, states, snapshots, (width - 1) * channels)
    if host.first_prefill:
        _conv_decode[x.dtype](host.first_prefill, host.num_decode_tokens * channels, *operands, *sequences)
    num_prefills = host.num_seqs - host.first_prefill
    if num_prefills:
        num_tokens = host.num_tokens - host.num_decode_tokens
        _conv_prefill[x.dtype](-(-num_tokens // ROWS), num_tokens * channels, *operands, *sequences, host.num_tokens)
        # Afterwards, because the rows of a sequence, which may be several threads', read the state before them.
        _update_states[x.dtype](num_prefills, (num_prefills + host.num_snapshots) * channels, *operands, *sequences)
    return out, snapshots


_VARIANTS: Mapping[Hashable, tuple[Any, ...]] = {
    dtype: (record(_Operands, x, INT, F32, F32, INT, F32, INT, INT, INT), sequences_type(x))
    for dtype, x in ELEMENTS.items()
}


@jit
def _begin(o: Any, channel: int, count: int, out: Any) -> None:
    for j in range(count):
        out[j] = o.bias[channel + j] if o.has_bias else ZERO


@jit
def _add_tap(out: Any, source: Any, weight: Any, count: int) -> None:
    for j in range(count):
        out[j] += load(source, j) * weight[j]


@jit
def _clear(numbers: Any) -> None:
    """So many as a bias of a block has."""
    for j in range(BLOCK):
        numbers[j] = ZERO


@jit
def _bias_of(o: Any, channel: int, zeros: Any) -> Any:
    return advance(o.bias, channel) if o.has_bias else zeros


@exact_jit
def _four_taps(bias: Any, weight: Any, apart: int, oldest: Any, second: Any, third: Any, newest: Any, j: int) -> Any:
    """Four times `_add_tap` of one number, in the same order. `apart`: numbers between a tap's weight and the next."""
    value = load_apart(bias, j) + load_apart(oldest, j) * load_apart(weight, j)
    value = value + load_apart(second, j) * load_apart(weight, apart + j)
    value = value + load_apart(third, j) * load_apart(weight, 2 * apart + j)
    return value + load_apart(newest, j) * load_apart(weight, 3 * apart + j)


@jit
def _convolve_row(
    o: Any, bias: Any, channel: int, oldest: Any, second: Any, third: Any, newest: Any, count: int, out: Any
) -> None:
    """All four taps of a row at once: what `_begin`, `_add_tap` and `_end` do, with a number read and written once."""
    weight, apart = advance(o.weight, channel), o.channels
    if o.silu:
        for j in range(count):
            store_apart(out, j, silu_of(_four_taps(bias, weight, apart, oldest, second, third, newest, j)))
    else:
        for j in range(count):
            store_apart(out, j, _four_taps(bias, weight, apart, oldest, second, third, newest, j))


@jit
def _convolve_two_rows(o: Any, bias: Any, channel: int, oldest: Any, count: int, out: Any) -> None:
    """`_convolve_row` twice, of rows that follow each other, by one loop: it reads weights and most inputs once."""
    weight, apart, next_out = advance(o.weight, channel), o.channels, advance(out, o.channels)
    second = advance(oldest, o.x_row)
    third, fourth, newest = advance(second, o.x_row), advance(second, 2 * o.x_row), advance(second, 3 * o.x_row)
    if o.silu:
        for j in range(count):
            store_apart(out, j, silu_of(_four_taps(bias, weight, apart, oldest, second, third, fourth, j)))
            store_apart(next_out, j, silu_of(_four_taps(bias, weight, apart, second, third, fourth, newest, j)))
    else:
        for j in range(count):
            store_apart(out, j, _four_taps(bias, weight, apart, oldest, second, third, fourth, j))
            store_apart(next_out, j, _four_taps(bias, weight, apart, second, third, fourth, newest, j))


@jit
def _end(o: Any, out: Any, count: int) -> None:
    if o.silu:
        for j in range(count):
            out[j] = silu_of(out[j])


@kernel(_VARIANTS)
def _conv_decode(begin: int, end: int, o: Any, s: Any) -> None:
    """Items are sequences."""
    taps, channels = o.width - 1, o.channels
    zeros = stack_buffer(BLOCK)
    _clear(zeros)
    scratch = s.states
    if has_verifies(s):
        buffer = np.empty(room_for_state(s.state_size), np.float32)
        scratch = scratch_state(s, buffer)
    for sequence in range(begin, end):
        first_row, end_row = int(s.cu_seqlens[sequence]), int(s.cu_seqlens[sequence + 1])
        state = begin_steps(s, sequence, 0, s.state_size, scratch)
        fresh = s.seq_starts[sequence] == 0
        for row in range(first_row, end_row):
            for channel in range(0, channels, BLOCK):
                count = min(BLOCK, channels - channel)
                out, newest = advance(o.out, row * channels + channel), advance(o.x, row * o.x_row + channel)
                at_once = taps == 3 and not fresh
                if at_once:
                    past, bias = advance(state, channel), _bias_of(o, channel, zeros)
                    second, third = advance(past, channels), advance(past, 2 * channels)
                    _convolve_row(o, bias, channel, past, second, third, newest, count, out)
                else:
                    _begin(o, channel, count, out)
                for tap in range(taps):
                    past = advance(state, tap * channels + channel)
                    if fresh:
                        for j in range(count):
                            store(past, j, ZERO)
                    elif not at_once:
                        _add_tap(out, past, advance(o.weight, tap * channels + channel), count)
                    if tap:
                        copy(past, advance(past, -channels), count)
                if not at_once:
                    _add_tap(out, newest, advance(o.weight, taps * channels + channel), count)
                    _end(o, out, count)
                if taps:
                    copy(newest, advance(state, (taps - 1) * channels + channel), count)
            fresh = False
            store_snapshots(s, sequence, row + 1 - first_row, 0, state, s.state_size)
    if has_verifies(s):
        buffer[0] = ZERO  # pointers keep nothing alive


@jit
def _add_taps(o: Any, state: Any, fresh: bool, begin_row: int, row: int, channel: int, count: int, out: Any) -> None:
    """All taps of a row of a sequence that begins at `begin_row`, some of them, unless it is fresh, of its state."""
    for tap in range(o.width):
        source = row - (o.width - 1) + tap
        weight = advance(o.weight, tap * o.channels + channel)
        if source >= begin_row:
            _add_tap(out, advance(o.x, source * o.x_row + channel), weight, count)
        elif not fresh:
            _add_tap(out, advance(state, (row - begin_row + tap) * o.channels + channel), weight, count)


@kernel({key: (*kinds, INT) for key, kinds in _VARIANTS.items()})
def _conv_prefill(begin: int, end: int, o: Any, s: Any, num_rows: int) -> None:
    """Items are blocks of rows, from the first prefill row on."""
    taps, channels = o.width - 1, o.channels
    zeros = stack_buffer(BLOCK)
    _clear(zeros)
    sequence = s.first_prefill
    first_prefill_row = int(s.cu_seqlens[sequence])
    first_row = first_prefill_row + begin * ROWS
    end_row = min(first_prefill_row + end * ROWS, num_rows)
    while first_row < end_row:
        while s.cu_seqlens[sequence + 1] <= first_row:
            sequence += 1
        # The rows of one sequence, and no more than one block of them.
        last_row = min(first_row + ROWS, min(end_row, int(s.cu_seqlens[sequence + 1])))
        begin_row = int(s.cu_seqlens[sequence])
        state = advance(s.states, s.slots[sequence] * s.slot_stride)
        fresh = s.seq_starts[sequence] == 0
        for channel in range(0, channels, BLOCK):
            count = min(BLOCK, channels - channel)
            bias, row = _bias_of(o, channel, zeros), first_row
            while row < last_row:
                out, oldest = advance(o.out, row * channels + channel), advance(o.x, (row - taps) * o.x_row + channel)
                at_once = taps == 3 and row - taps >= begin_row
                if at_once and row + 1 < last_row:
                    _convolve_two_rows(o, bias, channel, oldest, count, out)
                    row += 2
                    continue
                if at_once:
                    second, third = advance(oldest, o.x_row), advance(oldest, 2 * o.x_row)
                    newest = advance(oldest, 3 * o.x_row)
                    _convolve_row(o, bias, channel, oldest, second, third, newest, count, out)
                else:
                    _begin(o, channel, count, out)
                    _add_taps(o, state, fresh, begin_row, row, channel, count, out)
                    _end(o, out, count)
                row += 1
        first_row = last_row


@kernel(_VARIANTS)
def _update_states(begin: int, end: int, o: Any, s: Any) -> None:
    """Items are prefill sequences."""
    for item in range(begin, end):
        sequence = s.first_prefill + item
        first_row, length = int(s.cu_seqlens[sequence]), s.cu_seqlens[sequence + 1] - s.cu_seqlens[sequence]
        state = advance(s.states, s.slots[sequence] * s.slot_stride)
        if s.seq_starts[sequence] == 0:
            for j in range(s.state_size):
                store(state, j, ZERO)
        first = first_snapshot(s, sequence)
        for index in range(first, end_of_snapshots(s, first, sequence, length)):
            _copy_window(o, state, first_row, s.snapshot_offsets[index], advance(s.snapshots, index * s.state_size))
        _copy_window(o, state, first_row, length, state)


@jit
def _copy_window(o: Any, state: Any, first_row: int, length: int, target: Any) -> None:
    """target = the last width - 1 inputs of the state and, after them, `length` rows of x from `first_row` on; it may
    be the state."""
    for tap in range(o.width - 1):
        source = length - (o.width - 1) + tap
        out = advance(target, tap * o.channels)
        if source >= 0:
            copy(advance(o.x, (first_row + source) * o.x_row), out, o.channels)
        else:
            copy(advance(state, (length + tap) * o.channels), out, o.channels)
