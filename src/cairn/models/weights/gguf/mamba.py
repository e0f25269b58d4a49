"""llama.cpp's architectures with Mamba2: nemotron_h, nemotron_h_moe, granitehybrid and falcon-h1 (its
`conversion/nemotron.py`, `granite.py`, `falcon_h1.py` and `mamba.py`), and granite, whose attention is stored alike."""

from collections.abc import Mapping
from typing import Any

from cairn.models.config_schema import MAX_LAYERS
from cairn.models.weights.gguf.conversion import (
    ATTENTION,
    MLP,
    PROJECTIONS,
    Conversion,
    LayerRules,
    decoder_rules,
    layer_name,
    matrices,
    renamed,
    with_rows,
)
from cairn.models.weights.gguf.metadata import OUTPUT, GgufMetadata
from cairn.models.weights.gguf.views import Rule, Rules, flat, paired_rotary, taps

_NO_POSITIONS = "nope"


def _mamba2(below: str) -> Rules:
    return {
        "ssm_in.weight": Rule(name=f"{below}.in_proj.weight"),
        "ssm_in.bias": Rule(name=f"{below}.in_proj.bias"),
        "ssm_conv1d.weight": Rule(name=f"{below}.conv1d.weight", shape=taps),
        "ssm_conv1d.bias": Rule(name=f"{below}.conv1d.bias"),
        "ssm_a": Rule(name=f"{below}.A_log", shape=flat, change="decay"),
        "ssm_d": Rule(name=f"{below}.D", shape=flat),
        "ssm_dt.bias": Rule(name=f"{below}.dt_bias"),
        "ssm_norm.weight": Rule(name=f"{below}.norm.weight", shape=flat),
        "ssm_out.weight": Rule(name=f"{below}.out_proj.weight"),
        "ssm_out.bias": Rule(name=f"{below}.out_proj.bias"),
    }


def _paired(config: Mapping[str, Any], rules: Rules) -> Rules:
    """Queries and keys in the order in which Llama's are stored."""
    heads, kv_heads = max(1, config["num_attention_heads"]), max(1, config["num_key_value_heads"])
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    if head_dim % 2:  # which the family refuses, by name, where it has positions
        return rules
    queries, keys = paired_rotary(heads, head_dim), paired_rotary(kv_heads, head_dim)
    names = {"attn_q": queries, "attn_k": keys}
    return with_rows(rules, {f"{name}.{kind}": order for name, order in names.items() for kind in ("weight", "bias")})


def _has_bias(metadata: GgufMetadata, *names: str) -> bool:
    return bool(metadata.layers(*(f"{name}.bias" for name in names)))


def _mamba2_sizes(metadata: GgufMetadata) -> tuple[int, int]:
    """Heads, and channels of x. Raises ModelError that names the field."""
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if heads == 0 or inner % heads:
        path = metadata.model.path_of
        raise metadata.model.error(
            f"{path('ssm.inner_size')} {inner} must be a multiple of {path('ssm.time_step_rank')} {heads}, of as many "
            "heads"
        )
    return heads, inner


