"""LFM2's random-weight checkpoints."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models.recipe import LOGIT_STD, Asked, Recipe, config_head

__all__ = ["recipe"]


def recipe() -> Recipe:
    return Recipe(
        sizes=MappingProxyType({"tiny": _tiny(), "small": _small()}),
        config=_config,
        # Tied to the output.
        gains=MappingProxyType({"embed_tokens.weight": LOGIT_STD}),
    )


def _tiny() -> Mapping[str, Any]:
    """About 6 M parameters; a checkpoint is 1 page of 16 tokens."""
    return {
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"],
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "block_ff_dim": 768,
    }


def _small() -> Mapping[str, Any]:
    """About 300 M parameters."""
    return {
        "layer_types": ["conv", "conv", "full_attention"] * 8,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "block_ff_dim": 4096,
    }


def _config(sizes: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    return {
        **config_head("Lfm2ForCausalLM", "lfm2", {"num_hidden_layers": len(sizes["layer_types"]), **sizes}, asked),
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-05,
        "block_use_swiglu": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "initializer_range": 0.02,
        "norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "use_cache": True,
        "use_pos_enc": True,
    }
