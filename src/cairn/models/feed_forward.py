"""Feed-forward layers: their sizes, how they are sharded, and how they are built. No torch before they are built.

A rank has a share of the inner channels, of every expert, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import Slice, shard_even

if TYPE_CHECKING:
    from cairn.kernels.contract import Weight
    from cairn.layers.feed_forward import SharedExpert, SigmoidRouter, SoftmaxRouter, SquaredReluMLP, SwiGLU
    from cairn.layers.linear import Linear, Projection
    from cairn.models.decoder_builder import DecoderBuilder

    Experts = tuple[Weight, Weight]
    """The matrices of all experts: into their inner channels, and out of them."""


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
        """See `LayerSizes`."""
        self.shard(0, size)

    def build_swiglu(
        self,
        b: "DecoderBuilder",
        name: str,
        parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        gate_factor: float = 1.0,
    ) -> "SwiGLU":
        """`parts`: the names of gate, up and down; `gate_factor`: a constant multiplier of the gate."""
        import torch

        from cairn.layers.feed_forward import SwiGLU
        from cairn.layers.linear import ScaledLinear

        weights, inner, shape = b.weights, self.shard(b.rank, b.size), (self.inner, self.hidden)
        gate_up: Projection = weights.fused([(f"{name}.{part}", shape, (inner,)) for part in parts[:2]], bias)
        if gate_factor != 1.0:
            gate = torch.full((inner[1] - inner[0],), gate_factor)
            gate_up = ScaledLinear(gate_up, torch.cat([gate, torch.ones_like(gate)]).to(weights.device))
        return SwiGLU(weights.kernels, gate_up, weights.row_parallel(f"{name}.{parts[2]}", shape[::-1], inner, bias))

    def build_fused_swiglu(self, b: "DecoderBuilder", gate_up: str, down: str) -> "SwiGLU":
        """A SwiGLU whose gate and up are stored as one matrix, in this order; both tensors by their names."""
        from cairn.layers.feed_forward import SwiGLU

        weights, inner = b.weights, self.shard(b.rank, b.size)
        both = weights.column_parallel(gate_up, (2 * self.inner, self.hidden), *self.gate_and_up(inner))
        return SwiGLU(weights.kernels, both, weights.row_parallel(down, (self.hidden, self.inner), inner))

    def build_squared_relu(self, b: "DecoderBuilder", name: str, bias: bool = False) -> "SquaredReluMLP":
        """`up_proj` and `down_proj`."""
        from cairn.layers.feed_forward import SquaredReluMLP

        weights, inner, shape = b.weights, self.shard(b.rank, b.size), (self.inner, self.hidden)
        up = weights.column_parallel(f"{name}.up_proj", shape, inner, bias=bias)
        down = weights.row_parallel(f"{name}.down_proj", shape[::-1], inner, bias)
        return SquaredReluMLP(weights.kernels, up, down)

    def build_shared_expert(self, b: "DecoderBuilder", name: str) -> "SharedExpert":
        """A SwiGLU and, called `<name>_gate`, the gate on its outcome."""
        from cairn.layers.feed_forward import SharedExpert

        expert = self.build_swiglu(b, name)
        gate = b.weights.unquantized(b.weights.tensor(f"{name}_gate.weight", (1, self.hidden)))
        return SharedExpert(b.weights.kernels, expert, gate)

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
        """See `LayerSizes`."""
        self.expert.check_size(size)

    def build_softmax_router(self, b: "DecoderBuilder", name: str, normalize: bool = True) -> "SoftmaxRouter":
        """By a softmax over all experts; `normalize`: the weights of a token's experts add up to 1."""
        from cairn.layers.feed_forward import SoftmaxRouter

        return SoftmaxRouter(b.weights.kernels, self._gate(b, name, self.expert.hidden), self.top_k, normalize)

    def build_sigmoid_router(self, b: "DecoderBuilder", name: str, hidden: int, **rule: Any) -> "SigmoidRouter":
        """By a sigmoid and a correction; `rule`: further fields of `SigmoidRouter`."""
        from cairn.layers.feed_forward import SigmoidRouter

        gate = self._gate(b, name, hidden)
        correction = b.weights.tensor(f"{name}.e_score_correction_bias", (self.count,)).float()
        return SigmoidRouter(b.weights.kernels, gate, correction, top_k=self.top_k, **rule)

    def _gate(self, b: "DecoderBuilder", name: str, hidden: int) -> "Linear":
        return b.weights.unquantized(b.weights.tensor(f"{name}.weight", (self.count, hidden)).float())

    def build_stacked(self, b: "DecoderBuilder", gate_up: str, down: str) -> "Experts":
        """SwiGLUs in two stacks, gate and up [count, 2 * inner, hidden] and down [count, hidden, inner], by the names
        of both tensors."""
        weights, expert, inner = b.weights, self.expert, self.expert.shard(b.rank, b.size)
        shape = (self.count, 2 * expert.inner, expert.hidden)
        return (
            weights.pack(weights.tensor(gate_up, shape, *expert.gate_and_up(inner), dim=1)),
            weights.pack(weights.tensor(down, (self.count, expert.hidden, expert.inner), inner, dim=2)),
        )

    def build_swiglus(self, b: "DecoderBuilder", name: str) -> "Experts":
        """SwiGLUs by a tensor for each expert and matrix, or by two stacks where the checkpoint has those: both forms
        are published. gate and up are one product."""
        if f"{name}.gate_up_proj" in b.stored:
            return self.build_stacked(b, f"{name}.gate_up_proj", f"{name}.down_proj")
        return self._build_experts(b, name, ("gate", "up"))

    def build_squared_relus(self, b: "DecoderBuilder", name: str) -> "Experts":
        """Squared-ReLU MLPs by a tensor for each expert and matrix."""
        return self._build_experts(b, name, ("up",))

    def _build_experts(self, b: "DecoderBuilder", name: str, parts: Sequence[str]) -> "Experts":
        """`parts`: the names of an expert's matrices into its inner channels."""
        weights, inner, shape = b.weights, self.expert.shard(b.rank, b.size), (self.expert.inner, self.expert.hidden)
        ups, downs = [], []
        for expert in range(self.count):
            base = f"{name}.{expert}"
            ups.append(weights.rows([weights.matrix(f"{base}.{part}_proj.weight", shape, inner) for part in parts]))
            downs.append(weights.matrix(f"{base}.down_proj.weight", shape[::-1], inner, dim=1))
        return weights.pack_experts(ups), weights.pack_experts(downs)
