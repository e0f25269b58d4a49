"""Mamba2's state space scan: 64-token chunks for prefill, one token in place for decode.

The chunked form is that of arXiv 2405.21060, section 6: inside a chunk an attention-like product under the decay
mask, between chunks the state. A thread goes through a whole sequence with some heads of one group, which share the
product of b and c, so that all it works on stays in its core's own cache.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.cpu.compiled import BF16, F32, FLOAT, I32, INT, jit, kernel
from cairn.kernels.cpu.recurrence import (
    ONE,
    ZERO,
    by_row,
    check_states,
    copy_block,
    empty,
    first_snapshot,
    snapshot_addresses,
    snapshots_until,
    softplus,
    transpose,
)
from cairn.kernels.cpu.scalars import advance, exp, load
from cairn.kernels.cpu.vectors import LANES, TILE_LANES, TILE_ROWS, add_product, aligned, round_up

MOST_HEADS = 8
"""Heads that a thread takes at once: their states have to stay in its core's cache."""


def ssd(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    states: Tensor,
    batch: Batch,
) -> tuple[Tensor, Tensor]:
    """See `Kernels.ssd`."""
    host = batch.host
    _, heads, dim = x.shape
    _, groups, size = b.shape
    check_states(states, (heads, dim, size), torch.float32)
    y, snapshots = empty(*x.shape), empty(host.num_snapshots, heads, dim, size)
    num_prefills = host.num_seqs - host.num_decodes
    x, b, c, dt = by_row(x), by_row(b), by_row(c), by_row(dt)

    def operands(dt: Tensor) -> tuple[float, ...]:
        return (
            *(x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0)),
            *(b.data_ptr(), b.stride(0), c.data_ptr(), c.stride(0)),
            *(a.data_ptr(), d.data_ptr(), dt_bias.data_ptr(), *dt_limit, states.data_ptr(), states.stride(0)),
            *(y.data_ptr(), snapshots.data_ptr()),
            *(batch.cu_seqlens.data_ptr(), batch.state_slots.data_ptr(), batch.seq_starts.data_ptr()),
            *snapshot_addresses(host),
            *(host.num_decodes, groups, heads // groups, dim, size),
        )

    if host.num_decodes:
        # In dt's own dtype beside prefills, too: one variant is compiled for a model, and a row's bits are those of one
        # variant.
        items = host.num_decodes * heads
        _ssd_decode[dt.dtype](items, items * size * dim // 4, *operands(dt))
    if num_prefills:
        wide_dt = dt.float()
        at_once = _heads_at_once(heads // groups, groups * num_prefills)
        work = (host.num_rows - host.num_decodes) * heads * size * dim // 16
        _ssd_prefill[torch.float32](num_prefills * heads // at_once, work, *operands(wide_dt), at_once)
    return y, snapshots


def _heads_at_once(per_group: int, num_groups: int) -> int:
    """As many heads of a group as leave each thread two times something to do."""
    wanted = 2 * torch.get_num_threads()
    fitting = (count for count in range(MOST_HEADS, 1, -1) if per_group % count == 0)
    return next((count for count in fitting if num_groups * per_group // count >= wanted), 1)


def _types(gate: Any) -> tuple[Any, ...]:
    return (
        *(F32, INT, gate, INT, F32, INT, F32, INT),
        *(F32, F32, F32, FLOAT, FLOAT, F32, INT),
        *(F32, F32),
        *(I32, I32, I32),
        *(I32, I32, INT),
        *(INT, INT, INT, INT, INT),
    )


@jit
def _time_step(dt: float, bias: float, low: float, high: float) -> float:
    return min(max(softplus(dt + bias), low), high)


@kernel({torch.float32: _types(F32), torch.bfloat16: _types(BF16)})
def _ssd_decode(
    begin: int,
    end: int,
    x: Any,
    x_row: int,
    dt: Any,
    dt_row: int,
    b: Any,
    b_row: int,
    c: Any,
    c_row: int,
    a: Any,
    d: Any,
    dt_bias: Any,
    dt_min: float,
    dt_max: float,
    states: Any,
    slot_size: int,
    y: Any,
    snapshots: Any,
    cu_seqlens: Any,
    slots: Any,
    seq_starts: Any,
    snapshot_rows: Any,
    snapshot_offsets: Any,
    num_snapshots: int,
    num_decodes: int,
    groups: int,
    per_group: int,
    dim: int,
    size: int,
) -> None:
    """Items are pairs (row, head)."""
    heads = groups * per_group
    for item in range(begin, end):
        row, head = item // heads, item % heads
        state = advance(states, slots[row] * slot_size + head * dim * size)
        if seq_starts[row] == 0:
            copy_block(state, 0, 0, 0, state, size, dim, size)
        step = _time_step(load(dt, row * dt_row + head), dt_bias[head], dt_min, dt_max)
        decay = exp(step * a[head])
        group = head // per_group * size
        b_here, c_here = advance(b, row * b_row + group), advance(c, row * c_row + group)
        for i in range(dim):
            value = x[row * x_row + head * dim + i]
            written, read = step * value, ZERO
            for j in range(size):
                number = decay * state[i * size + j] + written * b_here[j]
                state[i * size + j] = number
                read += number * c_here[j]
            y[item * dim + i] = read + d[head] * value
        kept = first_snapshot(snapshot_rows, num_snapshots, row)
        while kept < num_snapshots and snapshot_rows[kept] == row:
            copy_block(state, size, dim, size, advance(snapshots, (kept * heads + head) * dim * size), size, dim, size)
            kept += 1


@kernel({torch.float32: (*_types(F32), INT)})
def _ssd_prefill(
    begin: int,
    end: int,
    x: Any,
    x_row: int,
    dt: Any,
    dt_row: int,
    b: Any,
    b_row: int,
    c: Any,
    c_row: int,
    a: Any,
    d: Any,
    dt_bias: Any,
    dt_min: float,
    dt_max: float,
    states: Any,
    slot_size: int,
    y: Any,
    snapshots: Any,
    cu_seqlens: Any,
    slots: Any,
    seq_starts: Any,
    snapshot_rows: Any,
    snapshot_offsets: Any,
    num_snapshots: int,
    num_decodes: int,
    groups: int,
    per_group: int,
    dim: int,
    size: int,
    at_once: int,
) -> None:
    """Items are pairs (prefill sequence, `at_once` heads of one group)."""
    heads = groups * per_group
    per_sequence = heads // at_once
    # Rows and columns of a state, and how long a row of x is, in scratch memory.
    state_rows, columns, x_columns = round_up(dim, TILE_ROWS), round_up(size, TILE_LANES), round_up(dim, LANES)
    square = CHUNK * CHUNK
    scratch = np.empty(
        LANES + CHUNK * (3 * columns + 2 * x_columns + state_rows) + 2 * square + (at_once + 1) * state_rows * columns,
        np.float32,
    )
    b_rows = aligned(scratch)
    c_rows = advance(b_rows, CHUNK * columns)
    turned_c = advance(c_rows, CHUNK * columns)
    x_rows = advance(turned_c, CHUNK * columns)
    faded = advance(x_rows, CHUNK * x_columns)
    turned_y = advance(faded, CHUNK * x_columns)
    pairs = advance(turned_y, CHUNK * state_rows)
    scores = advance(pairs, square)
    midway = advance(scores, square)
    live = advance(midway, state_rows * columns)
    # The log of the decay since the chunk's start. Behind a strong decay its differences are small beside it, and in
    # float32 they would lose what they are needed for.
    decays = np.empty(CHUNK, np.float64)
    steps, grown = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)

    for item in range(begin, end):
        sequence, first_head = num_decodes + item // per_sequence, item % per_sequence * at_once
        group = first_head // per_group * size
        first_row, end_row = int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])
        position = int(seq_starts[sequence])
        slot = advance(states, slots[sequence] * slot_size + first_head * dim * size)
        known_rows = 0 if position == 0 else dim
        for index in range(at_once):
            state = advance(live, index * state_rows * columns)
            copy_block(advance(slot, index * dim * size), size, known_rows, size, state, columns, state_rows, columns)
        snapshot = first_snapshot(snapshot_rows, num_snapshots, sequence)
        row = first_row
        while row < end_row:
            length = min(CHUNK - position % CHUNK, end_row - row)
            rows, width = round_up(length, TILE_ROWS), round_up(length, TILE_LANES)
            copy_block(advance(b, row * b_row + group), b_row, length, size, b_rows, columns, rows, columns)
            copy_block(advance(c, row * c_row + group), c_row, length, size, c_rows, columns, width, columns)
            transpose(c_rows, columns, width, size, turned_c, CHUNK)
            # b of row j times c of row i, and of these the triangle i >= j alone.
            for i in range(0, width, TILE_LANES):
                right = advance(turned_c, i)
                tall = min(i + TILE_LANES, rows)
                add_product(b_rows, columns, 1, right, CHUNK, advance(pairs, i), CHUNK, tall, TILE_LANES, size, ZERO)
            behind = snapshots_until(
                snapshot_rows, snapshot_offsets, snapshot, num_snapshots, sequence, row + length - first_row
            )
            for index in range(at_once):
                head = first_head + index
                state = advance(live, index * state_rows * columns)
                total = 0.0
                for i in range(length):
                    step = _time_step(load(dt, (row + i) * dt_row + head), dt_bias[head], dt_min, dt_max)
                    total += np.float64(step * a[head])
                    steps[i], decays[i], grown[i] = step, total, exp(np.float32(total))
                for i in range(length, width):
                    decays[i], grown[i] = total, ZERO
                x_here = advance(x, row * x_row + head * dim)
                copy_block(x_here, x_row, length, dim, x_rows, x_columns, length, x_columns)
                _weigh(pairs, decays, steps, length, width, scores)
                add_product(state, columns, 1, turned_c, CHUNK, turned_y, CHUNK, dim, width, size, ZERO)
                for j in range(state_rows):
                    for i in range(width):
                        turned_y[j * CHUNK + i] *= grown[i]
                for i in range(0, width, TILE_LANES):
                    here, right = advance(turned_y, i), advance(scores, i)
                    depth = min(i + TILE_LANES, length)
                    add_product(x_rows, 1, x_columns, right, CHUNK, here, CHUNK, dim, TILE_LANES, depth, ONE)
                out = advance(y, (row * heads + head) * dim)
                for i in range(length):
                    for j in range(dim):
                        out[i * heads * dim + j] = turned_y[j * CHUNK + i] + d[head] * x_rows[i * x_columns + j]
                for kept in range(snapshot, behind):
                    seen = first_row + snapshot_offsets[kept] - row
                    if seen < length:
                        copy_block(state, columns, state_rows, columns, midway, columns, state_rows, columns)
                        _advance(midway, x_rows, x_columns, b_rows, columns, steps, decays, seen, dim, faded)
                        target = advance(snapshots, (kept * heads + head) * dim * size)
                        copy_block(midway, columns, dim, size, target, size, dim, size)
                _advance(state, x_rows, x_columns, b_rows, columns, steps, decays, length, dim, faded)
                for kept in range(snapshot, behind):
                    if first_row + snapshot_offsets[kept] - row == length:
                        target = advance(snapshots, (kept * heads + head) * dim * size)
                        copy_block(state, columns, dim, size, target, size, dim, size)
            snapshot = behind
            row += length
            position += length
        for index in range(at_once):
            state = advance(live, index * state_rows * columns)
            copy_block(state, columns, dim, size, advance(slot, index * dim * size), size, dim, size)
    # The pointers above keep nothing alive.
    scratch[0] = ZERO


@jit
def _weigh(pairs: Any, decays: Any, steps: Any, length: int, width: int, scores: Any) -> None:
    """scores[j, i]: what token i finds of what token j <= i writes."""
    for j in range(length):
        step, there = steps[j], decays[j]
        for first in range(j // TILE_LANES * TILE_LANES, width, LANES):
            for lane in range(LANES):
                i = first + lane
                decay = exp(np.float32(decays[i] - there)) if i >= j else ZERO
                scores[j * CHUNK + i] = step * decay * pairs[j * CHUNK + i]


@jit
def _advance(
    state: Any,
    x_rows: Any,
    x_columns: int,
    b_rows: Any,
    columns: int,
    steps: Any,
    decays: Any,
    length: int,
    dim: int,
    faded: Any,
) -> None:
    """A state as it was at the chunk's start becomes the state after the chunk's first `length` rows."""
    last = decays[length - 1]
    for i in range(length):
        factor = steps[i] * exp(np.float32(last - decays[i]))
        for j in range(x_columns):
            faded[i * x_columns + j] = factor * x_rows[i * x_columns + j]
    add_product(faded, 1, x_columns, b_rows, columns, state, columns, dim, columns, length, exp(np.float32(last)))
