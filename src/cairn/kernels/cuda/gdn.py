"""The gated delta rule (arXiv 2412.06464), chunk by chunk (its section 3.3, and arXiv 2406.06484 for the inverse).

Of a chunk of 64 tokens, with Q and K over their lengths and G the sum of the logarithms of its decays so far:

    A = tril(w K K^T * exp(G_i - G_j), -1)          T = (1 + A)^-1 w
    W = T (exp(G) K)            U = T V             for all chunks at once
    N = U - W S                 S' = exp(G_last) S + K^T (exp(G_last - G) N)       chunk after chunk, state S
    Y = exp(G) Q S + tril(Q K^T * exp(G_i - G_j)) N                                for all chunks at once

    state after the first n tokens of a chunk: the third line with the tokens after them masked, since N of a token
    does not depend on later ones

Decodes, verifies and folds go token by token: see `gdn_decode`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.device import kernel, limits, power_of_2
from cairn.kernels.cuda.gdn_decode import EPS, take_tokens
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.cuda.scalars import (
    LEAST_DECAY,
    LEAST_PART,
    NUM_WARPS,
    Precision,
    chunk_rows_of,
    chunks_before_snapshot,
    precision_of,
    product,
    sigmoid,
    softplus,
    stages_that_fit,
    wide_product,
)

_EXACT_STATE_WARPS, _EXACT_OUTPUT_WARPS = 8, 32
"""Where products are made without tensor cores. Operands of a whole product are taken into registers there: with fewer
warps nearly all of a thread's are spilled, 4 KB, as `cuobjdump --dump-resource-usage` says. No times were measured."""


@triton.jit
def _inverse(a, PRECISION: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangular [64, 64].

    Its four diagonal blocks of 16 by forward substitution, all at a time: (1 + a) = D^-1 (1 + N) with D the blocks'
    inverses and N = D (a without them), of which N^4 = 0, so that the inverse is (1 - N) (1 + N^2) D.
    """
    inner = tl.arange(0, 16)
    block = tl.arange(0, 4)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = -tl.sum(tl.where(on_diagonal, tl.reshape(a, [4, 16, 4, 16]), 0.0), axis=2)
    for i in range(2, 16):
        at_row = inner[None, :, None] == i
        row = tl.sum(tl.where(at_row, blocks, 0.0), axis=1)
        row += tl.sum(row[:, :, None] * blocks, axis=1)
        blocks = tl.where(at_row, row[:, None, :], blocks)
    blocks += tl.where(inner[None, :, None] == inner[None, None, :], 1.0, 0.0)
    spread = tl.where(on_diagonal, tl.broadcast_to(blocks[:, :, None, :], [4, 16, 4, 16]), 0.0)
    diagonal = tl.reshape(spread, [64, 64])
    place = tl.arange(0, 64) // 16
    below = tl.where(place[:, None] > place[None, :], a, 0.0)
    n = wide_product(diagonal, below, PRECISION)
    half = diagonal + wide_product(wide_product(n, n, PRECISION), diagonal, PRECISION)
    return half - wide_product(n, half, PRECISION)


@kernel
def _chunks_kernel(
    k, v, beta, dt, a, dt_bias, totals, scales, w, u, cu_seqlens, chunk_seqs, chunk_rows, num_rows, beta_scale,
    k_stride, v_stride, beta_stride, dt_stride,
    H: tl.constexpr, PER_KEY: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk of a value head has without the state before it: G, W and U, and what K is multiplied with to have
    length 1: products are made of it as it came, rows and columns of their results are scaled."""
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, valid = chunk_rows_of(chunk, chunk_seqs, chunk_rows, cu_seqlens)
    token = tl.arange(0, 64)
    rows = first.to(tl.int64) + token

    raw = tl.load(dt + rows * dt_stride + head, mask=valid, other=0.0).to(tl.float32)
    decay = tl.load(a + head) * softplus(raw + tl.load(dt_bias + head))
    total = tl.cumsum(tl.where(valid, tl.maximum(decay, LEAST_DECAY), 0.0), axis=0)
    tl.store(totals + head.to(tl.int64) * num_rows + rows, total, mask=valid)
    weight = sigmoid(tl.load(beta + rows * beta_stride + head, mask=valid, other=0.0).to(tl.float32))
    weight = tl.where(valid, beta_scale * weight, 0.0)

    size = tl.arange(0, BS)
    key_mask = valid[:, None] & (size < S)[None, :]
    key_head = head // PER_KEY
    keys = tl.load(k + rows[:, None] * k_stride + key_head * S + size[None, :], mask=key_mask, other=0.0)
    wide = keys.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) + EPS)
    tl.store(scales + head.to(tl.int64) * num_rows + rows, scale, mask=valid)

    scores = product(keys, tl.trans(keys), tl.zeros((64, 64), tl.float32), PRECISION)
    before = token[:, None] > token[None, :]
    relative_decay = tl.exp(tl.where(before, total[:, None] - total[None, :], 0.0)) * scale[None, :]
    inverse = _inverse(tl.where(before, (weight * scale)[:, None] * scores * relative_decay, 0.0), PRECISION)

    key_weights = inverse * (weight * scale * tl.exp(total))[None, :]
    value_weights = inverse * weight[None, :]
    if PRECISION == "bf16":
        key_weights, value_weights = key_weights.to(tl.bfloat16), value_weights.to(tl.bfloat16)
    out = product(key_weights, keys, tl.zeros((64, BS), tl.float32), PRECISION)
    places = w + rows[:, None] * (H * S) + head * S + size[None, :]
    tl.store(places, out.to(w.dtype.element_ty), mask=key_mask)
    for begin in tl.static_range(0, P, BP):
        dim = begin + tl.arange(0, BP)
        mask = valid[:, None] & (dim < P)[None, :]
        values = tl.load(v + rows[:, None] * v_stride + head * P + dim[None, :], mask=mask, other=0.0)
        out = product(value_weights, values, tl.zeros((64, BP), tl.float32), PRECISION)
        tl.store(u + rows[:, None] * (H * P) + head * P + dim[None, :], out.to(u.dtype.element_ty), mask=mask)


