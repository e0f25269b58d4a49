"""The gated delta rule: 64-token chunks for prefill, token by token in place for decode.

The chunked form is that of arXiv 2406.06484 with the decay of arXiv 2412.06464: what the tokens of a chunk write is
the solution of one triangular system, everything else are products. A thread goes through a whole sequence with one
key head and its value heads, so that all it works on stays in its core's own cache.
"""

from typing import Any, NamedTuple

import numpy as np
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
from cairn.kernels.cpu.scalars import ONE, ZERO, advance, exp, load, sigmoid, store
from cairn.kernels.cpu.vectors import LANES, TILE_LANES, TILE_ROWS, add_product, aligned, round_up

NORM_EPS = np.float32(1e-6)


class _Operands(NamedTuple):
    """What has a row for each token, and the result y [T, heads, dim]."""

    q: Any
    q_row: int
    k: Any
    k_row: int
    v: Any
    v_row: int
    beta: Any
    beta_row: int
    dt: Any
    dt_row: int
    y: Any


class _Parameters(NamedTuple):
    """A layer's own: see `Kernels.gdn`. `per_key`: value heads of a key head."""

    a: Any
    dt_bias: Any
    key_heads: int
    per_key: int
    size: int
    dim: int
    beta_scale: Any


def gdn(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dt: Tensor, a: Tensor, dt_bias: Tensor, states: Tensor, batch: Batch,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.gdn`."""
    host = batch.host
    _, heads, dim = v.shape
    _, key_heads, size = q.shape
    check_states(states, (heads, size, dim))
    y = empty(*v.shape)
    snapshots = empty(host.num_snapshots, heads, size, dim, dtype=states.dtype)
    num_prefills = host.num_seqs - host.first_prefill
    q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    beta, dt = with_contiguous_rows(beta), with_contiguous_rows(dt)
    parameters = a.data_ptr(), dt_bias.data_ptr(), key_heads, heads // key_heads, size, dim, beta_scale
    sequences = sequence_arguments(batch, states, snapshots, heads * size * dim)
    if host.first_prefill:
        # In the gates' own dtype beside prefills, too: one variant is compiled for a model, and a row's bits are those
        # of one variant.
        operands = (*row_args(q), *row_args(k), *row_args(v), *row_args(beta), *row_args(dt), y.data_ptr())
        cost = host.num_decode_tokens * heads * size * dim // 4
        decode = _gdn_decode[StateKey(dt.dtype, states.dtype)]
        decode(host.first_prefill * heads, cost, *operands, *parameters, *sequences)
    if num_prefills:
        wide_beta, wide_dt = beta.float(), dt.float()
        operands = (*row_args(q), *row_args(k), *row_args(v), *row_args(wide_beta), *row_args(wide_dt), y.data_ptr())
        cost = (host.num_tokens - host.num_decode_tokens) * heads * size * dim // 16
        _gdn_prefill[StateKey(None, states.dtype)](num_prefills * key_heads, cost, *operands, *parameters, *sequences)
    return y, snapshots


def _types(gate: Any) -> tuple[Any, ...]:
    return (
        record(_Operands, F32, INT, F32, INT, F32, INT, gate, INT, gate, INT, F32),
        record(_Parameters, F32, F32, INT, INT, INT, INT, FLOAT),
    )


_DECODE_TYPES, _PREFILL_TYPES = sequence_kernel_types(_types)


@jit
def _l2_normalize(x: Any, size: int, scale: float, out: Any) -> None:
    """out = scale * x / |x|."""
    squares = NORM_EPS
    for i in range(size):
        squares += x[i] * x[i]
    factor = np.float32(scale) / np.sqrt(squares)
    for i in range(size):
        out[i] = x[i] * factor


@jit
def _log_decay(o: Any, p: Any, row: int, head: int) -> Any:
    return p.a[head] * softplus(load(o.dt, row * o.dt_row + head) + p.dt_bias[head])


@jit
def _beta(o: Any, p: Any, row: int, head: int) -> Any:
    return p.beta_scale * sigmoid(load(o.beta, row * o.beta_row + head))


@kernel(_DECODE_TYPES)
def _gdn_decode(begin: int, end: int, o: Any, p: Any, s: Any) -> None:
    """Items are pairs (sequence, value head)."""
    heads, size, dim = p.key_heads * p.per_key, p.size, p.dim
    query, key = np.empty(size, np.float32), np.empty(size, np.float32)
    written, read = np.empty(dim, np.float32), np.empty(dim, np.float32)
    scratch = s.states
    if has_verifies(s):
        buffer = np.empty(room_for_state(size * dim), np.float32)
        scratch = scratch_state(s, buffer)
    for item in range(begin, end):
        sequence, head = item // heads, item % heads
        key_head = head // p.per_key
        first_row, end_row = int(s.cu_seqlens[sequence]), int(s.cu_seqlens[sequence + 1])
        state = begin_steps(s, sequence, head * size * dim, size * dim, scratch)
        fresh = s.seq_starts[sequence] == 0
        for row in range(first_row, end_row):
            _l2_normalize(advance(o.q, row * o.q_row + key_head * size), size, size**-0.5, query)
            _l2_normalize(advance(o.k, row * o.k_row + key_head * size), size, ONE, key)
            decay, beta = exp(_log_decay(o, p, row, head)), _beta(o, p, row, head)
            value = advance(o.v, row * o.v_row + head * dim)
            out = advance(o.y, (row * heads + head) * dim)
            for j in range(dim):
                written[j] = ZERO
                read[j] = ZERO
            query_key = ZERO
            if fresh:
                for i in range(size * dim):
                    store(state, i, ZERO)
                for i in range(size):
                    query_key += query[i] * key[i]
                fresh = False
            else:
                # What the key reads, and what the query reads before the key's value is written.
                for i in range(size):
                    from_key, from_query = key[i], query[i]
                    query_key += from_query * from_key
                    for j in range(dim):
                        number = load(state, i * dim + j)
                        written[j] += from_key * number
                        read[j] += from_query * number
            for j in range(dim):
                written[j] = beta * (value[j] - decay * written[j])
                out[j] = decay * read[j] + query_key * written[j]
            for i in range(size):
                from_key = key[i]
                for j in range(dim):
                    store(state, i * dim + j, decay * load(state, i * dim + j) + from_key * written[j])
            store_snapshots(s, sequence, row + 1 - first_row, head * size * dim, state, size * dim)
    if has_verifies(s):
        buffer[0] = ZERO  # pointers keep nothing alive


class _Scratch(NamedTuple):
    """A thread's buffers for one chunk. Rows and columns are rounded up to whole tiles.

    `keys`, `queries` [CHUNK, keys_row], `transposed_keys` [keys_row, CHUNK]; `key_key`, `query_key`, `system`, `scores`
    [CHUNK, CHUNK]; `written`, `decayed`, `out` [CHUNK, columns]; `snapshot` and each of `states` [state_rows, columns];
    by token: `decays` float64, the log of the decay since the chunk's start (after a strong decay its differences are
    small beside it, and in float32 they would lose what they are needed for), its exponential `decay`, and `betas`.
    """

    keys: Any
    queries: Any
    transposed_keys: Any
    key_key: Any
    query_key: Any
    system: Any
    scores: Any
    written: Any
    decayed: Any
    out: Any
    snapshot: Any
    states: Any
    decays: Any
    decay: Any
    betas: Any


@kernel(_PREFILL_TYPES)
def _gdn_prefill(begin: int, end: int, o: Any, p: Any, s: Any) -> None:
    """Items are pairs (prefill sequence, key head)."""
    heads, per_key, size, dim = p.key_heads * p.per_key, p.per_key, p.size, p.dim
    state_rows, columns, keys_row = round_up(size, TILE_ROWS), round_up(dim, TILE_LANES), round_up(size, LANES)
    square, state_size = CHUNK * CHUNK, state_rows * columns
    buffer = np.empty(
        LANES + 3 * CHUNK * keys_row + 4 * square + 3 * CHUNK * columns + (per_key + 1) * state_size, np.float32
    )
    keys = aligned(buffer)
    queries = advance(keys, CHUNK * keys_row)
    transposed_keys = advance(queries, CHUNK * keys_row)
    key_key = advance(transposed_keys, CHUNK * keys_row)
    query_key = advance(key_key, square)
    system = advance(query_key, square)
    scores = advance(system, square)
    written = advance(scores, square)
    decayed = advance(written, CHUNK * columns)
    out = advance(decayed, CHUNK * columns)
    snapshot = advance(out, CHUNK * columns)
    states = advance(snapshot, state_size)
    decays = np.empty(CHUNK, np.float64)
    decay, betas = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    products = keys, queries, transposed_keys, key_key, query_key, system, scores, written, decayed, out
    m = _Scratch(*products, snapshot, states, decays, decay, betas)

    for item in range(begin, end):
        sequence, key_head = s.first_prefill + item // p.key_heads, item % p.key_heads
        first_row, end_row = int(s.cu_seqlens[sequence]), int(s.cu_seqlens[sequence + 1])
        position = int(s.seq_starts[sequence])
        first_head = key_head * per_key
        slot = advance(s.states, s.slots[sequence] * s.slot_stride + first_head * size * dim)
        known_rows = 0 if position == 0 else size
        for index in range(per_key):
            state = advance(states, index * state_size)
            copy_block(advance(slot, index * size * dim), dim, known_rows, dim, state, columns, state_rows, columns)
        next_snapshot = first_snapshot(s, sequence)
        row = first_row
        while row < end_row:
            length = min(CHUNK - position % CHUNK, end_row - row)
            _multiply_keys(o, p, m, row, length, key_head, keys_row)
            snapshots_end = end_of_snapshots(s, next_snapshot, sequence, row + length - first_row)
            for index in range(per_key):
                head = first_head + index
                state = advance(states, index * state_size)
                _scan_chunk(o, p, m, row, length, head, state, columns, keys_row)
                for kept in range(next_snapshot, snapshots_end):
                    num_tokens = first_row + s.snapshot_offsets[kept] - row
                    if num_tokens < length:
                        copy_block(state, columns, state_rows, columns, snapshot, columns, state_rows, columns)
                        _advance_state(m, snapshot, num_tokens, size, columns, keys_row)
                        target = advance(s.snapshots, (kept * heads + head) * size * dim)
                        copy_block(snapshot, columns, size, dim, target, dim, size, dim)
                _advance_state(m, state, length, size, columns, keys_row)
                round_block(state, columns, size, dim, s.states)
                for kept in range(next_snapshot, snapshots_end):
                    if first_row + s.snapshot_offsets[kept] - row == length:
                        target = advance(s.snapshots, (kept * heads + head) * size * dim)
                        copy_block(state, columns, size, dim, target, dim, size, dim)
            next_snapshot = snapshots_end
            row += length
            position += length
        for index in range(per_key):
            state = advance(states, index * state_size)
            copy_block(state, columns, size, dim, advance(slot, index * size * dim), dim, size, dim)
    # The pointers above keep nothing alive.
    buffer[0] = ZERO


@jit
def _multiply_keys(o: Any, p: Any, m: Any, row: int, length: int, key_head: int, keys_row: int) -> None:
    """The chunk's keys and queries over their lengths, and the lower triangles of their products with the keys."""
    size, tile_rows, width = p.size, round_up(length, TILE_ROWS), round_up(length, TILE_LANES)
    for i in range(length):
        key, query = advance(o.k, (row + i) * o.k_row), advance(o.q, (row + i) * o.q_row)
        _l2_normalize(advance(key, key_head * size), size, ONE, advance(m.keys, i * keys_row))
        _l2_normalize(advance(query, key_head * size), size, size**-0.5, advance(m.queries, i * keys_row))
    copy_block(m.keys, 0, 0, 0, advance(m.keys, length * keys_row), keys_row, width - length, keys_row)
    copy_block(m.keys, 0, 0, 0, advance(m.queries, length * keys_row), keys_row, width - length, keys_row)
    transpose(m.keys, keys_row, width, size, m.transposed_keys, CHUNK)
    for first in range(0, width, TILE_LANES):
        right, corner, below = advance(m.transposed_keys, first), first * CHUNK + first, tile_rows - first
        left, out = advance(m.keys, first * keys_row), advance(m.key_key, corner)
        add_product(left, keys_row, 1, right, CHUNK, out, CHUNK, below, TILE_LANES, size, ZERO)
        left, out = advance(m.queries, first * keys_row), advance(m.query_key, corner)
        add_product(left, keys_row, 1, right, CHUNK, out, CHUNK, below, TILE_LANES, size, ZERO)


@jit
def _scan_chunk(
    o: Any, p: Any, m: Any, row: int, length: int, head: int, state: Any, columns: int, keys_row: int
) -> None:
    """y of a chunk and a value head and what its tokens write, from the state before the chunk, which is left alone."""
    size, dim, tile_rows = p.size, p.dim, round_up(length, TILE_ROWS)
    total = 0.0
    for i in range(length):
        total += np.float64(_log_decay(o, p, row + i, head))
        m.decays[i], m.decay[i], m.betas[i] = total, exp(np.float32(total)), _beta(o, p, row + i, head)
    for i in range(length, tile_rows):
        m.decays[i], m.betas[i] = total, ZERO
    _weigh(m, tile_rows)
    add_product(m.keys, keys_row, 1, state, columns, m.written, columns, tile_rows, columns, size, ZERO)
    add_product(m.queries, keys_row, 1, state, columns, m.out, columns, tile_rows, columns, size, ZERO)
    for i in range(length):
        value = advance(o.v, (row + i) * o.v_row + head * dim)
        beta, factor = m.betas[i], m.decay[i]
        for j in range(dim):
            m.written[i * columns + j] = beta * (value[j] - factor * m.written[i * columns + j])
        for j in range(dim):
            m.out[i * columns + j] *= factor
    _solve(m.system, m.written, tile_rows, columns)
    for first in range(0, tile_rows, TILE_ROWS):
        left, out, depth = advance(m.scores, first * CHUNK), advance(m.out, first * columns), first + TILE_ROWS
        add_product(left, CHUNK, 1, m.written, columns, out, columns, TILE_ROWS, columns, depth, ONE)
    row_size = p.key_heads * p.per_key * dim
    copy_block(m.out, columns, length, dim, advance(o.y, row * row_size + head * dim), row_size, length, dim)


@jit
def _weigh(m: Any, rows: int) -> None:
    """Row i of the system: what token i does not write since it reads it of the tokens before it in the chunk; of the
    scores: what its query reads of what they and it write."""
    for i in range(rows):
        beta, decay_i = -m.betas[i], m.decays[i]
        for first in range(0, i + 1, LANES):
            for lane in range(LANES):
                j = first + lane
                place = i * CHUNK + j
                decay = exp(np.float32(decay_i - m.decays[j])) if j <= i else ZERO
                m.system[place] = beta * decay * m.key_key[place]
                m.scores[place] = decay * m.query_key[place]


@jit
def _solve(system: Any, written: Any, rows: int, columns: int) -> None:
    """written = (1 - system)^-1 written, of the system's triangle below the diagonal."""
    for first in range(0, rows, TILE_ROWS):
        out, left = advance(written, first * columns), advance(system, first * CHUNK)
        add_product(left, CHUNK, 1, written, columns, out, columns, TILE_ROWS, columns, first, ONE)
        # A bound that is always TILE_ROWS, which LLVM does not know: it would write 28 loops out for it.
        for i in range(1, min(TILE_ROWS, rows - first)):
            for t in range(i):
                factor = system[(first + i) * CHUNK + first + t]
                for j in range(columns):
                    out[i * columns + j] += factor * out[t * columns + j]


@jit
def _advance_state(m: Any, state: Any, length: int, size: int, columns: int, keys_row: int) -> None:
    """A state as it was at the chunk's start becomes the state after the chunk's first `length` rows."""
    last = m.decays[length - 1]
    for i in range(length):
        factor = exp(np.float32(last - m.decays[i]))
        for j in range(columns):
            m.decayed[i * columns + j] = factor * m.written[i * columns + j]
    add_product(m.keys, 1, keys_row, m.decayed, columns, state, columns, size, columns, length, exp(np.float32(last)))
