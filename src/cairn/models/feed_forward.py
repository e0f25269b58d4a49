"""Feed-forward layers: their sizes, how they are sharded, and their tensors. Without torch.

A rank has a share of the inner channels, of every expert, too.
"""

from dataclasses import dataclass
from typing import Literal

from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import Slice, shard_even
from cairn.models.weight_specs import (
    ExpertMatrices,
    ExpertStacks,
    MixerSpec,
    ProductSpec,
    StoredTensor,
    WeightSpec,
    column_parallel,
    fused,
    matrix,
    row_parallel,
    transposed,
)

Activation = Literal["silu", "gelu"]
"""Of a gate: see `Kernels.silu_mul` and `Kernels.gelu_mul`."""


@dataclass(frozen=True, slots=True)
class FeedForwardSizes(LayerSizes):
    """`matrices`: of [inner, hidden], 3 with a gate and 2 without; `extra_weights`: a gate on the outcome. `field`:
    what config.json calls `inner`."""

    field: str
    hidden: int
    inner: int
    matrices: int = 3
    extra_weights: int = 0

    @property
    def active_weights(self) -> int:
        return self.matrices * self.hidden * self.inner + self.extra_weights

    def shard(self, rank: int, size: int) -> Slice:
        """The rank's inner channels. Raises ConfigError naming --tensor-parallel-size and the field."""
        return shard_even(self.field, self.inner, rank, size)

    def check_size(self, size: int) -> None:
        self.shard(0, size)

    def gate_and_up(self, inner: Slice) -> tuple[Slice, Slice]:
        """Where the rows of gate and up are in a matrix that has both."""
        return inner, (inner[0] + self.inner, inner[1] + self.inner)


@dataclass(frozen=True, slots=True)
class ExpertSizes(LayerSizes):
    """`count` experts, of which a token goes to `top_k`. `extra_weights`: of the router and whatever else is not an
    expert's."""

    count: int
    top_k: int
    expert: FeedForwardSizes
    extra_weights: int

    @property
    def active_weights(self) -> int:
        return self.top_k * self.expert.active_weights + self.extra_weights

    def check_size(self, size: int) -> None:
        self.expert.check_size(size)


@dataclass(frozen=True, slots=True)
class GatedMLPLayer(MixerSpec):
    """A SwiGLU, or with another `activation` a GeGLU.

    `parts`: the tensors of gate, up and down below `name`, or of gate and up as one matrix, in this order, and down.
    `gate_factor`: a constant multiplier of the gate. `outcome_gate`: the tensor of a gate on the outcome, if there is
    one.
    """

    sizes: FeedForwardSizes
    name: str
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    activation: Activation = "silu"
    gate_factor: float = 1.0
    outcome_gate: str | None = None

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        inner, (rows, hidden) = self.sizes.shard(rank, size), (self.sizes.inner, self.sizes.hidden)
        *ups, down = (f"{self.name}.{part}" for part in self.parts)
        if len(ups) == 1:
            gate_up = column_parallel(ups[0], (2 * rows, hidden), *self.sizes.gate_and_up(inner), bias=self.bias)
        else:
            gate_up = fused(tuple((up, (rows, hidden), (inner,)) for up in ups), self.bias)
        weights: dict[str, WeightSpec] = {
            "gate_up": gate_up,
            "down": row_parallel(down, (hidden, rows), inner, rank, self.bias),
        }
        if self.outcome_gate is not None:
            weights["gate"] = ProductSpec((StoredTensor(self.outcome_gate, (1, hidden)),), precision="dtype")
        return weights


@dataclass(frozen=True, slots=True)
class SquaredReluLayer(MixerSpec):
    """`up_proj` and `down_proj` below `name`."""

    sizes: FeedForwardSizes
    name: str
    bias: bool = False

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        inner, shape = self.sizes.shard(rank, size), (self.sizes.inner, self.sizes.hidden)
        return {
            "up": column_parallel(f"{self.name}.up_proj", shape, inner, bias=self.bias),
            "down": row_parallel(f"{self.name}.down_proj", shape[::-1], inner, rank, self.bias),
        }


class RouterRule:
    """How a mixture's experts are chosen and weighed by the outputs of its gate."""

    __slots__ = ()

    def weights(self, gate: WeightSpec, count: int, hidden: int) -> dict[str, WeightSpec]:
        """The gate, `gate`, and what else it has, for `count` experts of tokens of `hidden` channels, by the names that
        its router gives them."""
        return {"gate": gate}


@dataclass(frozen=True, slots=True)
class SoftmaxRule(RouterRule):
    """See `SoftmaxRouter`. `normalize`: the weights of a token's experts add up to 1."""

    normalize: bool = True


@dataclass(frozen=True, slots=True)
class SigmoidRule(RouterRule):
    """See `SigmoidRouter`. `correction`: the tensor that is added to the rates where experts are chosen, None for
    none; `normalize`: as in `SoftmaxRule`."""

    num_groups: int
    top_groups: int
    scale: float
    correction: str | None
    epsilon: float = 1e-20
    normalize: bool = True

    def weights(self, gate: WeightSpec, count: int, hidden: int) -> dict[str, WeightSpec]:
        correction = {} if self.correction is None else {"correction": StoredTensor(self.correction, (count,))}
        return {"gate": gate, **correction}


@dataclass(frozen=True, slots=True)
class InputScalingRule(RouterRule):
    """See `InputScalingRouter`."""


