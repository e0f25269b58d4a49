"""Llama 4 (Meta's checkpoints and transformers' `models/llama4`): attention within chunks of positions, which turn
neighbouring elements and whose heads are normed after that, or over all tokens and without positions; then a SwiGLU, or
a mixture of them beside a shared one, of which one gets a token, scaled. There is no recurrent state, so any matched
length is a hit. Of a checkpoint that also sees the text model alone is served."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from cairn.kernels.attention_rule import AttentionRule
from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import (
    MAX_LAYERS,
    Fields,
    boolean,
    custom,
    integer,
    layer_kinds,
    number,
    only,
    reach,
    token_ids,
)
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_HEADS, MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import OUTPUT, DecoderSpec, NamedMixer
from cairn.models.feed_forward import ExpertsLayer, GatedMLPLayer, InputScalingRule
from cairn.models.nested_config import INNER_EOS, PREFIXES, is_nested, parts_beside, text_config, text_prefix
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, TemperatureSpec, rope_scaling, rope_theta
from cairn.models.weight_specs import MixerSpec

CHUNKED, FULL = "chunked_attention", "full_attention"


def _by_positions(fields: Fields) -> tuple[str, ...]:
    """Layers without positions see all tokens: those that `no_rope_layers` has a 0 for, or every so many."""
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS, default=48)
    turned = fields.integers("no_rope_layers", 0, 1)
    if not turned:
        interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, default=4)
        turned = tuple(int((index + 1) % interval != 0) for index in range(count))
    if len(turned) < count:
        raise fields.error(f"no_rope_layers has {len(turned)} entries for num_hidden_layers {count}")
    return tuple(CHUNKED if each else FULL for each in turned[:count])


def _with_kinds(fields: Fields, name: str, config: Any) -> bool:
    """transformers takes a layer's mask and its positions from two fields."""
    if fields.has("layer_types"):
        for index, (kind, other) in enumerate(zip(config.layer_types, _by_positions(fields), strict=True)):
            if kind != other:
                raise fields.error(
                    f"layer_types has {kind!r} for layer {index}, whose positions, by no_rope_layers or "
                    f"no_rope_layer_interval, make it {other!r}"
                )
    return True


