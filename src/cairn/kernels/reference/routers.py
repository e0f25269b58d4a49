"""Which experts a token goes to, token by token."""

import torch
from torch import Tensor

from cairn.kernels.reference.elementwise import sigmoid


def softmax_router(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `Kernels.softmax_router`."""
    choice = torch.empty(logits.shape[0], top_k, dtype=torch.int64)
    share = logits.new_empty(logits.shape[0], top_k)
    for token, row in enumerate(logits):
        rates = torch.exp(row - row.max())
        rates /= rates.sum()
        best = rates.argsort(descending=True, stable=True)[:top_k]
        choice[token] = best
        share[token] = rates[best] / rates[best].sum() if normalize else rates[best]
    return choice, share


def sigmoid_router(
    logits: Tensor,
    correction: Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `Kernels.sigmoid_router`."""
    choice = torch.empty(logits.shape[0], top_k, dtype=torch.int64)
    share = logits.new_empty(logits.shape[0], top_k)
    for token, row in enumerate(logits):
        rates = sigmoid(row)
        ranked = rates + correction
        groups = ranked.view(num_groups, -1)
        worth = groups.sort(dim=-1, descending=True).values[:, :2].sum(-1)
        open_groups = worth.argsort(descending=True, stable=True)[:top_groups].tolist()
        for group in set(range(num_groups)) - set(open_groups):
            groups[group] = -torch.inf
        best = ranked.argsort(descending=True, stable=True)[:top_k]
        choice[token] = best
        share[token] = rates[best] / (rates[best].sum() + 1e-20) if normalize else rates[best]
    return choice, share * scale
