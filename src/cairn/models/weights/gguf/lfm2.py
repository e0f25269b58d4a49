"""llama.cpp's lfm2 and lfm2moe (its `conversion/lfm2.py`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models.config_schema import MAX_LAYERS
from cairn.models.weights.gguf.conversion import Conversion, decoder_rules, layer_name, matrices, swiglu_experts
from cairn.models.weights.gguf.metadata import GgufMetadata
from cairn.models.weights.gguf.views import Rule, taps

_ATTENTION = MappingProxyType(
    {
        "attn_q": "q_proj",
        "attn_k": "k_proj",
        "attn_v": "v_proj",
        "attn_output": "out_proj",
        "attn_q_norm": "q_layernorm",
        "attn_k_norm": "k_layernorm",
    }
)
_CONVOLUTION = MappingProxyType({"shortconv.in_proj": "in_proj", "shortconv.out_proj": "out_proj"})
_FEED_FORWARD = MappingProxyType({"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"})


def convert_lfm2(metadata: GgufMetadata) -> Conversion:
    """LFM2, dense."""
    return _lfm2(_config(metadata, "lfm2") | {"intermediate_size": metadata.each_layer("feed_forward_length")})


def convert_lfm2_moe(metadata: GgufMetadata) -> Conversion:
    """LFM2 with a mixture of experts."""
    # ggml's number of a sigmoid.
    metadata.model.only("expert_gating_func", 2)
    config = _config(metadata, "lfm2_moe") | {
        "num_dense_layers": metadata.integer("leading_dense_block_count"),
        "intermediate_size": metadata.each_layer("feed_forward_length"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "norm_topk_prob": metadata.model.boolean("expert_weights_norm", default=True),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "use_expert_bias": bool(metadata.layers("exp_probs_b.bias")),
    }
    return _lfm2(config)


def _config(metadata: GgufMetadata, model_type: str) -> dict[str, Any]:
    config = metadata.config(model_type, eps="norm_eps")
    recurrent = metadata.layers("shortconv.conv.weight", "shortconv.in_proj.weight", "shortconv.out_proj.weight")
    return config | {
        "tie_embedding": config["tie_word_embeddings"],
        "rope_parameters": metadata.rope(),
        "layer_types": [
            "conv" if layer in recurrent else "full_attention"
            for layer in range(min(metadata.num_layers, MAX_LAYERS + 1))
        ],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": bool(metadata.layers("shortconv.in_proj.bias")),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2(config: Mapping[str, Any]) -> Conversion:
    layer = {
        "attn_norm.weight": Rule(name="operator_norm.weight"),
        "ffn_norm.weight": Rule(name="ffn_norm.weight"),
        "shortconv.conv.weight": Rule(name="conv.conv.weight", shape=taps),
        "shortconv.conv.bias": Rule(name="conv.conv.bias"),
        **matrices(_ATTENTION, "self_attn"),
        **matrices(_CONVOLUTION, "conv"),
        **matrices(_FEED_FORWARD, "feed_forward"),
        **swiglu_experts("feed_forward.experts", "w1", "w3", "w2"),
        "ffn_gate_inp.weight": Rule(name="feed_forward.gate.weight"),
        "exp_probs_b.bias": Rule(name="feed_forward.expert_bias"),
    }
    top = decoder_rules(final_norm="model.embedding_norm")
    top = {**top, "token_embd_norm.weight": Rule(name="model.embedding_norm.weight")}
    return Conversion(config, lambda number: top if number is None else layer, layer_name)
