"""Causal depthwise convolution, token by token."""

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.reference import elementwise
from cairn.kernels.reference.elementwise import widen
from cairn.kernels.reference.sequences import sequences_of, stack_snapshots


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: Batch, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """See `Kernels.conv`."""
    out = torch.empty(x.shape, dtype=weight.dtype)
    kept = []
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
                kept.append(state)
        states[sequence.slot] = state
    return out, stack_snapshots(kept, states)
