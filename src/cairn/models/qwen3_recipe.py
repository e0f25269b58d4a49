"""Qwen3's random-weight checkpoints."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models.recipe import LOGIT_STD, Asked, Recipe, config_head

__all__ = ["recipe"]


def recipe() -> Recipe:
    return Recipe(
        sizes=MappingProxyType({"tiny": _tiny(), "small": _small()}),
        config=_config,
        # Queries are long enough for attention that looks at a few tokens and not at all of them alike.
        spreads=MappingProxyType({"embed_tokens.weight": (0.0, 1.0), "q_norm.weight": (3.0, 0.3)}),
        gains=MappingProxyType({"lm_head.weight": LOGIT_STD}),
    )


def _tiny() -> Mapping[str, Any]:
    """About 5 M parameters; a checkpoint is 1 page of 16 tokens, a hidden state and nothing else."""
    return {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
    }


def _small() -> Mapping[str, Any]:
    """About 300 M parameters."""
    return {
        "num_hidden_layers": 22,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 2048,
    }


def _config(sizes: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    return {
        **config_head("Qwen3ForCausalLM", "qwen3", sizes, asked),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": sizes["num_hidden_layers"],
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }
