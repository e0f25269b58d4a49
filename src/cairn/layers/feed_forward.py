"""Feed-forward layers: MLPs, and mixtures of experts with their routers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels, Weight
from cairn.kernels.operations import KernelFunction
from cairn.layers.linear import Linear, Projection
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm


@dataclass(frozen=True, slots=True)
class SquaredReluMLP:
    """down relu(up x)^2 (arXiv 2109.08668), one rank's inner channels."""

    kernels: Kernels
    up: Linear
    down: Linear

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        return self.down(self.kernels.squared_relu(self.up(hidden, batch)), batch)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate x) * up x) (arXiv 2002.05202), one rank's inner channels; `gate_up` gives gate | up.
    `activation`: `silu_mul` of the kernels, or `gelu_mul`."""

    activation: KernelFunction
    gate_up: Projection
    down: Projection

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        gate, up = self.gate_up(hidden, batch).chunk(2, dim=-1)
        return self.down(self.activation(gate, up), batch)


class Router(Protocol):
    """Which experts a token goes to, the weight of each, and what they get of it."""

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, hidden] -> (input [rows, hidden], topk_ids int64, topk_weights float32), the latter [rows, top_k]."""


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
    epsilon: float

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """See `Router`."""
        logits = self.gate(hidden.float(), batch)
        rule = self.top_k, self.num_groups, self.top_groups, self.normalize, self.scale, self.epsilon
        return hidden, *self.kernels.sigmoid_router(logits, self.correction_bias, *rule)


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """See `Kernels.softmax_router`; the logits are float32 products."""

    kernels: Kernels
    gate: Linear
    top_k: int
    normalize: bool

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """See `Router`."""
        return hidden, *self.kernels.softmax_router(self.gate(hidden.float(), batch), self.top_k, self.normalize)


@dataclass(frozen=True, slots=True)
class InputScalingRouter:
    """Llama 4's: the expert with a token's largest logit, a float32 product, gets the token times that logit's
    sigmoid."""

    kernels: Kernels
    gate: Linear

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """See `Router`."""
        logits = self.gate(hidden.float(), batch)
        # Of one expert the weight is 1.
        ids, ones = self.kernels.softmax_router(logits, 1, True)
        return self.kernels.sigmoid_mul(hidden, logits.gather(1, ids).to(hidden.dtype)), ids, ones


@dataclass(frozen=True, slots=True)
class NormedRouter:
    """Gemma 4's: the logits, float32 products, are of what `norm` makes of the input, whose weight is float32, and
    experts get what `experts_norm` makes of it. The weights of the chosen ones, which add up to 1, are multiplied by
    each one's `expert_scales`, float32 [E]."""

    kernels: Kernels
    norm: RMSNorm
    experts_norm: RMSNorm
    gate: Linear
    top_k: int
    expert_scales: Tensor

    def __call__(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """See `Router`."""
        logits = self.gate(self.norm(hidden).float(), batch)
        ids, weights = self.kernels.softmax_router(logits, self.top_k, True)
        return self.experts_norm(hidden), ids, weights * self.expert_scales[ids]


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """sigmoid(gate x) * expert(x), for all tokens; `gate` has one output."""

    kernels: Kernels
    expert: GatedMLP
    gate: Linear

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        return self.kernels.sigmoid_mul(self.expert(hidden, batch, memory), self.gate(hidden, batch))


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts, and one shared expert if there is any.

    A rank has all experts with a share of their inner channels, packed. `form`: of the routed ones, `Kernels.experts`
    or one with its operands, by which `up` is [E, 2 * inner, in] with the gate first, or [E, inner, in] without one.
    `down` [E, in, inner]. The routed experts work in a latent space where `to_latent` and `from_latent` are given;
    `from_latent` is applied to the rank's partial sum, which needs one sum over ranks less than the other order, so its
    bias is rank 0's alone.
    """

    form: KernelFunction
    router: Router
    up: Weight
    down: Weight
    shared: SquaredReluMLP | GatedMLP | SharedExpert | None
    to_latent: Linear | None = None
    from_latent: Linear | None = None

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        routed, topk_ids, topk_weights = self.router(hidden, batch)
        if self.to_latent is not None:
            routed = self.to_latent(routed, batch)
        routed = self.form(routed, topk_ids, topk_weights, self.up, self.down, batch)
        if self.from_latent is not None:
            routed = self.from_latent(routed, batch)
        return routed if self.shared is None else self.shared(hidden, batch, memory).add_(routed)


@dataclass(frozen=True, slots=True)
class ClampedExperts:
    """Routed experts as gpt-oss has them: see `Kernels.clamped_experts`. A rank has all of them with a share of their
    inner channels, packed; `down_bias` is rank 0's alone."""

    kernels: Kernels
    router: Router
    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor
    down_bias: Tensor | None
    alpha: float
    limit: float

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        routed, topk_ids, topk_weights = self.router(hidden, batch)
        weights = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        return self.kernels.clamped_experts(routed, topk_ids, topk_weights, *weights, self.alpha, self.limit, batch)
