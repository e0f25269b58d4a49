"""Gemma 4 as it is published: config.json of each size, without what is not the text model's, and the tensors' names
and shapes."""

from collections.abc import Mapping
from typing import Any

WINDOWED, FULL = "sliding_attention", "full_attention"

Shapes = dict[str, tuple[int, ...]]


def _published(*, name: str = "gemma4", period: int = 6, **text: Any) -> dict[str, Any]:
    """`period`: the last of so many layers sees all tokens."""
    layers = text["num_hidden_layers"]
    return {
        "model_type": name,
        "architectures": [f"{name.title().replace('_', '')}ForConditionalGeneration"],
        "audio_token_id": 258881,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "dtype": "bfloat16",
            "enable_moe_block": False,
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "layer_types": [FULL if (index + 1) % period == 0 else WINDOWED for index in range(layers)],
            "max_position_embeddings": 262144,
            "model_type": f"{name}_text",
            "moe_intermediate_size": None,
            "num_experts": None,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
                WINDOWED: {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 1024,
            "tie_word_embeddings": True,
            "top_k_experts": None,
            "use_bidirectional_attention": "vision",
            "use_cache": True,
            "use_double_wide_mlp": False,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
            **text,
        },
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
    }


_LARGE = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_SMALL = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Gemma-4-31B": _published(
        **_LARGE,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_global_key_value_heads=4,
        num_hidden_layers=60,
        num_key_value_heads=16,
    ),
    "Gemma-4-26B-A4B": _published(
        **_LARGE,
        enable_moe_block=True,
        moe_intermediate_size=704,
        num_experts=128,
        top_k_experts=8,
        hidden_size=2816,
        intermediate_size=2112,
        num_attention_heads=16,
        num_global_key_value_heads=2,
        num_hidden_layers=30,
        num_key_value_heads=8,
    ),
    "Gemma-4-12B": _published(
        name="gemma4_unified",
        **_LARGE,
        hidden_size=3840,
        intermediate_size=15360,
        num_attention_heads=16,
        num_global_key_value_heads=1,
        num_hidden_layers=48,
        num_key_value_heads=8,
    ),
    "Gemma-4-E4B": _published(
        **_SMALL,
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=8,
        num_hidden_layers=42,
        num_key_value_heads=2,
        num_kv_shared_layers=18,
    ),
    "Gemma-4-E2B": _published(
        period=5,
        **{**_SMALL, "use_double_wide_mlp": True},
        hidden_size=1536,
        intermediate_size=6144,
        num_attention_heads=8,
        num_hidden_layers=35,
        num_key_value_heads=1,
        num_kv_shared_layers=20,
    ),
}


def text_shapes(raw: Mapping[str, Any]) -> Shapes:
    """The text model's tensors, those included that nothing is computed with."""
    text, prefix = raw["text_config"], "model.language_model"
    hidden, width = text["hidden_size"], text["hidden_size_per_layer_input"]
    shapes: Shapes = {f"{prefix}.embed_tokens.weight": (text["vocab_size"], hidden)}
    if width:
        every = text["num_hidden_layers"] * width
        shapes[f"{prefix}.embed_tokens_per_layer.weight"] = (text["vocab_size_per_layer_input"], every)
        shapes[f"{prefix}.per_layer_model_projection.weight"] = (every, hidden)
        shapes[f"{prefix}.per_layer_projection_norm.weight"] = (width,)
    for index in range(text["num_hidden_layers"]):
        shapes |= {f"{prefix}.layers.{index}.{name}": shape for name, shape in _layer_shapes(text, index).items()}
    return shapes | {f"{prefix}.norm.weight": (hidden,)}


def _layer_shapes(text: Mapping[str, Any], index: int) -> Shapes:
    hidden, inner, width = text["hidden_size"], text["intermediate_size"], text["hidden_size_per_layer_input"]
    full = text["layer_types"][index] == FULL
    dim = text["global_head_dim"] if full else text["head_dim"]
    made_of_keys = full and text["attention_k_eq_v"]
    keys = dim * (text["num_global_key_value_heads"] if made_of_keys else text["num_key_value_heads"])
    if text["use_double_wide_mlp"] and index >= text["num_hidden_layers"] - text["num_kv_shared_layers"]:
        inner *= 2
    shapes: Shapes = {
        "self_attn.q_proj.weight": (text["num_attention_heads"] * dim, hidden),
        "self_attn.o_proj.weight": (hidden, text["num_attention_heads"] * dim),
        **{f"self_attn.{part}_proj.weight": (keys, hidden) for part in ("k" if made_of_keys else "kv")},
        **{f"self_attn.{part}_norm.weight": (dim,) for part in "qk"},
        **{f"mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")},
        "mlp.down_proj.weight": (hidden, inner),
        "layer_scalar": (1,),
    }
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if width:
        norms.append("post_per_layer_input_norm")
        shapes |= {"per_layer_input_gate.weight": (width, hidden), "per_layer_projection.weight": (hidden, width)}
    if text["enable_moe_block"]:
        count, expert = text["num_experts"], text["moe_intermediate_size"]
        norms += [f"{norms[3]}_1", f"{norms[3]}_2", f"{norms[2]}_2"]
        shapes |= {
            "experts.gate_up_proj": (count, 2 * expert, hidden),
            "experts.down_proj": (count, hidden, expert),
            "router.proj.weight": (count, hidden),
            "router.scale": (hidden,),
            "router.per_expert_scale": (count,),
        }
    return shapes | {f"{norm}.weight": (hidden,) for norm in norms}


OTHERS: Shapes = {
    "model.vision_tower.patch_embedder.input_proj.weight": (1152, 768),
    "model.embed_vision.embedding_projection.weight": (1536, 1152),
    "model.audio_tower.output_proj.weight": (1536, 1024),
    "model.embed_audio.embedding_projection.weight": (1536, 1536),
}
"""Some of what belongs to other kinds of input."""
