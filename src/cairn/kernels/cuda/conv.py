"""Causal depthwise convolution of sequences that lie one after the other (as in Mamba2, arXiv 2405.21060).

A token's taps are the last W - 1 inputs and itself; inputs before a sequence's first row are in its state. The bound is
the memory: inputs are read once from it, further taps find them in the caches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.device import kernel, power_of_2
from cairn.kernels.cuda.metadata import CudaMetadata

_ROWS = 16
"""Rows of a prefill that a program takes."""

_CHANNELS = 128
_DECODE_CHANNELS = 256


@triton.jit
def _activated(sums, SILU: tl.constexpr):
    if SILU:
        return sums * tl.sigmoid(sums)
    return sums


@triton.jit
def _window(
    x, states_of_slot, first_row, seen, started, channel, channels, x_stride, W: tl.constexpr, TAPS: tl.constexpr
):
    """The last W - 1 inputs when `seen` of the rows from `first_row` on have been: [TAPS, channels] in x's dtype."""
    tap = tl.arange(0, TAPS)
    token = seen - (W - 1) + tap
    known = (tap < W - 1)[:, None] & (channel < channels)[None, :]
    rows = first_row.to(tl.int64) + token
    new = tl.load(x + (rows * x_stride)[:, None] + channel[None, :], mask=known & (token >= 0)[:, None], other=0)
    places = ((token + (W - 1)) * channels)[:, None] + channel[None, :]
    old = tl.load(states_of_slot + places, mask=known & ((token < 0) & started)[:, None], other=0)
    return tl.where((token >= 0)[:, None], new, old)


@triton.jit
def _store_window(target, window, channel, channels, W: tl.constexpr, TAPS: tl.constexpr):
    tap = tl.arange(0, TAPS)
    mask = (tap < W - 1)[:, None] & (channel < channels)[None, :]
    tl.store(target + (tap * channels)[:, None] + channel[None, :], window, mask=mask)


