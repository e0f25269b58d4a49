"""Routers, and experts that have their tokens in tiles of `ROW_TILE` rows."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Weight
from cairn.kernels.exact.elementwise import gelu_mul, sigmoid, silu_, squared_relu, widen
from cairn.kernels.exact.metadata import ROW_TILE
from cairn.kernels.exact.products import has_fixed_shapes, multiply_tiles


def softmax_router(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `Kernels.softmax_router`."""
    topk_weights, topk_ids = logits.softmax(dim=-1).topk(top_k, dim=-1)
    return topk_ids, topk_weights / topk_weights.sum(-1, keepdim=True) if normalize else topk_weights


def sigmoid_router(
    logits: Tensor, correction: Tensor, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float,
    epsilon: float = 1e-20,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.sigmoid_router`."""
    rates = sigmoid(logits)
    ranked = rates + correction
    if top_groups < num_groups:
        ranked = _best_groups(ranked, num_groups, top_groups)
    topk_ids = ranked.topk(top_k, dim=-1).indices
    topk_weights = rates.gather(1, topk_ids)
    if normalize:
        topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + epsilon)
    return topk_ids, topk_weights * scale


def _best_groups(ranked: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Experts outside the best groups get -inf."""
    grouped = ranked.view(ranked.shape[0], num_groups, ranked.shape[1] // num_groups)
    worth = grouped.topk(2, dim=-1).values.sum(-1)
    chosen = worth.topk(top_groups, dim=-1).indices
    left_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).view(ranked.shape)


def experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: Weight, down: Weight, batch: Batch) -> Tensor:
    """See `Kernels.experts`."""

    def run(expert: int, rows: Tensor) -> Tensor:
        return _multiply(squared_relu(_multiply(rows, up[expert])), down[expert])

    return _mix(x, topk_ids, topk_weights, run)


def gated_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Weight, down: Weight, batch: Batch
) -> Tensor:
    """See `Kernels.gated_experts`."""

    def run(expert: int, rows: Tensor) -> Tensor:
        gate, up = _multiply(rows, gate_up[expert]).chunk(2, dim=-1)
        return _multiply(silu_(gate.contiguous()).mul_(up), down[expert])

    return _mix(x, topk_ids, topk_weights, run)


def gelu_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Weight, down: Weight, batch: Batch
) -> Tensor:
    """See `Kernels.gelu_experts`."""

    def run(expert: int, rows: Tensor) -> Tensor:
        return _multiply(gelu_mul(*_multiply(rows, gate_up[expert]).chunk(2, dim=-1)), down[expert])

    return _mix(x, topk_ids, topk_weights, run)


def clamped_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Weight, down: Weight, gate_up_bias: Tensor,
    down_bias: Tensor | None, alpha: float, limit: float, batch: Batch,
) -> Tensor:  # fmt: skip
    """See `Kernels.clamped_experts`."""

    def run(expert: int, rows: Tensor) -> Tensor:
        gate, up = _multiply(rows, gate_up[expert], gate_up_bias[expert]).chunk(2, dim=-1)
        gate, up = widen(gate).clamp(max=limit), widen(up).clamp(-limit, limit)
        inner = sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1)).to(rows.dtype)
        return _multiply(inner, down[expert], None if down_bias is None else down_bias[expert])

    return _mix(x, topk_ids, topk_weights, run)


def _mix(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The experts' results, added by the tokens' shares; `run` gets an expert and its tokens' rows."""
    out = torch.zeros(x.shape, dtype=topk_weights.dtype)
    order = topk_ids.flatten().argsort(stable=True)
    tokens = order // topk_ids.shape[1]
    shares = topk_weights.flatten()[order, None]
    begin = 0
    for expert, count in enumerate(torch.bincount(topk_ids.flatten()).tolist()):
        mine = slice(begin, begin + count)
        begin += count
        if count:
            out.index_add_(0, tokens[mine], run(expert, x[tokens[mine]]) * shares[mine])
    return out.to(x.dtype)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A bias comes on top: products of experts are tried out without one, and others may be other code."""
    out = multiply_tiles(x, weight, None, ROW_TILE) if has_fixed_shapes(x) else F.linear(x, weight)
    return out if bias is None else out.add_(bias)
