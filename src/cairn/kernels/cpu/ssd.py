"""Mamba2's state space scan: 64-token chunks for prefill, token by token in place for decode.

The chunked form is that of arXiv 2405.21060, section 6: inside a chunk an attention-like product under the decay
mask, between chunks the state. A thread goes through a whole sequence with some heads of one group, which share the
product of b and c, so that all it works on stays in its core's own cache.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.cpu.compiled import F32, FLOAT, INT, StateKey, jit, kernel, record, row_args
from cairn.kernels.cpu.recurrence import (
    begin_steps,
    check_states,
    copy_block,
    empty,
    end_of_snapshots,
    first_snapshot,
    has_verifies,
    room_for_state,
    round_block,
    scratch_state,
    sequence_arguments,
    sequence_kernel_types,
    softplus,
    store_snapshots,
    transpose,
    with_contiguous_rows,
)
from cairn.kernels.cpu.scalars import ONE, ZERO, advance, exp, load, store
from cairn.kernels.cpu.vectors import LANES, TILE_LANES, TILE_ROWS, add_product, aligned, round_up

MAX_HEADS_AT_ONCE = 8
"""Heads that a thread takes at once: their states have to stay in its core's cache."""


class _Operands(NamedTuple):
    """What has a row for each token, and the result y [T, heads, dim]."""

    x: Any
    x_row: int
    dt: Any
    dt_row: int
    b: Any
    b_row: int
    c: Any
    c_row: int
    y: Any


class _Parameters(NamedTuple):
    """A layer's own: see `Kernels.ssd`. `per_group`: heads that share b and c."""

    a: Any
    d: Any
    dt_bias: Any
    dt_min: float
    dt_max: float
    heads: int
    per_group: int
    dim: int
    size: int