@triton.jit
def _update_state(
    x, state, snapshots, cu_seqlens, seq_snapshots, snapshot_offsets, seq, first_row, started, in_place,
    channel, channels, x_stride, W: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """A sequence's snapshots, and at last its new state if it is `in_place`: everything is read before that is
    written."""
    first_snapshot = tl.load(seq_snapshots + seq)
    target = snapshots + first_snapshot.to(tl.int64) * ((W - 1) * channels)
    for snapshot in range(first_snapshot, tl.load(seq_snapshots + seq + 1)):
        seen = tl.load(snapshot_offsets + snapshot)
        window = _window(x, state, first_row, seen, started, channel, channels, x_stride, W, TAPS)
        _store_window(target, window, channel, channels, W, TAPS)
        target += (W - 1) * channels
    seen = tl.load(cu_seqlens + seq + 1) - first_row
    window = _window(x, state, first_row, seen, started, channel, channels, x_stride, W, TAPS)
    # Threads may read what others of the program write.
    tl.debug_barrier()
    if in_place:
        _store_window(state, window, channel, channels, W, TAPS)


@kernel
def _decode_kernel(
    x, weight, bias, states, out, snapshots, slots, seq_starts, seq_snapshots, channels,
    x_stride, state_stride,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One sequence's one row, its output and its state; sequence i has row i."""
    seq = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    row = seq.to(tl.int64)
    state = states + tl.load(slots + seq).to(tl.int64) * state_stride
    started = tl.load(seq_starts + seq) > 0
    sums = tl.zeros((CHANNELS,), dtype=tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + channel, mask=inside, other=0)
    for tap in tl.static_range(W - 1):
        value = tl.load(state + tap * channels + channel, mask=inside & started, other=0).to(tl.float32)
        sums += value * tl.load(weight + tap * channels + channel, mask=inside, other=0)
    value = tl.load(x + row * x_stride + channel, mask=inside, other=0).to(tl.float32)
    sums += value * tl.load(weight + (W - 1) * channels + channel, mask=inside, other=0)
    tl.store(out + row * channels + channel, _activated(sums, SILU).to(out.dtype.element_ty), mask=inside)

    window = _window(x, state, row, 1, started, channel, channels, x_stride, W, TAPS)
    snapshot = tl.load(seq_snapshots + seq)
    if tl.load(seq_snapshots + seq + 1) > snapshot:
        target = snapshots + snapshot.to(tl.int64) * ((W - 1) * channels)
        _store_window(target, window, channel, channels, W, TAPS)
    # Threads may read what others of the program write.
    tl.debug_barrier()
    _store_window(state, window, channel, channels, W, TAPS)


@kernel
def _tokens_kernel(
    x, weight, bias, states, out, snapshots, cu_seqlens, slots, seq_starts, seq_snapshots, snapshot_offsets,
    num_in_place, channels,
    x_stride, state_stride,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One sequence's rows, one after the other: of a decode, a verify or a fold. Their outputs and snapshots, and at
    last, of the first `num_in_place` sequences, the new state."""
    seq = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    state = states + tl.load(slots + seq).to(tl.int64) * state_stride
    started = tl.load(seq_starts + seq) > 0
    first_row = tl.load(cu_seqlens + seq)
    for before in range(tl.load(cu_seqlens + seq + 1) - first_row):
        row = first_row.to(tl.int64) + before
        sums = tl.zeros((CHANNELS,), dtype=tl.float32)
        if HAS_BIAS:
            sums += tl.load(bias + channel, mask=inside, other=0)
        for tap in tl.static_range(W - 1):
            place = before + tap
            old = tl.load(state + place * channels + channel, mask=inside & started & (place < W - 1), other=0)
            new = tl.load(x + (row + tap - (W - 1)) * x_stride + channel, mask=inside & (place >= W - 1), other=0)
            value = tl.where(place < W - 1, old, new).to(tl.float32)
            sums += value * tl.load(weight + tap * channels + channel, mask=inside, other=0)
        value = tl.load(x + row * x_stride + channel, mask=inside, other=0).to(tl.float32)
        sums += value * tl.load(weight + (W - 1) * channels + channel, mask=inside, other=0)
        tl.store(out + row * channels + channel, _activated(sums, SILU).to(out.dtype.element_ty), mask=inside)
    _update_state(
        x, state, snapshots, cu_seqlens, seq_snapshots, snapshot_offsets, seq, first_row, started, seq < num_in_place,
        channel, channels, x_stride, W, TAPS,
    )  # fmt: skip


@kernel
def _prefill_kernel(
    x, weight, bias, states, out, row_seqs, cu_seqlens, slots, seq_starts,
    first_row, end_row,
    channels,
    x_stride, state_stride,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Outputs of some rows, which may be several sequences'."""
    row = first_row + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    seq = tl.load(row_seqs + row, mask=row < end_row, other=0)
    first = tl.load(cu_seqlens + seq)
    # How many of the sequence's rows come before; rows after the end have nothing to read.
    before = tl.where(row < end_row, row - first, -1)
    valid = (row < end_row)[:, None] & inside[None, :]
    places = row.to(tl.int64)[:, None] * x_stride + channel[None, :]
    sums = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + channel, mask=inside, other=0)[None, :]
    # Oldest taps first: those out of the state, which a tile of rows far after their sequence's first has not.
    if tl.min(tl.where(row < end_row, before, W)) < W - 1:
        state = tl.load(slots + seq).to(tl.int64) * state_stride
        started = (row < end_row) & (tl.load(seq_starts + seq) > 0)
        for tap in tl.static_range(W - 1):
            old = (started & (before + tap < W - 1))[:, None] & inside[None, :]
            state_places = (state + (before + tap) * channels)[:, None] + channel[None, :]
            value = tl.load(states + state_places, mask=old, other=0).to(tl.float32)
            sums += value * tl.load(weight + tap * channels + channel, mask=inside, other=0)[None, :]
    for tap in tl.static_range(W):
        new = (before + tap >= W - 1)[:, None] & valid
        value = tl.load(x + places + (tap - (W - 1)) * x_stride, mask=new, other=0).to(tl.float32)
        sums += value * tl.load(weight + tap * channels + channel, mask=inside, other=0)[None, :]
    out_places = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out + out_places, _activated(sums, SILU).to(out.dtype.element_ty), mask=valid)


@kernel
def _update_states_kernel(
    x, states, snapshots, cu_seqlens, slots, seq_starts, seq_snapshots, snapshot_offsets, first_seq, channels,
    x_stride, state_stride,
    W: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One sequence's snapshots, and at last its new state."""
    seq = first_seq + tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    state = states + tl.load(slots + seq).to(tl.int64) * state_stride
    started = tl.load(seq_starts + seq) > 0
    first_row = tl.load(cu_seqlens + seq)
    _update_state(
        x, state, snapshots, cu_seqlens, seq_snapshots, snapshot_offsets, seq, first_row, started, True,
        channel, channels, x_stride, W, TAPS,
    )  # fmt: skip


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: Batch, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """See `Kernels.conv`."""
    host, metadata = batch.host, batch.metadata
    assert isinstance(metadata, CudaMetadata)
    width, channels = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    snapshots = torch.empty((host.num_snapshots, width - 1, channels), dtype=states.dtype, device=x.device)
    biases = weight if bias is None else bias
    block = _block(channels, _DECODE_CHANNELS)
    parts, tile = triton.cdiv(channels, block), {"TAPS": power_of_2(width - 1), "CHANNELS": block, "num_warps": 2}
    variant = {"HAS_BIAS": bias is not None, "SILU": silu, "W": width}
    if metadata.one_by_one and host.first_prefill:
        _tokens_kernel[(parts, host.first_prefill)](
            *(x, weight, biases, states, out, snapshots),
            *(batch.cu_seqlens, batch.state_slots, batch.seq_starts, metadata.seq_snapshots, metadata.snapshot_offsets),
            *(host.num_in_place, channels, x.stride(0), states.stride(0)),
            **variant,
            **tile,
        )
    elif host.num_decodes:
        _decode_kernel[(parts, host.num_decodes)](
            *(x, weight, biases, states, out, snapshots),
            *(batch.state_slots, batch.seq_starts, metadata.seq_snapshots),
            *(channels, x.stride(0), states.stride(0)),
            **variant,
            **tile,
        )
    num_prefills = host.num_seqs - host.first_prefill
    if num_prefills:
        block, rows = _block(channels, _CHANNELS), host.num_tokens - host.num_decode_tokens
        _prefill_kernel[(triton.cdiv(channels, block), triton.cdiv(rows, _ROWS))](
            *(x, weight, biases, states, out),
            *(metadata.row_seqs, batch.cu_seqlens, batch.state_slots, batch.seq_starts),
            *(host.num_decode_tokens, host.num_tokens, channels, x.stride(0), states.stride(0)),
            **variant,
            ROWS=_ROWS,
            CHANNELS=block,
            num_warps=4,
        )
        # Afterwards, because the rows of a sequence, which may be several programs', want the state before them.
        _update_states_kernel[(parts, num_prefills)](
            *(x, states, snapshots),
            *(batch.cu_seqlens, batch.state_slots, batch.seq_starts, metadata.seq_snapshots, metadata.snapshot_offsets),
            *(host.first_prefill, channels, x.stride(0), states.stride(0)),
            W=width,
            **tile,
        )
    return out, snapshots


def _block(channels: int, most: int) -> int:
    return min(power_of_2(channels, 16), most)
