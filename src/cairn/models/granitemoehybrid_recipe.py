"""Granite 4.0's random-weight checkpoints."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models.recipe import LOGIT_STD, Asked, Recipe, config_head

__all__ = ["recipe"]

LOGITS_SCALING = 2.0


def recipe() -> Recipe:
    return Recipe(
        sizes=MappingProxyType({"tiny": _tiny(), "small": _small()}),
        config=_config,
        spreads=MappingProxyType({".D": (1.0, 0.2)}),
        # Tied to the output; the layers are loud enough that an answer is not its last token for ever.
        gains=MappingProxyType(
            {
                "embed_tokens.weight": LOGITS_SCALING * LOGIT_STD,
                "o_proj.weight": 4.0,
                "out_proj.weight": 4.0,
                "output_linear.weight": 4.0,
            }
        ),
    )


def _tiny() -> Mapping[str, Any]:
    """About 9 M parameters; a checkpoint is 9 pages of 16 tokens in float32."""
    return {
        "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba", "attention"],
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_multiplier": 0.125,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "shared_intermediate_size": 256,
    }


def _small() -> Mapping[str, Any]:
    """About 300 M parameters."""
    return {
        "layer_types": (["mamba"] * 5 + ["attention"]) * 3,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "attention_multiplier": 0.125,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 192,
        "shared_intermediate_size": 1024,
    }


def _config(sizes: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    return {
        **config_head(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            {"num_hidden_layers": len(sizes["layer_types"]), **sizes},
            asked,
        ),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embedding_multiplier": 1.5,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "logits_scaling": LOGITS_SCALING,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_proj_bias": False,
        "normalization_function": "rmsnorm",
        "output_router_logits": False,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
    }
