"""From a decoder as data to one rank's model."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import singledispatchmethod
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, count
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.contract import Kernels
from cairn.kernels.quantized import QuantizedWeight
from cairn.layers.attention import Attention, HeadNorms, Positions
from cairn.layers.communicator import SINGLE_RANK, Communicator
from cairn.layers.feed_forward import (
    ClampedExperts,
    GatedActivation,
    GatedMLP,
    Gelu,
    GeluExperts,
    InputScalingRouter,
    MixtureOfExperts,
    NormedRouter,
    Router,
    SharedExpert,
    SigmoidRouter,
    Silu,
    SoftmaxRouter,
    SquaredReluMLP,
)
from cairn.layers.gated_delta_net import GatedDeltaNet
from cairn.layers.layer_inputs import LayerInputMixer, LayerInputs
from cairn.layers.linear import Linear, Projection, ScaledLinear
from cairn.layers.mamba2 import Mamba2
from cairn.layers.model import Model, Normed, Parallel, Scaled, SideBySide, Softcap, VocabParallelEmbedding
from cairn.layers.mtp_head import MTPHead
from cairn.layers.norms import (
    GatedNorm,
    GatedRMSNorm,
    NormOfSum,
    PostNorm,
    RMSNorm,
    SandwichNorm,
    ScaledSum,
    ShardedGatedRMSNorm,
    ShardedRMSNorm,
    SiluGate,
)
from cairn.layers.residual import Layer, Mixer
from cairn.layers.rotary import Rotary, Temperature, make_rotary
from cairn.layers.short_conv import ShortConv
from cairn.models.attention import AttentionLayer
from cairn.models.contract import StoredLoader, TensorLoader
from cairn.models.decoder_config import ServedQuantization
from cairn.models.decoder_spec import (
    DecoderSpec,
    EmbeddingScale,
    HeadSpec,
    NormedMixer,
    ParallelMixers,
    ScaledMixer,
    SideBySideMixers,
    scalar,
)
from cairn.models.feed_forward import (
    Activation,
    ClampedExpertsLayer,
    ExpertsLayer,
    GatedMLPLayer,
    GeluExpertsLayer,
    InputScalingRule,
    RouterRule,
    SigmoidRule,
    SoftmaxRule,
    SquaredReluLayer,
)
from cairn.models.gated_delta_net import DeltaNetLayer
from cairn.models.layer_inputs import LayerInputLayer, LayerInputsSpec
from cairn.models.mamba2 import Mamba2Layer
from cairn.models.rank_weights import RankWeights
from cairn.models.rotary import RotarySpec, TemperatureSpec
from cairn.models.sharding import HeadShard, shard_vocabulary
from cairn.models.short_conv import ShortConvLayer
from cairn.models.weight_specs import MixerSpec, StoredTensor

logger = logging.getLogger(__name__)

AnyNorm = TypeVar("AnyNorm", RMSNorm, PostNorm, SandwichNorm)

ACTIVATIONS: Mapping[Activation, Callable[[Kernels], GatedActivation]] = MappingProxyType({"silu": Silu, "gelu": Gelu})

Backend = Literal["cpu", "cuda", "cuda_exact", "exact", "reference"]


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model is to be executed: `exact` in fixed shapes, in which dtype, as which rank, on which kernels
    (None: the fast ones, or with `exact` those; a name, or functions that are there), which work on `device`.
    `quantization`: what weights are kept in, instead of the dtype. `load_stored`: gives those that
    stay as they are stored."""

    exact: bool
    dtype: torch.dtype
    communicator: Communicator = SINGLE_RANK
    backend: Backend | Kernels | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed
    quantization: ServedQuantization | None = None
    load_stored: StoredLoader | None = None


def build_decoder(spec: DecoderSpec, load: TensorLoader, execution: Execution) -> Model:
    """One rank of the model, its weights drawn from `load`. Raises ModelError that names the tensor, and before one
    is drawn ConfigError: for `exact` in another dtype than float32 or quantized, and for a number of ranks that the
    model cannot be sharded among."""
    if execution.exact and execution.dtype != torch.float32:
        raise ConfigError(f"--exact needs --dtype float32: the fixed rounding is not kept in {execution.dtype}")
    if execution.exact and execution.quantization is not None:
        raise ConfigError(f"--exact cannot be had with --quantization {execution.quantization}: leave one of them out")
    return _DecoderBuilder(spec, load, execution).build()


def load_kernels(backend: Backend | Kernels) -> Kernels:
    """The kernel functions of a backend, which may be these already. `exact` and, on GPUs, `cuda_exact`: fixed shapes
    and orders; `exact` also replaces `cpu` where numba is missing; `reference`: the slow truth, for tests."""
    if not isinstance(backend, str):
        return backend
    if backend == "cpu" and find_spec("numba") is None:
        logger.warning("numba cannot be imported: the CPU's kernels are replaced by plain ones, which are much slower")
        backend = "exact"
    kernels: Kernels = import_module(f"cairn.kernels.{backend}")
    return kernels


