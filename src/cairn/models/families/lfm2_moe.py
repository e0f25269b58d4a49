"""LFM2 with a mixture of experts (Liquid AI's checkpoints and transformers' `models/lfm2_moe`): LFM2's convolutions and
attention, and behind the first layers' SwiGLU in all others a mixture of them."""

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from cairn.models.config_schema import boolean, integer, layer_kinds, number
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_WIDTH
from cairn.models.families.lfm2 import ATTENTION, CONV, LAYERS, Lfm2Config
from cairn.models.feed_forward import ExpertsLayer, SigmoidRule
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.weight_specs import MixerSpec

NORM_EPSILON = 1e-6
"""Added to the sum of a token's rates before they are divided by it."""


def _has_sparse(config: Any) -> bool:
    return bool(len(config.layer_types) > config.num_dense_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    """`num_dense_layers`: the first ones have a single SwiGLU; sizes of what no layer has are 0."""

    layer_types: tuple[str, ...] = layer_kinds((CONV, ATTENTION))
    num_dense_layers: int = integer(0, lambda config: len(config.layer_types), default=2)
    intermediate_size: int = integer(1, MAX_WIDTH, default=7168, when=attrgetter("num_dense_layers"))
    moe_intermediate_size: int = integer(1, MAX_WIDTH, default=1792, when=_has_sparse)
    num_experts: int = integer(1, 1 << 12, default=32, when=_has_sparse)
    num_experts_per_tok: int = integer(1, lambda config: config.num_experts, default=4, when=_has_sparse)
    norm_topk_prob: bool = boolean(default=True, when=_has_sparse)
    routed_scaling_factor: float = number(1e-9, 1e6, default=1.0, when=_has_sparse)
    use_expert_bias: bool = boolean(default=True, when=_has_sparse)

    def _feed_forward(self, index: int, name: str, stored: Collection[str]) -> MixerSpec:
        """Experts are published as a tensor for each expert and matrix; programs that keep them as stacks write those,
        too."""
        if index < self.num_dense_layers:
            return Lfm2Config._feed_forward(self, index, name, stored)
        experts = f"{name}.experts"
        stacks = f"{experts}.gate_up_proj", f"{experts}.down_proj"
        bias = f"{name}.expert_bias" if self.use_expert_bias else None
        return ExpertsLayer(
            sizes=self.mixture("moe_intermediate_size", self.num_experts, self.num_experts_per_tok),
            hidden=self.hidden_size,
            router=f"{name}.gate",
            routing=SigmoidRule(1, 1, self.routed_scaling_factor, bias, NORM_EPSILON, self.norm_topk_prob),
            experts=experts,
            parts=("w1", "w3"),
            down="w2",
            stacks=stacks if stacks[0] in stored else None,
        )

    def layer_counts(self) -> dict[str, int]:
        counts = dict[str, int]()
        words = {CONV: "short convolution", ATTENTION: "attention"}
        for index, kind in enumerate(self.layer_types):
            word = f"{words[kind]} with {'MLP' if index < self.num_dense_layers else 'mixture of experts'}"
            counts[word] = counts.get(word, 0) + 1
        return counts


FAMILY = Family(
    model_type="lfm2_moe", architecture="Lfm2MoeForCausalLM", config=Lfm2MoeConfig, float32_tensors=("expert_bias",)
)

RECIPE = Recipe(
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    # About 8 M parameters, a checkpoint is 1 page of 16 tokens; about 300 M parameters.
    sizes={
        **LAYERS,
        "intermediate_size": by_size(512, 2816),
        "moe_intermediate_size": by_size(128, 160),
        "num_dense_layers": 2,
        "num_experts": by_size(8, 16),
        "num_experts_per_tok": by_size(2, 4),
    },
    fields={
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "tie_embedding": True,
        "use_expert_bias": True,
    },
    # Tied to the output. The bias chooses other experts than the rates alone, now and then.
    spreads={"expert_bias": (0.0, 0.1)},
    gains={"embed_tokens.weight": LOGIT_STD},
    float32=("expert_bias",),
)
