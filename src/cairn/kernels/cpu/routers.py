"""Which experts a token goes to: a few passes over a row of scores, the first of equal ones before the others."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import F32, FLOAT, I64, INT, jit, kernel, row_args
from cairn.kernels.cpu.scalars import advance, exp, sigmoid


@jit
def _take_best(scores: Any, taken: Any, begin: int, end: int) -> int:
    """The index of the largest score that is not taken yet, which is taken now; -1 where there is none."""
    best = -1
    for e in range(begin, end):
        if not taken[e] and (best < 0 or scores[e] > scores[best]):
            best = e
    if best >= 0:
        taken[best] = True
    return best


@kernel({torch.float32: (F32, INT, INT, INT, INT, I64, F32)})
def _softmax_router(
    begin: int, end: int, logits: Any, row: int, experts: int, top_k: int, normalize: int, topk_ids: Any,
    topk_weights: Any,
) -> None:  # fmt: skip
    taken = np.empty(experts, np.bool_)
    for i in range(begin, end):
        scores, chosen = advance(logits, i * row), advance(topk_ids, i * top_k)
        weights = advance(topk_weights, i * top_k)
        taken[:] = False
        for k in range(top_k):
            chosen[k] = _take_best(scores, taken, 0, experts)
        largest, total = scores[chosen[0]], np.float32(0)
        for k in range(top_k):
            weights[k] = exp(scores[chosen[k]] - largest)
            total += weights[k]
        if not normalize:
            total = np.float32(0)
            for e in range(experts):
                total += exp(scores[e] - largest)
        for k in range(top_k):
            weights[k] = weights[k] / total


def softmax_router(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `Kernels.softmax_router`."""
    rows, experts = logits.shape
    topk_ids, topk_weights = torch.empty(rows, top_k, dtype=torch.int64), torch.empty(rows, top_k)
    _softmax_router[logits.dtype](
        rows, logits.numel() * top_k, *row_args(logits), experts, top_k, normalize, topk_ids.data_ptr(),
        topk_weights.data_ptr(),
    )  # fmt: skip
    return topk_ids, topk_weights


@kernel({torch.float32: (F32, INT, F32, INT, INT, INT, INT, INT, FLOAT, FLOAT, I64, F32)})
def _sigmoid_router(
    begin: int, end: int, logits: Any, row: int, correction: Any, experts: int, top_k: int, num_groups: int,
    top_groups: int, normalize: int, scale: Any, epsilon: Any, topk_ids: Any, topk_weights: Any,
) -> None:  # fmt: skip
    rates, scores = np.empty(experts, np.float32), np.empty(experts, np.float32)
    worth, taken = np.empty(num_groups, np.float32), np.empty(experts, np.bool_)
    group_taken = np.empty(num_groups, np.bool_)
    size = experts // num_groups
    for i in range(begin, end):
        source, chosen = advance(logits, i * row), advance(topk_ids, i * top_k)
        weights = advance(topk_weights, i * top_k)
        for e in range(experts):
            rates[e] = sigmoid(source[e])
            scores[e] = rates[e] + correction[e]
        taken[:] = False
        group_taken[:] = False
        for group in range(num_groups):
            worth[group] = np.float32(0)
            for _ in range(min(2, size)):
                worth[group] += scores[_take_best(scores, taken, group * size, (group + 1) * size)]
        taken[:] = True
        for _ in range(top_groups):
            group = _take_best(worth, group_taken, 0, num_groups)
            taken[group * size : (group + 1) * size] = False
        total = epsilon
        for k in range(top_k):
            chosen[k] = _take_best(scores, taken, 0, experts)
            total += rates[chosen[k]]
        factor = scale / total if normalize else scale
        for k in range(top_k):
            weights[k] = rates[chosen[k]] * factor


def sigmoid_router(
    logits: Tensor, correction: Tensor, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float,
    epsilon: float = 1e-20,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.sigmoid_router`."""
    rows, experts = logits.shape
    topk_ids, topk_weights = torch.empty(rows, top_k, dtype=torch.int64), torch.empty(rows, top_k)
    correction = correction.float().contiguous()
    _sigmoid_router[logits.dtype](
        rows, logits.numel() * (top_k + 2), *row_args(logits), correction.data_ptr(), experts, top_k, num_groups,
        top_groups, normalize, scale, epsilon, topk_ids.data_ptr(), topk_weights.data_ptr(),
    )  # fmt: skip
    return topk_ids, topk_weights
