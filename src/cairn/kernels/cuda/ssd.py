"""Mamba2's state space scan, chunk by chunk (arXiv 2405.21060, section 6).

Of a chunk of 64 tokens, with G the sum of step * a so far:

    S' = exp(G_last) S + B^T (step exp(G_last - G) X)              chunk after chunk, state S
    Y = exp(G) C S + tril(C B^T * exp(G_i - G_j) step_j) X + d X   for all chunks at once

    state after the first n tokens of a chunk: the first line with the tokens after them masked

Decodes, verifies and folds go token by token: see `ssd_decode`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.device import kernel, limits, power_of_2
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
    softplus,
    stages_that_fit,
)
from cairn.kernels.cuda.ssd_decode import take_tokens


@kernel
def _steps_kernel(
    dt, a, dt_bias, steps, totals, cu_seqlens, chunk_seqs, chunk_rows, num_rows,
    dt_stride,
    limit_low, limit_high,
    H: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """How far each token of a chunk moves its states, and G: both [H, T], so that a chunk's lie side by side."""
    parts: tl.constexpr = (H + BH - 1) // BH
    chunk = tl.program_id(0) // parts
    head = tl.program_id(0) % parts * BH + tl.arange(0, BH)
    first, valid = chunk_rows_of(chunk, chunk_seqs, chunk_rows, cu_seqlens)
    row = first + tl.arange(0, 64)
    mask = valid[:, None] & (head < H)[None, :]
    raw = tl.load(dt + row.to(tl.int64)[:, None] * dt_stride + head[None, :], mask=mask, other=0.0).to(tl.float32)
    step = softplus(raw + tl.load(dt_bias + head, mask=head < H, other=0.0)[None, :])
    step = tl.where(mask, tl.minimum(tl.maximum(step, limit_low), limit_high), 0.0)
    rate = tl.load(a + head, mask=head < H, other=0.0)
    total = tl.cumsum(tl.maximum(step * rate[None, :], LEAST_DECAY), axis=0)
    at = head.to(tl.int64)[None, :] * num_rows + row[:, None]
    tl.store(steps + at, step, mask=mask)
    tl.store(totals + at, total, mask=mask)


@triton.jit
def _load_b_or_c(source, rows, valid, stride, group, begin, S: tl.constexpr, BS: tl.constexpr):
    """Numbers [begin, begin + BS) of the S that a group has in each of `rows`: [64, BS]."""
    size = begin + tl.arange(0, BS)
    mask = valid[:, None] & (size < S)[None, :]
    return tl.load(source + rows[:, None] * stride + group * S + size[None, :], mask=mask, other=0.0)