def convert_nemotron_h(metadata: GgufMetadata) -> Conversion:
    """Nemotron-H and Nemotron 3."""
    config = metadata.config("nemotron_h", eps="layer_norm_epsilon")
    heads, inner = _mamba2_sizes(metadata)
    config |= {
        "hybrid_override_pattern": "".join(
            _nemotron_letter(metadata, layer) for layer in range(min(metadata.num_layers, MAX_LAYERS + 1))
        ),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "n_groups": metadata.integer("ssm.group_count"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_conv_bias": _has_bias(metadata, "ssm_conv1d"),
        "use_bias": _has_bias(metadata, "ssm_in"),
        "mlp_bias": _has_bias(metadata, "ffn_up", "ffn_up_shexp"),
        "num_nextn_predict_layers": metadata.num_heads_predicting,
    }
    if metadata.layers("ffn_up_exps.weight"):
        config |= _nemotron_experts(metadata)
    dense = [layer for layer in metadata.layers("ffn_up.weight") if not metadata.layer_has(layer, "ffn_up_exps.weight")]
    if dense:
        config["intermediate_size"] = metadata.tensors[f"blk.{dense[0]}.ffn_up.weight"].shape[0]
    return Conversion(config, _nemotron_rules(metadata, config), lambda number: _nemotron_layer(metadata, number))


def _nemotron_letter(metadata: GgufMetadata, layer: int) -> str:
    """A layer's kind, by its tensors; that of a layer that has none is Mamba2, whose tensors are missing then."""
    if metadata.layer_has(layer, "ffn_up_exps.weight", "ffn_down_exps.weight"):
        return "E"
    if metadata.layer_has(layer, "ffn_up.weight", "ffn_down.weight"):
        return "-"
    return "*" if metadata.layer_has(layer, "attn_q.weight", "attn_k.weight", "attn_output.weight") else "M"


def _nemotron_experts(metadata: GgufMetadata) -> dict[str, Any]:
    """config.json's fields of experts."""
    fields: dict[str, Any] = {
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 1),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": metadata.model.boolean("expert_weights_norm", default=True),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }
    if metadata.model.has("moe_latent_size"):
        fields["moe_latent_size"] = metadata.integer("moe_latent_size")
    return fields


def _nemotron_layer(metadata: GgufMetadata, number: int) -> str:
    return f"backbone.layers.{number}" if number < metadata.num_layers else "mtp"


def _nemotron_rules(metadata: GgufMetadata, config: Mapping[str, Any]) -> LayerRules:
    attention = _paired(config, matrices(PROJECTIONS, "mixer"))
    feed_forward: Rules = {
        **matrices({"ffn_up": "up_proj", "ffn_down": "down_proj"}, "mixer"),
        **matrices({"ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}, "mixer.shared_experts"),
        **matrices({"ffn_latent_down": "fc1_latent_proj", "ffn_latent_up": "fc2_latent_proj"}, "mixer"),
        "ffn_up_exps.weight": Rule(name="mixer.experts.{expert}.up_proj.weight"),
        "ffn_down_exps.weight": Rule(name="mixer.experts.{expert}.down_proj.weight"),
        "ffn_gate_inp.weight": Rule(name="mixer.gate.weight"),
        "exp_probs_b.bias": Rule(name="mixer.gate.e_score_correction_bias"),
    }
    norm: Rules = {"attn_norm.weight": Rule(name="norm.weight")}
    layer = {**norm, **attention, **feed_forward, **_mamba2("mixer")}
    head = {
        **renamed({**norm, **attention}, "layers.0.{}"),
        **renamed(feed_forward, "layers.1.{}"),
        "nextn.eh_proj.weight": Rule(name="layers.0.eh_proj.weight"),
        "nextn.enorm.weight": Rule(name="layers.0.enorm.weight"),
        "nextn.hnorm.weight": Rule(name="layers.0.hnorm.weight"),
        "post_attention_norm.weight": Rule(name="layers.1.norm.weight"),
        "nextn.shared_head_norm.weight": Rule(name="layers.1.final_layernorm.weight"),
    }
    top = decoder_rules("backbone.embeddings", "backbone.norm_f")

    def rules(number: int | None) -> Rules:
        if number is None:
            return top
        return layer if number < metadata.num_layers else head

    return rules


def convert_granite_hybrid(metadata: GgufMetadata) -> Conversion:
    """Granite 4.0 with Mamba2."""
    config, hidden = metadata.config("granitemoehybrid"), max(1, metadata.integer("embedding_length"))
    heads, inner = _mamba2_sizes(metadata)
    if inner % hidden:
        path = metadata.model.path_of("ssm.inner_size")
        raise metadata.model.error(f"{path} {inner} must be a multiple of the embedding's length {hidden}")
    experts = metadata.integer("expert_count", 0)
    shared = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    recurrent = metadata.layers("ssm_a", "ssm_in.weight", "ssm_out.weight")
    config |= _multipliers(metadata) | {
        "layer_types": [
            "mamba" if layer in recurrent else "attention" for layer in range(min(metadata.num_layers, MAX_LAYERS + 1))
        ],
        "position_embedding_type": (
            "rope" if metadata.model.boolean("rope.scaling.finetuned", default=True) else _NO_POSITIONS
        ),
        "rope_parameters": metadata.rope(),
        "mamba_expand": inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _has_bias(metadata, "ssm_conv1d"),
        "mamba_proj_bias": _has_bias(metadata, "ssm_in"),
        "attention_bias": _has_bias(metadata, "attn_q"),
        "num_local_experts": experts,
        "shared_intermediate_size": metadata.each_layer(shared),
    }
    if experts:
        config["num_experts_per_tok"] = metadata.integer("expert_used_count")
        config["intermediate_size"] = metadata.each_layer("feed_forward_length")
    names = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp") if experts else ("ffn_gate", "ffn_up", "ffn_down")
    gate, up, down = (f"{name}.weight" for name in names)
    layer = {
        "attn_norm.weight": Rule(name="input_layernorm.weight"),
        "ffn_norm.weight": Rule(name="post_attention_layernorm.weight"),
        **_paired(config, ATTENTION),
        **_mamba2("mamba"),
        gate: Rule(name="shared_mlp.input_linear.weight"),
        up: Rule(name="shared_mlp.input_linear.weight", place=1),
        down: Rule(name="shared_mlp.output_linear.weight"),
        "ffn_gate_exps.weight": Rule(name="block_sparse_moe.input_linear.weight"),
        "ffn_up_exps.weight": Rule(name="block_sparse_moe.input_linear.weight", place=1),
        "ffn_down_exps.weight": Rule(name="block_sparse_moe.output_linear.weight"),
        "ffn_gate_inp.weight": Rule(name="block_sparse_moe.router.layer.weight"),
    }
    top = decoder_rules()
    return Conversion(config, lambda number: top if number is None else layer, layer_name)


def _multipliers(metadata: GgufMetadata) -> dict[str, Any]:
    """Granite's; 1 is what a file is silent about."""
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: metadata.number(stored) for name, stored in names.items() if metadata.model.has(stored)}


def convert_granite(metadata: GgufMetadata) -> Conversion:
    """Granite 3, dense, and Granite 4.0 without Mamba2."""
    metadata.model.only("expert_count", 0)
    config = metadata.config("granite") | _multipliers(metadata)
    config |= {
        "rope_parameters": metadata.rope(),
        "intermediate_size": metadata.each_layer("feed_forward_length"),
        "attention_bias": _has_bias(metadata, "attn_q"),
        "mlp_bias": _has_bias(metadata, "ffn_up"),
    }
    layer = {
        "attn_norm.weight": Rule(name="input_layernorm.weight"),
        "ffn_norm.weight": Rule(name="post_attention_layernorm.weight"),
        **_paired(config, ATTENTION),
        **MLP,
    }
    top = decoder_rules()
    return Conversion(config, lambda number: top if number is None else layer, layer_name)


def convert_falcon_h1(metadata: GgufMetadata) -> Conversion:
    """Falcon-H1, whose weights are stored with their multipliers."""
    if OUTPUT not in metadata.tensors:
        raise metadata.model.error(
            f"{OUTPUT} is missing: the embedding, which is stored with its multiplier, is no output"
        )
    heads, inner = _mamba2_sizes(metadata)
    config = metadata.config("falcon_h1") | {
        "rope_parameters": metadata.rope(),
        "intermediate_size": metadata.each_layer("feed_forward_length"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _has_bias(metadata, "ssm_conv1d"),
        "mamba_proj_bias": _has_bias(metadata, "ssm_in"),
        "projectors_bias": _has_bias(metadata, "ssm_out"),
        "mamba_rms_norm": bool(metadata.layers("ssm_norm.weight")),
        "mamba_norm_before_gate": False,
    }
    norm = Rule(name="pre_ff_layernorm.weight")
    layer = {
        "attn_norm.weight": Rule(name="input_layernorm.weight"),
        "ffn_norm": norm,
        "ffn_norm.weight": norm,
        **ATTENTION,
        **matrices({"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}, "feed_forward"),
        **_mamba2("mamba"),
    }
    top = decoder_rules(final_norm="model.final_layernorm")
    return Conversion(config, lambda number: top if number is None else layer, layer_name)