def _sparse_layers(fields: Fields, name: str, config: Any) -> tuple[int, ...]:
    count = len(config.layer_types)
    if fields.get(name) is not None:
        return fields.integers(name, 0, count - 1)
    step = fields.integer("interleave_moe_layer_step", 1, MAX_LAYERS, default=1)
    return tuple(range(step - 1, count, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """Defaults are transformers'. `intermediate_size`: of an expert; `intermediate_size_mlp`: of a layer without
    experts; `moe_layers`: those with them; `attention_chunk_size`: 0 in a model without chunks."""

    scaling_extends: ClassVar[bool] = False

    layer_types: tuple[str, ...] = layer_kinds((CHUNKED, FULL), default=_by_positions)
    kinds_agree: bool = custom(_with_kinds, fact=False)
    vocab_size: int = integer(1, 1 << 24, default=202_048)
    hidden_size: int = integer(1, 1 << 20, default=5120)
    max_position_embeddings: int = integer(1, 1 << 30, default=131_072, fact=False)
    eos_token_ids: tuple[int, ...] = token_ids(names=("eos_token_id", INNER_EOS), fact=False)
    eps: float = number(1e-12, 1.0, default=1e-5, names=("rms_norm_eps",))
    num_attention_heads: int = integer(1, MAX_HEADS, default=40)
    num_key_value_heads: int = integer(1, MAX_HEADS, default=8, divides="num_attention_heads")
    head_dim: int = integer(1, 1 << 12, default=128)
    rope_theta: float = rope_theta(5e5)
    rope_scaling: RopeScaling | None = rope_scaling()
    use_qk_norm: bool = boolean(default=True)
    attention_chunk_size: int = reach(CHUNKED, default=8192)
    attn_temperature_tuning: bool = boolean(default=True)
    floor_scale: int = integer(1, 1 << 30, default=8192)
    attn_scale: float = number(0.0, 1e6, default=0.1)
    moe_layers: tuple[int, ...] = custom(_sparse_layers)
    intermediate_size: int = integer(1, MAX_WIDTH, default=8192)
    intermediate_size_mlp: int = integer(1, MAX_WIDTH, default=16384)
    num_local_experts: int = integer(1, 1 << 12, default=16)
    num_experts_per_tok: int = only(1)
    hidden_act: str = only("silu")
    nested: bool = is_nested()

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        prefix = text_prefix(stored, nested=self.nested)
        outer = "language_model." if prefix == PREFIXES[1] else ""
        return DecoderSpec(
            config=self,
            embedding=f"{prefix}.embed_tokens.weight",
            layers=tuple(self._layers(prefix)),
            final_norm=f"{prefix}.norm",
            output=f"{outer}{OUTPUT}",
        )

    def _layers(self, prefix: str) -> Iterator[NamedMixer]:
        for index, kind in enumerate(self.layer_types):
            name = f"{prefix}.layers.{index}"
            yield f"{name}.input_layernorm", self._attention(f"{name}.self_attn", kind)
            yield f"{name}.post_attention_layernorm", self._feed_forward(f"{name}.feed_forward", index)

    def _attention(self, name: str, kind: str) -> MixerSpec:
        if kind == FULL:
            tuned = TemperatureSpec(self.head_dim, self.floor_scale, self.attn_scale)
            return AttentionLayer(self.attention, name, rotary=tuned if self.attn_temperature_tuning else None)
        rotary = RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling, interleaved=True)
        rule = AttentionRule(chunk=self.attention_chunk_size)
        return AttentionLayer(self.attention, name, unit_norms=self.use_qk_norm, rotary=rotary, rule=rule)

    def _feed_forward(self, name: str, index: int) -> MixerSpec:
        if index not in self.moe_layers:
            return GatedMLPLayer(self.feed_forward("intermediate_size_mlp"), name)
        experts = f"{name}.experts"
        return ExpertsLayer(
            sizes=self.mixture("intermediate_size", self.num_local_experts, 1),
            hidden=self.hidden_size,
            router=f"{name}.router",
            routing=InputScalingRule(),
            stacks=(f"{experts}.gate_up_proj", f"{experts}.down_proj"),
            shared=GatedMLPLayer(self.feed_forward("intermediate_size"), f"{name}.shared_expert"),
            inputs_first=True,
        )

    def layer_counts(self) -> dict[str, int]:
        attention = {CHUNKED: "chunked attention", FULL: "attention"}
        forward = ("with MLP", "with mixture of experts")
        words = [f"{attention[kind]} {forward[i in self.moe_layers]}" for i, kind in enumerate(self.layer_types)]
        return {word: words.count(word) for word in dict.fromkeys(words)}


FAMILIES = (
    Family(model_type="llama4_text", architecture="Llama4ForCausalLM", config=Llama4Config),
    Family(
        model_type="llama4",
        architecture="Llama4ForConditionalGeneration",
        config=Llama4Config,
        ignored_tensors=parts_beside("vision_model", "multi_modal_projector"),
        flatten=text_config(tied=False),
    ),
)

RECIPE = Recipe(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    # About 8 M parameters with chunks of 40 tokens; about 300 M.
    sizes={
        "num_hidden_layers": by_size(4, 8),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": by_size(2, 4),
        "head_dim": 64,
        "intermediate_size": by_size(128, 1024),
        "intermediate_size_mlp": by_size(512, 4096),
        "num_local_experts": by_size(8, 16),
        "attention_chunk_size": by_size(40, 512),
        "floor_scale": by_size(32, 512),
        "interleave_moe_layer_step": by_size(2, 2),
        "no_rope_layer_interval": by_size(4, 4),
    },
    fields={
        "attention_bias": False,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "hidden_act": "silu",
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
    },
    spreads={"embed_tokens.weight": (0.0, 1.0)},
    # Experts' matrices have their inputs first, of which those out of them have half as many as others would.
    gains={"lm_head.weight": LOGIT_STD, "experts.down_proj": 2**0.5},
)
