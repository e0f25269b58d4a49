"""Which experts a token goes to, and with what share; all in the logits' dtype."""

import torch
from torch import Tensor

from cairn.kernels.exact.elementwise import sigmoid


def softmax_router(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `Kernels.softmax_router`."""
    share, choice = logits.softmax(dim=-1).topk(top_k, dim=-1)
    return choice, share / share.sum(-1, keepdim=True) if normalize else share


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
    rates = sigmoid(logits)
    ranked = rates + correction
    if top_groups < num_groups:
        ranked = _best_groups(ranked, num_groups, top_groups)
    choice = ranked.topk(top_k, dim=-1).indices
    share = rates.gather(1, choice)
    if normalize:
        share = share / (share.sum(-1, keepdim=True) + 1e-20)
    return choice, share * scale


def _best_groups(ranked: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Experts outside the best groups get -inf."""
    grouped = ranked.view(ranked.shape[0], num_groups, ranked.shape[1] // num_groups)
    worth = grouped.topk(2, dim=-1).values.sum(-1)
    chosen = worth.topk(top_groups, dim=-1).indices
    left_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).view(ranked.shape)