@kernel
def _states_kernel(
    k, w, u, totals, scales, chunk_states, states, snapshots, cu_seqlens, seq_starts, slots, seq_chunks,
    seq_snapshots, snapshot_offsets, first_seq, num_rows,
    k_stride, slot_stride,
    H: tl.constexpr, PER_KEY: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One sequence's states of a part of a value head, chunk after chunk, and its snapshots.

    In a program of its own, so that it may write N where it has read U: nobody else reads that part of these rows.
    """
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    sequence = first_seq + tl.program_id(0) // (parts * H)
    first, last = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    start = tl.load(seq_starts + sequence)
    first_chunk = tl.load(seq_chunks + sequence)
    num_chunks = tl.load(seq_chunks + sequence + 1) - first_chunk

    token, size, dim = tl.arange(0, 64), tl.arange(0, BS), part * BP + tl.arange(0, BP)
    mask = (size < S)[:, None] & (dim < P)[None, :]
    inside = head * (S * P) + size[:, None] * P + dim[None, :]
    live = states + tl.load(slots + sequence).to(tl.int64) * slot_stride + inside
    state = tl.load(live, mask=mask & (start > 0), other=0.0).to(tl.float32)

    snapshot, end_of_snapshots = tl.load(seq_snapshots + sequence), tl.load(seq_snapshots + sequence + 1)
    target = snapshots + snapshot.to(tl.int64) * (H * S * P) + inside
    for index in range(snapshot, end_of_snapshots + 1):
        begin_chunk, end_chunk = chunks_before_snapshot(
            index, snapshot, end_of_snapshots, snapshot_offsets, start, num_chunks
        )
        for c in tl.range(begin_chunk, end_chunk, num_stages=STAGES):
            at = chunk_states + (first_chunk + c).to(tl.int64) * (H * S * P) + inside
            tl.store(at, state.to(chunk_states.dtype.element_ty), mask=mask)
            begin = first - start % 64 + c * 64
            end = tl.minimum(begin + 64, last)
            rows = begin + token
            valid = (rows >= first) & (rows < end)
            per_row = head.to(tl.int64) * num_rows
            final = tl.load(totals + per_row + end - 1)
            left = tl.where(valid, final - tl.load(totals + per_row + rows, mask=valid, other=0.0), 0.0)
            left = tl.exp(left) * tl.load(scales + per_row + rows, mask=valid, other=0.0)
            rows = rows.to(tl.int64)
            key_mask = valid[:, None] & (size < S)[None, :]
            reads = tl.load(w + rows[:, None] * (H * S) + head * S + size[None, :], mask=key_mask, other=0.0)
            places = u + rows[:, None] * (H * P) + head * P + dim[None, :]
            new = tl.load(places, mask=valid[:, None] & (dim < P)[None, :], other=0.0).to(tl.float32)
            keys_at = k + rows[:, None] * k_stride + (head // PER_KEY) * S + size[None, :]
            keys = tl.load(keys_at, mask=key_mask, other=0.0)
            new -= product(reads, state, tl.zeros((64, BP), tl.float32), PRECISION)
            tl.store(places, new.to(u.dtype.element_ty), mask=valid[:, None] & (dim < P)[None, :])
            state = product(tl.trans(keys), new * left[:, None], state * tl.exp(final), PRECISION)
            state = state.to(live.dtype.element_ty).to(tl.float32)
        if index < end_of_snapshots:
            # Of a snapshot inside a chunk this is where `_snapshots_kernel` goes on from.
            tl.store(target, state.to(live.dtype.element_ty), mask=mask)
            target += H * S * P
    tl.store(live, state.to(live.dtype.element_ty), mask=mask)


@kernel
def _snapshots_kernel(
    k, u, totals, scales, snapshots, cu_seqlens, seq_starts, snapshot_seqs, snapshot_offsets, first_snapshot,
    num_rows,
    k_stride,
    H: tl.constexpr, PER_KEY: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a part of a head of a prefill's snapshot from its chunk's first position to its own; N stands in U."""
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    snapshot = first_snapshot + tl.program_id(0) // (parts * H)
    sequence = tl.load(snapshot_seqs + snapshot)
    start, first = tl.load(seq_starts + sequence), tl.load(cu_seqlens + sequence)
    position = start % 64 + tl.load(snapshot_offsets + snapshot)
    if position % 64 > 0:
        token, size, dim = tl.arange(0, 64), tl.arange(0, BS), part * BP + tl.arange(0, BP)
        begin = first - start % 64 + position // 64 * 64
        end = begin + position % 64
        rows = begin + token
        valid = (rows >= first) & (rows < end)
        per_row = head.to(tl.int64) * num_rows
        final = tl.load(totals + per_row + end - 1)
        left = tl.where(valid, final - tl.load(totals + per_row + rows, mask=valid, other=0.0), 0.0)
        left = tl.exp(left) * tl.load(scales + per_row + rows, mask=valid, other=0.0)
        rows = rows.to(tl.int64)
        new_at = u + rows[:, None] * (H * P) + head * P + dim[None, :]
        new = tl.load(new_at, mask=valid[:, None] & (dim < P)[None, :], other=0.0).to(tl.float32)
        keys_at = k + rows[:, None] * k_stride + (head // PER_KEY) * S + size[None, :]
        keys = tl.load(keys_at, mask=valid[:, None] & (size < S)[None, :], other=0.0)
        mask = (size < S)[:, None] & (dim < P)[None, :]
        target = snapshots + snapshot.to(tl.int64) * (H * S * P) + head * (S * P) + size[:, None] * P + dim[None, :]
        state = tl.load(target, mask=mask, other=0.0).to(tl.float32) * tl.exp(final)
        state = product(tl.trans(keys), new * left[:, None], state, PRECISION)
        tl.store(target, state.to(target.dtype.element_ty), mask=mask)


@kernel
def _outputs_kernel(
    q, k, u, totals, scales, chunk_states, y, cu_seqlens, chunk_seqs, chunk_rows, num_rows,
    q_stride, k_stride,
    H: tl.constexpr, PER_KEY: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the queries of a chunk read, of a part of a value head."""
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    chunk = tl.program_id(0) // (parts * H)
    first, valid = chunk_rows_of(chunk, chunk_seqs, chunk_rows, cu_seqlens)
    token = tl.arange(0, 64)
    rows = first.to(tl.int64) + token
    size, dim = tl.arange(0, BS), part * BP + tl.arange(0, BP)
    key_mask = valid[:, None] & (size < S)[None, :]
    mask = valid[:, None] & (dim < P)[None, :]

    key_head = head // PER_KEY
    queries = tl.load(q + rows[:, None] * q_stride + key_head * S + size[None, :], mask=key_mask, other=0.0)
    keys = tl.load(k + rows[:, None] * k_stride + key_head * S + size[None, :], mask=key_mask, other=0.0)
    per_row = head.to(tl.int64) * num_rows + rows
    total = tl.load(totals + per_row, mask=valid, other=0.0)
    scale = tl.load(scales + per_row, mask=valid, other=0.0)
    scores = product(queries, tl.trans(keys), tl.zeros((64, 64), tl.float32), PRECISION)
    sees = (token[:, None] >= token[None, :]) & valid[:, None]
    relative_decay = tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0)) * scale[None, :]
    scores = tl.where(sees, scores * relative_decay, 0.0)
    if PRECISION == "bf16":
        scores = scores.to(tl.bfloat16)
    inside = head * (S * P) + size[:, None] * P + dim[None, :]
    state_mask = (size < S)[:, None] & (dim < P)[None, :]
    state = tl.load(chunk_states + chunk.to(tl.int64) * (H * S * P) + inside, mask=state_mask, other=0.0)
    out = product(queries, state, tl.zeros((64, BP), tl.float32), PRECISION) * tl.exp(total)[:, None]
    new = tl.load(u + rows[:, None] * (H * P) + head * P + dim[None, :], mask=mask, other=0.0)
    out = product(scores, new, out, PRECISION)
    # A query's length divides all of its row: products are made of it as it came.
    wide = queries.to(tl.float32)
    out *= (S**-0.5 / tl.sqrt(tl.sum(wide * wide, axis=1) + EPS))[:, None]
    tl.store(y + rows[:, None] * (H * P) + head * P + dim[None, :], out.to(y.dtype.element_ty), mask=mask)


def gdn(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dt: Tensor, a: Tensor, dt_bias: Tensor, states: Tensor, batch: Batch,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.gdn`."""
    metadata, host = batch.metadata, batch.host
    assert isinstance(metadata, CudaMetadata)
    heads, dim = v.shape[1:]
    size = q.shape[2]
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    snapshots = torch.empty((host.num_snapshots, *states.shape[1:]), dtype=states.dtype, device=states.device)
    shape: dict[str, Any] = {"H": heads, "PER_KEY": heads // q.shape[1], "S": size, "P": dim}
    if host.first_prefill:
        take_tokens(q, k, v, beta, dt, a, dt_bias, states, y, snapshots, batch, metadata, float(beta_scale))
    if metadata.num_chunks:
        precision = precision_of(dt.dtype, metadata.exact)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        num_rows = v.shape[0]
        totals, scales = (torch.empty((heads, num_rows), dtype=torch.float32, device=v.device) for _ in range(2))
        w = torch.empty((num_rows, heads, size), dtype=dtype, device=v.device)
        u = torch.empty(v.shape, dtype=dtype, device=v.device)
        chunk_states = torch.empty((metadata.num_chunks, heads, size, dim), dtype=dtype, device=v.device)
        chunks = (batch.cu_seqlens, metadata.chunk_seqs, metadata.chunk_rows, num_rows)
        _chunks_kernel[(metadata.num_chunks * heads,)](
            k, v, beta, dt, a, dt_bias, totals, scales, w, u, *chunks, float(beta_scale),
            k.stride(0), v.stride(0), beta.stride(0), dt.stride(0), **shape, **_chunks_tile(size, dim, precision),
        )  # fmt: skip
        tile = _states_tile(size, dim, precision)
        programs = (host.num_seqs - host.first_prefill) * heads * triton.cdiv(dim, tile["BP"])
        _states_kernel[(programs,)](
            k, w, u, totals, scales, chunk_states, states, snapshots, batch.cu_seqlens, batch.seq_starts,
            batch.state_slots, metadata.seq_chunks, metadata.seq_snapshots, metadata.snapshot_offsets,
            host.first_prefill, num_rows, k.stride(0), states.stride(0), **shape, **tile,
        )  # fmt: skip
        first = metadata.num_decode_snapshots
        if host.num_snapshots > first:
            tile = _snapshots_tile(size, dim, precision)
            programs = (host.num_snapshots - first) * heads * triton.cdiv(dim, tile["BP"])
            _snapshots_kernel[(programs,)](
                k, u, totals, scales, snapshots, batch.cu_seqlens, batch.seq_starts, metadata.snapshot_seqs,
                metadata.snapshot_offsets, first, num_rows, k.stride(0), **shape, **tile,
            )  # fmt: skip
        tile = _outputs_tile(size, dim, precision)
        _outputs_kernel[(metadata.num_chunks * heads * triton.cdiv(dim, tile["BP"]),)](
            q, k, u, totals, scales, chunk_states, y, *chunks, q.stride(0), k.stride(0), **shape, **tile
        )
    return y, snapshots


def _chunks_tile(size: int, dim: int, precision: Precision) -> dict[str, Any]:
    low = precision == "bf16"
    part = LEAST_PART if low else min(32, power_of_2(dim, 16))
    tile = {"BS": power_of_2(size, 16), "BP": part, "PRECISION": precision}
    # A third program fits onto a multiprocessor of 65,536 registers.
    return {**tile, "num_warps": 4, "maxnreg": 168} if low else {**tile, "num_warps": NUM_WARPS[precision]}


def _states_tile(size: int, dim: int, precision: Precision) -> dict[str, Any]:
    """Narrow, because nothing but heads and parts of them are at work at a time."""
    low = precision == "bf16"
    tile: dict[str, Any] = {"BS": power_of_2(size, 16), "BP": min(32 if low else 16, power_of_2(dim, 16))}
    # W and K of a chunk, and the part's U.
    chunk_bytes = 2 * 64 * (2 * tile["BS"] + tile["BP"])
    stages = stages_that_fit(4, chunk_bytes, 16_384, limits().shared_memory) if low else 1
    return {
        **tile,
        "PRECISION": precision,
        "STAGES": stages,
        "num_warps": _EXACT_STATE_WARPS if precision == "ieee" else 4,
    }


def _snapshots_tile(size: int, dim: int, precision: Precision) -> dict[str, Any]:
    """As the states': a snapshot at a prompt's end is the state there, bit for bit if `precision` is "ieee"."""
    most = 16 if precision == "ieee" else 32
    tile = {"BS": power_of_2(size, 16), "BP": min(most, power_of_2(dim, 16)), "PRECISION": precision}
    return {**tile, "num_warps": _EXACT_STATE_WARPS if precision == "ieee" else 4}


def _outputs_tile(size: int, dim: int, precision: Precision) -> dict[str, Any]:
    low = precision == "bf16"
    part = min(128, power_of_2(dim, LEAST_PART)) if low else min(32, power_of_2(dim, 16))
    tile = {"BS": power_of_2(size, 16), "BP": part, "PRECISION": precision}
    if low:
        return {**tile, "num_warps": 4, "maxnreg": 168}
    return {**tile, "num_warps": _EXACT_OUTPUT_WARPS if precision == "ieee" else NUM_WARPS[precision]}
