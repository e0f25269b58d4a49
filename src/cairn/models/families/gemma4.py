"""Gemma 4 (Google's checkpoints and transformers' `models/gemma4` and `models/gemma4_unified`): attention that sees a
window of tokens in some layers and all of them in the others, which have heads of another size, then a GeGLU, with
norms before and after each, and after all of it a scale of the hidden states. By config.json there are besides: keys
that values are made of, layers that read the keys and values of an earlier one, a mixture of experts beside the GeGLU,
and inputs of each layer of their own. There is no recurrent state, so any matched length is a hit. Of a checkpoint that
also sees and hears the text model alone is served."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

from cairn.kernels.attention_rule import AttentionRule
from cairn.models.attention import AttentionLayer, AttentionSizes
from cairn.models.config_schema import MAX_LAYERS, Fields, boolean, custom, integer, layer_kinds, only, reach, token_ids
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_HEADS, MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import DecoderSpec, EmbeddingScale, NormedMixer, SideBySideMixers
from cairn.models.families.gemma import FULL, KINDS, WINDOWED, every, softcap
from cairn.models.feed_forward import ExpertsLayer, FeedForwardSizes, GatedMLPLayer, NormedRule
from cairn.models.layer_inputs import LayerInputLayer, LayerInputsSpec
from cairn.models.nested_config import INNER_EOS, is_nested, parts_beside, text_config, text_prefix
from cairn.models.random_weights.recipe import LOGIT_STD, CheckpointOptions, Recipe, by_size
from cairn.models.rotary import PROPORTIONAL, RopeKind, RopeScaling, RotarySpec, rope_scaling, rope_theta
from cairn.models.weight_specs import MixerSpec

FULL_ROPE = RopeKind(FULL, ("default", PROPORTIONAL), head_dim="global_head_dim")
WINDOWED_ROPE = RopeKind(WINDOWED)

ROPE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        WINDOWED: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": PROPORTIONAL, "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    }
)
"""`rope_parameters` where config.json has none."""

OVERRIDDEN = ("head_dim", "num_key_value_heads")


def _with_positions(raw: Mapping[str, object]) -> Mapping[str, object]:
    return raw if raw.get("rope_parameters") is not None else {**raw, "rope_parameters": ROPE}


def _nested(raw: Mapping[str, object]) -> Fields:
    text = raw.get("text_config")
    return text_config(tied=True)({**raw, "text_config": _with_positions(text)} if isinstance(text, Mapping) else raw)


def _ends_full(fields: Fields, name: str, config: Any) -> bool:
    """transformers would make the last layer see all tokens whatever config.json says."""
    last = config.layer_types[-1]
    if last != FULL:
        raise fields.error(
            f"{fields.path_of('layer_types')} has {last!r} for layer {len(config.layer_types) - 1}, the last one, "
            f"which must be {FULL!r}"
        )
    return True


def _of_full_layers(field: str, alone: Callable[[Fields, Any], int]) -> Any:
    """A field: what layers that see all tokens have in the place of `field`, in `per_layer_config`, as transformers
    writes it, or else as `alone` reads it."""

    def reader(fields: Fields, name: str, config: Any) -> int:
        usual, place = getattr(config, field), fields.path_of("per_layer_config")
        overrides = fields.read("per_layer_config", dict[str, dict[str, int]], "an object of integers by layer", None)
        if overrides is None:
            return alone(fields, config)
        of_full = set[int]()
        for index, kind in enumerate(config.layer_types):
            layer = overrides.get(str(index), {})
            for each in set(layer) - {*OVERRIDDEN}:
                raise fields.error(f"{place} has {each!r} for layer {index}, which is not implemented")
            value = Fields(layer, path_of=f"{place}.{index}.{{}}".format).integer(field, 1, MAX_HEADS, default=usual)
            if kind == WINDOWED and value != usual:
                raise fields.error(
                    f"{place} has {field} {value} for layer {index}, which is {kind} and has {usual} like the others"
                )
            if kind == FULL:
                of_full.add(value)
            if len(of_full) > 1:
                raise fields.error(
                    f"{place} has {field} {value} for layer {index}, but all layers that are {FULL} must have one"
                )
        return of_full.pop() if of_full else usual

    return custom(reader)


def _global_kv_heads(fields: Fields, config: Any) -> int:
    """transformers does not look at the field where values have a projection of their own."""
    name = "num_global_key_value_heads"
    if not config.attention_k_eq_v:
        return int(config.num_key_value_heads)
    return fields.integer(name, 1, MAX_HEADS, default=config.num_key_value_heads)


def _sharing(fields: Fields, name: str, config: Any) -> int:
    """Every layer that shares has an earlier one of its kind that does not."""
    kinds = config.layer_types
    count = fields.integer(name, 0, MAX_LAYERS, default=0)
    first = len(kinds) - count
    for index in range(max(0, first), len(kinds)) if count else ():
        if kinds[index] not in kinds[: max(0, first)]:
            raise fields.error(
                f"{fields.path_of(name)} {count} makes layer {index} read keys and values of an earlier layer that is "
                f"{kinds[index]}, but none of the {max(0, first)} layers that have their own is"
            )
    return count


def _layer_input_width(fields: Fields, name: str, config: Any) -> int:
    """Null and 0 are none."""
    return fields.integer(name, 0, MAX_WIDTH, default=0 if fields.says(name) else 256)


_HAS_EXPERTS = attrgetter("enable_moe_block")


def _fits(fields: Fields, name: str, config: Any) -> bool:
    heads = config.num_attention_heads
    if heads % (kv_heads := config.num_global_key_value_heads):
        layer = config.layer_types.index(FULL)
        raise fields.error(
            f"num_attention_heads {heads} must be a multiple of num_global_key_value_heads {kv_heads}, which layer "
            f"{layer} has"
        )
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """Defaults are transformers'. `global_head_dim`, `num_global_key_value_heads`, `rope_theta`, `rope_scaling`: of
    layers that see all tokens; `head_dim`, `num_key_value_heads`, `rope_local_base_freq`: of the others.
    `attention_k_eq_v`: the former have no projection of values. `num_kv_shared_layers`: so many last layers read the
    keys and values of the last one of their kind before them. What a model does not have is 0."""

    scaling_extends: ClassVar[bool] = False

    layer_types: tuple[str, ...] = layer_kinds(KINDS, default=every(6, 30))
    ends_full: bool = custom(_ends_full, fact=False)
    vocab_size: int = integer(1, 1 << 24, default=262_144)
    hidden_size: int = integer(1, 1 << 20, default=2304)
    max_position_embeddings: int = integer(1, 1 << 30, default=131_072, fact=False)
    eos_token_ids: tuple[int, ...] = token_ids(names=("eos_token_id", INNER_EOS), fact=False)
    tie_word_embeddings: bool = boolean(default=True)
    num_attention_heads: int = integer(1, MAX_HEADS, default=8)
    num_key_value_heads: int = integer(1, MAX_HEADS, default=4, divides="num_attention_heads")
    head_dim: int = integer(1, 1 << 12, default=256)
    attention_k_eq_v: bool = boolean(default=False)
    global_head_dim: int = _of_full_layers(
        "head_dim", lambda fields, config: fields.integer("global_head_dim", 1, 1 << 12, default=512)
    )
    num_global_key_value_heads: int = _of_full_layers("num_key_value_heads", _global_kv_heads)
    heads_fit: bool = custom(_fits, fact=False)
    sliding_window: int = reach(WINDOWED, default=512)
    final_logit_softcapping: float | None = softcap(None)
    # Of images' tokens: text is causal.
    use_bidirectional_attention: str | None = only(None, False, "vision")
    rope_local_base_freq: float = rope_theta(1e4, WINDOWED_ROPE, when=lambda config: WINDOWED in config.layer_types)
    rope_theta: float = rope_theta(1e6, FULL_ROPE)
    rope_scaling: RopeScaling | None = rope_scaling(FULL_ROPE)
    num_kv_shared_layers: int = custom(_sharing)
    intermediate_size: int = integer(1, MAX_WIDTH, default=9216)
    use_double_wide_mlp: bool = boolean(default=False)
    hidden_activation: str = only("gelu_pytorch_tanh")
    hidden_size_per_layer_input: int = custom(_layer_input_width)
    vocab_size_per_layer_input: int = integer(
        lambda config: config.vocab_size, 1 << 24, default=262_144, when=attrgetter("hidden_size_per_layer_input")
    )
    enable_moe_block: bool = boolean(default=False)
    num_experts: int = integer(1, 1 << 12, when=_HAS_EXPERTS)
    top_k_experts: int = integer(1, lambda config: config.num_experts, when=_HAS_EXPERTS)
    moe_intermediate_size: int = integer(1, MAX_WIDTH, when=_HAS_EXPERTS)
    nested: bool = is_nested()

    @property
    def first_shared(self) -> int:
        """The first layer that has no keys and values."""
        return len(self.layer_types) - self.num_kv_shared_layers

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        prefix = text_prefix(stored, nested=self.nested)
        blocks = [tuple(self._block(f"{prefix}.layers", index)) for index in range(len(self.layer_types))]
        firsts = [*(block[0][0] for block in blocks[1:]), f"{prefix}.norm"]
        layers = [layer for block in blocks for layer in block]
        scales = {first: f"{prefix}.layers.{index}.layer_scalar" for index, first in enumerate(firsts)}
        return DecoderSpec(
            config=self,
            embedding=f"{prefix}.embed_tokens.weight",
            layers=tuple((norm, mixer) for norm, mixer, _ in layers),
            norms_after=MappingProxyType({norm: after for norm, _, after in layers if after is not None}),
            post_norms=frozenset(norm for norm, _, after in layers if after is None),
            sum_scales=MappingProxyType(scales),
            final_norm=f"{prefix}.norm",
            embedding_scale=EmbeddingScale(self.hidden_size**0.5, rounded=True),
            logit_cap=self.final_logit_softcapping,
            layer_inputs=self._layer_inputs(prefix),
        )

    def _block(self, layers: str, index: int) -> Iterator[tuple[str, MixerSpec, str | None]]:
        """Each with the name of the norm after it, or under that name, where nothing is normed before."""
        name = f"{layers}.{index}"
        yield f"{name}.input_layernorm", self._attention(layers, index), f"{name}.post_attention_layernorm"
        mlp = GatedMLPLayer(self._mlp(index), f"{name}.mlp", activation="gelu")
        before, after = (f"{name}.{place}_feedforward_layernorm" for place in ("pre", "post"))
        if self.enable_moe_block:
            router, experts = f"{name}.router", f"{name}.experts"
            mixture = ExpertsLayer(
                sizes=self.mixture("moe_intermediate_size", self.num_experts, self.top_k_experts),
                hidden=self.hidden_size,
                router=f"{router}.proj",
                routing=NormedRule(f"{before}_2.weight", f"{router}.scale", f"{router}.per_expert_scale"),
                stacks=(f"{experts}.gate_up_proj", f"{experts}.down_proj"),
                activation="gelu",
            )
            parts = NormedMixer(before, self.hidden_size, mlp), mixture
            yield after, SideBySideMixers(parts, (f"{after}_1", f"{after}_2")), None
        else:
            yield before, mlp, after
        if self.hidden_size_per_layer_input:
            projection = self.hidden_size_per_layer_input * self.hidden_size
            layer_input = LayerInputLayer(
                sizes=self.feed_forward("hidden_size_per_layer_input", matrices=2, extra_weights=projection),
                gate=f"{name}.per_layer_input_gate",
                out=f"{name}.per_layer_projection",
                layer=index,
            )
            yield f"{name}.post_per_layer_input_norm", layer_input, None

    def _attention(self, layers: str, index: int) -> AttentionLayer:
        kind, shares = self.layer_types[index], index >= self.first_shared
        owner = max((i for i in range(self.first_shared) if self.layer_types[i] == kind), default=0)
        return AttentionLayer(
            self._attention_sizes(kind, shares),
            f"{layers}.{index}.self_attn",
            ("q_norm",) if shares else ("q_norm", "k_norm"),
            rotary=self._rotary(kind),
            rule=AttentionRule(window=self.sliding_window if kind == WINDOWED else None, scale=1.0),
            norms_values=not shares,
            keys_of=f"{layers}.{owner}.self_attn" if shares else None,
        )

    def _attention_sizes(self, kind: str, shares: bool) -> AttentionSizes:
        if kind == WINDOWED:
            return replace(self.attention, kv_projections=0 if shares else 2)
        return AttentionSizes(
            self.hidden_size,
            self.num_attention_heads,
            self.num_global_key_value_heads,
            self.global_head_dim,
            bias=self.attention_bias,
            kv_projections=0 if shares else 1 if self.attention_k_eq_v else 2,
            kv_heads_field="num_global_key_value_heads",
        )

    def _rotary(self, kind: str) -> RotarySpec:
        if kind == WINDOWED:
            return RotarySpec(self.head_dim, self.rope_local_base_freq)
        return RotarySpec(self.global_head_dim, self.rope_theta, scaling=self.rope_scaling)

    def _mlp(self, index: int) -> FeedForwardSizes:
        sizes = self.feed_forward("intermediate_size")
        wide = self.use_double_wide_mlp and index >= self.first_shared
        return replace(sizes, inner=2 * sizes.inner) if wide else sizes

    def _layer_inputs(self, prefix: str) -> LayerInputsSpec | None:
        if not self.hidden_size_per_layer_input:
            return None
        return LayerInputsSpec(
            embedding=f"{prefix}.embed_tokens_per_layer",
            projection=f"{prefix}.per_layer_model_projection",
            norm=f"{prefix}.per_layer_projection_norm",
            num_tokens=self.vocab_size_per_layer_input,
            num_layers=len(self.layer_types),
            hidden=self.hidden_size,
            width=self.hidden_size_per_layer_input,
        )

    def unused(self, stored: Collection[str] = ()) -> Iterator[str]:
        """See `DecoderConfig`. Published checkpoints have keys and values for all layers."""
        prefix = text_prefix(stored, nested=self.nested)
        for index in range(self.first_shared, len(self.layer_types)):
            for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
                yield f"{prefix}.layers.{index}.self_attn.{part}."

    def layer_counts(self) -> dict[str, int]:
        kinds = {WINDOWED: "windowed attention", FULL: "attention"}
        forward = "MLP beside mixture of experts" if self.enable_moe_block else "MLP"
        words = [
            f"{kinds[kind]}{' to keys of an earlier layer' if index >= self.first_shared else ''} with {forward}"
            for index, kind in enumerate(self.layer_types)
        ]
        return {word: words.count(word) for word in dict.fromkeys(words)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4UnifiedConfig(Gemma4Config):
    """Of the model with one encoder of all that is not text: without experts and inputs of layers."""

    max_position_embeddings: int = integer(1, 1 << 30, default=262_144, fact=False)
    sliding_window: int = reach(WINDOWED, default=1024)
    hidden_size_per_layer_input: int = custom(lambda fields, name, config: 0, fact=False)
    enable_moe_block: bool = custom(lambda fields, name, config: False, default=False, fact=False)


_OTHERS = parts_beside(
    "vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder", "audio_embedder"
)


def _families(name: str, architecture: str, config: type[Gemma4Config]) -> Iterator[Family]:
    """Of the text model, and of the one that it is a part of."""
    yield Family(
        model_type=f"{name}_text",
        architecture=f"{architecture}ForCausalLM",
        config=config,
        flatten=lambda raw: Fields(_with_positions(raw)),
    )
    yield Family(
        model_type=name,
        architecture=f"{architecture}ForConditionalGeneration",
        config=config,
        ignored_tensors=_OTHERS,
        flatten=_nested,
    )


FAMILIES = (
    *_families("gemma4", "Gemma4", Gemma4Config),
    *_families("gemma4_unified", "Gemma4Unified", Gemma4UnifiedConfig),
)

_FINAL = 10.0

_AFTER = tuple(
    f"{name}.weight" for name in ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm")
)


def _with_all_tokens(raw: dict[str, Any], options: CheckpointOptions) -> dict[str, Any]:
    return {**raw, "vocab_size_per_layer_input": options.vocab_size}


RECIPE = Recipe(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    # About 5 M parameters with windows of 40 tokens; about 300 M. All that the published ones have is in one model.
    sizes={
        "num_hidden_layers": by_size(6, 18),
        "layer_types": by_size([WINDOWED, WINDOWED, FULL] * 2, ([WINDOWED] * 5 + [FULL]) * 3),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 8),
        "num_key_value_heads": by_size(2, 2),
        "num_global_key_value_heads": by_size(2, 2),
        "head_dim": by_size(64, 128),
        "global_head_dim": by_size(128, 256),
        "intermediate_size": by_size(256, 1024),
        "sliding_window": by_size(40, 512),
        "num_kv_shared_layers": by_size(3, 6),
        "hidden_size_per_layer_input": by_size(32, 64),
        "num_experts": by_size(8, 12),
        "top_k_experts": by_size(2, 4),
        "moe_intermediate_size": by_size(64, 256),
    },
    fields={
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {kind: dict(each) for kind, each in ROPE.items()},
        "tie_word_embeddings": True,
        "use_double_wide_mlp": True,
    },
    spreads={
        # Scores are not divided by the root of a head: attention looks at a few tokens.
        "q_norm.weight": (0.25, 0.03),
        "per_layer_projection_norm.weight": (1.0, 0.1),
        "model.norm.weight": (_FINAL, 0.1),
        # What layers add is less than what is there.
        **dict.fromkeys(_AFTER, (0.5, 0.05)),
        "norm.weight": (1.0, 0.1),
        "layer_scalar": (0.9, 0.02),
        # Divided by the root of the width: no two experts are nearly equal for most tokens.
        "router.scale": (32.0, 2.0),
        "per_expert_scale": (1.0, 0.1),
        "embed_tokens_per_layer.weight": (0.0, 0.2),
    },
    wrap=_with_all_tokens,
    # Tied to the output: as small as that the next token is not the last one again.
    gains={"embed_tokens.weight": LOGIT_STD / _FINAL},
)
