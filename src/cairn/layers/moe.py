"""Mixtures of experts: a router, routed experts and a shared one."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels, Weight
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory
from cairn.layers.mlp import SquaredReluMLP, SwiGLU


class Router(Protocol):
    """Which experts a token goes to, and what each contributes."""

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """[rows, hidden] -> (topk_ids int64, topk_weights float32), both [rows, top_k]."""
        ...


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """See `Kernels.sigmoid_router`; the logits are float32 products."""

    kernels: Kernels
    gate: Linear
    correction_bias: Tensor
    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Router`."""
        logits = self.gate(hidden.float(), batch)
        rule = self.top_k, self.num_groups, self.top_groups, self.normalize, self.scale
        return self.kernels.sigmoid_router(logits, self.correction_bias, *rule)


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """See `Kernels.softmax_router`; the logits are float32 products."""

    kernels: Kernels
    gate: Linear
    top_k: int
    normalize: bool

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Router`."""
        return self.kernels.softmax_router(self.gate(hidden.float(), batch), self.top_k, self.normalize)


@dataclass(frozen=True, slots=True)
class SigmoidMixture:
    """Routed squared-ReLU experts, in a latent space where `to_latent` and `from_latent` are given, plus one shared
    expert; `up` [E, inner, in] and `down` [E, in, inner], packed.

    A rank has all experts with a share of their inner channels. `from_latent` is applied to its partial sum, which
    needs one sum over ranks less than the other order; so its bias is rank 0's alone.
    """

    kernels: Kernels
    router: Router
    up: Weight
    down: Weight
    shared: SquaredReluMLP
    to_latent: Linear | None
    from_latent: Linear | None

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        topk_ids, topk_weights = self.router(hidden, batch)
        inner = hidden if self.to_latent is None else self.to_latent(hidden, batch)
        routed = self.kernels.experts(inner, topk_ids, topk_weights, self.up, self.down, batch)
        if self.from_latent is not None:
            routed = self.from_latent(routed, batch)
        return self.shared(hidden, batch, memory).add_(routed)


@dataclass(frozen=True, slots=True)
class GatedSharedExpert:
    """sigmoid(gate x) * expert(x), for all tokens; `gate` has one output."""

    kernels: Kernels
    expert: SwiGLU
    gate: Linear

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        return self.kernels.sigmoid_mul(self.expert(hidden, batch, memory), self.gate(hidden, batch))


@dataclass(frozen=True, slots=True)
class SoftmaxMixture:
    """Routed SwiGLU experts and, unless None, a shared one, as in Qwen2-MoE and what followed. A rank has all experts
    with a share of their inner channels: `gate_up` [E, 2 * inner, hidden], gate first, and `down` [E, hidden, inner],
    packed."""

    kernels: Kernels
    router: Router
    gate_up: Weight
    down: Weight
    shared: GatedSharedExpert | SwiGLU | None

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        topk_ids, topk_weights = self.router(hidden, batch)
        routed = self.kernels.gated_experts(hidden, topk_ids, topk_weights, self.gate_up, self.down, batch)
        return routed if self.shared is None else self.shared(hidden, batch, memory).add_(routed)