class _DecoderBuilder:
    def __init__(self, spec: DecoderSpec, load: TensorLoader, execution: Execution) -> None:
        self._spec, self._execution, self._communicator = spec, execution, execution.communicator
        self._rank, self._size = self._communicator.rank, self._communicator.size
        self._memory_spec = spec.cache_spec(self._rank, self._size).memory_spec(execution.dtype, execution.device)
        self._kernels = load_kernels(execution.backend or ("exact" if execution.exact else "cpu"))
        self._weights = RankWeights(
            load, self._kernels, execution.device, execution.quantization, execution.load_stored
        )
        self._recurrent_layers = count()
        # Layers of one attention group follow one another in the model's memory.
        groups = self._memory_spec.attention
        firsts = accumulate((group.num_layers for group in groups[:-1]), initial=0)
        self._attention_groups = {
            replace(group, num_layers=1): (number, count(first))
            for number, (group, first) in enumerate(zip(groups, firsts, strict=False))
        }
        self._attention_places: dict[str, tuple[int, int]] = {}
        self._rotaries: dict[RotarySpec | TemperatureSpec, int] = {}

    def build(self) -> Model:
        spec = self._spec
        embedding = self._vocabulary(spec.vocabulary(spec.embedding, self._rank, self._size))
        layer_inputs = None if spec.layer_inputs is None else self._layer_inputs(spec.layer_inputs)
        layers = tuple(self._layer(norm, mixer) for norm, mixer in spec.layers)
        final_norm = self._of_scaled_sum(spec.final_norm, self._norm(spec.final_norm))
        output = embedding
        if spec.output != spec.embedding:
            output = self._vocabulary(spec.vocabulary(spec.output, self._rank, self._size))
        lm_head = self._weights.linear([output]).weight
        head = None if spec.head is None else self._head(spec.head)
        return Model(
            kernels=self._kernels,
            spec=self._memory_spec,
            exact=self._execution.exact,
            vocab_size=spec.config.vocab_size,
            communicator=self._communicator,
            embedding=self._embedding(embedding, spec.embedding_scale),
            layers=layers,
            final_norm=final_norm,
            lm_head=lm_head,
            linears=tuple(self._weights.linears),
            rotaries=tuple(map(self._rotary, self._rotaries)),
            logit_scale=spec.logit_scale,
            logit_cap=None if spec.logit_cap is None else Softcap(self._kernels, spec.logit_cap),
            layer_inputs=layer_inputs,
            head=head,
        )

    def _embedding(self, weight: Tensor | QuantizedWeight, scale: EmbeddingScale) -> VocabParallelEmbedding:
        """Sharded like the output, which is as large: a sum over ranks a pass against a copy on every rank."""
        (first, _), _ = shard_vocabulary(self._spec.config.vocab_size, self._rank, self._size)
        value = torch.tensor(scale.value, dtype=self._execution.dtype).item() if scale.rounded else scale.value
        return VocabParallelEmbedding(self._kernels, weight, first, self._communicator, value)

    def _layer_inputs(self, spec: LayerInputsSpec) -> LayerInputs:
        embedding, projection, norm = (
            spec.vocabulary(self._spec.config.vocab_size, self._rank, self._size),
            self._weights.make(spec.product),
            self._weights.make(spec.norm_weight),
        )
        return LayerInputs(
            embedding=self._embedding(self._vocabulary(embedding), EmbeddingScale(spec.width**0.5, rounded=True)),
            projection=projection,
            norm=self._rms_norm(norm, self._spec.centred),
            num_layers=spec.num_layers,
            projection_scale=spec.hidden**-0.5,
            scale=2**-0.5,
        )

    def _head(self, head: HeadSpec) -> MTPHead:
        """Its attention is the last of the model's attention layers."""
        embedding_norm, hidden_norm = self._norm(head.embedding_norm), self._norm(head.hidden_norm)
        projection = self._weights.make(self._spec.product(head.projection, self._rank, self._size))
        kv_projection = self._weights.make(head.attention.keys_and_values(self._rank, self._size))
        attention_norm, attention = self._norm(head.attention_norm), cast(Attention, self._build(head.attention))
        others = tuple((self._norm(norm), self._build(mixer)) for norm, mixer in head.others)
        return MTPHead(
            embedding_norm=embedding_norm,
            hidden_norm=hidden_norm,
            projection=projection,
            attention_norm=attention_norm,
            attention=replace(attention, kv_projection=kv_projection),
            others=others,
            final_norm=self._norm(head.final_norm),
            communicator=self._communicator,
        )

    def _vocabulary(self, stored: StoredTensor) -> Tensor | QuantizedWeight:
        """The rank's tokens, with zeros where it has fewer than the first one: [rows, width]."""
        weight = self._weights.vocabulary(stored)
        _, rows = shard_vocabulary(self._spec.config.vocab_size, self._rank, self._size)
        missing = rows - weight.shape[0]
        if not missing:
            return weight

        def pad(part: Tensor) -> Tensor:
            return F.pad(part, (0, 0, 0, missing))

        return pad(weight) if isinstance(weight, Tensor) else weight.changed(pad)

    def _layer(self, name: str, mixer: MixerSpec) -> Layer:
        """The mixer with its norm `name`. Tensors are drawn in their order in the checkpoint."""
        norm, built, after = self._norm(name), self._build(mixer), self._spec.norms_after.get(name)
        if after is not None:
            return self._of_scaled_sum(name, SandwichNorm(norm, self._norm(after))), built
        if name not in self._spec.post_norms:
            return self._of_scaled_sum(name, norm), built
        parts = tuple(map(self._norm, mixer.result_norms))
        return self._of_scaled_sum(name, PostNorm(NormOfSum(parts, norm) if parts else norm)), built

    def _of_scaled_sum(self, name: str, norm: AnyNorm) -> AnyNorm | ScaledSum:
        """The norm called `name`, with the scale of the hidden states that it is of, if they have one."""
        scale = self._spec.sum_scales.get(name)
        return norm if scale is None else ScaledSum(norm, self._weights.tensor(scalar(scale)).item())

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
        rotation = self._rotaries.setdefault(spec, len(self._rotaries))
        return Positions(rotation, spec.interleaved, spec.queries_alone)

    @singledispatchmethod
    def _rotary(self, spec: RotarySpec) -> Rotary | Temperature:
        scaling = {} if spec.scaling is None else spec.scaling.parameters
        return make_rotary(spec.dim, spec.theta, spec.sections, scaling).to(self._execution.device)

    @_rotary.register
    def _(self, spec: TemperatureSpec) -> Rotary | Temperature:
        return Temperature(spec.dim // 2, spec.floor_scale, spec.strength)

    def _norm(self, name: str) -> RMSNorm:
        return self._rms_norm(self._weights.tensor(self._spec.norm(name)), self._spec.centred)

    def _rms_norm(self, weight: Tensor, centred: bool) -> RMSNorm:
        """The sum of a centred weight and 1 is kept in float32, as bfloat16 would round it."""
        return RMSNorm(self._kernels, weight.float() + 1.0 if centred else weight, self._spec.config.eps)

    def _query_norm(
        self, layer: AttentionLayer, weight: Tensor, num_heads: int, counts: bool
    ) -> RMSNorm | ShardedRMSNorm:
        """Of queries or of keys, of which the whole model has `num_heads` heads; `counts`: see `ShardedRMSNorm`."""
        if not layer.norms_all_heads or self._size == 1:
            return self._rms_norm(weight, layer.centred)
        width = num_heads * layer.sizes.head_dim
        return ShardedRMSNorm(weight, width, self._spec.config.eps, self._communicator, counts)

    def _scaled(self, projection: Linear, factors: list[tuple[int, float]]) -> Projection:
        """`factors`: of so many outputs each."""
        by_row = torch.cat([torch.full((rows,), factor) for rows, factor in factors])
        return ScaledLinear(projection, by_row.to(self._execution.device))

    def _draw(self, layer: MixerSpec) -> dict[str, Any]:
        """What the rank has of it, by the names that the layer gives it."""
        return {key: self._weights.make(each) for key, each in layer.weights(self._rank, self._size).items()}

    @singledispatchmethod
    def _build(self, layer: MixerSpec) -> Mixer:
        raise TypeError(f"no layer is built of {layer!r:.200}")

    @_build.register
    def _(self, layer: ScaledMixer) -> Mixer:
        return Scaled(self._build(layer.mixer), layer.after, layer.before)

    @_build.register
    def _(self, layer: ParallelMixers) -> Mixer:
        return Parallel(tuple(self._build(mixer) for mixer in layer.mixers))

    @_build.register
    def _(self, layer: AttentionLayer) -> Mixer:
        sizes, drawn, shard = layer.sizes, self._draw(layer), layer.sizes.shard(self._rank, self._size)
        first, last = sizes.rank_heads(self._rank, self._size)
        projection: Projection = drawn["q_k_v"]
        if layer.factors:
            rows = {"q_proj": last - first, "k_proj": shard.count, "v_proj": shard.count}
            factors = [(heads * sizes.head_dim, layer.factors.get(part, 1.0)) for part, heads in rows.items()]
            projection = self._scaled(drawn["q_k_v"], factors)
        ones = torch.ones(sizes.head_dim, device=self._execution.device)
        v_norm = self._rms_norm(ones, centred=False) if layer.norms_values else None
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

    @_build.register
    def _(self, layer: NormedMixer) -> Mixer:
        return Normed(self._rms_norm(self._draw(layer)["norm"], self._spec.centred), self._build(layer.mixer))

    @_build.register
    def _(self, layer: SideBySideMixers) -> Mixer:
        return SideBySide(tuple(self._build(mixer) for mixer in layer.mixers))

    @_build.register
    def _(self, layer: LayerInputLayer) -> Mixer:
        drawn, columns = self._draw(layer), slice(*layer.sizes.shard(self._rank, self._size))
        return LayerInputMixer(self._kernels, drawn["gate"], drawn["out"], layer.layer, columns)

    @_build.register
    def _(self, layer: Mamba2Layer) -> Mixer:
        sizes, drawn, shard = layer.sizes, self._draw(layer), layer.sizes.shard(self._rank, self._size)
        in_proj: Projection = drawn["in"]
        if layer.factors:
            widths = (sizes.inner, sizes.inner, sizes.bc, sizes.bc, sizes.num_heads)
            by_row = torch.cat([torch.full((width,), by) for width, by in zip(widths, layer.factors, strict=True)])
            by_row = torch.cat([by_row[begin:end] for begin, end in sizes.rank_rows(self._rank, self._size)])
            in_proj = ScaledLinear(drawn["in"], by_row.to(self._execution.device))
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

    @_build.register
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

    @_build.register
    def _(self, layer: ShortConvLayer) -> Mixer:
        drawn = self._draw(layer)
        return ShortConv(
            kernels=self._kernels,
            **_conv(drawn),
            in_proj=drawn["in"],
            out_proj=drawn["out"],
            layer=next(self._recurrent_layers),
        )

    @_build.register
    def _(self, layer: SquaredReluLayer) -> Mixer:
        return SquaredReluMLP(self._kernels, **self._draw(layer))

    @_build.register
    def _(self, layer: GatedMLPLayer) -> Mixer:
        drawn = self._draw(layer)
        gate_up: Projection = drawn["gate_up"]
        if layer.gate_factor != 1.0:
            rows = drawn["gate_up"].shape[0] // 2
            gate_up = self._scaled(drawn["gate_up"], [(rows, layer.gate_factor), (rows, 1.0)])
        mlp = GatedMLP(ACTIVATIONS[layer.activation](self._kernels), gate_up, drawn["down"])
        return SharedExpert(self._kernels, mlp, drawn["gate"]) if "gate" in drawn else mlp

    @_build.register
    def _(self, layer: ExpertsLayer) -> Mixer:
        drawn = self._draw(layer)
        up, down = drawn["experts"]
        shared: Any = None if layer.shared is None else self._build(layer.shared)
        gated = layer.stacks is not None or len(layer.parts) == 2
        latent = drawn.get("to_latent"), drawn.get("from_latent")
        router = self._router(layer.routing, drawn["gate"], layer.sizes.top_k, drawn)
        return MixtureOfExperts(self._kernels, router, up, down, gated, shared, *latent)

    @singledispatchmethod
    def _router(self, rule: RouterRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        """`gate`: gives a logit of each expert."""
        raise TypeError(f"no router is built of {rule!r:.200}")

    @_router.register
    def _(self, rule: SoftmaxRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        return SoftmaxRouter(self._kernels, gate, top_k, rule.normalize)

    @_router.register
    def _(self, rule: SigmoidRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        nothing = torch.zeros(gate.shape[0], device=self._execution.device)
        correction = drawn.get("correction", nothing).float()
        groups = rule.num_groups, rule.top_groups
        return SigmoidRouter(self._kernels, gate, correction, top_k, *groups, rule.normalize, rule.scale, rule.epsilon)

    @_router.register
    def _(self, rule: InputScalingRule, gate: Linear, top_k: int, drawn: Mapping[str, Any]) -> Router:
        return InputScalingRouter(self._kernels, gate)

    @_build.register
    def _(self, layer: GeluExpertsLayer) -> Mixer:
        drawn = self._draw(layer)
        router = NormedRouter(
            kernels=self._kernels,
            norm=self._rms_norm(drawn["scale"].float() * layer.hidden**-0.5, centred=False),
            experts_norm=self._rms_norm(drawn["norm"], self._spec.centred),
            gate=drawn["gate"],
            top_k=layer.sizes.top_k,
            expert_scales=drawn["expert_scales"].float(),
        )
        return GeluExperts(self._kernels, router, *drawn["experts"])

    @_build.register
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
