"""From layers as data to one rank's mixers, whose weights are drawn as they are built."""

from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatchmethod
from itertools import accumulate, count
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.kernels.operations import KernelFunction
from cairn.layers.attention import Attention, HeadNorms, Positions
from cairn.layers.communicator import Communicator
from cairn.layers.feed_forward import (
    ClampedExperts,
    GatedMLP,
    InputScalingRouter,
    MixtureOfExperts,
    NormedRouter,
    Router,
    SharedExpert,
    SigmoidRouter,
    SoftmaxRouter,
    SquaredReluMLP,
)
from cairn.layers.gated_delta_net import GatedDeltaNet
from cairn.layers.layer_inputs import LayerInputMixer
from cairn.layers.linear import Linear, Projection, ScaledLinear
from cairn.layers.mamba2 import Mamba2
from cairn.layers.memory import MemorySpec
from cairn.layers.model import Normed, Parallel, Scaled, SideBySide
from cairn.layers.norms import GatedNorm, GatedRMSNorm, RMSNorm, ShardedGatedRMSNorm, ShardedRMSNorm, SiluGate
from cairn.layers.residual import Mixer
from cairn.layers.short_conv import ShortConv
from cairn.models.attention import AttentionLayer
from cairn.models.decoder_spec import DecoderSpec, NormedMixer, ParallelMixers, ScaledMixer, SideBySideMixers
from cairn.models.feed_forward import (
    Activation,
    ClampedExpertsLayer,
    ExpertsLayer,
    GatedMLPLayer,
    InputScalingRule,
    NormedRule,
    RouterRule,
    SigmoidRule,
    SoftmaxRule,
    SquaredReluLayer,
)
from cairn.models.gated_delta_net import DeltaNetLayer
from cairn.models.layer_inputs import LayerInputLayer
from cairn.models.mamba2 import Mamba2Layer
from cairn.models.rank_weights import RankWeights
from cairn.models.rotary import RotarySpec, TemperatureSpec
from cairn.models.sharding import HeadShard
from cairn.models.short_conv import ShortConvLayer
from cairn.models.weight_specs import MixerSpec

ACTIVATIONS: Mapping[Activation, str] = MappingProxyType({"silu": "silu_mul", "gelu": "gelu_mul"})

EXPERTS: Mapping[Activation, str] = MappingProxyType({"silu": "gated_experts", "gelu": "gelu_experts"})
"""By the activation of a gate: functions of the kernels."""


