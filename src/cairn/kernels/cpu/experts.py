"""Experts: the tokens sorted by expert, and all experts' products in one go."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cpu.compiled import ELEMENTS, F32, FLOAT, I64, INT, kernel
from cairn.kernels.cpu.elementwise import gelu_mul, silu_mul, squared_relu
from cairn.kernels.cpu.products import AnyWeight, ExpertRows, multiply_experts
from cairn.kernels.cpu.recording import call_again
from cairn.kernels.cpu.scalars import ONE, advance, load, sigmoid, store


def experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: AnyWeight, down: AnyWeight, batch: Batch) -> Tensor:
    """See `Kernels.experts`."""
    return _mixed(x, topk_ids, topk_weights, up, down, squared_relu)


def gated_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: AnyWeight, down: AnyWeight, batch: Batch
) -> Tensor:
    """See `Kernels.gated_experts`."""
    return _mixed(x, topk_ids, topk_weights, gate_up, down, lambda inner: silu_mul(*inner.chunk(2, dim=-1)))


def gelu_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: AnyWeight, down: AnyWeight, batch: Batch
) -> Tensor:
    """See `Kernels.gelu_experts`."""
    return _mixed(x, topk_ids, topk_weights, gate_up, down, lambda inner: gelu_mul(*inner.chunk(2, dim=-1)))


def clamped_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: AnyWeight, down: AnyWeight, gate_up_bias: Tensor,
    down_bias: Tensor | None, alpha: float, limit: float, batch: Batch,
) -> Tensor:  # fmt: skip
    """See `Kernels.clamped_experts`."""

    def activation(inner: Tensor) -> Tensor:
        rows, width = inner.shape[0], inner.shape[1] // 2
        out = inner.new_empty(rows, width)
        _clamped_swiglu[inner.dtype](rows, out.numel() // 2, inner.data_ptr(), out.data_ptr(), width, alpha, limit)
        return out

    return _mixed(x, topk_ids, topk_weights, gate_up, down, activation, gate_up_bias, down_bias)


def _mixed(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    up: AnyWeight,
    down: AnyWeight,
    activation: Callable[[Tensor], Tensor],
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The experts' results, added by the tokens' shares."""
    tokens, top_k = topk_ids.shape
    num_rows = tokens * top_k
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.float().contiguous()
    out = x.new_empty(tokens, down.shape[-2])

    def run() -> None:
        ends = torch.zeros(down.shape[0], dtype=torch.int64)
        order, places = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.int64)
        _sort_by_expert[topk_ids.dtype](
            *(1, 0, topk_ids.data_ptr(), num_rows, top_k),
            *(ends.data_ptr(), down.shape[0], order.data_ptr(), places.data_ptr()),
        )
        rows = ExpertRows(order, ends, num_rows)
        inner = activation(multiply_experts(x, up, rows, up_bias))
        result = multiply_experts(inner, down, replace(rows, order=None), down_bias)
        _add_shares[x.dtype](
            *(tokens, result.numel() // 4, result.data_ptr(), places.data_ptr()),
            *(topk_weights.data_ptr(), top_k, out.data_ptr(), out.shape[1]),
        )

    call_again(run)
    return out


@kernel({dtype: (x, x, INT, FLOAT, FLOAT) for dtype, x in ELEMENTS.items()})
def _clamped_swiglu(begin: int, end: int, inner: Any, out: Any, width: int, alpha: Any, limit: Any) -> None:
    """Rows of gate and up beside each other. A number that is none stays so."""
    for i in range(begin, end):
        source, target = advance(inner, 2 * i * width), advance(out, i * width)
        for j in range(width):
            gate, up = load(source, j), load(source, width + j)
            gate = limit if gate > limit else gate
            up = limit if up > limit else up
            up = -limit if up < -limit else up
            store(target, j, (up + ONE) * gate * sigmoid(alpha * gate))


@kernel({torch.int64: (I64, INT, INT, I64, INT, I64, I64)})
def _sort_by_expert(
    begin: int, end: int, topk_ids: Any, count: int, top_k: int, ends: Any, num_experts: int, order: Any, places: Any
) -> None:
    """Fills `order` with the tokens, those of expert 0 first, `places` with where each topk_ids went, and `ends` with
    where an expert's tokens end. One item does all of it. `ends` comes in as zeros."""
    for i in range(count):
        ends[topk_ids[i]] += 1
    total = np.int64(0)
    for e in range(num_experts):
        mine = ends[e]
        ends[e] = total
        total += mine
    for i in range(count):
        place = ends[topk_ids[i]]
        ends[topk_ids[i]] = place + 1
        order[place] = i // top_k
        places[i] = place


@kernel({dtype: (x, I64, F32, INT, x, INT) for dtype, x in ELEMENTS.items()})
def _add_shares(
    begin: int, end: int, result: Any, places: Any, topk_weights: Any, top_k: int, out: Any, width: int
) -> None:
    """Each token's results, by their shares, in the order in which it chose its experts."""
    buffer = np.empty(width, np.float32)
    for i in range(begin, end):
        target = advance(out, i * width)
        for j in range(width):
            buffer[j] = 0
        for k in range(i * top_k, (i + 1) * top_k):
            source, factor = advance(result, places[k] * width), topk_weights[k]
            for j in range(width):
                buffer[j] += factor * load(source, j)
        for j in range(width):
            store(target, j, buffer[j])
