"""What the published config.json files of four models say, as far as it decides what they remember and compute."""

from collections.abc import Mapping
from types import MappingProxyType


def _qwen(layers: int, vocab_size: int, experts: int, experts_per_token: int) -> Mapping[str, object]:
    """What Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B have in common."""
    return MappingProxyType(
        {
            "dtype": "bfloat16",
            "vocab_size": vocab_size,
            "max_position_embeddings": 262144,
            "hidden_size": 2048,
            "num_hidden_layers": layers,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        }
    )


PUBLISHED: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "nemotron-3-nano": MappingProxyType(
            {
                "model_type": "nemotron_h",
                "dtype": "bfloat16",
                "vocab_size": 131072,
                "max_position_embeddings": 262144,
                "hidden_size": 2688,
                "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                "num_attention_heads": 32,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "mamba_num_heads": 64,
                "mamba_head_dim": 64,
                "ssm_state_size": 128,
                "n_groups": 8,
                "conv_kernel": 4,
                "n_routed_experts": 128,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712,
            }
        ),
        "qwen3.5-35b-a3b": MappingProxyType({"model_type": "qwen3_5_moe", "text_config": _qwen(40, 248320, 256, 8)}),
        "qwen3-next-80b-a3b": MappingProxyType({"model_type": "qwen3_next", **_qwen(48, 151936, 512, 10)}),
        "granite-4-h-small": MappingProxyType(
            {
                "model_type": "granitemoehybrid",
                "dtype": "bfloat16",
                "vocab_size": 100352,
                "max_position_embeddings": 131072,
                "hidden_size": 4096,
                "layer_types": tuple("attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)),
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "mamba_n_heads": 128,
                "mamba_d_head": 64,
                "mamba_d_state": 128,
                "mamba_n_groups": 1,
                "mamba_d_conv": 4,
                "num_local_experts": 72,
                "num_experts_per_tok": 10,
                "intermediate_size": 768,
                "shared_intermediate_size": 1536,
            }
        ),
    }
)

HALF_BY_DEFAULT = frozenset({"granite-4-h-small"})
"""Published without a wish for a float32 state."""
