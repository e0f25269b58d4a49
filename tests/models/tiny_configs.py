"""config.json of tiny models, a function for each family that is made of parts; the sizes that decide nothing are one's
and all's."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

VOCAB = 97

COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
    }
)


def _config(changes: Mapping[str, Any], *, architecture: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [f"{architecture}ForCausalLM"], **COMMON, **fields, **changes}


def granite(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybrid",
        layer_types=["mamba", "attention", "mamba"],
        rms_norm_eps=1e-5,
        bos_token_id=1,
        attention_multiplier=0.25,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.7,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=20,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        intermediate_size=24,
        shared_intermediate_size=40,
        num_local_experts=6,
        num_experts_per_tok=3,
        position_embedding_type="nope",
        tie_word_embeddings=True,
    )


def falcon(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="falcon_h1",
        architecture="FalconH1",
        rms_norm_eps=1e-5,
        bos_token_id=1,
        head_dim=16,
        rope_theta=1e5,
        mamba_d_ssm=48,
        mamba_n_heads=4,
        mamba_d_head=12,
        mamba_d_state=20,
        mamba_n_groups=2,
        mamba_d_conv=4,
        mamba_norm_before_gate=False,
        mamba_rms_norm=False,
        intermediate_size=56,
        embedding_multiplier=2.5,
        lm_head_multiplier=0.6,
        key_multiplier=0.55,
        attention_in_multiplier=0.9,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.7,
        mlp_multipliers=[0.85, 0.65],
        ssm_multipliers=[0.9, 0.75, 1.2, 1.1, 0.8],
        tie_word_embeddings=False,
    )


def lfm2(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="lfm2",
        architecture="Lfm2",
        layer_types=["conv", "full_attention", "conv", "conv"],
        num_hidden_layers=4,
        norm_eps=1e-5,
        bos_token_id=1,
        rope_theta=1e6,
        conv_L_cache=3,
        conv_bias=False,
        block_auto_adjust_ff_dim=True,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_ff_dim=80,
    )


def lfm3(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="lfm3",
        architecture="Lfm3",
        layer_types=["conv", "full_attention", "sliding_attention", "conv"],
        num_hidden_layers=4,
        norm_eps=1e-5,
        bos_token_id=1,
        head_dim=16,
        sliding_window=12,
        conv_L_cache=7,
        intermediate_size=56,
    )


def qwen3(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="qwen3",
        architecture="Qwen3",
        rms_norm_eps=1e-6,
        head_dim=16,
        rope_theta=1e6,
        intermediate_size=56,
        tie_word_embeddings=False,
    )


def dense_granite(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="granite",
        architecture="Granite",
        rms_norm_eps=1e-5,
        bos_token_id=1,
        rope_theta=1e5,
        attention_multiplier=0.25,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.7,
        intermediate_size=56,
        tie_word_embeddings=True,
    )


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="qwen3_moe",
        architecture="Qwen3Moe",
        rms_norm_eps=1e-6,
        head_dim=16,
        rope_theta=1e6,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    )


def lfm2_moe(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="lfm2_moe",
        architecture="Lfm2Moe",
        layer_types=["conv", "full_attention", "conv", "conv"],
        num_hidden_layers=4,
        norm_eps=1e-5,
        bos_token_id=1,
        rope_theta=1e6,
        conv_L_cache=3,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
    )


def olmo_hybrid(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="olmo_hybrid",
        architecture="OlmoHybrid",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rms_norm_eps=1e-6,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        linear_conv_kernel_dim=4,
        intermediate_size=56,
        rope_parameters={"rope_theta": None, "rope_type": "default"},
        tie_word_embeddings=False,
    )


def gemma3(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="gemma3_text",
        architecture="Gemma3",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rms_norm_eps=1e-6,
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=20,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        intermediate_size=56,
    )


def gemma4(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="gemma4_text",
        architecture="Gemma4",
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        num_hidden_layers=4,
        rms_norm_eps=1e-6,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        head_dim=12,
        global_head_dim=16,
        attention_k_eq_v=True,
        sliding_window=12,
        final_logit_softcapping=2.5,
        intermediate_size=56,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )


SHARING = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB + 3,
}
"""Of Gemma 4: keys and values of earlier layers, and inputs of each layer."""


def gemma2(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="gemma2",
        architecture="Gemma2",
        rms_norm_eps=1e-6,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=12,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
        rope_theta=1e4,
        intermediate_size=56,
    )


def llama4(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="llama4_text",
        architecture="Llama4",
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 1],
        rms_norm_eps=1e-5,
        head_dim=16,
        rope_theta=1e5,
        attention_chunk_size=20,
        floor_scale=12,
        attn_scale=0.3,
        intermediate_size=24,
        intermediate_size_mlp=56,
        interleave_moe_layer_step=2,
        num_local_experts=6,
        tie_word_embeddings=False,
    )


def gpt_oss(**changes: Any) -> dict[str, Any]:
    return _config(
        changes,
        model_type="gpt_oss",
        architecture="GptOss",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rms_norm_eps=1e-5,
        head_dim=16,
        sliding_window=12,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e5,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        intermediate_size=24,
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_alpha=1.3,
        swiglu_limit=0.8,
        tie_word_embeddings=False,
    )


MAKERS: Mapping[str, Callable[..., dict[str, Any]]] = MappingProxyType(
    {
        "granitemoehybrid": granite,
        "falcon_h1": falcon,
        "lfm2": lfm2,
        "qwen3": qwen3,
        "granite": dense_granite,
        "qwen3_moe": qwen3_moe,
        "lfm2_moe": lfm2_moe,
        "olmo_hybrid": olmo_hybrid,
        "gpt_oss": gpt_oss,
        "gemma3_text": gemma3,
        "gemma4_text": gemma4,
        "gemma2": gemma2,
        "lfm3": lfm3,
        "llama4_text": llama4,
    }
)
"""By `model_type`; changes are fields by name."""
