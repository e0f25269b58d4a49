"""The gated delta rule: 64-token chunks for prefill, one token in place for decode.

The chunked form is that of arXiv 2406.06484 with the decay of arXiv 2412.06464: what the tokens of a chunk write is
the solution of one triangular system, everything else are products. A thread goes through a whole sequence with one
key head and its value heads, so that all it works on stays in its core's own cache.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.cpu.compiled import BF16, F32, I32, INT, jit, kernel
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
from cairn.kernels.cpu.scalars import advance, exp, load, sigmoid
from cairn.kernels.cpu.vectors import LANES, TILE_LANES, TILE_ROWS, add_product, aligned, round_up

NORM_EPS = np.float32(1e-6)


def gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    dt: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    batch: Batch,
) -> tuple[Tensor, Tensor]:
    """See `Kernels.gdn`."""
    host = batch.host
    _, heads, dim = v.shape
    _, key_heads, size = q.shape
    check_states(states, (heads, size, dim), torch.float32)
    y, snapshots = empty(*v.shape), empty(host.num_snapshots, heads, size, dim)
    num_prefills = host.num_seqs - host.num_decodes
    q, k, v, beta, dt = by_row(q), by_row(k), by_row(v), by_row(beta), by_row(dt)

    def operands(beta: Tensor, dt: Tensor) -> tuple[int, ...]:
        return (
            *(q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(beta.data_ptr(), beta.stride(0), dt.data_ptr(), dt.stride(0), a.data_ptr(), dt_bias.data_ptr()),
            *(states.data_ptr(), states.stride(0), y.data_ptr(), snapshots.data_ptr()),
            *(batch.cu_seqlens.data_ptr(), batch.state_slots.data_ptr(), batch.seq_starts.data_ptr()),
            *snapshot_addresses(host),
            *(host.num_decodes, key_heads, heads // key_heads, size, dim),
        )

    if host.num_decodes:
        # In the gates' own dtype beside prefills, too: one variant is compiled for a model, and a row's bits are those
        # of one variant.
        items = host.num_decodes * heads
        _gdn_decode[dt.dtype](items, items * size * dim // 4, *operands(beta, dt))
    if num_prefills:
        wide_beta, wide_dt = beta.float(), dt.float()
        work = (host.num_rows - host.num_decodes) * heads * size * dim // 16
        _gdn_prefill[torch.float32](num_prefills * key_heads, work, *operands(wide_beta, wide_dt))
    return y, snapshots


def _types(gate: Any) -> tuple[Any, ...]:
    return (
        *(F32, INT, F32, INT, F32, INT),
        *(gate, INT, gate, INT, F32, F32),
        *(F32, INT, F32, F32),
        *(I32, I32, I32),
        *(I32, I32, INT),
        *(INT, INT, INT, INT, INT),
    )


@jit
def _unit(x: Any, size: int, scale: float, out: Any) -> None:
    """out = scale * x / |x|."""
    squares = NORM_EPS
    for i in range(size):
        squares += x[i] * x[i]
    factor = np.float32(scale) / np.sqrt(squares)
    for i in range(size):
        out[i] = x[i] * factor


@kernel({torch.float32: _types(F32), torch.bfloat16: _types(BF16)})
def _gdn_decode(
    begin: int,
    end: int,
    q: Any,
    q_row: int,
    k: Any,
    k_row: int,
    v: Any,
    v_row: int,
    beta: Any,
    beta_row: int,
    dt: Any,
    dt_row: int,
    a: Any,
    dt_bias: Any,
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
    key_heads: int,
    per_key: int,
    size: int,
    dim: int,
) -> None:
    """Items are pairs (row, value head)."""
    heads = key_heads * per_key
    query, key = np.empty(size, np.float32), np.empty(size, np.float32)
    written, read = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for item in range(begin, end):
        row, head = item // heads, item % heads
        key_head = head // per_key
        _unit(advance(q, row * q_row + key_head * size), size, size**-0.5, query)
        _unit(advance(k, row * k_row + key_head * size), size, ONE, key)
        decay = exp(a[head] * softplus(load(dt, row * dt_row + head) + dt_bias[head]))
        share = sigmoid(load(beta, row * beta_row + head))
        value = advance(v, row * v_row + head * dim)
        out = advance(y, (row * heads + head) * dim)
        state = advance(states, slots[row] * slot_size + head * size * dim)
        for j in range(dim):
            written[j] = ZERO
            read[j] = ZERO
        both = ZERO
        if seq_starts[row] == 0:
            for i in range(size * dim):
                state[i] = ZERO
            for i in range(size):
                both += query[i] * key[i]
        else:
            # What the key finds, and what the query finds before the key's value is written.
            for i in range(size):
                from_key, from_query = key[i], query[i]
                both += from_query * from_key
                for j in range(dim):
                    number = state[i * dim + j]
                    written[j] += from_key * number
                    read[j] += from_query * number
        for j in range(dim):
            written[j] = share * (value[j] - decay * written[j])
            out[j] = decay * read[j] + both * written[j]
        for i in range(size):
            from_key = key[i]
            for j in range(dim):
                state[i * dim + j] = decay * state[i * dim + j] + from_key * written[j]
        index = first_snapshot(snapshot_rows, num_snapshots, row)
        while index < num_snapshots and snapshot_rows[index] == row:
            kept = advance(snapshots, (index * heads + head) * size * dim)
            copy_block(state, dim, size, dim, kept, dim, size, dim)
            index += 1


@kernel({torch.float32: _types(F32)})
def _gdn_prefill(
    begin: int,
    end: int,
    q: Any,
    q_row: int,
    k: Any,
    k_row: int,
    v: Any,
    v_row: int,
    beta: Any,
    beta_row: int,
    dt: Any,
    dt_row: int,
    a: Any,
    dt_bias: Any,
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
    key_heads: int,
    per_key: int,
    size: int,
    dim: int,
) -> None:
    """Items are pairs (prefill sequence, key head)."""
    heads = key_heads * per_key
    # A state's rows and columns in scratch memory, and the columns of what a chunk's rows have of them.
    state_rows, columns = round_up(size, TILE_ROWS), round_up(dim, TILE_LANES)
    keys_row = round_up(size, LANES)
    square = CHUNK * CHUNK
    scratch = np.empty(
        LANES + CHUNK * keys_row * 3 + 4 * square + 3 * CHUNK * columns + (per_key + 1) * state_rows * columns,
        np.float32,
    )
    keys = aligned(scratch)
    queries = advance(keys, CHUNK * keys_row)
    turned_keys = advance(queries, CHUNK * keys_row)
    key_key = advance(turned_keys, CHUNK * keys_row)
    query_key = advance(key_key, square)
    system = advance(query_key, square)
    scores = advance(system, square)
    written = advance(scores, square)
    faded = advance(written, CHUNK * columns)
    out = advance(faded, CHUNK * columns)
    midway = advance(out, CHUNK * columns)
    live = advance(midway, state_rows * columns)
    # The log of the decay since the chunk's start. Behind a strong decay its differences are small beside it, and in
    # float32 they would lose what they are needed for.
    decays = np.empty(CHUNK, np.float64)
    shares, grown = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)

    for item in range(begin, end):
        sequence, key_head = num_decodes + item // key_heads, item % key_heads
        first_row, last_row = int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])
        position = int(seq_starts[sequence])
        first_head = key_head * per_key
        slot = advance(states, slots[sequence] * slot_size + first_head * size * dim)
        for index in range(per_key):
            count = 0 if position == 0 else size
            state = advance(live, index * state_rows * columns)
            copy_block(advance(slot, index * size * dim), dim, count, dim, state, columns, state_rows, columns)
        snapshot = first_snapshot(snapshot_rows, num_snapshots, sequence)
        row = first_row
        while row < last_row:
            length = min(CHUNK - position % CHUNK, last_row - row)
            rows, width = round_up(length, TILE_ROWS), round_up(length, TILE_LANES)
            for i in range(length):
                _unit(advance(k, (row + i) * k_row + key_head * size), size, ONE, advance(keys, i * keys_row))
                scale = size**-0.5
                _unit(advance(q, (row + i) * q_row + key_head * size), size, scale, advance(queries, i * keys_row))
            copy_block(keys, 0, 0, 0, advance(keys, length * keys_row), keys_row, width - length, keys_row)
            copy_block(keys, 0, 0, 0, advance(queries, length * keys_row), keys_row, width - length, keys_row)
            transpose(keys, keys_row, width, size, turned_keys, CHUNK)
            # The lower triangle alone is wanted.
            for begun in range(0, width, TILE_LANES):
                corner, below = begun * CHUNK + begun, rows - begun
                right = advance(turned_keys, begun)
                left = advance(keys, begun * keys_row)
                tall = TILE_LANES
                add_product(left, keys_row, 1, right, CHUNK, advance(key_key, corner), CHUNK, below, tall, size, ZERO)
                left = advance(queries, begun * keys_row)
                add_product(
                    left,
                    keys_row,
                    1,
                    right,
                    CHUNK,
                    advance(query_key, corner),
                    CHUNK,
                    below,
                    tall,
                    size,
                    ZERO,
                )
            behind = snapshots_until(
                snapshot_rows, snapshot_offsets, snapshot, num_snapshots, sequence, row + length - first_row
            )
            for index in range(per_key):
                head = first_head + index
                state = advance(live, index * state_rows * columns)
                total = 0.0
                for i in range(length):
                    step = softplus(load(dt, (row + i) * dt_row + head) + dt_bias[head])
                    total += np.float64(a[head] * step)
                    decays[i] = total
                    grown[i] = exp(np.float32(total))
                    shares[i] = sigmoid(load(beta, (row + i) * beta_row + head))
                for i in range(length, rows):
                    decays[i] = total
                    shares[i] = ZERO
                _triangles(key_key, query_key, decays, shares, rows, system, scores)
                add_product(keys, keys_row, 1, state, columns, written, columns, rows, columns, size, ZERO)
                add_product(queries, keys_row, 1, state, columns, out, columns, rows, columns, size, ZERO)
                for i in range(length):
                    value = advance(v, (row + i) * v_row + head * dim)
                    share, factor = shares[i], grown[i]
                    for j in range(dim):
                        written[i * columns + j] = share * (value[j] - factor * written[i * columns + j])
                    for j in range(dim):
                        out[i * columns + j] *= factor
                _solve(system, written, rows, columns)
                for begun in range(0, rows, TILE_ROWS):
                    here, left = advance(out, begun * columns), advance(scores, begun * CHUNK)
                    depth = begun + TILE_ROWS
                    add_product(left, CHUNK, 1, written, columns, here, columns, TILE_ROWS, columns, depth, ONE)
                target = advance(y, (row * heads + head) * dim)
                copy_block(out, columns, length, dim, target, heads * dim, length, dim)
                for kept in range(snapshot, behind):
                    seen = first_row + snapshot_offsets[kept] - row
                    if seen < length:
                        copy_block(state, columns, state_rows, columns, midway, columns, state_rows, columns)
                        _advance(midway, keys, keys_row, written, faded, decays, seen, size, columns)
                        target = advance(snapshots, (kept * heads + head) * size * dim)
                        copy_block(midway, columns, size, dim, target, dim, size, dim)
                _advance(state, keys, keys_row, written, faded, decays, length, size, columns)
                for kept in range(snapshot, behind):
                    if first_row + snapshot_offsets[kept] - row == length:
                        target = advance(snapshots, (kept * heads + head) * size * dim)
                        copy_block(state, columns, size, dim, target, dim, size, dim)
            snapshot = behind
            row += length
            position += length
        for index in range(per_key):
            state = advance(live, index * state_rows * columns)
            copy_block(state, columns, size, dim, advance(slot, index * size * dim), dim, size, dim)
    # The pointers above keep nothing alive.
    scratch[0] = ZERO


@jit
def _triangles(key_key: Any, query_key: Any, decays: Any, shares: Any, rows: int, system: Any, scores: Any) -> None:
    """Row i of the system: what token i does not write since it reads it of the tokens before it in the chunk; of the
    scores: what its query finds of what they and it write."""
    for i in range(rows):
        share, here = -shares[i], decays[i]
        for first in range(0, i + 1, LANES):
            for lane in range(LANES):
                j = first + lane
                place = i * CHUNK + j
                decay = exp(np.float32(here - decays[j])) if j <= i else ZERO
                system[place] = share * decay * key_key[place]
                scores[place] = decay * query_key[place]


@jit
def _solve(system: Any, written: Any, rows: int, columns: int) -> None:
    """written = (1 - system)^-1 written, of the system's triangle below the diagonal."""
    for begun in range(0, rows, TILE_ROWS):
        here, left = advance(written, begun * columns), advance(system, begun * CHUNK)
        add_product(left, CHUNK, 1, written, columns, here, columns, TILE_ROWS, columns, begun, ONE)
        # A bound that is always TILE_ROWS, which LLVM does not know: it would write 28 loops out for it.
        for i in range(1, min(TILE_ROWS, rows - begun)):
            for t in range(i):
                factor = system[(begun + i) * CHUNK + begun + t]
                for j in range(columns):
                    here[i * columns + j] += factor * here[t * columns + j]


@jit
def _advance(
    state: Any,
    keys: Any,
    keys_row: int,
    written: Any,
    faded: Any,
    decays: Any,
    length: int,
    size: int,
    columns: int,
) -> None:
    """A state as it was at the chunk's start becomes the state after the chunk's first `length` rows."""
    last = decays[length - 1]
    for i in range(length):
        factor = exp(np.float32(last - decays[i]))
        for j in range(columns):
            faded[i * columns + j] = factor * written[i * columns + j]
    add_product(keys, 1, keys_row, faded, columns, state, columns, size, columns, length, exp(np.float32(last)))
