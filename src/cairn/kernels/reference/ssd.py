"""Mamba2's recurrence as it is written, token by token."""

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.reference.elementwise import softplus, widen
from cairn.kernels.reference.sequences import sequences_of, stack_snapshots


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
    y = torch.empty(x.shape, dtype=x.dtype)
    kept = []
    per_group = x.shape[1] // b.shape[1]
    for sequence in sequences_of(batch.host, batch.state_slots):
        state = sequence.state_before(states)
        for offset, row in enumerate(sequence.rows, start=1):
            step = softplus(widen(dt[row]) + dt_bias).clamp(*dt_limit)
            b_head, c_head = (part[row].repeat_interleave(per_group, dim=0) for part in (b, c))  # [H, S]
            added = step[:, None, None] * x[row][:, :, None] * b_head[:, None, :]
            state = torch.exp(step * a)[:, None, None] * state + added
            y[row] = (state * c_head[:, None, :]).sum(-1) + d[:, None] * x[row]
            if offset in sequence.snapshot_offsets:
                kept.append(state)
        states[sequence.slot] = state
    return y, stack_snapshots(kept, states)
