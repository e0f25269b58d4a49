"""llama.cpp's qwen3, qwen3moe, qwen35 and qwen35moe (its `conversion/qwen.py`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.models.config_schema import MAX_LAYERS
from cairn.models.weights.gguf.conversion import (
    ATTENTION,
    HEAD_NORMS,
    MLP,
    Conversion,
    decoder_rules,
    layer_name,
    renamed,
    swiglu_experts,
)
from cairn.models.weights.gguf.metadata import GgufMetadata
from cairn.models.weights.gguf.views import Rule, Rules, flat, single_row, taps, tiled_heads

_EXPERTS = ("ffn_gate_exps.weight", "ffn_gate_up_exps.weight")
_MIXTURE: Rules = MappingProxyType(
    {
        **swiglu_experts("mlp.experts"),
        "ffn_gate_inp.weight": Rule(name="mlp.gate.weight"),
        "ffn_gate_inp_shexp.weight": Rule(name="mlp.shared_expert_gate.weight", shape=single_row),
        "ffn_gate_shexp.weight": Rule(name="mlp.shared_expert.gate_proj.weight"),
        "ffn_up_shexp.weight": Rule(name="mlp.shared_expert.up_proj.weight"),
        "ffn_down_shexp.weight": Rule(name="mlp.shared_expert.down_proj.weight"),
    }
)


def convert_qwen3(metadata: GgufMetadata) -> Conversion:
    """Qwen3, dense."""
    config = metadata.config("qwen3") | {
        "rope_parameters": metadata.rope(),
        "intermediate_size": metadata.each_layer("feed_forward_length"),
    }
    return _qwen3(config)


def convert_qwen3_moe(metadata: GgufMetadata) -> Conversion:
    """Qwen3 with a mixture of experts."""
    config = metadata.config("qwen3_moe") | {"rope_parameters": metadata.rope()} | _mixture(metadata)
    config["norm_topk_prob"] = metadata.model.boolean("expert_weights_norm", default=True)
    return _qwen3(config)


def _qwen3(config: Mapping[str, Any]) -> Conversion:
    layer = {
        "attn_norm.weight": Rule(name="input_layernorm.weight"),
        "ffn_norm.weight": Rule(name="post_attention_layernorm.weight"),
        **ATTENTION,
        **HEAD_NORMS,
        **MLP,
        **_MIXTURE,
    }
    top = decoder_rules()
    return Conversion(config, lambda number: top if number is None else layer, layer_name)


def _mixture(metadata: GgufMetadata) -> dict[str, Any]:
    """config.json's fields of experts."""
    sparse = metadata.layers(*_EXPERTS)
    fields: dict[str, Any] = {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "mlp_only_layers": [layer for layer in range(min(metadata.num_layers, MAX_LAYERS)) if layer not in sparse],
    }
    if fields["mlp_only_layers"]:
        fields["intermediate_size"] = metadata.each_layer("feed_forward_length")
    return fields


def convert_qwen3_5(metadata: GgufMetadata) -> Conversion:
    """Qwen3.5, dense."""
    config = _qwen3_5_config(metadata, "qwen3_5_text")
    return _qwen3_5(metadata, config | {"intermediate_size": metadata.each_layer("feed_forward_length")})


def convert_qwen3_5_moe(metadata: GgufMetadata) -> Conversion:
    """Qwen3.5 with a mixture of experts."""
    config = _qwen3_5_config(metadata, "qwen3_5_moe_text") | _mixture(metadata)
    config["shared_expert_intermediate_size"] = metadata.integer("expert_shared_feed_forward_length")
    return _qwen3_5(metadata, config)


def _qwen3_5_config(metadata: GgufMetadata, model_type: str) -> dict[str, Any]:
    config, model = metadata.config(model_type), metadata.model
    rotated, head_dim = metadata.integer("rope.dimension_count"), max(1, config.get("head_dim", 256))
    heads = metadata.integer("ssm.time_step_rank")
    recurrent = metadata.layers("ssm_a", "ssm_out.weight", "ssm_conv1d.weight")
    rope = metadata.rope() | {"partial_rotary_factor": min(1.0, rotated / head_dim)}
    if model.has("rope.dimension_sections"):
        sections = model.read("rope.dimension_sections", list[int], "a list of integers")
        rope["mrope_section"] = sections[:3]
    return config | {
        "rope_parameters": rope,
        "layer_types": [
            "linear_attention" if layer in recurrent else "full_attention"
            for layer in range(min(metadata.num_layers, MAX_LAYERS + 1))
        ],
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(1, heads),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "mtp_num_hidden_layers": metadata.num_heads_predicting,
    }


def _qwen3_5(metadata: GgufMetadata, config: Mapping[str, Any]) -> Conversion:
    norms = {
        "attn_norm.weight": Rule(name="input_layernorm.weight", change="plus one"),
        "post_attention_norm.weight": Rule(name="post_attention_layernorm.weight", change="plus one"),
        "attn_q_norm.weight": Rule(name="self_attn.q_norm.weight", change="plus one"),
        "attn_k_norm.weight": Rule(name="self_attn.k_norm.weight", change="plus one"),
    }
    layer = {**norms, **ATTENTION, **MLP, **_MIXTURE, **_delta_net(config)}
    top = decoder_rules(change="plus one")
    # Of the head that drafts: tensors that are in none of its layers have other names than those that are.
    head = {
        **renamed(layer, "layers.0.{}"),
        "nextn.eh_proj.weight": Rule(name="fc.weight"),
        "nextn.enorm.weight": Rule(name="pre_fc_norm_embedding.weight", change="plus one"),
        "nextn.hnorm.weight": Rule(name="pre_fc_norm_hidden.weight", change="plus one"),
        "nextn.shared_head_norm.weight": Rule(name="norm.weight", change="plus one"),
    }

    def rules(number: int | None) -> Rules:
        if number is None:
            return top
        return layer if number < metadata.num_layers else head

    return Conversion(config, rules, lambda number: layer_name(number) if number < metadata.num_layers else "mtp")


def _delta_net(config: Mapping[str, Any]) -> Rules:
    groups, heads = max(1, config["linear_num_key_heads"]), config["linear_num_value_heads"]
    if heads % groups:  # which the family refuses, by name
        return {}
    keys, head_dim = 2 * groups * config["linear_key_head_dim"], config["linear_value_head_dim"]
    single, values = tiled_heads(groups, heads, 1), tiled_heads(groups, heads, head_dim)
    after_keys = tiled_heads(groups, heads, head_dim, before=keys)
    return {
        "attn_qkv.weight": Rule(name="linear_attn.in_proj_qkv.weight", row_order=after_keys),
        "attn_gate.weight": Rule(name="linear_attn.in_proj_z.weight", row_order=values),
        "ssm_alpha.weight": Rule(name="linear_attn.in_proj_a.weight", row_order=single),
        "ssm_beta.weight": Rule(name="linear_attn.in_proj_b.weight", row_order=single),
        "ssm_out.weight": Rule(name="linear_attn.out_proj.weight", column_order=values),
        "ssm_conv1d.weight": Rule(name="linear_attn.conv1d.weight", shape=taps, row_order=after_keys),
        "ssm_a": Rule(name="linear_attn.A_log", shape=flat, row_order=single, change="decay"),
        "ssm_dt.bias": Rule(name="linear_attn.dt_bias", row_order=single),
        "ssm_norm.weight": Rule(name="linear_attn.norm.weight"),
    }