class MixerBuilder:
    """Builds the mixers of a model's layers, in their order: each has a number among those of its kind.

    `rotaries`: what the attention of the layers that were built turns by; each is numbered by its place.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        memory_spec: MemorySpec,
        weights: RankWeights,
        kernels: Kernels,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.rotaries: dict[RotarySpec | TemperatureSpec, int] = {}
        self._spec, self._weights, self._kernels, self._device = spec, weights, kernels, device
        # Looked up once: each time a method that dispatches makes a function.
        self._make = weights.make
        self._communicator, self._rank, self._size = communicator, communicator.rank, communicator.size
        self._recurrent_layers = count()
        # Layers of one attention group follow one another in the model's memory.
        groups = memory_spec.attention
        firsts = accumulate((group.num_layers for group in groups[:-1]), initial=0)
        self._attention_groups = {
            replace(group, num_layers=1): (number, count(first))
            for number, (group, first) in enumerate(zip(groups, firsts, strict=False))
        }
        self._attention_places: dict[str, tuple[int, int]] = {}

    def _place(self, layer: AttentionLayer) -> tuple[int, int]:
        """The group, and the number of the layer, whose keys and values it reads."""
        if layer.keys_of is not None:
            return self._attention_places[layer.keys_of]
        spec = self._spec.attention_spec(layer, self._rank, self._size)
        assert spec is not None
        group, numbers = self._attention_groups[spec]
        return self._attention_places.setdefault(layer.name, (group, next(numbers)))

    def _positions_of(self, layer: AttentionLayer) -> Positions | None:
        spec = layer.rotary or self._spec.rotary
        if spec is None:
            return None
        rotation = self.rotaries.setdefault(spec, len(self.rotaries))
        return Positions(rotation, spec.interleaved, spec.queries_alone)

    def rms_norm(self, weight: Tensor, centred: bool) -> RMSNorm:
        """The sum of a centred weight and 1 is kept in float32, as bfloat16 would round it."""
        return RMSNorm(self._kernels, weight.float() + 1.0 if centred else weight, self._spec.config.eps)

    def _query_norm(
        self, layer: AttentionLayer, weight: Tensor, num_heads: int, counts: bool
    ) -> RMSNorm | ShardedRMSNorm:
        """Of queries or of keys, of which the whole model has `num_heads` heads; `counts`: see `ShardedRMSNorm`."""
        if not layer.norms_all_heads or self._size == 1:
            return self.rms_norm(weight, layer.centred)
        width = num_heads * layer.sizes.head_dim
        return ShardedRMSNorm(weight, width, self._spec.config.eps, self._communicator, counts)

    def _scaled(self, projection: Linear, factors: list[tuple[int, float]]) -> Projection:
        """`factors`: of so many outputs each."""
        by_row = torch.cat([torch.full((rows,), factor) for rows, factor in factors])
        return ScaledLinear(projection, by_row.to(self._device))

    def _draw(self, layer: MixerSpec) -> dict[str, Any]:
        """What the rank has of it, by the names that the layer gives it."""
        return {key: self._make(each) for key, each in layer.weights(self._rank, self._size).items()}

    @singledispatchmethod
    def build(self, layer: MixerSpec) -> Mixer:
        """The rank's part of a layer. Raises ModelError that names a tensor."""
        raise TypeError(f"no layer is built of {layer!r:.200}")

    @build.register
    def _(self, layer: ScaledMixer) -> Mixer:
        return Scaled(self.build(layer.mixer), layer.after, layer.before)

    @build.register
    def _(self, layer: ParallelMixers) -> Mixer:
        return Parallel(tuple(self.build(mixer) for mixer in layer.mixers))

    @build.register
    def _(self, layer: AttentionLayer) -> Mixer:
        sizes, drawn, shard = layer.sizes, self._draw(layer), layer.sizes.shard(self._rank, self._size)
        first, last = sizes.rank_heads(self._rank, self._size)
        projection: Projection = drawn["q_k_v"]
        if layer.factors:
            rows = {"q_proj": last - first, "k_proj": shard.count, "v_proj": shard.count}
            factors = [(heads * sizes.head_dim, layer.factors.get(part, 1.0)) for part, heads in rows.items()]
            projection = self._scaled(drawn["q_k_v"], factors)
        ones = torch.ones(sizes.head_dim, device=self._device)
        v_norm = self.rms_norm(ones, centred=False) if layer.norms_values else None
        if layer.unit_norms:
            drawn |= {"q_norm": ones, "k_norm": ones}
        q_norm, k_norm = (
            None if key not in drawn else self._query_norm(layer, drawn[key], heads, counts)
            for key, heads, counts in (
                ("q_norm", sizes.num_heads, True),
                ("k_norm", sizes.num_kv_heads, shard.replica == 0),
            )
        )
        group, number = self._place(layer)
        return Attention(
            kernels=self._kernels,
            projection=projection,
            o_proj=drawn["out"],
            num_heads=last - first,
            num_kv_heads=shard.count,
            head_dim=sizes.head_dim,
            layer=number,
            group=group,
            positions=self._positions_of(layer),
            norms=HeadNorms(q_norm, k_norm, v_norm, layer.norms_all_heads, layer.unit_norms),
            kv_parts=sizes.kv_projections,
            gate_width=sizes.gate_width,
            rule=layer.rule,
            sinks=None if layer.sinks is None else drawn["sinks"].float(),
        )

    @build.register
    def _(self, layer: NormedMixer) -> Mixer:
        return Normed(self.rms_norm(self._draw(layer)["norm"], self._spec.centred), self.build(layer.mixer))

    @build.register
    def _(self, layer: SideBySideMixers) -> Mixer:
        return SideBySide(tuple(self.build(mixer) for mixer in layer.mixers))

    @build.register
    def _(self, layer: LayerInputLayer) -> Mixer:
        drawn, columns = self._draw(layer), slice(*layer.sizes.shard(self._rank, self._size))
        return LayerInputMixer(self._kernels, drawn["gate"], drawn["out"], layer.layer, columns)

    @build.register
    def _(self, layer: Mamba2Layer) -> Mixer:
        sizes, drawn, shard = layer.sizes, self._draw(layer), layer.sizes.shard(self._rank, self._size)
        in_proj: Projection = drawn["in"]
        if layer.factors:
            widths = (sizes.inner, sizes.inner, sizes.bc, sizes.bc, sizes.num_heads)
            by_row = torch.cat([torch.full((width,), by) for width, by in zip(widths, layer.factors, strict=True)])
            by_row = torch.cat([by_row[begin:end] for begin, end in sizes.rank_rows(self._rank, self._size)])
            in_proj = ScaledLinear(drawn["in"], by_row.to(self._device))
        return Mamba2(
            kernels=self._kernels,
            num_heads=shard.count * sizes.unit_heads,
            head_dim=sizes.head_dim,
            num_groups=1 if sizes.one_group else shard.count,
            state_size=sizes.state_size,
            dt_limit=sizes.dt_limit,
            in_proj=in_proj,
            **_conv(drawn),
            a=-drawn["A_log"].float().exp(),
            d=drawn["D"].float(),
            dt_bias=drawn["dt_bias"].float(),
            norm=self._gated_norm(layer, drawn.get("norm"), shard),
            out_proj=drawn["out"],
            layer=next(self._recurrent_layers),
        )

    def _gated_norm(self, layer: Mamba2Layer, weight: Tensor | None, shard: HeadShard) -> GatedNorm:
        """Groups are whole on the ranks that have them; a single one is sharded over all ranks."""
        sizes, output_slice = layer.sizes, shard.local_output(layer.sizes.unit_channels)
        if weight is None:
            return SiluGate(self._kernels, output_slice)
        if sizes.one_group and self._size > 1:
            return ShardedGatedRMSNorm(self._kernels, weight, sizes.inner, sizes.eps, self._communicator, output_slice)
        groups = 1 if sizes.one_group else shard.count
        return GatedRMSNorm(self._kernels, weight, groups, sizes.eps, output_slice)

    @build.register
    def _(self, layer: DeltaNetLayer) -> Mixer:
        sizes, drawn, shard = layer.sizes, self._draw(layer), layer.sizes.shard(self._rank, self._size)
        return GatedDeltaNet(
            kernels=self._kernels,
            num_key_heads=shard.count,
            key_dim=sizes.key_dim,
            num_value_heads=shard.count * sizes.unit_heads,
            value_dim=sizes.value_dim,
            in_proj=drawn["in"],
            conv=_conv(drawn)["conv"],
            a=-drawn["A_log"].float().exp(),
            dt_bias=drawn["dt_bias"].float(),
            norm=RMSNorm(self._kernels, drawn["norm"].float(), sizes.eps),
            out_proj=drawn["out"],
            layer=next(self._recurrent_layers),
            output_slice=shard.local_output(sizes.unit_values),
            beta_scale=layer.beta_scale,
        )

    @build.register
    def _(self, layer: ShortConvLayer) -> Mixer:
        drawn = self._draw(layer)
        return ShortConv(
            kernels=self._kernels,
            **_conv(drawn),
            in_proj=drawn["in"],
            out_proj=drawn["out"],
            layer=next(self._recurrent_layers),
        )

    @build.register
    def _(self, layer: SquaredReluLayer) -> Mixer:
        return SquaredReluMLP(self._kernels, **self._draw(layer))

    @build.register
    def _(self, layer: GatedMLPLayer) -> Mixer:
        drawn = self._draw(layer)
        gate_up: Projection = drawn["gate_up"]
        if layer.gate_factor != 1.0:
            rows = drawn["gate_up"].shape[0] // 2
            gate_up = self._scaled(drawn["gate_up"], [(rows, layer.gate_factor), (rows, 1.0)])
        mlp = GatedMLP(KernelFunction(self._kernels, ACTIVATIONS[layer.activation]), gate_up, drawn["down"])
        return SharedExpert(self._kernels, mlp, drawn["gate"]) if "gate" in drawn else mlp

    @build.register
    def _(self, layer: ExpertsLayer) -> Mixer:
        drawn = self._draw(layer)
        up, down = drawn["experts"]
        shared: Any = None if layer.shared is None else self.build(layer.shared)
        form = KernelFunction(self._kernels, EXPERTS[layer.activation] if layer.is_gated else "experts")
        latent = drawn.get("to_latent"), drawn.get("from_latent")
        router = self._router(layer.routing, drawn["gate"], layer.sizes.top_k, drawn)
        return MixtureOfExperts(form, router, up, down, shared, *latent)

    @singledispatchmethod
    def _router(self, rule: RouterRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        """`gate`: gives a logit of each expert."""
        raise TypeError(f"no router is built of {rule!r:.200}")

    @_router.register
    def _(self, rule: SoftmaxRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        return SoftmaxRouter(self._kernels, gate, top_k, rule.normalize)

    @_router.register
    def _(self, rule: SigmoidRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        nothing = torch.zeros(gate.shape[0], device=self._device)
        correction = drawn.get("correction", nothing).float()
        groups = rule.num_groups, rule.top_groups
        return SigmoidRouter(self._kernels, gate, correction, top_k, *groups, rule.normalize, rule.scale, rule.epsilon)

    @_router.register
    def _(self, rule: InputScalingRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        return InputScalingRouter(self._kernels, gate)

    @_router.register
    def _(self, rule: NormedRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        scale: Tensor = drawn["scale"].float()
        return NormedRouter(
            kernels=self._kernels,
            norm=self.rms_norm(scale * len(scale) ** -0.5, centred=False),
            experts_norm=self.rms_norm(drawn["norm"], self._spec.centred),
            gate=gate,
            top_k=top_k,
            expert_scales=drawn["expert_scales"].float(),
        )

    @build.register
    def _(self, layer: ClampedExpertsLayer) -> Mixer:
        drawn = self._draw(layer)
        router = SoftmaxRouter(self._kernels, drawn["gate"], layer.sizes.top_k, normalize=True)
        gate_up, down, gate_up_bias, *down_bias = drawn["experts"]
        biases = gate_up_bias, next(iter(down_bias), None)
        return ClampedExperts(self._kernels, router, gate_up, down, *biases, layer.alpha, layer.limit)


def _conv(drawn: Mapping[str, Tensor]) -> dict[str, Any]:
    """A depthwise convolution [channels, 1, W] as float32 taps [W, channels], oldest first, and its bias."""
    bias = drawn.get("conv_bias")
    conv = drawn["conv"][:, 0].t().float().contiguous()
    return {"conv": conv, "conv_bias": None if bias is None else bias.float()}
