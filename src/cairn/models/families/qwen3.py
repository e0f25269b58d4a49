"""Qwen3, dense (arXiv 2505.09388 and transformers' `models/qwen3`): attention with a norm on every head of queries and
keys and rotary positions, then a SwiGLU. There is no recurrent state, so any matched length is a hit."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import by_layer, integer, layer_kinds, only, unread
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import DecoderSpec, NamedMixer
from cairn.models.feed_forward import GatedMLPLayer
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, rope_scaling, rope_theta
from cairn.models.weight_specs import MixerSpec

ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """`sliding_window` counts where `use_sliding_window` is true."""

    layer_types: tuple[str, ...] = layer_kinds((ATTENTION,), default=by_layer(lambda index: ATTENTION))
    head_dim: int = integer(1, 1 << 12, default=128)
    rope_theta: float = rope_theta()
    rope_scaling: RopeScaling | None = rope_scaling()
    intermediate_size: int = integer(1, MAX_WIDTH)
    hidden_act: str = only("silu")
    use_sliding_window: bool = only(False)
    sliding_window: int | None = unread()

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        return DecoderSpec(
            config=self,
            layers=tuple(self._layers(stored)),
            rotary=RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling),
        )

    def _layers(self, stored: Collection[str]) -> Iterator[NamedMixer]:
        for index in range(len(self.layer_types)):
            name = f"model.layers.{index}"
            yield f"{name}.input_layernorm", AttentionLayer(self.attention, f"{name}.self_attn", ("q_norm", "k_norm"))
            yield f"{name}.post_attention_layernorm", self._feed_forward(index, f"{name}.mlp", stored)

    def _feed_forward(self, index: int, name: str, stored: Collection[str]) -> MixerSpec:
        return GatedMLPLayer(self.feed_forward("intermediate_size"), name)

    def layer_counts(self) -> dict[str, int]:
        return {"attention with MLP": len(self.layer_types)}


FAMILY = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", config=Qwen3Config)

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    # About 5 M parameters, a checkpoint is 1 page of 16 tokens, a hidden state and nothing else; about 300 M.
    sizes={
        "num_hidden_layers": by_size(6, 22),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": by_size(2, 8),
        "head_dim": by_size(64, 128),
        "intermediate_size": by_size(512, 2048),
    },
    fields={
        "attention_bias": False,
        "hidden_act": "silu",
        "max_window_layers": by_size(6, 22),
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    # Queries are long enough for attention that looks at a few tokens and not at all of them alike.
    spreads={"embed_tokens.weight": (0.0, 1.0), "q_norm.weight": (3.0, 0.3)},
    gains={"lm_head.weight": LOGIT_STD},
)