def ssd(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor,
    dt_limit: tuple[float, float], states: Tensor, batch: Batch,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.ssd`."""
    host = batch.host
    _, heads, dim = x.shape
    _, groups, size = b.shape
    check_states(states, (heads, dim, size))
    y = empty(*x.shape)
    snapshots = empty(host.num_snapshots, heads, dim, size, dtype=states.dtype)
    num_prefills = host.num_seqs - host.first_prefill
    x, dt = with_contiguous_rows(x), with_contiguous_rows(dt)
    b, c = with_contiguous_rows(b), with_contiguous_rows(c)
    parameters = a.data_ptr(), d.data_ptr(), dt_bias.data_ptr(), *dt_limit, heads, heads // groups, dim, size
    sequences = sequence_arguments(batch, states, snapshots, heads * dim * size)
    if host.first_prefill:
        # In dt's own dtype beside prefills, too: one variant is compiled for a model, and a row's bits are those of one
        # variant.
        operands = (*row_args(x), *row_args(dt), *row_args(b), *row_args(c), y.data_ptr())
        cost = host.num_decode_tokens * heads * size * dim // 4
        decode = _ssd_decode[StateKey(dt.dtype, states.dtype)]
        decode(host.first_prefill * heads, cost, *operands, *parameters, *sequences)
    if num_prefills:
        wide_dt = dt.float()
        operands = (*row_args(x), *row_args(wide_dt), *row_args(b), *row_args(c), y.data_ptr())
        at_once = _heads_at_once(heads // groups, groups * num_prefills)
        num_tokens = host.num_tokens - host.num_decode_tokens
        items, cost = num_prefills * heads // at_once, num_tokens * heads * size * dim // 16
        _ssd_prefill[StateKey(None, states.dtype)](items, cost, *operands, *parameters, *sequences, at_once)
    return y, snapshots


def _heads_at_once(per_group: int, num_groups: int) -> int:
    """As many heads of a group as leave each thread two items at least."""
    min_items = 2 * torch.get_num_threads()
    divisors = (count for count in range(MAX_HEADS_AT_ONCE, 1, -1) if per_group % count == 0)
    return next((count for count in divisors if num_groups * per_group // count >= min_items), 1)


def _types(gate: Any) -> tuple[Any, ...]:
    return (
        record(_Operands, F32, INT, gate, INT, F32, INT, F32, INT, F32),
        record(_Parameters, F32, F32, F32, FLOAT, FLOAT, INT, INT, INT, INT),
    )


_DECODE_TYPES, _PREFILL_TYPES = sequence_kernel_types(_types)


@jit
def _time_step(o: Any, p: Any, row: int, head: int) -> Any:
    return min(max(softplus(load(o.dt, row * o.dt_row + head) + p.dt_bias[head]), p.dt_min), p.dt_max)


@kernel(_DECODE_TYPES)
def _ssd_decode(begin: int, end: int, o: Any, p: Any, s: Any) -> None:
    """Items are pairs (sequence, head)."""
    dim, size = p.dim, p.size
    scratch = s.states
    if has_verifies(s):
        buffer = np.empty(room_for_state(dim * size), np.float32)
        scratch = scratch_state(s, buffer)
    for item in range(begin, end):
        sequence, head = item // p.heads, item % p.heads
        first_row, end_row = int(s.cu_seqlens[sequence]), int(s.cu_seqlens[sequence + 1])
        state = begin_steps(s, sequence, head * dim * size, dim * size, scratch)
        if s.seq_starts[sequence] == 0:
            copy_block(state, 0, 0, 0, state, size, dim, size)
        group, d = head // p.per_group * size, p.d[head]
        for row in range(first_row, end_row):
            step = _time_step(o, p, row, head)
            decay = exp(step * p.a[head])
            b, c = advance(o.b, row * o.b_row + group), advance(o.c, row * o.c_row + group)
            x, y = advance(o.x, row * o.x_row + head * dim), advance(o.y, (row * p.heads + head) * dim)
            for i in range(dim):
                value = x[i]
                written, read = step * value, ZERO
                for j in range(size):
                    number = decay * load(state, i * size + j) + written * b[j]
                    store(state, i * size + j, number)
                    read += number * c[j]
                y[i] = read + d * value
            store_snapshots(s, sequence, row + 1 - first_row, head * dim * size, state, dim * size)
    if has_verifies(s):
        buffer[0] = ZERO  # pointers keep nothing alive


class _Scratch(NamedTuple):
    """A thread's buffers for one chunk. Rows and columns are rounded up to whole tiles.

    `b`, `c` [CHUNK, columns], `transposed_c` [columns, CHUNK], `x`, `decayed` [CHUNK, x_columns], `transposed_y`
    [state_rows, CHUNK]; `b_c` and `scores` [CHUNK, CHUNK], rows by j; `snapshot` and each of `states` [state_rows,
    columns]; by token: `decays` float64, the log of the decay since the chunk's start (after a strong decay its
    differences are small beside it, and in float32 they would lose what they are needed for), its exponential `decay`,
    and `steps`.
    """

    b: Any
    c: Any
    transposed_c: Any
    x: Any
    decayed: Any
    transposed_y: Any
    b_c: Any
    scores: Any
    snapshot: Any
    states: Any
    decays: Any
    decay: Any
    steps: Any


@kernel({key: (*types, INT) for key, types in _PREFILL_TYPES.items()})
def _ssd_prefill(begin: int, end: int, o: Any, p: Any, s: Any, at_once: int) -> None:
    """Items are pairs (prefill sequence, `at_once` heads of one group)."""
    dim, size = p.dim, p.size
    per_sequence = p.heads // at_once
    state_rows, columns, x_columns = round_up(dim, TILE_ROWS), round_up(size, TILE_LANES), round_up(dim, LANES)
    square, state_size = CHUNK * CHUNK, state_rows * columns
    buffer = np.empty(
        LANES + CHUNK * (3 * columns + 2 * x_columns + state_rows) + 2 * square + (at_once + 1) * state_size, np.float32
    )
    b = aligned(buffer)
    c = advance(b, CHUNK * columns)
    transposed_c = advance(c, CHUNK * columns)
    x = advance(transposed_c, CHUNK * columns)
    decayed = advance(x, CHUNK * x_columns)
    transposed_y = advance(decayed, CHUNK * x_columns)
    b_c = advance(transposed_y, CHUNK * state_rows)
    scores = advance(b_c, square)
    snapshot = advance(scores, square)
    states = advance(snapshot, state_size)
    decays = np.empty(CHUNK, np.float64)
    decay, steps = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    m = _Scratch(b, c, transposed_c, x, decayed, transposed_y, b_c, scores, snapshot, states, decays, decay, steps)

    for item in range(begin, end):
        sequence, first_head = s.first_prefill + item // per_sequence, item % per_sequence * at_once
        first_row, end_row = int(s.cu_seqlens[sequence]), int(s.cu_seqlens[sequence + 1])
        position = int(s.seq_starts[sequence])
        slot = advance(s.states, s.slots[sequence] * s.slot_stride + first_head * dim * size)
        known_rows = 0 if position == 0 else dim
        for index in range(at_once):
            state = advance(states, index * state_size)
            copy_block(advance(slot, index * dim * size), size, known_rows, size, state, columns, state_rows, columns)
        next_snapshot = first_snapshot(s, sequence)
        row = first_row
        while row < end_row:
            length = min(CHUNK - position % CHUNK, end_row - row)
            _multiply_b_c(o, p, m, row, length, first_head // p.per_group, columns)
            snapshots_end = end_of_snapshots(s, next_snapshot, sequence, row + length - first_row)
            for index in range(at_once):
                head = first_head + index
                state = advance(states, index * state_size)
                _scan_chunk(o, p, m, row, length, head, state, columns, x_columns)
                for kept in range(next_snapshot, snapshots_end):
                    num_tokens = first_row + s.snapshot_offsets[kept] - row
                    if num_tokens < length:
                        copy_block(state, columns, state_rows, columns, snapshot, columns, state_rows, columns)
                        _advance_state(m, snapshot, num_tokens, dim, columns, x_columns)
                        target = advance(s.snapshots, (kept * p.heads + head) * dim * size)
                        copy_block(snapshot, columns, dim, size, target, size, dim, size)
                _advance_state(m, state, length, dim, columns, x_columns)
                round_block(state, columns, dim, size, s.states)
                for kept in range(next_snapshot, snapshots_end):
                    if first_row + s.snapshot_offsets[kept] - row == length:
                        target = advance(s.snapshots, (kept * p.heads + head) * dim * size)
                        copy_block(state, columns, dim, size, target, size, dim, size)
            next_snapshot = snapshots_end
            row += length
            position += length
        for index in range(at_once):
            state = advance(states, index * state_size)
            copy_block(state, columns, dim, size, advance(slot, index * dim * size), size, dim, size)
    # The pointers above keep nothing alive.
    buffer[0] = ZERO


@jit
def _multiply_b_c(o: Any, p: Any, m: Any, row: int, length: int, group: int, columns: int) -> None:
    """b_c[j, i] = b of the chunk's row j times c of its row i, and of these the triangle i >= j alone."""
    size, tile_rows, width = p.size, round_up(length, TILE_ROWS), round_up(length, TILE_LANES)
    b, c = advance(o.b, row * o.b_row + group * size), advance(o.c, row * o.c_row + group * size)
    copy_block(b, o.b_row, length, size, m.b, columns, tile_rows, columns)
    copy_block(c, o.c_row, length, size, m.c, columns, width, columns)
    transpose(m.c, columns, width, size, m.transposed_c, CHUNK)
    for i in range(0, width, TILE_LANES):
        right, out, height = advance(m.transposed_c, i), advance(m.b_c, i), min(i + TILE_LANES, tile_rows)
        add_product(m.b, columns, 1, right, CHUNK, out, CHUNK, height, TILE_LANES, size, ZERO)


@jit
def _scan_chunk(
    o: Any, p: Any, m: Any, row: int, length: int, head: int, state: Any, columns: int, x_columns: int
) -> None:
    """y of a chunk and a head, from the state before the chunk and the tokens in it; the state is left as it is."""
    dim, width = p.dim, round_up(length, TILE_LANES)
    total = 0.0
    for i in range(length):
        step = _time_step(o, p, row + i, head)
        total += np.float64(step * p.a[head])
        m.steps[i], m.decays[i], m.decay[i] = step, total, exp(np.float32(total))
    for i in range(length, width):
        m.decays[i], m.decay[i] = total, ZERO
    copy_block(advance(o.x, row * o.x_row + head * dim), o.x_row, length, dim, m.x, x_columns, length, x_columns)
    _weigh(m, length, width)
    add_product(state, columns, 1, m.transposed_c, CHUNK, m.transposed_y, CHUNK, dim, width, p.size, ZERO)
    for j in range(round_up(dim, TILE_ROWS)):
        for i in range(width):
            m.transposed_y[j * CHUNK + i] *= m.decay[i]
    for i in range(0, width, TILE_LANES):
        out, right, depth = advance(m.transposed_y, i), advance(m.scores, i), min(i + TILE_LANES, length)
        add_product(m.x, 1, x_columns, right, CHUNK, out, CHUNK, dim, TILE_LANES, depth, ONE)
    y = advance(o.y, (row * p.heads + head) * dim)
    for i in range(length):
        for j in range(dim):
            y[i * p.heads * dim + j] = m.transposed_y[j * CHUNK + i] + p.d[head] * m.x[i * x_columns + j]


@jit
def _weigh(m: Any, length: int, width: int) -> None:
    """scores[j, i]: what token i reads of what token j <= i writes."""
    for j in range(length):
        step, decay_j = m.steps[j], m.decays[j]
        for first in range(j // TILE_LANES * TILE_LANES, width, LANES):
            for lane in range(LANES):
                i = first + lane
                decay = exp(np.float32(m.decays[i] - decay_j)) if i >= j else ZERO
                m.scores[j * CHUNK + i] = step * decay * m.b_c[j * CHUNK + i]


@jit
def _advance_state(m: Any, state: Any, length: int, dim: int, columns: int, x_columns: int) -> None:
    """A state as it was at the chunk's start becomes the state after the chunk's first `length` rows."""
    last = m.decays[length - 1]
    for i in range(length):
        factor = m.steps[i] * exp(np.float32(last - m.decays[i]))
        for j in range(x_columns):
            m.decayed[i * x_columns + j] = factor * m.x[i * x_columns + j]
    add_product(m.decayed, 1, x_columns, m.b, columns, state, columns, dim, columns, length, exp(np.float32(last)))
