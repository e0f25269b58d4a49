"""Mamba2's state space scan token by token, as its recurrence is written (`Kernels.ssd`): of decodes, verifies and
folds."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.device import kernel, power_of_2
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.cuda.scalars import softplus


@triton.jit
def _take_token(
    state, row, head, dim, size, x, dt, b, c, a, d, dt_bias, y, x_stride, dt_stride, b_stride, c_stride,
    limit_low, limit_high,
    H: tl.constexpr, PER_GROUP: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The state of a part of a head after the token of a row, whose y is stored."""
    step = softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head))
    step = tl.minimum(tl.maximum(step, limit_low), limit_high)
    group = head // PER_GROUP
    writes = tl.load(b + row * b_stride + group * S + size, mask=size < S, other=0.0).to(tl.float32)
    reads = tl.load(c + row * c_stride + group * S + size, mask=size < S, other=0.0).to(tl.float32)
    inputs = tl.load(x + row * x_stride + head * P + dim, mask=dim < P, other=0.0).to(tl.float32)
    state = state * tl.exp(step * tl.load(a + head)) + (step * inputs)[:, None] * writes[None, :]
    out = tl.sum(state * reads[None, :], axis=1) + tl.load(d + head) * inputs
    tl.store(y + row * (H * P) + head * P + dim, out.to(y.dtype.element_ty), mask=dim < P)
    return state


@kernel
def _decode_kernel(
    x, dt, b, c, a, d, dt_bias, states, y, snapshots, seq_starts, slots, seq_snapshots,
    x_stride, dt_stride, b_stride, c_stride, slot_stride,
    limit_low, limit_high,
    H: tl.constexpr, PER_GROUP: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """One token of a part of a head."""
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    sequence = tl.program_id(0) // (parts * H)
    row = sequence.to(tl.int64)
    dim, size = part * BP + tl.arange(0, BP), tl.arange(0, BS)
    mask = (dim < P)[:, None] & (size < S)[None, :]
    inside = head * (P * S) + dim[:, None] * S + size[None, :]
    live = states + tl.load(slots + sequence).to(tl.int64) * slot_stride + inside
    state = tl.load(live, mask=mask & (tl.load(seq_starts + sequence) > 0), other=0.0).to(tl.float32)

    state = _take_token(
        state, row, head, dim, size, x, dt, b, c, a, d, dt_bias, y, x_stride, dt_stride, b_stride, c_stride,
        limit_low, limit_high, H, PER_GROUP, P, S,
    )  # fmt: skip
    tl.store(live, state.to(live.dtype.element_ty), mask=mask)
    index = tl.load(seq_snapshots + sequence)
    if index < tl.load(seq_snapshots + sequence + 1):
        tl.store(snapshots + index.to(tl.int64) * (H * P * S) + inside, state.to(live.dtype.element_ty), mask=mask)


@kernel
def _tokens_kernel(
    x, dt, b, c, a, d, dt_bias, states, y, snapshots, cu_seqlens, seq_starts, slots, seq_snapshots, snapshot_offsets,
    num_in_place,
    x_stride, dt_stride, b_stride, c_stride, slot_stride,
    limit_low, limit_high,
    H: tl.constexpr, PER_GROUP: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The tokens of one sequence, one after the other, of a part of a head: of a decode, a verify or a fold. Of the
    first `num_in_place` sequences the live states are written."""
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    sequence = tl.program_id(0) // (parts * H)
    dim, size = part * BP + tl.arange(0, BP), tl.arange(0, BS)
    mask = (dim < P)[:, None] & (size < S)[None, :]
    inside = head * (P * S) + dim[:, None] * S + size[None, :]
    live = states + tl.load(slots + sequence).to(tl.int64) * slot_stride + inside
    state = tl.load(live, mask=mask & (tl.load(seq_starts + sequence) > 0), other=0.0).to(tl.float32)

    first, last = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    snapshot, end_of_snapshots = tl.load(seq_snapshots + sequence), tl.load(seq_snapshots + sequence + 1)
    target = snapshots + snapshot.to(tl.int64) * (H * P * S) + inside
    begin = 0
    for index in range(snapshot, end_of_snapshots + 1):
        end = tl.load(snapshot_offsets + index, mask=index < end_of_snapshots, other=last - first)
        for offset in range(begin, end):
            state = _take_token(
                state, first.to(tl.int64) + offset, head, dim, size, x, dt, b, c, a, d, dt_bias, y,
                x_stride, dt_stride, b_stride, c_stride, limit_low, limit_high, H, PER_GROUP, P, S,
            )  # fmt: skip
            state = state.to(live.dtype.element_ty).to(tl.float32)
        begin = end
        if index < end_of_snapshots:
            tl.store(target, state.to(live.dtype.element_ty), mask=mask)
            target += H * P * S
    if sequence < num_in_place:
        tl.store(live, state.to(live.dtype.element_ty), mask=mask)


def take_tokens(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor,
    dt_limit: tuple[float, float], states: Tensor, y: Tensor, snapshots: Tensor, batch: Batch, metadata: CudaMetadata,
) -> None:  # fmt: skip
    """As `Kernels.ssd`, of the sequences before the first prefill, of which there is one at least: into `y` and
    `snapshots`."""
    host, (heads, dim), size = batch.host, x.shape[1:], b.shape[2]
    tile = decode_tile(dim, size)
    shape: dict[str, Any] = {"H": heads, "PER_GROUP": heads // b.shape[1], "P": dim, "S": size, **tile}
    grid = (host.first_prefill * heads * triton.cdiv(dim, tile["BP"]),)
    operands = (x, dt, b, c, a, d, dt_bias, states, y, snapshots)
    strides = (x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0))
    if metadata.one_by_one:
        _tokens_kernel[grid](
            *(*operands, batch.cu_seqlens, batch.seq_starts, batch.state_slots),
            *(metadata.seq_snapshots, metadata.snapshot_offsets, host.num_in_place, *strides, *dt_limit),
            **shape,
        )
    else:
        _decode_kernel[grid](
            *(*operands, batch.seq_starts, batch.state_slots, metadata.seq_snapshots, *strides, *dt_limit), **shape
        )


def decode_tile(dim: int, size: int) -> dict[str, Any]:
    """16 KiB of state a program: enough loads in flight, and programs for every multiprocessor at one sequence."""
    return {"BP": min(32, power_of_2(dim)), "BS": power_of_2(size), "num_warps": 4}
