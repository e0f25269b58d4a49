"""Mamba2's recurrence as it is written, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    bc: tuple[Tensor, Tensor],
    ad: tuple[Tensor, Tensor],
    state: Tensor,
    marks: Sequence[int],
) -> list[Tensor]:
    """See `Kernels.ssd_prefill`."""
    (b, c), (a, d) = bc, ad
    kept = []
    per_group = x.shape[1] // b.shape[1]
    for token in range(x.shape[0]):
        b_head, c_head = (part[token].repeat_interleave(per_group, dim=0) for part in (b, c))  # [H, N]
        decay = torch.exp(dt[token] * a)
        step = dt[token][:, None, None] * x[token][:, :, None] * b_head[:, None, :]
        state.copy_(decay[:, None, None] * state + step)
        x[token] = (state * c_head[:, None, :]).sum(-1) + d[:, None] * x[token]
        kept += [state.clone() for mark in marks if mark == token + 1]
    return kept


def ssd_update(
    x: Tensor,
    dt: Tensor,
    bc: tuple[Tensor, Tensor],
    ad: tuple[Tensor, Tensor],
    states: Tensor,
    slots: Sequence[int],
) -> None:
    """See `Kernels.ssd_update`."""
    for row, slot in enumerate(slots):
        one = slice(row, row + 1)
        ssd_prefill(x[one], dt[one], (bc[0][one], bc[1][one]), ad, states[slot], [])
