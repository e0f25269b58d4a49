"""Qwen3.5-35B-A3B as published: its config.json, and its tensors by transformers' own classes.

Fields that only steer training are left out. The tensors of the multi-token prediction head, which transformers does
not know, are those of one more layer with attention, a tensor for each expert.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

__all__ = ["QWEN35", "QWEN35_FP8", "Headers", "fp8_headers", "qwen35_headers", "shallow"]

Headers = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> safetensors dtype, shape."""

QWEN35: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(40)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "vision_config": {
        "model_type": "qwen3_5_moe",
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}

QWEN35_FP8: dict[str, Any] = QWEN35 | {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens"],
    }
}


def shallow(raw: Mapping[str, Any]) -> dict[str, Any]:
    """4 layers with 8 experts each, and a vision tower of one block."""
    text = {**raw["text_config"], "num_hidden_layers": 4, "num_experts": 8}
    text["layer_types"] = text["layer_types"][:4]
    return {**raw, "text_config": text, "vision_config": {**raw["vision_config"], "depth": 1}}


def qwen35_headers(raw: Mapping[str, Any] = QWEN35) -> Headers:
    """In bfloat16, all experts of a layer in two tensors."""
    left_out = ("architectures", "model_type", "quantization_config")
    fields = {name: copy.deepcopy(value) for name, value in raw.items() if name not in left_out}
    with torch.device("meta"):
        model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**fields))
    found: Headers = {
        name: ("F32" if name.endswith("A_log") else "BF16", tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
    }
    return found | _mtp(found)


def _mtp(headers: Headers) -> Headers:
    """17 tensors and three for each expert."""
    layer = "model.language_model.layers.3."
    found = {f"mtp.layers.0.{name[len(layer) :]}": entry for name, entry in headers.items() if name.startswith(layer)}
    found = _one_by_one(found)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        found[f"mtp.{name}.weight"] = ("BF16", (2048,))
    found["mtp.fc.weight"] = ("BF16", (2048, 4096))
    return found


def _one_by_one(headers: Headers) -> Headers:
    """A tensor for each expert instead of one for all."""
    found: Headers = {}
    for name, (dtype, shape) in headers.items():
        base, _, last = name.rpartition(".")
        for expert in range(shape[0] if base.endswith(".experts") else 0):
            if last == "down_proj":
                found[f"{base}.{expert}.down_proj.weight"] = (dtype, shape[1:])
            else:
                for part in ("gate", "up"):
                    found[f"{base}.{expert}.{part}_proj.weight"] = (dtype, (shape[1] // 2, shape[2]))
        if not base.endswith(".experts"):
            found[name] = (dtype, shape)
    return found


def fp8_headers(scale: str, raw: Mapping[str, Any] = QWEN35) -> Headers:
    """In FP8, every matrix of a layer but the small ones, a tensor for each expert. `scale`: the factors' dtype."""
    kept = (
        "embed_tokens.weight",
        "lm_head.weight",
        "in_proj_a.weight",
        "in_proj_b.weight",
        "gate.weight",
        "shared_expert_gate.weight",
    )
    found: Headers = {}
    for name, (dtype, shape) in _one_by_one(qwen35_headers(raw)).items():
        found[name] = (dtype, shape)
        if name.startswith("model.visual.") or len(shape) != 2 or name.endswith((*kept, "mtp.fc.weight")):
            continue
        found[name] = ("F8_E4M3", shape)
        found[f"{name}_scale_inv"] = (scale, tuple(math.ceil(length / 128) for length in shape))
    return found
