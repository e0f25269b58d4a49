"""Routers and experts, token by token."""

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Weight
from cairn.kernels.reference.elementwise import gelu, sigmoid, silu, widen
from cairn.kernels.reference.products import multiply


def softmax_router(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `Kernels.softmax_router`."""
    topk_ids = torch.empty(logits.shape[0], top_k, dtype=torch.int64)
    topk_weights = logits.new_empty(logits.shape[0], top_k)
    for token, row in enumerate(logits):
        rates = torch.exp(row - row.max())
        rates /= rates.sum()
        best = rates.argsort(descending=True, stable=True)[:top_k]
        topk_ids[token] = best
        topk_weights[token] = rates[best] / rates[best].sum() if normalize else rates[best]
    return topk_ids, topk_weights


def sigmoid_router(
    logits: Tensor, correction: Tensor, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float,
    epsilon: float = 1e-20,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.sigmoid_router`."""
    topk_ids = torch.empty(logits.shape[0], top_k, dtype=torch.int64)
    topk_weights = logits.new_empty(logits.shape[0], top_k)
    for token, row in enumerate(logits):
        rates = sigmoid(row)
        ranked = rates + correction
        groups = ranked.view(num_groups, -1)
        worth = groups.sort(dim=-1, descending=True).values[:, :2].sum(-1)
        open_groups = worth.argsort(descending=True, stable=True)[:top_groups].tolist()
        for group in set(range(num_groups)) - set(open_groups):
            groups[group] = -torch.inf
        best = ranked.argsort(descending=True, stable=True)[:top_k]
        topk_ids[token] = best
        topk_weights[token] = rates[best] / (rates[best].sum() + epsilon) if normalize else rates[best]
    return topk_ids, topk_weights * scale


def experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: Weight, down: Weight, batch: Batch) -> Tensor:
    """See `Kernels.experts`."""

    def run(expert: int, token: Tensor) -> Tensor:
        inner = torch.relu(multiply(up[expert], token)) ** 2
        return multiply(down[expert], inner)

    return _mix(x, topk_ids, topk_weights, run)


def gated_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Weight, down: Weight, batch: Batch
) -> Tensor:
    """See `Kernels.gated_experts`."""
    return _mix(x, topk_ids, topk_weights, _gated_expert(gate_up, down, silu))


def gelu_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Weight, down: Weight, batch: Batch
) -> Tensor:
    """See `Kernels.gelu_experts`."""
    return _mix(x, topk_ids, topk_weights, _gated_expert(gate_up, down, gelu))


def _gated_expert(
    gate_up: Weight, down: Weight, activation: Callable[[Tensor], Tensor]
) -> Callable[[int, Tensor], Tensor]:
    """The output of an expert, by its number, for a token."""

    def run(expert: int, token: Tensor) -> Tensor:
        gate, up = torch.tensor_split(multiply(gate_up[expert], token), 2)
        return multiply(down[expert], activation(gate) * up)

    return run


def clamped_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Weight, down: Weight, gate_up_bias: Tensor,
    down_bias: Tensor | None, alpha: float, limit: float, batch: Batch,
) -> Tensor:  # fmt: skip
    """See `Kernels.clamped_experts`."""

    def run(expert: int, token: Tensor) -> Tensor:
        gate, up = torch.tensor_split(multiply(gate_up[expert], token) + widen(gate_up_bias[expert]), 2)
        gate = gate.clamp(max=limit)
        result = multiply(down[expert], (up.clamp(-limit, limit) + 1) * gate * sigmoid(alpha * gate))
        return result if down_bias is None else result + widen(down_bias[expert])

    return _mix(x, topk_ids, topk_weights, run)


def _mix(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """`run` gets an expert and a token [in], and gives what the expert makes of it [in]."""
    out = torch.zeros_like(widen(x))
    for token in range(x.shape[0]):
        for place in topk_ids[token].argsort().tolist():
            out[token] += topk_weights[token, place] * run(int(topk_ids[token, place]), widen(x[token]))
    return out.to(x.dtype)