@dataclass(frozen=True, slots=True)
class NormedRule(RouterRule):
    """See `NormedRouter`. The tensors of the norm before experts, of what scales the gate's input, and of what scales
    the experts' weights."""

    norm: str
    scale: str
    expert_scales: str

    def weights(self, gate: WeightSpec, count: int, hidden: int) -> dict[str, WeightSpec]:
        return {
            "norm": StoredTensor(self.norm, (hidden,)),
            "scale": StoredTensor(self.scale, (hidden,)),
            "gate": gate,
            "expert_scales": StoredTensor(self.expert_scales, (count,)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLayer(MixerSpec):
    """A mixture of experts, beside a `shared` one if there is any.

    `router`: the name of the gate over `hidden` channels, by which `routing` chooses. `experts`: the name below which
    an expert's matrices are by number, `parts` those into its inner channels, gate and up of a SwiGLU (or with another
    `activation` a GeGLU) or up alone of a squared-ReLU MLP, and `down` the one out of them. `stacks`: instead of these
    the tensors of all experts' gate and up [count, 2 * inner, hidden] and down [count, hidden, inner], or with
    `inputs_first` the last two dimensions the other way round. `latent`: the names of the products into the space in
    which routed experts work, and back; `bias`: of these. The latter has all of its inputs, but its outputs are a
    partial sum.
    """

    sizes: ExpertSizes
    hidden: int
    router: str
    routing: RouterRule = SoftmaxRule()
    experts: str = ""
    parts: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    stacks: tuple[str, str] | None = None
    latent: tuple[str, str] | None = None
    bias: bool = False
    shared: MixerSpec | None = None
    inputs_first: bool = False
    activation: Activation = "silu"

    @property
    def is_gated(self) -> bool:
        """Whether experts have gates."""
        return self.stacks is not None or len(self.parts) == 2

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return () if self.shared is None else (self.shared,)

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        count, width = self.sizes.count, self.sizes.expert.hidden
        gate = StoredTensor(f"{self.router}.weight", (count, self.hidden))
        weights = self.routing.weights(ProductSpec((gate,), precision="float32"), count, self.hidden)
        if self.latent is not None:
            to, back = self.latent
            weights["to_latent"] = column_parallel(to, (width, self.hidden), (0, width), bias=self.bias)
            weights["from_latent"] = row_parallel(back, (self.hidden, width), (0, width), rank, self.bias)
        return weights | {"experts": self._experts(self.sizes.expert.shard(rank, size))}

    def _experts(self, inner: Slice) -> WeightSpec:
        count, expert = self.sizes.count, self.sizes.expert
        if self.stacks is not None:
            up, down = self.stacks
            up_shape, down_shape = (count, 2 * expert.inner, expert.hidden), (count, expert.hidden, expert.inner)
            matrices = (
                StoredTensor(up, up_shape, expert.gate_and_up(inner), 1, is_matrix=True),
                StoredTensor(down, down_shape, (inner,), 2, is_matrix=True),
            )
            first, last = map(transposed, matrices) if self.inputs_first else matrices
            return ExpertStacks(first, last, inputs_first=self.inputs_first)
        shape, names = (expert.inner, expert.hidden), [f"{self.experts}.{number}" for number in range(count)]
        ups = (tuple(matrix(f"{name}.{part}", shape, inner) for part in self.parts) for name in names)
        downs = (matrix(f"{name}.{self.down}", shape[::-1], inner, dim=1) for name in names)
        return ExpertMatrices(tuple(ups), tuple(downs))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedExpertsLayer(MixerSpec):
    """gpt-oss's mixture of experts: see `Kernels.clamped_experts`. A token's experts are those with the largest logits
    of the router, which has a bias; they are weighed by a softmax over these alone.

    `name`: below which the tensors are. Rows of gate and up come by turns. `inputs_first`: matrices are stored as
    [count, in, out], as they are published where they are not quantized, and otherwise as [count, out, in].
    """

    sizes: ExpertSizes
    hidden: int
    name: str
    alpha: float
    limit: float
    inputs_first: bool

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        count, router = self.sizes.count, f"{self.name}.router"
        logits = StoredTensor(f"{router}.weight", (count, self.hidden)), StoredTensor(f"{router}.bias", (count,))
        gate = ProductSpec(logits[:1], logits[1:], precision="float32")
        return {"gate": gate, "experts": self._experts(self.sizes.expert.shard(rank, size), rank)}

    def _experts(self, inner: Slice, rank: int) -> ExpertStacks:
        count, expert, pairs = self.sizes.count, self.sizes.expert, (2 * inner[0], 2 * inner[1])
        names = f"{self.name}.experts.gate_up_proj", f"{self.name}.experts.down_proj"
        stacks = [
            StoredTensor(names[0], (count, 2 * expert.inner, expert.hidden), (pairs,), 1, is_matrix=True),
            StoredTensor(names[1], (count, expert.hidden, expert.inner), (inner,), 2, is_matrix=True),
        ]
        # The ranks' partial sums are added up.
        biases = [StoredTensor(f"{names[0]}_bias", (count, 2 * expert.inner), (pairs,), 1)]
        biases += [StoredTensor(f"{names[1]}_bias", (count, expert.hidden))] if rank == 0 else []
        up, down = map(transposed, stacks) if self.inputs_first else stacks
        return ExpertStacks(up, down, tuple(biases), by_turns=True, inputs_first=self.inputs_first)
