"""The gated delta rule token by token, as its recurrence is written (`Kernels.gdn`): of decodes, verifies and folds."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.device import kernel, power_of_2
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.cuda.scalars import sigmoid, softplus

EPS = tl.constexpr(1e-6)


@triton.jit
def _take_token(
    state, row, head, dim, size, q, k, v, beta, dt, a, dt_bias, y, beta_scale,
    q_stride, k_stride, v_stride, beta_stride, dt_stride,
    H: tl.constexpr, PER_KEY: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The state of a part of a value head after the token of a row, whose y is stored."""
    raw = tl.load(dt + row * dt_stride + head).to(tl.float32)
    decay = tl.exp(tl.load(a + head) * softplus(raw + tl.load(dt_bias + head)))
    weight = beta_scale * sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
    key_head = head // PER_KEY
    query = tl.load(q + row * q_stride + key_head * S + size, mask=size < S, other=0.0).to(tl.float32)
    query = query * (S**-0.5 / tl.sqrt(tl.sum(query * query, axis=0) + EPS))
    key = tl.load(k + row * k_stride + key_head * S + size, mask=size < S, other=0.0).to(tl.float32)
    key = key * (1.0 / tl.sqrt(tl.sum(key * key, axis=0) + EPS))
    value = tl.load(v + row * v_stride + head * P + dim, mask=dim < P, other=0.0).to(tl.float32)

    state = state * decay
    written = weight * (value - tl.sum(state * key[:, None], axis=0))
    state += key[:, None] * written[None, :]
    out = tl.sum(state * query[:, None], axis=0)
    tl.store(y + row * (H * P) + head * P + dim, out.to(y.dtype.element_ty), mask=dim < P)
    return state


@kernel
def _decode_kernel(
    q, k, v, beta, dt, a, dt_bias, states, y, snapshots, seq_starts, slots, seq_snapshots, beta_scale,
    q_stride, k_stride, v_stride, beta_stride, dt_stride, slot_stride,
    H: tl.constexpr, PER_KEY: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One token of a part of a value head."""
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    sequence = tl.program_id(0) // (parts * H)
    row = sequence.to(tl.int64)
    size, dim = tl.arange(0, BS), part * BP + tl.arange(0, BP)
    mask = (size < S)[:, None] & (dim < P)[None, :]
    inside = head * (S * P) + size[:, None] * P + dim[None, :]
    live = states + tl.load(slots + sequence).to(tl.int64) * slot_stride + inside
    state = tl.load(live, mask=mask & (tl.load(seq_starts + sequence) > 0), other=0.0).to(tl.float32)

    state = _take_token(
        state, row, head, dim, size, q, k, v, beta, dt, a, dt_bias, y, beta_scale,
        q_stride, k_stride, v_stride, beta_stride, dt_stride, H, PER_KEY, S, P,
    )  # fmt: skip
    tl.store(live, state.to(live.dtype.element_ty), mask=mask)
    index = tl.load(seq_snapshots + sequence)
    if index < tl.load(seq_snapshots + sequence + 1):
        tl.store(snapshots + index.to(tl.int64) * (H * S * P) + inside, state.to(live.dtype.element_ty), mask=mask)


@kernel
def _tokens_kernel(
    q, k, v, beta, dt, a, dt_bias, states, y, snapshots, cu_seqlens, seq_starts, slots, seq_snapshots, snapshot_offsets,
    num_in_place, beta_scale,
    q_stride, k_stride, v_stride, beta_stride, dt_stride, slot_stride,
    H: tl.constexpr, PER_KEY: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The tokens of one sequence, one after the other, of a part of a value head: of a decode, a verify or a fold. Of
    the first `num_in_place` sequences the live states are written."""
    parts: tl.constexpr = (P + BP - 1) // BP
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % H
    sequence = tl.program_id(0) // (parts * H)
    size, dim = tl.arange(0, BS), part * BP + tl.arange(0, BP)
    mask = (size < S)[:, None] & (dim < P)[None, :]
    inside = head * (S * P) + size[:, None] * P + dim[None, :]
    live = states + tl.load(slots + sequence).to(tl.int64) * slot_stride + inside
    state = tl.load(live, mask=mask & (tl.load(seq_starts + sequence) > 0), other=0.0).to(tl.float32)

    first, last = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    snapshot, end_of_snapshots = tl.load(seq_snapshots + sequence), tl.load(seq_snapshots + sequence + 1)
    target = snapshots + snapshot.to(tl.int64) * (H * S * P) + inside
    begin = 0
    for index in range(snapshot, end_of_snapshots + 1):
        end = tl.load(snapshot_offsets + index, mask=index < end_of_snapshots, other=last - first)
        for offset in range(begin, end):
            state = _take_token(
                state, first.to(tl.int64) + offset, head, dim, size, q, k, v, beta, dt, a, dt_bias, y, beta_scale,
                q_stride, k_stride, v_stride, beta_stride, dt_stride, H, PER_KEY, S, P,
            )  # fmt: skip
            state = state.to(live.dtype.element_ty).to(tl.float32)
        begin = end
        if index < end_of_snapshots:
            tl.store(target, state.to(live.dtype.element_ty), mask=mask)
            target += H * S * P
    if sequence < num_in_place:
        tl.store(live, state.to(live.dtype.element_ty), mask=mask)


def take_tokens(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dt: Tensor, a: Tensor, dt_bias: Tensor, states: Tensor,
    y: Tensor, snapshots: Tensor, batch: Batch, metadata: CudaMetadata, beta_scale: float,
) -> None:  # fmt: skip
    """As `Kernels.gdn`, of the sequences before the first prefill, of which there is one at least: into `y` and
    `snapshots`."""
    host, (heads, dim), (key_heads, size) = batch.host, v.shape[1:], q.shape[1:]
    tile = decode_tile(size, dim)
    shape: dict[str, Any] = {"H": heads, "PER_KEY": heads // key_heads, "S": size, "P": dim, **tile}
    grid = (host.first_prefill * heads * triton.cdiv(dim, tile["BP"]),)
    operands = (q, k, v, beta, dt, a, dt_bias, states, y, snapshots)
    strides = tuple(each.stride(0) for each in (q, k, v, beta, dt, states))
    if metadata.one_by_one:
        _tokens_kernel[grid](
            *(*operands, batch.cu_seqlens, batch.seq_starts, batch.state_slots),
            *(metadata.seq_snapshots, metadata.snapshot_offsets, host.num_in_place, beta_scale, *strides),
            **shape,
        )
    else:
        _decode_kernel[grid](
            *(*operands, batch.seq_starts, batch.state_slots, metadata.seq_snapshots, beta_scale, *strides), **shape
        )


def decode_tile(size: int, dim: int) -> dict[str, Any]:
    """16 KiB of state a program: enough loads in flight, and programs for every multiprocessor at one sequence."""
    return {"BS": power_of_2(size), "BP": min(32, power_of_2(dim)), "num_warps": 4}
