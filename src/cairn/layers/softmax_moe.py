"""Mixture of SwiGLU experts with a softmax router and a gated shared expert, as in Qwen2-MoE and what followed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import ROW_TILE, Kernels, Tiles
from cairn.layers.batch import Batch
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory
from cairn.layers.swiglu import SwiGLU


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """Chooses the `top_k` experts that softmax(logits) rates best. A share is that rate, over the chosen ones' sum if
    `normalize`. All in float32."""

    gate: Linear
    top_k: int
    normalize: bool

    def __call__(self, hidden: Tensor, tiles: Tiles | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [all rows, hidden] -> (choice int64, share float32), both [len(rows), top_k], for `rows` alone."""
        rates = self.gate(hidden.float(), tiles)[rows].softmax(dim=-1)
        share, choice = rates.topk(self.top_k, dim=-1)
        if self.normalize:
            share = share / share.sum(-1, keepdim=True)
        return choice, share


@dataclass(frozen=True, slots=True)
class GatedSharedExpert:
    """sigmoid(gate x) * expert(x), for all tokens; `gate` has one output."""

    kernels: Kernels
    expert: SwiGLU
    gate: Linear

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        rate = self.kernels.sigmoid(self.gate(hidden, batch.tiles))
        return self.expert(hidden, batch, memory).mul_(rate)


@dataclass(frozen=True, slots=True)
class SoftmaxMixture:
    """Routed experts and, unless None, a shared one. A rank has all experts with a share of their inner channels:
    gate_up [E][2 * inner, hidden], gate first, and down [E][hidden, inner]."""

    kernels: Kernels
    router: SoftmaxRouter
    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    shared: GatedSharedExpert | SwiGLU | None

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]. Padding rows are not routed."""
        rows, tiles = batch.token_rows, batch.tiles
        choice, share = self.router(hidden, tiles, rows)
        tile = None if tiles is None else ROW_TILE
        mixed = self.kernels.gated_experts(hidden[rows], choice, share, (self.gate_up, self.down), tile)
        routed = torch.zeros_like(hidden)
        routed[rows] = mixed.to(hidden.dtype)
        return routed if self.shared is None else self.shared(hidden, batch, memory).add_(routed)
