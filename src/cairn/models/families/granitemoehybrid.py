"""Granite 4.0 (IBM's checkpoints and transformers' `models/granitemoehybrid`): Mamba2 or attention, with or without
rotary positions; then a mixture of SwiGLU experts beside a shared one, or the shared one alone; constant multipliers of
embedding, residual branches, attention scores and logits."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import by_layer, integer, layer_kinds, number, only
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_WIDTH
from cairn.models.decoder_spec import DecoderSpec, EmbeddingScale, NamedMixer, ScaledMixer
from cairn.models.feed_forward import ExpertsLayer, GatedMLPLayer
from cairn.models.mamba2 import MAMBA2_FLOAT32, Mamba2Config, Mamba2Layer
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, rope_scaling, rope_theta
from cairn.models.weight_specs import MixerSpec

MAMBA, ATTENTION = "mamba", "attention"

KINDS = MappingProxyType(
    {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(Mamba2Config):
    """`rope_theta` 0: attention without positions. `num_local_experts` 0: no mixture."""

    layer_types: tuple[str, ...] = layer_kinds(
        KINDS, names=("layer_types", "layers_block_type"), default=by_layer(lambda index: MAMBA)
    )
    # "nope" is what the checkpoints say, null what transformers writes.
    position_embedding_type: str = only("nope", "rope")
    rope_theta: float = rope_theta(when=lambda config: config.position_embedding_type == "rope")
    rope_scaling: RopeScaling | None = rope_scaling(when=lambda config: config.position_embedding_type == "rope")
    attention_multiplier: float = number(1e-9, 1e6, default=1.0)
    embedding_multiplier: float = number(1e-9, 1e6, default=1.0)
    residual_multiplier: float = number(1e-9, 1e6, default=1.0)
    logits_scaling: float = number(1e-9, 1e6, default=1.0)
    num_local_experts: int = integer(0, 1 << 12, default=8)
    num_experts_per_tok: int = integer(
        1, lambda config: config.num_local_experts, default=2, when=lambda config: config.num_local_experts
    )
    intermediate_size: int = integer(1, MAX_WIDTH, when=lambda config: config.num_local_experts)
    shared_intermediate_size: int = integer(1, MAX_WIDTH, default=1024)
    hidden_act: str = only("silu")
    normalization_function: str = only("rmsnorm")

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        return DecoderSpec(
            config=self,
            layers=tuple(self._layers()),
            rotary=RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling) if self.rope_theta else None,
            embedding_scale=EmbeddingScale(self.embedding_multiplier),
            logit_scale=1 / self.logits_scaling,
        )

    def _layers(self) -> Iterator[NamedMixer]:
        # The kernels scale by head_dim^-0.5.
        factors = {"q_proj": self.attention_multiplier * math.sqrt(self.head_dim)}
        for index, kind in enumerate(self.layer_types):
            name, by = f"model.layers.{index}", self.residual_multiplier
            if kind == MAMBA:
                mixer: MixerSpec = Mamba2Layer(self.mamba2, f"{name}.mamba")
            else:
                mixer = AttentionLayer(self.attention, f"{name}.self_attn", factors=factors)
            yield f"{name}.input_layernorm", ScaledMixer(mixer, by)
            yield f"{name}.post_attention_layernorm", ScaledMixer(self._feed_forward(name), by)

    def _feed_forward(self, name: str) -> MixerSpec:
        sizes, moe = self.feed_forward("shared_intermediate_size"), f"{name}.block_sparse_moe"
        shared = GatedMLPLayer(sizes, f"{name}.shared_mlp", ("input_linear", "output_linear"))
        if not self.num_local_experts:
            return shared
        return ExpertsLayer(
            sizes=self.mixture("intermediate_size", self.num_local_experts, self.num_experts_per_tok),
            hidden=self.hidden_size,
            router=f"{moe}.router.layer",
            stacks=(f"{moe}.input_linear.weight", f"{moe}.output_linear.weight"),
            shared=shared,
        )

    def layer_counts(self) -> dict[str, int]:
        feed_forward = "mixture of experts" if self.num_local_experts else "MLP"
        words = {MAMBA: f"Mamba2 with {feed_forward}", ATTENTION: f"attention with {feed_forward}"}
        return {word: count for kind, word in words.items() if (count := self.layer_types.count(kind))}


FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    config=GraniteConfig,
    float32_tensors=MAMBA2_FLOAT32,
)

LOGITS_SCALING = 2.0

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    # About 9 M parameters, a checkpoint is 9 pages of 16 tokens in float32; about 300 M parameters.
    sizes={
        "num_hidden_layers": by_size(6, 18),
        "layer_types": by_size((["mamba"] * 2 + ["attention"]) * 2, (["mamba"] * 5 + ["attention"]) * 3),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": by_size(2, 4),
        "attention_multiplier": 0.125,
        "mamba_n_heads": by_size(8, 32),
        "mamba_d_head": 64,
        "mamba_d_state": by_size(32, 128),
        "mamba_n_groups": 1,
        "num_local_experts": by_size(8, 16),
        "num_experts_per_tok": by_size(2, 4),
        "intermediate_size": by_size(128, 192),
        "shared_intermediate_size": by_size(256, 1024),
    },
    fields={
        "attention_bias": False,
        "embedding_multiplier": 1.5,
        "hidden_act": "silu",
        "logits_scaling": LOGITS_SCALING,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_proj_bias": False,
        "normalization_function": "rmsnorm",
        "position_embedding_type": "nope",
        "residual_multiplier": 0.8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
    },
    spreads={".D": (1.0, 0.2)},
    # Tied to the output; the layers are loud enough that an answer is not its last token for ever.
    gains={
        "embed_tokens.weight": LOGITS_SCALING * LOGIT_STD,
        "o_proj.weight": 4.0,
        "out_proj.weight": 4.0,
        "output_linear.weight": 4.0,
    },
)
