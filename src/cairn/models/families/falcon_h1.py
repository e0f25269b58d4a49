"""Falcon-H1 (arXiv 2507.22448 and transformers' `models/falcon_h1`): every layer has Mamba2 and rotary attention side
by side on the same normed input, then a SwiGLU, with constant multipliers almost everywhere."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cairn.errors import ModelError
from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import MAX_LAYERS, Fields, boolean, custom, integer, number, numbers, only
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_WIDTH
from cairn.models.decoder_spec import DecoderSpec, EmbeddingScale, NamedMixer, ParallelMixers, ScaledMixer
from cairn.models.feed_forward import GatedMLPLayer
from cairn.models.mamba2 import MAMBA2_FLOAT32, Mamba2Config, Mamba2Layer, expanded_inner
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, rope_scaling, rope_theta


def _normed(fields: Fields, name: str, config: Any) -> bool:
    normed = fields.boolean(name, default=False)
    # Where config.json is silent the norm comes first; false is always written out, as it is not the default.
    if normed and fields.boolean("mamba_norm_before_gate", default=True):
        raise ModelError(
            "config.json: mamba_norm_before_gate is true (which it also is where it is missing), but with "
            "mamba_rms_norm only false is implemented"
        )
    return normed


def _inner(fields: Fields, name: str, config: Any) -> int:
    return fields.integer(name, 1, MAX_WIDTH) if fields.has(name) else expanded_inner(fields, name, config)


def _multiplier() -> Any:
    return number(-1e6, 1e6, default=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(Mamba2Config):
    """`ssm_multipliers`: of gate, x, B, C and dt; `mlp_multipliers`: of the gate before its silu, and of the output."""

    num_hidden_layers: int = integer(1, MAX_LAYERS)
    eps: float = number(1e-12, 1.0, default=1e-5, names=("rms_norm_eps",))
    rope_theta: float = rope_theta()
    rope_scaling: RopeScaling | None = rope_scaling()
    mamba_inner: int = custom(_inner, names=("mamba_d_ssm",))
    mamba_rms_norm: bool = custom(_normed)
    projectors_bias: bool = boolean(default=False)
    intermediate_size: int = integer(1, MAX_WIDTH)
    mlp_bias: bool = boolean(default=False)
    hidden_act: str = only("silu")
    embedding_multiplier: float = _multiplier()
    lm_head_multiplier: float = _multiplier()
    key_multiplier: float = _multiplier()
    attention_in_multiplier: float = _multiplier()
    attention_out_multiplier: float = _multiplier()
    ssm_in_multiplier: float = _multiplier()
    ssm_out_multiplier: float = _multiplier()
    ssm_multipliers: tuple[float, ...] = numbers(5, -1e6, 1e6, default=1.0)
    mlp_multipliers: tuple[float, ...] = numbers(2, -1e6, 1e6, default=1.0)

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        return DecoderSpec(
            config=self,
            layers=tuple(self._layers()),
            final_norm="model.final_layernorm",
            rotary=RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling),
            embedding_scale=EmbeddingScale(self.embedding_multiplier),
            logit_scale=self.lm_head_multiplier,
        )

    def _layers(self) -> Iterator[NamedMixer]:
        of_gate, of_mlp = self.mlp_multipliers
        sizes = replace(self.mamba2, out_bias=self.projectors_bias, normed=self.mamba_rms_norm)
        for index in range(self.num_hidden_layers):
            name = f"model.layers.{index}"
            mamba2 = Mamba2Layer(sizes, f"{name}.mamba", self.ssm_multipliers)
            attention = AttentionLayer(self.attention, f"{name}.self_attn", factors={"k_proj": self.key_multiplier})
            mixers = (
                ScaledMixer(mamba2, self.ssm_out_multiplier, self.ssm_in_multiplier),
                ScaledMixer(attention, self.attention_out_multiplier, self.attention_in_multiplier),
            )
            yield f"{name}.input_layernorm", ParallelMixers(mixers)
            mlp_sizes = self.feed_forward("intermediate_size")
            mlp = GatedMLPLayer(mlp_sizes, f"{name}.feed_forward", bias=self.mlp_bias, gate_factor=of_gate)
            yield f"{name}.pre_ff_layernorm", ScaledMixer(mlp, of_mlp)

    def layer_counts(self) -> dict[str, int]:
        return {"Mamba2 beside attention with MLP": self.num_hidden_layers}


FAMILY = Family(
    model_type="falcon_h1", architecture="FalconH1ForCausalLM", config=FalconH1Config, float32_tensors=MAMBA2_FLOAT32
)

LM_HEAD_MULTIPLIER = 0.25

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    # About 5 M parameters, a checkpoint is 3 pages of 16 tokens in float32; about 300 M parameters.
    sizes={
        "num_hidden_layers": by_size(4, 20),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": by_size(2, 4),
        "head_dim": 64,
        "mamba_d_ssm": by_size(256, 2048),
        "mamba_n_heads": by_size(8, 32),
        "mamba_d_head": by_size(32, 64),
        "mamba_d_state": by_size(32, 128),
        "mamba_n_groups": 2,
        "intermediate_size": by_size(512, 2048),
    },
    fields={
        "attention_bias": False,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "embedding_multiplier": 4.0,
        "hidden_act": "silu",
        "key_multiplier": 0.5,
        "lm_head_multiplier": LM_HEAD_MULTIPLIER,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": True,
        "mamba_use_mlp": True,
        "mlp_bias": False,
        "mlp_multipliers": [0.875, 0.75],
        "projectors_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.75, 0.5, 1.0, 0.875, 0.625],
        "ssm_out_multiplier": 0.75,
        "tie_word_embeddings": False,
    },
    spreads={".D": (1.0, 0.2), "embed_tokens.weight": (0.0, 0.25)},
    gains={"lm_head.weight": LOGIT_STD / LM_HEAD_MULTIPLIER},
)
