"""Olmo Hybrid (Ai2's checkpoints and transformers' `models/olmo_hybrid`): a gated delta net whose norms come before it
and before its SwiGLU, or attention whose norms come after it and after its SwiGLU, mostly without positions."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import MAX_LAYERS, Fields, boolean, custom, integer, layer_kinds, only
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_HEADS, MAX_WIDTH
from cairn.models.decoder_spec import DecoderSpec, NamedMixer
from cairn.models.feed_forward import GatedMLPLayer
from cairn.models.gated_delta_net import DELTA, HAS_DELTA, DeltaNetConfig, SeparateDeltaNetLayer
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, rope_scaling, rope_theta

FULL = "full_attention"


def _every_fourth(fields: Fields) -> tuple[str, ...]:
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    kinds = tuple(DELTA if index % 4 != 3 else FULL for index in range(count))
    return kinds if FULL in kinds else (*kinds[:-1], FULL)


def _has_positions(fields: Fields, name: str, config: Any) -> bool:
    """A base that is null says that there are none; one that is missing is the usual one, as in transformers."""
    nested = (fields.get(field) for field in ("rope_scaling", "rope_parameters"))
    rope: Mapping[str, Any] = next((each for each in nested if isinstance(each, Mapping) and each), {})
    if "rope_theta" in rope:
        return rope["rope_theta"] is not None
    return fields.has("rope_theta") or not fields.says("rope_theta")


def _turns(config: Any) -> bool:
    return bool(config.has_attention and config.has_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoHybridConfig(DeltaNetConfig):
    """Sizes of a layer kind that the model does not have are 0. `has_positions`: whether attention's are rotary, or
    there are none."""

    # Whatever config.json says of the other norms.
    delta_norm_eps: ClassVar[float | None] = 1e-5

    layer_types: tuple[str, ...] = layer_kinds((DELTA, FULL), default=_every_fourth)
    has_attention: bool = custom(lambda fields, name, config: FULL in config.layer_types, fact=False)
    num_attention_heads: int = integer(1, MAX_HEADS, divides="hidden_size")
    has_positions: bool = custom(_has_positions)
    rope_theta: float = rope_theta(when=_turns)
    rope_scaling: RopeScaling | None = rope_scaling(when=_turns)
    linear_num_key_heads: int = integer(
        1,
        MAX_HEADS,
        default=lambda config: config.num_attention_heads,
        divides="linear_num_value_heads",
        when=HAS_DELTA,
    )
    linear_num_value_heads: int = integer(
        1, MAX_HEADS, default=lambda config: config.num_attention_heads, when=HAS_DELTA
    )
    linear_key_head_dim: int = integer(
        1, 1 << 12, default=lambda config: int(0.75 * config.hidden_size / config.linear_num_key_heads), when=HAS_DELTA
    )
    linear_value_head_dim: int = integer(
        1, 1 << 12, default=lambda config: 2 * config.linear_key_head_dim, when=HAS_DELTA
    )
    linear_allow_neg_eigval: bool = boolean(default=True, when=HAS_DELTA)
    intermediate_size: int = integer(1, MAX_WIDTH)
    hidden_act: str = only("silu")

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        rotary = RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling) if self.rope_theta else None
        layers = tuple(self._layers(stored))
        # Two of each layer: those of attention come after it and its SwiGLU.
        kinds = [kind for kind in self.layer_types for _ in range(2)]
        post_norms = frozenset(norm for (norm, _), kind in zip(layers, kinds, strict=True) if kind == FULL)
        return DecoderSpec(config=self, layers=layers, post_norms=post_norms, rotary=rotary)

    def _layers(self, stored: Collection[str]) -> Iterator[NamedMixer]:
        for index, kind in enumerate(self.layer_types):
            name = f"model.layers.{index}"
            mlp = GatedMLPLayer(self.feed_forward("intermediate_size"), f"{name}.mlp")
            # The second names are those under which transformers writes a model that it has read.
            second = _stored_norm(stored, name, "post_attention_layernorm", "feedforward_layer_norm")
            if kind == FULL:
                attention = AttentionLayer(
                    self.attention, f"{name}.self_attn", ("q_norm", "k_norm"), norms_all_heads=True
                )
                yield second, attention
                yield f"{name}.post_feedforward_layernorm", mlp
            else:
                scale = 2.0 if self.linear_allow_neg_eigval else 1.0
                delta_net = SeparateDeltaNetLayer(self.delta_net, f"{name}.linear_attn", scale)
                yield _stored_norm(stored, name, "input_layernorm", "attention_layer_norm"), delta_net
                yield second, mlp

    def layer_counts(self) -> dict[str, int]:
        words = {DELTA: "gated delta net with MLP", FULL: "attention with MLP"}
        return {word: count for kind, word in words.items() if (count := self.layer_types.count(kind))}


def _stored_norm(stored: Collection[str], layer: str, *names: str) -> str:
    """The name that is stored, or else the first one."""
    full_names = [f"{layer}.{name}" for name in names]
    return next((name for name in full_names if f"{name}.weight" in stored), full_names[0])


FAMILY = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    config=OlmoHybridConfig,
    float32_tensors=("A_log", "dt_bias"),
)

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    dtype_field="dtype",
    # About 7 M parameters; about 300 M.
    sizes={
        "num_hidden_layers": by_size(6, 16),
        "layer_types": by_size([DELTA, DELTA, FULL] * 2, [DELTA, DELTA, DELTA, FULL] * 4),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 8),
        "num_key_value_heads": by_size(4, 8),
        "linear_num_key_heads": by_size(4, 8),
        "linear_num_value_heads": by_size(4, 8),
        "linear_key_head_dim": by_size(48, 96),
        "linear_value_head_dim": by_size(96, 192),
        "intermediate_size": by_size(512, 3840),
    },
    fields={
        "attention_bias": False,
        "hidden_act": "silu",
        "linear_allow_neg_eigval": True,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        "tie_word_embeddings": False,
    },
    spreads={"embed_tokens.weight": (0.0, 1.0), "q_norm.weight": (3.0, 0.3)},
    gains={"lm_head.weight": LOGIT_STD},
    float32=("A_log",),
)
