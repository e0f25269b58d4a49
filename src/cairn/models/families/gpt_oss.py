"""gpt-oss (OpenAI's model card, arXiv 2508.10925, and transformers' `models/gpt_oss`): attention with one sink a head,
of a window and of full reach in turn, and a mixture of experts with biases, which are published in MXFP4. There is no
recurrent state, so any matched length is a hit."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from cairn.kernels.attention_rule import AttentionRule
from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import boolean, by_layer, integer, layer_kinds, number, only, reach
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import DecoderSpec, NamedMixer
from cairn.models.feed_forward import ClampedExpertsLayer
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, rope_scaling, rope_theta

SLIDING, FULL = "sliding_attention", "full_attention"

YARN = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """`sliding_window`: tokens that a token of a layer with a window sees, itself among them; 0 where no layer has
    one."""

    layer_types: tuple[str, ...] = layer_kinds(
        (SLIDING, FULL), default=by_layer(lambda index: FULL if index % 2 else SLIDING)
    )
    sliding_window: int = reach(SLIDING, default=128)
    eps: float = number(1e-12, 1.0, default=1e-5, names=("rms_norm_eps",))
    head_dim: int = integer(1, 1 << 12, default=64)
    attention_bias: bool = boolean(default=True)
    rope_theta: float = rope_theta(default=150000.0)
    rope_scaling: RopeScaling | None = rope_scaling(missing=YARN)
    intermediate_size: int = integer(1, MAX_WIDTH, default=2880)
    num_local_experts: int = integer(1, 1 << 12, default=128, names=("num_local_experts", "num_experts"))
    num_experts_per_tok: int = integer(1, lambda config: config.num_local_experts, default=4)
    swiglu_alpha: float = number(-1e6, 1e6, default=1.702)
    swiglu_limit: float = number(1e-6, 1e6, default=7.0)
    hidden_act: str = only("silu")

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        return DecoderSpec(
            config=self,
            layers=tuple(self._layers(stored)),
            rotary=RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling),
        )

    def _layers(self, stored: Collection[str]) -> Iterator[NamedMixer]:
        for index, kind in enumerate(self.layer_types):
            name = f"model.layers.{index}"
            rule = AttentionRule(window=self.sliding_window) if kind == SLIDING else AttentionRule()
            attention = AttentionLayer(self.attention, f"{name}.self_attn", rule=rule, sinks="sinks")
            yield f"{name}.input_layernorm", attention
            experts = ClampedExpertsLayer(
                sizes=self.mixture("intermediate_size", self.num_local_experts, self.num_experts_per_tok),
                hidden=self.hidden_size,
                name=f"{name}.mlp",
                alpha=self.swiglu_alpha,
                limit=self.swiglu_limit,
                inputs_first=f"{name}.mlp.experts.gate_up_proj_blocks" not in stored,
            )
            yield f"{name}.post_attention_layernorm", experts

    def layer_counts(self) -> dict[str, int]:
        words = {SLIDING: "windowed attention with mixture of experts", FULL: "attention with mixture of experts"}
        return {word: count for kind, word in words.items() if (count := self.layer_types.count(kind))}


FAMILY = Family(model_type="gpt_oss", architecture="GptOssForCausalLM", config=GptOssConfig)

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    dtype_field="dtype",
    # About 8 M parameters, a checkpoint is 1 page of 16 tokens, a hidden state and nothing else; about 300 M.
    sizes={
        "num_hidden_layers": by_size(6, 10),
        "layer_types": by_size([SLIDING, FULL] * 3, [SLIDING, FULL] * 5),
        "sliding_window": by_size(20, 128),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": by_size(2, 4),
        "head_dim": 64,
        "intermediate_size": by_size(128, 512),
        "num_local_experts": by_size(8, 16),
        "num_experts_per_tok": by_size(2, 4),
    },
    fields={
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 1024},
        "rope_theta": 150000,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    spreads={"embed_tokens.weight": (0.0, 1.0), "sinks": (0.0, 1.0), "proj_bias": (0.0, 0.1)},
    # Experts' matrices have their inputs first, of which the first ones have twice as many as the others.
    gains={"lm_head.weight": LOGIT_STD, "experts.down_proj": 2**0.5},
)
