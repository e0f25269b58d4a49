"""Qwen3 with a mixture of experts (arXiv 2505.09388 and transformers' `models/qwen3_moe`): Qwen3's attention, then a
mixture of SwiGLU experts or, in some layers, a single SwiGLU. There is no recurrent state, so any matched length is a
hit."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from cairn.models.config_schema import boolean, custom, integer
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_WIDTH, head_dim_by_hidden_size
from cairn.models.families import qwen3
from cairn.models.families.qwen3 import Qwen3Config
from cairn.models.families.qwen3_5 import HAS_SPARSE, has_dense, sparse_layers
from cairn.models.feed_forward import ExpertsLayer, SoftmaxRule
from cairn.models.random_weights.recipe import by_size
from cairn.models.weight_specs import MixerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """`sparse_layers`: those that have a mixture of experts; sizes of what no layer has are 0."""

    head_dim: int = integer(1, 1 << 12, default=head_dim_by_hidden_size)
    sparse_layers: tuple[int, ...] = custom(sparse_layers)
    intermediate_size: int = integer(1, MAX_WIDTH, when=has_dense)
    num_experts: int = integer(1, 1 << 12, default=128, names=("num_experts", "num_local_experts"), when=HAS_SPARSE)
    num_experts_per_tok: int = integer(1, lambda config: config.num_experts, default=8, when=HAS_SPARSE)
    moe_intermediate_size: int = integer(1, MAX_WIDTH, default=768, when=HAS_SPARSE)
    norm_topk_prob: bool = boolean(default=False, when=HAS_SPARSE)

    def _feed_forward(self, index: int, name: str, stored: Collection[str]) -> MixerSpec:
        """Experts are published as a tensor for each expert and matrix; programs that keep them as stacks write those,
        too."""
        if index not in self.sparse_layers:
            return Qwen3Config._feed_forward(self, index, name, stored)
        experts = f"{name}.experts"
        stacks = f"{experts}.gate_up_proj", f"{experts}.down_proj"
        return ExpertsLayer(
            sizes=self.mixture("moe_intermediate_size", self.num_experts, self.num_experts_per_tok),
            hidden=self.hidden_size,
            router=f"{name}.gate",
            routing=SoftmaxRule(self.norm_topk_prob),
            experts=experts,
            stacks=stacks if stacks[0] in stored else None,
        )

    def layer_counts(self) -> dict[str, int]:
        sparse = len(self.sparse_layers)
        words = {"attention with mixture of experts": sparse, "attention with MLP": len(self.layer_types) - sparse}
        return {word: count for word, count in words.items() if count}


FAMILY = Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", config=Qwen3MoeConfig)

RECIPE = replace(
    qwen3.RECIPE,
    architecture=FAMILY.architecture,
    model_type=FAMILY.model_type,
    # About 8 M parameters, a checkpoint is 1 page of 16 tokens, a hidden state and nothing else; about 300 M.
    sizes={
        "num_hidden_layers": by_size(6, 20),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 16),
        "num_key_value_heads": by_size(2, 4),
        "head_dim": by_size(64, 128),
        "intermediate_size": by_size(512, 2048),
        "moe_intermediate_size": by_size(128, 192),
        "num_experts": by_size(8, 16),
        "num_experts_per_tok": by_size(2, 4),
    },
    fields={
        **qwen3.RECIPE.fields,
        "decoder_sparse_step": 1,
        "max_window_layers": by_size(6, 20),
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
)