@triton.jit
def _chunk_update(
    state, x, b, steps, totals, base, chunk, first, last, head, dim, seen, num_rows, x_stride, b_stride,
    PER_GROUP: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state [S, P] after the first `seen` tokens of a chunk."""
    begin = base + chunk * 64
    end = tl.minimum(begin + seen, last)
    rows = begin + tl.arange(0, 64)
    valid = (rows >= first) & (rows < end)
    per_row = head.to(tl.int64) * num_rows
    final = tl.load(totals + per_row + end - 1)
    step = tl.load(steps + per_row + rows, mask=valid, other=0.0)
    total = tl.load(totals + per_row + rows, mask=valid, other=0.0)
    moves = step * tl.exp(tl.where(valid, final - total, 0.0))
    rows = rows.to(tl.int64)
    mask = valid[:, None] & (dim < P)[None, :]
    inputs = tl.load(x + rows[:, None] * x_stride + head * P + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    writes = _load_b_or_c(b, rows, valid, b_stride, head // PER_GROUP, 0, S, BS)
    return product(tl.trans(writes), inputs * moves[:, None], state * tl.exp(final), PRECISION)


@kernel
def _states_kernel(
    x, b, steps, totals, chunk_states, states, snapshots, cu_seqlens, seq_starts, slots, seq_chunks, seq_snapshots,
    snapshot_offsets, first_seq, num_rows,
    x_stride, b_stride, slot_stride,
    H: tl.constexpr, PER_GROUP: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One sequence's states of a part of a head, chunk after chunk, and its snapshots."""
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    sequence = first_seq + tl.program_id(0) // (parts * H)
    first, last = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    start = tl.load(seq_starts + sequence)
    first_chunk = tl.load(seq_chunks + sequence)
    num_chunks = tl.load(seq_chunks + sequence + 1) - first_chunk
    base = first - start % 64

    dim, size = part * BP + tl.arange(0, BP), tl.arange(0, BS)
    # Transposed: products want at least 64 rows, and P may be cut into less.
    mask = (size < S)[:, None] & (dim < P)[None, :]
    state_offsets = head * (P * S) + dim[:, None] * S + size[None, :]
    chunk_state_offsets = head * (S * P) + size[:, None] * P + dim[None, :]
    live = states + tl.load(slots + sequence).to(tl.int64) * slot_stride + state_offsets
    state = tl.trans(tl.load(live, mask=tl.trans(mask) & (start > 0), other=0.0).to(tl.float32))

    snapshot, end_of_snapshots = tl.load(seq_snapshots + sequence), tl.load(seq_snapshots + sequence + 1)
    target = snapshots + snapshot.to(tl.int64) * (H * P * S) + state_offsets
    for index in range(snapshot, end_of_snapshots + 1):
        begin_chunk, end_chunk = chunks_before_snapshot(
            index, snapshot, end_of_snapshots, snapshot_offsets, start, num_chunks
        )
        for c in tl.range(begin_chunk, end_chunk, num_stages=STAGES):
            at = chunk_states + (first_chunk + c).to(tl.int64) * (H * S * P) + chunk_state_offsets
            tl.store(at, state.to(chunk_states.dtype.element_ty), mask=mask)
            state = _chunk_update(
                state, x, b, steps, totals, base, c, first, last, head, dim, 64, num_rows, x_stride, b_stride,
                PER_GROUP, P, S, BS, PRECISION,
            )  # fmt: skip
            state = state.to(live.dtype.element_ty).to(tl.float32)
        if index < end_of_snapshots:
            # Of a snapshot inside a chunk this is where `_snapshots_kernel` goes on from.
            tl.store(target, tl.trans(state).to(live.dtype.element_ty), mask=tl.trans(mask))
            target += H * P * S
    tl.store(live, tl.trans(state).to(live.dtype.element_ty), mask=tl.trans(mask))


@kernel
def _snapshots_kernel(
    x, b, steps, totals, snapshots, cu_seqlens, seq_starts, snapshot_seqs, snapshot_offsets, first_snapshot,
    num_rows,
    x_stride, b_stride,
    H: tl.constexpr, PER_GROUP: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes a part of a head of a prefill's snapshot from its chunk's first position to its own."""
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    snapshot = first_snapshot + tl.program_id(0) // (parts * H)
    sequence = tl.load(snapshot_seqs + snapshot)
    start, first = tl.load(seq_starts + sequence), tl.load(cu_seqlens + sequence)
    position = start % 64 + tl.load(snapshot_offsets + snapshot)
    if position % 64 > 0:
        dim, size = part * BP + tl.arange(0, BP), tl.arange(0, BS)
        mask = (size < S)[:, None] & (dim < P)[None, :]
        at = head * (P * S) + dim[None, :] * S + size[:, None]
        target = snapshots + snapshot.to(tl.int64) * (H * P * S) + at
        last = tl.load(cu_seqlens + sequence + 1)
        state = _chunk_update(
            tl.load(target, mask=mask, other=0.0).to(tl.float32), x, b, steps, totals, first - start % 64,
            position // 64, first, last, head, dim, position % 64, num_rows, x_stride, b_stride,
            PER_GROUP, P, S, BS, PRECISION,
        )  # fmt: skip
        tl.store(target, state.to(target.dtype.element_ty), mask=mask)


@kernel
def _outputs_kernel(
    x, b, c, d, steps, totals, chunk_states, y, cu_seqlens, chunk_seqs, chunk_rows, num_rows,
    x_stride, b_stride, c_stride,
    H: tl.constexpr, PER_GROUP: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a chunk reads of its states, for some heads that share b and c; BS of the S numbers of a state at a time."""
    parts: tl.constexpr = (PER_GROUP + HEADS - 1) // HEADS
    groups: tl.constexpr = H // PER_GROUP
    part, group = tl.program_id(0) % parts, tl.program_id(0) // parts % groups
    chunk = tl.program_id(0) // (parts * groups)
    first_row, valid = chunk_rows_of(chunk, chunk_seqs, chunk_rows, cu_seqlens)
    token = tl.arange(0, 64)
    rows = first_row.to(tl.int64) + token

    dim, size = tl.arange(0, BP), tl.arange(0, BS)
    scores = tl.zeros((64, 64), tl.float32)
    for begin in tl.static_range(0, S, BS):
        writes = _load_b_or_c(b, rows, valid, b_stride, group, begin, S, BS)
        reads = _load_b_or_c(c, rows, valid, c_stride, group, begin, S, BS)
        scores = product(reads, tl.trans(writes), scores, PRECISION)
    scores = tl.where(token[:, None] >= token[None, :], scores, 0.0)
    mask = valid[:, None] & (dim < P)[None, :]
    first = group * PER_GROUP + part * HEADS
    for head in tl.range(first, tl.minimum(first + HEADS, (group + 1) * PER_GROUP), num_stages=STAGES):
        per_row = head * num_rows
        step = tl.load(steps + per_row + rows, mask=valid, other=0.0)
        total = tl.load(totals + per_row + rows, mask=valid, other=0.0)
        inputs = tl.load(x + rows[:, None] * x_stride + head * P + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        out = tl.zeros((64, BP), tl.float32)
        for begin in tl.static_range(0, S, BS):
            if BS < S:
                reads = _load_b_or_c(c, rows, valid, c_stride, group, begin, S, BS)
            at = chunk.to(tl.int64) * (H * S * P) + head * (S * P) + (begin + size)[:, None] * P + dim[None, :]
            state_mask = (begin + size < S)[:, None] & (dim < P)[None, :]
            out = product(reads, tl.load(chunk_states + at, mask=state_mask, other=0.0), out, PRECISION)
        out *= tl.exp(total)[:, None]
        relative_decay = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * step[None, :]
        out = product(scores * relative_decay, inputs, out, PRECISION)
        out += tl.load(d + head) * inputs
        tl.store(y + rows[:, None] * (H * P) + head * P + dim[None, :], out.to(y.dtype.element_ty), mask=mask)


def ssd(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor,
    dt_limit: tuple[float, float], states: Tensor, batch: Batch,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.ssd`."""
    metadata, host = batch.metadata, batch.host
    assert isinstance(metadata, CudaMetadata)
    heads, dim = x.shape[1:]
    size = b.shape[2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    snapshots = torch.empty((host.num_snapshots, *states.shape[1:]), dtype=states.dtype, device=states.device)
    shape: dict[str, Any] = {"H": heads, "PER_GROUP": heads // b.shape[1], "P": dim, "S": size}
    if host.first_prefill:
        take_tokens(x, dt, b, c, a, d, dt_bias, dt_limit, states, y, snapshots, batch, metadata)
    if metadata.num_chunks:
        precision = precision_of(dt.dtype, metadata.exact)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        num_rows = x.shape[0]
        steps, totals = (torch.empty((heads, num_rows), dtype=torch.float32, device=x.device) for _ in range(2))
        chunk_states = torch.empty((metadata.num_chunks, heads, size, dim), dtype=dtype, device=x.device)
        chunks = (batch.cu_seqlens, metadata.chunk_seqs, metadata.chunk_rows, num_rows)
        tile = _steps_tile(heads)
        _steps_kernel[(metadata.num_chunks * triton.cdiv(heads, tile["BH"]),)](
            dt, a, dt_bias, steps, totals, *chunks, dt.stride(0), *dt_limit, H=heads, **tile
        )
        tile = _states_tile(dim, size, precision)
        programs = (host.num_seqs - host.first_prefill) * heads * triton.cdiv(dim, tile["BP"])
        _states_kernel[(programs,)](
            x, b, steps, totals, chunk_states, states, snapshots, batch.cu_seqlens, batch.seq_starts, batch.state_slots,
            metadata.seq_chunks, metadata.seq_snapshots, metadata.snapshot_offsets, host.first_prefill, num_rows,
            x.stride(0), b.stride(0), states.stride(0), **shape, **tile,
        )  # fmt: skip
        first = metadata.num_decode_snapshots
        if host.num_snapshots > first:
            tile = _snapshots_tile(dim, size, precision)
            programs = (host.num_snapshots - first) * heads * triton.cdiv(dim, tile["BP"])
            _snapshots_kernel[(programs,)](
                x, b, steps, totals, snapshots, batch.cu_seqlens, batch.seq_starts, metadata.snapshot_seqs,
                metadata.snapshot_offsets, first, num_rows, x.stride(0), b.stride(0), **shape, **tile,
            )  # fmt: skip
        tile = _outputs_tile(dim, size, shape["PER_GROUP"], precision)
        programs = metadata.num_chunks * b.shape[1] * triton.cdiv(shape["PER_GROUP"], tile["HEADS"])
        _outputs_kernel[(programs,)](
            x, b, c, d, steps, totals, chunk_states, y, *chunks, x.stride(0), b.stride(0), c.stride(0), **shape, **tile
        )
    return y, snapshots


def _steps_tile(heads: int) -> dict[str, Any]:
    return {"BH": min(32, power_of_2(heads)), "num_warps": 4}


def _states_tile(dim: int, size: int, precision: Precision) -> dict[str, Any]:
    """Narrow, because nothing but heads and parts of them are at work at a time."""
    low = precision == "bf16"
    tile: dict[str, Any] = {"BP": min(32 if low else 16, power_of_2(dim, 16)), "BS": power_of_2(size, 16)}
    chunk_bytes = 2 * 64 * (tile["BS"] + tile["BP"])
    stages = stages_that_fit(4, chunk_bytes, 16_384, limits().shared_memory) if low else 1
    return {**tile, "PRECISION": precision, "STAGES": stages, "num_warps": 8 if low else 4}


def _snapshots_tile(dim: int, size: int, precision: Precision) -> dict[str, Any]:
    """As the states': a snapshot at a prompt's end is the state there, bit for bit if `precision` is "ieee"."""
    most = 16 if precision == "ieee" else 32
    tile = {"BP": min(most, power_of_2(dim, 16)), "BS": power_of_2(size, 16), "PRECISION": precision}
    return {**tile, "num_warps": 4}


def _outputs_tile(dim: int, size: int, per_group: int, precision: Precision) -> dict[str, Any]:
    """Heads of a group one after the other: b and c are read, and multiplied with each other, once for all."""
    least = LEAST_PART if precision == "bf16" else 16
    tile: dict[str, Any] = {"HEADS": min(8, per_group), "BP": power_of_2(dim, least), "BS": power_of_2(size, 16)}
    if precision != "bf16":
        # 256 numbers of float32 a state are more than the shared memory of most GPUs.
        tile["BS"] = min(128, tile["BS"])
    # A head's x and state; b of all of them.
    head_bytes, shared_bytes = 2 * tile["BP"] * (64 + tile["BS"]), 2 * 64 * tile["BS"] + 2048
    stages = stages_that_fit(3, head_bytes, shared_bytes, limits().shared_memory) if precision == "bf16" else 1
    return {**tile, "PRECISION": precision, "STAGES": stages, "num_warps": NUM_WARPS[precision]}
