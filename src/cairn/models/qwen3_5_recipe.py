"""Qwen3.5's random-weight checkpoints, text alone."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models.recipe import LOGIT_STD, Asked, Recipe, Size, config_head

__all__ = ["IMAGE_TOKENS", "recipe"]

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Control tokens that Qwen3.5's tokenizer has beside those of any chat."""


def recipe(*, experts: bool) -> Recipe:
    sizes: dict[Size, dict[str, Any]] = {"tiny": _tiny(), "small": _small()}
    if experts:
        sizes["tiny"] |= _mixture(experts=8, chosen=2, inner=128, shared=256)
        sizes["small"] |= _mixture(experts=16, chosen=4, inner=512, shared=1024)
    return Recipe(
        sizes=MappingProxyType({size: MappingProxyType(fields) for size, fields in sizes.items()}),
        config=_moe_config if experts else _dense_config,
        # Weights of norms are stored less 1, but for the one behind the delta rule.
        spreads=MappingProxyType(
            {
                "layernorm.weight": (0.0, 0.1),
                "q_norm.weight": (0.0, 0.1),
                "k_norm.weight": (0.0, 0.1),
                "linear_attn.norm.weight": (1.0, 0.1),
                ".norm.weight": (0.0, 0.1),
                "embed_tokens.weight": (0.0, 1.0),
            }
        ),
        gains=MappingProxyType({"lm_head.weight": LOGIT_STD}),
        float32=("A_log",),
        tokens=IMAGE_TOKENS,
    )


def _tiny() -> dict[str, Any]:
    """About 4 M parameters, 7 M with experts; a checkpoint is 4 pages of 16 tokens in float32."""
    return {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "intermediate_size": 512,
        "mrope_section": [4, 2, 2],
    }


def _small() -> dict[str, Any]:
    """About 300 M parameters, with the ratio of state to keys and values of the published models: a checkpoint is worth
    3,000 tokens."""
    return {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "intermediate_size": 3584,
        "mrope_section": [6, 5, 5],
    }


def _mixture(experts: int, chosen: int, inner: int, shared: int) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
    }


def _dense_config(sizes: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    return _config(sizes, asked, "qwen3_5_text", "Qwen3_5ForCausalLM")


def _moe_config(sizes: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    dense = {name: value for name, value in sizes.items() if name != "intermediate_size"}
    return _config(dense, asked, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")


def _config(sizes: Mapping[str, Any], asked: Asked, model_type: str, architecture: str) -> dict[str, Any]:
    """config.json with the fields, names and forms of the published text models."""
    count = sizes["num_hidden_layers"]
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(count)]
    return {
        **config_head(
            architecture,
            model_type,
            {name: value for name, value in sizes.items() if name != "mrope_section"},
            asked,
            dtype_field="dtype",
        ),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": sizes["mrope_section"],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
    }
