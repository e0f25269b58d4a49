"""Nemotron-H's random-weight checkpoints."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models.nemotron_h_config import MODEL_TYPE
from cairn.models.recipe import LOGIT_STD, Asked, Recipe, config_head

__all__ = ["recipe"]


def recipe() -> Recipe:
    return Recipe(
        sizes=MappingProxyType({"tiny": _tiny(), "small": _small()}),
        config=_config,
        spreads=MappingProxyType(
            {".D": (1.0, 0.2), "e_score_correction_bias": (0.0, 0.05), "embeddings.weight": (0.0, 1.0)}
        ),
        gains=MappingProxyType({"lm_head.weight": LOGIT_STD}),
        float32=("e_score_correction_bias",),
    )


def _tiny() -> Mapping[str, Any]:
    """About 5 M parameters; a checkpoint is 6 pages of 16 tokens in float32, 11 in bfloat16."""
    return {
        "hybrid_override_pattern": "MEM*M-MEM*",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 2,
        "intermediate_size": 512,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 256,
    }


def _small() -> Mapping[str, Any]:
    """About 300 M parameters, with the ratio of state to keys and values of the published models: a checkpoint is
    worth 3,000 tokens."""
    return {
        "hybrid_override_pattern": "MEMEM*EMEM-M*EMEMEM*EM-MEM*",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "intermediate_size": 4096,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 1024,
    }


def _config(sizes: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    return {
        **config_head(
            "NemotronHForCausalLM",
            MODEL_TYPE,
            {"num_hidden_layers": len(sizes["hybrid_override_pattern"]), **sizes},
            asked,
        ),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_logits_to_keep": 1,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
    }
