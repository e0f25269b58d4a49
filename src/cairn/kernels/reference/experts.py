"""Experts, token by token."""

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Weight
from cairn.kernels.reference.elementwise import silu, widen
from cairn.kernels.reference.int8 import multiply


def experts(x: Tensor, choice: Tensor, share: Tensor, up: Weight, down: Weight, batch: Batch) -> Tensor:
    """See `Kernels.experts`."""

    def run(expert: int, token: Tensor) -> Tensor:
        inner = torch.relu(multiply(up[expert], token)) ** 2
        return multiply(down[expert], inner)

    return _mix(x, choice, share, run)


def gated_experts(x: Tensor, choice: Tensor, share: Tensor, gate_up: Weight, down: Weight, batch: Batch) -> Tensor:
    """See `Kernels.gated_experts`."""

    def run(expert: int, token: Tensor) -> Tensor:
        gate, up = torch.tensor_split(multiply(gate_up[expert], token), 2)
        return multiply(down[expert], silu(gate) * up)

    return _mix(x, choice, share, run)


def _mix(x: Tensor, choice: Tensor, share: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """`run` gets an expert and a token [in], and gives what the expert makes of it [in]."""
    out = torch.zeros_like(widen(x))
    for token in range(x.shape[0]):
        for place in choice[token].argsort().tolist():
            out[token] += share[token, place] * run(int(choice[token, place]), widen(x[token]))
    return out.to(x.dtype)
