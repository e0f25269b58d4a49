"""LFM3 (Liquid AI's checkpoints and transformers' `models/lfm3`): a doubly gated short convolution, attention over a
window of tokens or attention over all of them, with a gate on every head, then a SwiGLU, with norms before and after
each. The two kinds of attention turn by positions of their own, of which one is of a part of each head."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from cairn.kernels.attention_rule import AttentionRule
from cairn.models.attention import AttentionLayer, AttentionSizes
from cairn.models.config_schema import (
    Fields,
    boolean,
    by_layer,
    has_layers,
    integer,
    layer_kinds,
    number,
    reach,
)
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_HEADS, MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import DecoderSpec
from cairn.models.feed_forward import GatedMLPLayer
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import PROPORTIONAL, RopeKind, RopeScaling, RotarySpec, rope_scaling, rope_theta
from cairn.models.short_conv import ShortConvLayer, ShortConvSizes
from cairn.models.weight_specs import MixerSpec

CONV, WINDOWED, FULL = "conv", "sliding_attention", "full_attention"

FULL_ROPE = RopeKind(FULL, ("default", PROPORTIONAL))
WINDOWED_ROPE = RopeKind(WINDOWED, ("default", PROPORTIONAL))

ROPE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        WINDOWED: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": PROPORTIONAL, "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    }
)
"""`rope_parameters` where config.json has none."""


def _woven(index: int) -> str:
    """Of four layers one sees all tokens and, but for the first four, one a window."""
    return {2: FULL, 0: WINDOWED}.get(index % 4, CONV) if index else CONV


def _with_positions(raw: Mapping[str, object]) -> Fields:
    return Fields(raw if raw.get("rope_parameters") is not None else {**raw, "rope_parameters": ROPE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm3Config(DecoderConfig):
    """Defaults are transformers'. `conv_L_cache`: how many inputs the convolution sees; `conv_bias`: of convolution and
    projections. What a model without layers of a kind has of it is 0."""

    scaling_extends: ClassVar[bool] = False

    layer_types: tuple[str, ...] = layer_kinds((CONV, WINDOWED, FULL), default=by_layer(_woven, count=24))
    vocab_size: int = integer(1, 1 << 24, default=128_000)
    hidden_size: int = integer(1, 1 << 20, default=2048)
    max_position_embeddings: int = integer(1, 1 << 30, default=128_000, fact=False)
    eps: float = number(1e-12, 1.0, default=1e-5, names=("norm_eps",))
    tie_word_embeddings: bool = boolean(default=True)
    num_attention_heads: int = integer(1, MAX_HEADS, default=16)
    num_key_value_heads: int = integer(1, MAX_HEADS, default=4, divides="num_attention_heads")
    head_dim: int = integer(1, 1 << 12, default=128)
    use_attention_gate: bool = boolean(default=True)
    use_sandwich_norm: bool = boolean(default=True)
    sliding_window: int = reach(WINDOWED, default=256)
    conv_L_cache: int = integer(2, 64, default=7)
    conv_bias: bool = boolean(default=False)
    intermediate_size: int = integer(1, MAX_WIDTH, default=7680)
    windowed_rope_scaling: RopeScaling | None = rope_scaling(WINDOWED_ROPE, when=has_layers(WINDOWED))
    windowed_rope_theta: float = rope_theta(1e6, WINDOWED_ROPE, when=has_layers(WINDOWED))
    rope_scaling: RopeScaling | None = rope_scaling(FULL_ROPE, when=has_layers(FULL))
    rope_theta: float = rope_theta(1e6, FULL_ROPE, when=has_layers(FULL))

    @property
    def attention(self) -> AttentionSizes:
        """Of one attention layer, of either kind."""
        return AttentionSizes(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            bias=self.attention_bias,
            gated_heads=self.use_attention_gate,
        )

    @property
    def conv(self) -> ShortConvSizes:
        """Of one short convolution: as many units as query heads, so that it can be sharded wherever attention can."""
        return ShortConvSizes(
            self.hidden_size, self.num_attention_heads, "num_attention_heads", self.conv_L_cache, self.conv_bias
        )

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        layers = tuple(self._layers())
        after = {before: after for before, _, after in layers} if self.use_sandwich_norm else {}
        return DecoderSpec(
            config=self,
            layers=tuple((before, mixer) for before, mixer, _ in layers),
            norms_after=MappingProxyType(after),
            final_norm="model.embedding_norm",
        )

    def _layers(self) -> Iterator[tuple[str, MixerSpec, str]]:
        """Each with the name of the norm after it."""
        for index, kind in enumerate(self.layer_types):
            name = f"model.layers.{index}"
            mixer = ShortConvLayer(self.conv, f"{name}.conv") if kind == CONV else self._attention(name, kind)
            yield f"{name}.operator_norm", mixer, f"{name}.post_operator_norm"
            mlp = GatedMLPLayer(self.feed_forward("intermediate_size"), f"{name}.feed_forward", ("w1", "w3", "w2"))
            yield f"{name}.ffn_norm", mlp, f"{name}.post_ffn_norm"

    def _attention(self, layer: str, kind: str) -> MixerSpec:
        rotary = RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling)
        rule = AttentionRule()
        if kind == WINDOWED:
            rotary = RotarySpec(self.head_dim, self.windowed_rope_theta, scaling=self.windowed_rope_scaling)
            rule = AttentionRule(window=self.sliding_window)
        return AttentionLayer(self.attention, f"{layer}.self_attn", ("q_norm", "k_norm"), rotary=rotary, rule=rule)

    def layer_counts(self) -> dict[str, int]:
        words = {
            CONV: "short convolution with MLP",
            WINDOWED: "windowed attention with MLP",
            FULL: "attention with MLP",
        }
        return {word: count for kind, word in words.items() if (count := self.layer_types.count(kind))}


FAMILY = Family(model_type="lfm3", architecture="Lfm3ForCausalLM", config=Lfm3Config, flatten=_with_positions)

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    dtype_field="dtype",
    # About 6 M parameters with windows of 40 tokens; about 300 M.
    sizes={
        "num_hidden_layers": by_size(8, 24),
        "layer_types": by_size([CONV, CONV, FULL, CONV, WINDOWED, CONV, FULL, CONV], [CONV, CONV, FULL, WINDOWED] * 6),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 8),
        "num_key_value_heads": by_size(2, 2),
        "head_dim": by_size(64, 128),
        "intermediate_size": by_size(512, 2816),
        "sliding_window": by_size(40, 256),
    },
    fields={
        "attention_bias": False,
        "conv_L_cache": 7,
        "conv_bias": False,
        "norm_eps": 1e-05,
        "rope_parameters": {kind: dict(settings) for kind, settings in ROPE.items()},
        "tie_word_embeddings": True,
        "use_attention_gate": True,
        "use_sandwich_norm": True,
    },
    # Tied to the output.
    gains={"embed_tokens.weight": LOGIT_STD},
)
