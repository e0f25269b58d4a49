"""Mixture of squared-ReLU experts with a sigmoid router (DeepSeek-V3's, arXiv 2412.19437, section 2.1.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import ROW_TILE, Kernels, Tiles
from cairn.layers.batch import Batch
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory
from cairn.layers.mlp import SquaredReluMLP


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses `top_k` experts a token, out of its best `top_groups` of `num_groups` groups of experts.

    The choice is made by sigmoid(logit) + correction_bias, the share is the sigmoid alone, over the chosen ones'
    sum if `normalize`, times `scale`. All in float32. A group is worth its two best experts.
    """

    kernels: Kernels
    gate: Linear
    correction_bias: Tensor
    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float

    def __call__(self, hidden: Tensor, tiles: Tiles | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [all rows, hidden] -> (choice int64, share float32), both [len(rows), top_k], for `rows` alone."""
        scores = self.kernels.sigmoid(self.gate(hidden.float(), tiles))[rows]
        ranked = scores + self.correction_bias
        if self.top_groups < self.num_groups:
            ranked = self._best_groups(ranked)
        choice = ranked.topk(self.top_k, dim=-1).indices
        share = scores.gather(1, choice)
        if self.normalize:
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return choice, share * self.scale

    def _best_groups(self, ranked: Tensor) -> Tensor:
        """Experts outside the best groups get -inf."""
        grouped = ranked.view(ranked.shape[0], self.num_groups, -1)
        worth = grouped.topk(2, dim=-1).values.sum(-1)
        chosen = worth.topk(self.top_groups, dim=-1).indices
        left_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, chosen, False)
        return grouped.masked_fill(left_out[..., None], -torch.inf).view(ranked.shape)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts, in a latent space where `to_latent` and `from_latent` are given, plus one shared expert.

    A rank has all experts with a share of their inner channels. `from_latent` is applied to its partial sum, which
    needs one sum over ranks less than the other order; so its bias is rank 0's alone.
    """

    kernels: Kernels
    router: Router
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    shared: SquaredReluMLP
    to_latent: Linear | None
    from_latent: Linear | None

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]. Padding rows are not routed."""
        rows, tiles = batch.token_rows, batch.tiles
        choice, share = self.router(hidden, tiles, rows)
        inner = hidden if self.to_latent is None else self.to_latent(hidden, tiles)
        tile = None if tiles is None else ROW_TILE
        mixed = self.kernels.experts(inner[rows], choice, share, (self.up, self.down), tile)
        routed = torch.zeros_like(inner)
        routed[rows] = mixed.to(inner.dtype)
        if self.from_latent is not None:
            routed = self.from_latent(routed, tiles)
        return self.shared(hidden, batch, memory).add_(routed)
