"""LFM2, dense (Liquid AI's checkpoints and transformers' `models/lfm2`): a doubly gated short convolution or rotary
attention with normed heads, then a SwiGLU. The state of a convolution is its last inputs."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import MAX_LAYERS, Fields, boolean, custom, integer, layer_kinds, number
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_HEADS, MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import DecoderSpec, NamedMixer
from cairn.models.feed_forward import GatedMLPLayer
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, rope_scaling, rope_theta
from cairn.models.short_conv import ShortConvLayer, ShortConvSizes
from cairn.models.weight_specs import MixerSpec

CONV, ATTENTION = "conv", "full_attention"


def _first_published(fields: Fields) -> tuple[str, ...]:
    """By `full_attn_idxs`, which the first published checkpoints have instead of `layer_types`."""
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    if not fields.has("full_attn_idxs"):
        return (ATTENTION,) * count
    attention = fields.integers("full_attn_idxs", 0, count - 1)
    return tuple(ATTENTION if index in attention else CONV for index in range(count))


def _inner(fields: Fields, name: str, config: Any) -> int:
    """Two thirds of the stored size, unless config.json says that it is final."""
    size = fields.integer(name, 1, MAX_WIDTH, default=12288)
    if not fields.boolean("block_auto_adjust_ff_dim", default=True):
        return size
    multiple = fields.integer("block_multiple_of", 1, 1 << 16, default=256)
    size = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0) * int(2 * size / 3))
    return multiple * -(-size // multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """`conv_L_cache`: how many inputs the convolution sees; `conv_bias`: of convolution and projections;
    `intermediate_size`: of SwiGLU's three matrices, as it is used."""

    layer_types: tuple[str, ...] = layer_kinds((CONV, ATTENTION), default=_first_published)
    eps: float = number(1e-12, 1.0, default=1e-5, names=("norm_eps",))
    # The older name counts where both are said, as in transformers.
    tie_word_embeddings: bool = boolean(default=True, names=("tie_embedding", "tie_word_embeddings"))
    num_attention_heads: int = integer(1, MAX_HEADS, divides="hidden_size")
    rope_theta: float = rope_theta(default=1e6)
    rope_scaling: RopeScaling | None = rope_scaling()
    conv_L_cache: int = integer(2, 64, default=3)
    conv_bias: bool = boolean(default=False)
    intermediate_size: int = custom(_inner, names=("block_ff_dim", "intermediate_size"))

    @property
    def conv(self) -> ShortConvSizes:
        """Of one short convolution: as many units as query heads, so that it can be sharded wherever attention can."""
        return ShortConvSizes(
            self.hidden_size, self.num_attention_heads, "num_attention_heads", self.conv_L_cache, self.conv_bias
        )

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        return DecoderSpec(
            config=self,
            layers=tuple(self._layers(stored)),
            final_norm="model.embedding_norm",
            rotary=RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling),
        )

    def _layers(self, stored: Collection[str]) -> Iterator[NamedMixer]:
        for index, kind in enumerate(self.layer_types):
            name, norms = f"model.layers.{index}", ("q_layernorm", "k_layernorm")
            if kind == CONV:
                mixer: MixerSpec = ShortConvLayer(self.conv, f"{name}.conv")
            else:
                mixer = AttentionLayer(self.attention, f"{name}.self_attn", norms, out="out_proj")
            yield f"{name}.operator_norm", mixer
            yield f"{name}.ffn_norm", self._feed_forward(index, f"{name}.feed_forward", stored)

    def _feed_forward(self, index: int, name: str, stored: Collection[str]) -> MixerSpec:
        return GatedMLPLayer(self.feed_forward("intermediate_size"), name, ("w1", "w3", "w2"))

    def layer_counts(self) -> dict[str, int]:
        words = {CONV: "short convolution with MLP", ATTENTION: "attention with MLP"}
        return {word: count for kind, word in words.items() if (count := self.layer_types.count(kind))}


FAMILY = Family(model_type="lfm2", architecture="Lfm2ForCausalLM", config=Lfm2Config)

LAYERS = MappingProxyType(
    {
        "num_hidden_layers": by_size(8, 24),
        "layer_types": by_size([CONV, CONV, ATTENTION, CONV, CONV, ATTENTION, CONV, CONV], [CONV, CONV, ATTENTION] * 8),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": by_size(2, 8),
    }
)

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    # About 6 M parameters, a checkpoint is 1 page of 16 tokens; about 300 M parameters.
    sizes={**LAYERS, "block_ff_dim": by_size(768, 4096)},
    fields={
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-05,
        "block_use_swiglu": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "use_pos_enc": True,
    },
    # Tied to the output.
    gains={"embed_tokens.weight": LOGIT_STD},
)
