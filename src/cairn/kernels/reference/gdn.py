"""The gated delta rule as it is written, token by token."""

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.reference.elementwise import sigmoid, softplus, widen
from cairn.kernels.reference.sequences import sequences_of, stack_snapshots


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


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
    y = torch.empty(v.shape, dtype=v.dtype)
    kept = []
    per_key = v.shape[1] // q.shape[1]
    for sequence in sequences_of(batch.host, batch.state_slots):
        state = sequence.state_before(states)
        for offset, row in enumerate(sequence.rows, start=1):
            query, key = (_unit(part[row]).repeat_interleave(per_key, dim=0) for part in (q, k))  # [H, S]
            decay = torch.exp(a * softplus(widen(dt[row]) + dt_bias))
            state = decay[:, None, None] * state
            read = (state * key[:, :, None]).sum(1)
            written = sigmoid(widen(beta[row]))[:, None] * (v[row] - read)
            state = state + key[:, :, None] * written[:, None, :]
            y[row] = (state * query[:, :, None]).sum(1) * q.shape[-1] ** -0.5
            if offset in sequence.snapshot_offsets:
                kept.append(state)
        states[sequence.slot] = state
    return y, stack_snapshots(kept, states)
