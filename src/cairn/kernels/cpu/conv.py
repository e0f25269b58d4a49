"""Causal depthwise convolution with a time-major state: channels innermost, a block of them at a time."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cpu.compiled import BF16, F32, I32, INT, jit, kernel
from cairn.kernels.cpu.recurrence import ZERO, by_row, check_states, empty, first_snapshot, snapshot_addresses
from cairn.kernels.cpu.scalars import advance, load, store
from cairn.kernels.cpu.scalars import silu as silu_of

BLOCK = 256
"""Channels that are summed up before the next ones: their sums stay in the core's first cache."""

ROWS = 32
"""Rows of a prefill that a thread takes at once."""


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: Batch, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """See `Kernels.conv`."""
    host = batch.host
    width, channels = weight.shape
    check_states(states, (width - 1, channels), x.dtype)
    out = empty(*x.shape)
    snapshots = torch.empty((host.num_snapshots, width - 1, channels), dtype=states.dtype)
    x = by_row(x)
    operands = (
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), bias is not None),
        *(states.data_ptr(), states.stride(0), out.data_ptr(), snapshots.data_ptr()),
        *(batch.cu_seqlens.data_ptr(), batch.state_slots.data_ptr(), batch.seq_starts.data_ptr()),
        *snapshot_addresses(host),
        *(host.num_decodes, width, channels, silu),
    )
    if host.num_decodes:
        _conv_decode[x.dtype](host.num_decodes, host.num_decodes * channels, *operands)
    num_prefills = host.num_seqs - host.num_decodes
    if num_prefills:
        rows = host.num_rows - host.num_decodes
        _conv_prefill[x.dtype](-(-rows // ROWS), rows * channels, *operands, host.num_rows, host.num_seqs)
        # Afterwards, because the rows of a sequence, which may be several threads', want the state before them.
        _move_states[x.dtype](num_prefills, (num_prefills + host.num_snapshots) * channels, *operands)
    return out, snapshots


def _types(model: Any) -> tuple[Any, ...]:
    return (
        *(model, INT, F32, F32, INT),
        *(model, INT, F32, model),
        *(I32, I32, I32),
        *(I32, I32, INT),
        *(INT, INT, INT, INT),
    )


_VARIANTS: Mapping[Hashable, tuple[Any, ...]] = {torch.float32: _types(F32), torch.bfloat16: _types(BF16)}


@jit
def _begin(out: Any, bias: Any, has_bias: int, channel: int, count: int) -> None:
    for j in range(count):
        out[j] = bias[channel + j] if has_bias else ZERO


@jit
def _add_tap(out: Any, source: Any, weight: Any, count: int) -> None:
    for j in range(count):
        out[j] += load(source, j) * weight[j]


@jit
def _end(out: Any, count: int, silu: int) -> None:
    if silu:
        for j in range(count):
            out[j] = silu_of(out[j])


@jit
def _copy(source: Any, target: Any, count: int) -> None:
    for j in range(count):
        target[j] = source[j]


@kernel(_VARIANTS)
def _conv_decode(
    begin: int,
    end: int,
    x: Any,
    x_row: int,
    weight: Any,
    bias: Any,
    has_bias: int,
    states: Any,
    slot_size: int,
    out: Any,
    snapshots: Any,
    cu_seqlens: Any,
    slots: Any,
    seq_starts: Any,
    snapshot_rows: Any,
    snapshot_offsets: Any,
    num_snapshots: int,
    num_decodes: int,
    width: int,
    channels: int,
    silu: int,
) -> None:
    """Items are rows."""
    for row in range(begin, end):
        state = advance(states, slots[row] * slot_size)
        fresh = seq_starts[row] == 0
        for channel in range(0, channels, BLOCK):
            count = min(BLOCK, channels - channel)
            sums = advance(out, row * channels + channel)
            newest = advance(x, row * x_row + channel)
            _begin(sums, bias, has_bias, channel, count)
            for tap in range(width - 1):
                past = advance(state, tap * channels + channel)
                if fresh:
                    for j in range(count):
                        store(past, j, ZERO)
                else:
                    _add_tap(sums, past, advance(weight, tap * channels + channel), count)
                if tap:
                    _copy(past, advance(past, -channels), count)
            _add_tap(sums, newest, advance(weight, (width - 1) * channels + channel), count)
            _end(sums, count, silu)
            if width > 1:
                _copy(newest, advance(state, (width - 2) * channels + channel), count)
        kept = first_snapshot(snapshot_rows, num_snapshots, row)
        while kept < num_snapshots and snapshot_rows[kept] == row:
            _copy(state, advance(snapshots, kept * (width - 1) * channels), (width - 1) * channels)
            kept += 1


@kernel({key: (*kinds, INT, INT) for key, kinds in _VARIANTS.items()})
def _conv_prefill(
    begin: int,
    end: int,
    x: Any,
    x_row: int,
    weight: Any,
    bias: Any,
    has_bias: int,
    states: Any,
    slot_size: int,
    out: Any,
    snapshots: Any,
    cu_seqlens: Any,
    slots: Any,
    seq_starts: Any,
    snapshot_rows: Any,
    snapshot_offsets: Any,
    num_snapshots: int,
    num_decodes: int,
    width: int,
    channels: int,
    silu: int,
    num_rows: int,
    num_seqs: int,
) -> None:
    """Items are blocks of rows, from the first prefill row on."""
    first_row = num_decodes + begin * ROWS
    end_row = min(num_decodes + end * ROWS, num_rows)
    sequence = num_decodes
    while first_row < end_row:
        while cu_seqlens[sequence + 1] <= first_row:
            sequence += 1
        # The rows of one sequence, and no more than one block of them.
        last_row = min(first_row + ROWS, min(end_row, int(cu_seqlens[sequence + 1])))
        before = int(cu_seqlens[sequence])
        state = advance(states, slots[sequence] * slot_size)
        fresh = seq_starts[sequence] == 0
        for channel in range(0, channels, BLOCK):
            count = min(BLOCK, channels - channel)
            for row in range(first_row, last_row):
                sums = advance(out, row * channels + channel)
                _begin(sums, bias, has_bias, channel, count)
                for tap in range(width):
                    source = row - (width - 1) + tap
                    taps = advance(weight, tap * channels + channel)
                    if source >= before:
                        _add_tap(sums, advance(x, source * x_row + channel), taps, count)
                    elif not fresh:
                        _add_tap(sums, advance(state, (row - before + tap) * channels + channel), taps, count)
                _end(sums, count, silu)
        first_row = last_row


@kernel(_VARIANTS)
def _move_states(
    begin: int,
    end: int,
    x: Any,
    x_row: int,
    weight: Any,
    bias: Any,
    has_bias: int,
    states: Any,
    slot_size: int,
    out: Any,
    snapshots: Any,
    cu_seqlens: Any,
    slots: Any,
    seq_starts: Any,
    snapshot_rows: Any,
    snapshot_offsets: Any,
    num_snapshots: int,
    num_decodes: int,
    width: int,
    channels: int,
    silu: int,
) -> None:
    """Items are prefill sequences."""
    for item in range(begin, end):
        sequence = num_decodes + item
        first_row = int(cu_seqlens[sequence])
        state = advance(states, slots[sequence] * slot_size)
        if seq_starts[sequence] == 0:
            for j in range((width - 1) * channels):
                store(state, j, ZERO)
        kept = first_snapshot(snapshot_rows, num_snapshots, sequence)
        while kept < num_snapshots and snapshot_rows[kept] == sequence:
            target = advance(snapshots, kept * (width - 1) * channels)
            _keep_last(state, advance(x, first_row * x_row), x_row, snapshot_offsets[kept], width, channels, target)
            kept += 1
        length = cu_seqlens[sequence + 1] - first_row
        _keep_last(state, advance(x, first_row * x_row), x_row, length, width, channels, state)


@jit
def _keep_last(state: Any, x: Any, x_row: int, length: int, width: int, channels: int, target: Any) -> None:
    """target = the last width - 1 inputs of the state and, behind them, `length` rows of x; it may be the state."""
    for tap in range(width - 1):
        source = length - (width - 1) + tap
        here = advance(target, tap * channels)
        if source >= 0:
            _copy(advance(x, source * x_row), here, channels)
        else:
            _copy(advance(state, (length + tap) * channels), here, channels)
