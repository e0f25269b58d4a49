"""The gated delta rule as it is written, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gdn_prefill(
    v: Tensor, qk: tuple[Tensor, Tensor], gates: tuple[Tensor, Tensor], state: Tensor, marks: Sequence[int]
) -> list[Tensor]:
    """See `Kernels.gdn_prefill`."""
    kept = []
    per_head = v.shape[1] // qk[0].shape[1]
    for token in range(v.shape[0]):
        unit = [part[token] / torch.sqrt(part[token].square().sum(-1, keepdim=True) + 1e-6) for part in qk]
        q, k = (part.repeat_interleave(per_head, dim=0) for part in unit)  # [Hv, K]
        decayed = torch.exp(gates[0][token])[:, None, None] * state
        read = (decayed * k[:, :, None]).sum(1)
        written = gates[1][token][:, None] * (v[token] - read)
        state.copy_(decayed + k[:, :, None] * written[:, None, :])
        v[token] = (state * q[:, :, None]).sum(1) * q.shape[-1] ** -0.5
        kept += [state.clone() for mark in marks if mark == token + 1]
    return kept


def gdn_update(
    v: Tensor, qk: tuple[Tensor, Tensor], gates: tuple[Tensor, Tensor], states: Tensor, slots: Sequence[int]
) -> None:
    """See `Kernels.gdn_update`."""
    for row, slot in enumerate(slots):
        one = slice(row, row + 1)
        gdn_prefill(v[one], (qk[0][one], qk[1][one]), (gates[0][one], gates[1][one]), states[slot], [])
