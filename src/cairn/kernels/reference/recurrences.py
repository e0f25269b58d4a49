"""What carries a state from token to token: the convolution, Mamba2 and the gated delta rule as they are written."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.batch import CHUNK, Batch, HostBatch
from cairn.kernels.reference import elementwise
from cairn.kernels.reference.elementwise import sigmoid, softplus, widen


@dataclass(frozen=True, slots=True)
class SequencePass:
    """One sequence's tokens of this pass: rows [first_row, first_row + end - start) of the batch, which stand at
    positions [start, end). Snapshots of its state are taken after each of the first `snapshot_offsets` of them.
    `in_place`: whether its live state is written, which it is unless it is to be verified. `in_chunks`: whether it is a
    prefill, whose states are rounded where a chunk ends, or else one whose states are after each token."""

    slot: int
    first_row: int
    start: int
    end: int
    kv_write_from: int
    snapshot_offsets: tuple[int, ...]
    in_place: bool
    in_chunks: bool

    @property
    def rows(self) -> range:
        """The sequence's rows of the batch."""
        return range(self.first_row, self.first_row + self.end - self.start)

    def state_before(self, states: Tensor) -> Tensor:
        """The sequence's state before this pass, a copy."""
        state = states[self.slot]
        return torch.zeros_like(state) if self.start == 0 else state.clone()

    def round_state(self, state: Tensor, offset: int, states: Tensor) -> Tensor:
        """The state after the first `offset` tokens of the pass, rounded to the states' dtype where it is to be."""
        if self.in_chunks and (self.start + offset) % CHUNK:
            return state
        return widen(state.to(states.dtype))

    def write_state(self, states: Tensor, state: Tensor) -> None:
        """The sequence's state after this pass, where it is to be written."""
        if self.in_place:
            states[self.slot] = state


def sequences_of(host: HostBatch, state_slots: Tensor | None = None) -> Iterator[SequencePass]:
    """In the order of the rows, which is that of the snapshots, too. `state_slots`: of a `Batch`, for kernels that work
    on states."""
    slots = host.slots if state_slots is None else state_slots.tolist()
    for i in range(host.num_seqs):
        yield SequencePass(
            slot=int(slots[i]),
            first_row=int(host.cu_seqlens[i]),
            start=int(host.seq_starts[i]),
            end=int(host.seq_lens[i]),
            kv_write_from=int(host.kv_write_from[i]),
            snapshot_offsets=tuple(int(offset) for offset in host.snapshot_offsets[host.snapshot_seqs == i]),
            in_place=i < host.num_in_place or i >= host.first_prefill,
            in_chunks=i >= host.first_prefill,
        )


def stack_snapshots(snapshots: list[Tensor], states: Tensor) -> Tensor:
    """States of one slot each -> [N, ...] in the states' dtype, N = 0 included."""
    return torch.stack(snapshots).to(states.dtype) if snapshots else states.new_empty(0, *states.shape[1:])


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: Batch, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """See `Kernels.conv`."""
    out = torch.empty(x.shape, dtype=weight.dtype)
    snapshots = []
    for sequence in sequences_of(batch.host, batch.state_slots):
        state = sequence.state_before(states)
        for offset, row in enumerate(sequence.rows, start=1):
            window = torch.cat([state, x[row : row + 1]])
            mixed = (widen(window) * weight).sum(0)
            if bias is not None:
                mixed += bias
            out[row] = elementwise.silu(mixed) if silu else mixed
            state = window[1:]
            if offset in sequence.snapshot_offsets:
                snapshots.append(state)
        sequence.write_state(states, state)
    return out, stack_snapshots(snapshots, states)


def ssd(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor,
    dt_limit: tuple[float, float], states: Tensor, batch: Batch,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.ssd`."""
    y = torch.empty(x.shape, dtype=x.dtype)
    snapshots = []
    per_group = x.shape[1] // b.shape[1]
    for sequence in sequences_of(batch.host, batch.state_slots):
        state = widen(sequence.state_before(states))
        for offset, row in enumerate(sequence.rows, start=1):
            step = softplus(widen(dt[row]) + dt_bias).clamp(*dt_limit)
            b_head, c_head = (part[row].repeat_interleave(per_group, dim=0) for part in (b, c))  # [H, S]
            added = step[:, None, None] * x[row][:, :, None] * b_head[:, None, :]
            state = torch.exp(step * a)[:, None, None] * state + added
            y[row] = (state * c_head[:, None, :]).sum(-1) + d[:, None] * x[row]
            state = sequence.round_state(state, offset, states)
            if offset in sequence.snapshot_offsets:
                snapshots.append(state)
        sequence.write_state(states, state)
    return y, stack_snapshots(snapshots, states)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gdn(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dt: Tensor, a: Tensor, dt_bias: Tensor, states: Tensor, batch: Batch,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.gdn`."""
    y = torch.empty(v.shape, dtype=v.dtype)
    snapshots = []
    per_key = v.shape[1] // q.shape[1]
    for sequence in sequences_of(batch.host, batch.state_slots):
        state = widen(sequence.state_before(states))
        for offset, row in enumerate(sequence.rows, start=1):
            query, key = (_unit(part[row]).repeat_interleave(per_key, dim=0) for part in (q, k))  # [H, S]
            decay = torch.exp(a * softplus(widen(dt[row]) + dt_bias))
            state = decay[:, None, None] * state
            read = (state * key[:, :, None]).sum(1)
            written = beta_scale * sigmoid(widen(beta[row]))[:, None] * (v[row] - read)
            state = state + key[:, :, None] * written[:, None, :]
            y[row] = (state * query[:, :, None]).sum(1) * q.shape[-1] ** -0.5
            state = sequence.round_state(state, offset, states)
            if offset in sequence.snapshot_offsets:
                snapshots.append(state)
        sequence.write_state(states, state)
    return y, stack_snapshots(snapshots, states)
