"""Falcon-H1's random-weight checkpoints."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models.recipe import LOGIT_STD, Asked, Recipe, config_head

__all__ = ["recipe"]

LM_HEAD_MULTIPLIER = 0.25


def recipe() -> Recipe:
    return Recipe(
        sizes=MappingProxyType({"tiny": _tiny(), "small": _small()}),
        config=_config,
        spreads=MappingProxyType({".D": (1.0, 0.2), "embed_tokens.weight": (0.0, 0.25)}),
        gains=MappingProxyType({"lm_head.weight": LOGIT_STD / LM_HEAD_MULTIPLIER}),
    )


def _tiny() -> Mapping[str, Any]:
    """About 5 M parameters; a checkpoint is 3 pages of 16 tokens in float32."""
    return {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_n_groups": 2,
        "intermediate_size": 512,
    }


def _small() -> Mapping[str, Any]:
    """About 300 M parameters."""
    return {
        "num_hidden_layers": 20,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "mamba_d_ssm": 2048,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 2,
        "intermediate_size": 2048,
    }


def _config(sizes: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    return {
        **config_head("FalconH1ForCausalLM", "falcon_h1", sizes, asked),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "embedding_multiplier": 4.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "key_multiplier": 0.5,
        "lm_head_multiplier": LM_HEAD_MULTIPLIER,
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": True,
        "mamba_use_mlp": True,
        "mlp_bias": False,
        "mlp_multipliers": [0.875, 0.75],
        "num_logits_to_keep": 1,
        "projectors_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.75, 0.5, 1.0, 0.875, 0.625],
        "ssm_out_multiplier": 0.75,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
