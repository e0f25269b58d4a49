"""Granite 3, dense (IBM's checkpoints and transformers' `models/granite`): rotary attention and a SwiGLU, with constant
multipliers of embedding, residual branches, attention scores and logits. There is no recurrent state, so any matched
length is a hit."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import boolean, by_layer, integer, layer_kinds, number, only
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import DecoderSpec, EmbeddingScale, NamedMixer, ScaledMixer
from cairn.models.feed_forward import GatedMLPLayer
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, rope_scaling, rope_theta

ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseGraniteConfig(DecoderConfig):
    """`mlp_bias`: of all three matrices of a SwiGLU."""

    layer_types: tuple[str, ...] = layer_kinds((ATTENTION,), default=by_layer(lambda index: ATTENTION))
    rope_theta: float = rope_theta()
    rope_scaling: RopeScaling | None = rope_scaling()
    attention_multiplier: float = number(1e-9, 1e6, default=1.0)
    embedding_multiplier: float = number(1e-9, 1e6, default=1.0)
    residual_multiplier: float = number(1e-9, 1e6, default=1.0)
    logits_scaling: float = number(1e-9, 1e6, default=1.0)
    intermediate_size: int = integer(1, MAX_WIDTH)
    mlp_bias: bool = boolean(default=False)
    hidden_act: str = only("silu")

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        return DecoderSpec(
            config=self,
            layers=tuple(self._layers()),
            rotary=RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling),
            embedding_scale=EmbeddingScale(self.embedding_multiplier),
            logit_scale=1 / self.logits_scaling,
        )

    def _layers(self) -> Iterator[NamedMixer]:
        # The kernels scale by head_dim^-0.5.
        factors = {"q_proj": self.attention_multiplier * math.sqrt(self.head_dim)}
        by, sizes = self.residual_multiplier, self.feed_forward("intermediate_size")
        for index in range(len(self.layer_types)):
            name = f"model.layers.{index}"
            attention = AttentionLayer(self.attention, f"{name}.self_attn", factors=factors)
            yield f"{name}.input_layernorm", ScaledMixer(attention, by)
            mlp = GatedMLPLayer(sizes, f"{name}.mlp", bias=self.mlp_bias)
            yield f"{name}.post_attention_layernorm", ScaledMixer(mlp, by)

    def layer_counts(self) -> dict[str, int]:
        return {"attention with MLP": len(self.layer_types)}


FAMILY = Family(model_type="granite", architecture="GraniteForCausalLM", config=DenseGraniteConfig)

LOGITS_SCALING = 2.0

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    # About 5 M parameters, a checkpoint is 1 page of 16 tokens, a hidden state and nothing else; about 300 M.
    sizes={
        "num_hidden_layers": by_size(6, 24),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": by_size(2, 4),
        "attention_multiplier": 0.25,
        "intermediate_size": by_size(512, 3072),
    },
    fields={
        "attention_bias": False,
        "embedding_multiplier": 1.5,
        "hidden_act": "silu",
        "logits_scaling": LOGITS_SCALING,
        "mlp_bias": False,
        "residual_multiplier": 0.8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    # Tied to the output; the layers are loud enough that an answer is not its last token for ever.
    gains={"embed_tokens.weight": LOGITS_SCALING * LOGIT_STD, "o_proj.weight": 4.0, "down_proj.weight": 4.0},
)
