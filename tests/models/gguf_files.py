"""Checkpoints as GGUF files: names by the `gguf` package's own table, numbers and metadata as llama.cpp's converter has
them (its `convert_hf_to_gguf.py`)."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file

from models.gguf_blocks import encode

Array = NDArray[np.float32]
Config = Mapping[str, Any]
Named = tuple[str, Array]

ARCHITECTURES: Mapping[str, str] = {
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
    "nemotron_h": "NEMOTRON_H_MOE",
    "granitemoehybrid": "GRANITE_HYBRID",
    "granite": "GRANITE",
    "falcon_h1": "FALCON_H1",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2MOE",
}

_PRE = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35", "granite": "refact", "granitemoehybrid": "refact"}
STORED = "stored as "
"""Before a name that is the file's."""

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


def write_gguf(
    folder: Path,
    out: Path,
    type_name: str | Callable[[str], str] = "F32",
    change: Callable[[GGUFWriter], None] | None = None,
    rename: Callable[[str], str | None] = lambda name: name,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """The checkpoint in `folder`; matrices of the layers in this type where its blocks fit, the embedding and output
    too, all else in float32. `change`: says something else in the end; `rename`: other names, None to leave one out;
    `tokenizer`: fields that are not as `folder` has them, None to leave one out."""
    config = json.loads((folder / "config.json").read_text())
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]
    writer = GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    _METADATA[config["model_type"]](writer, config)
    _write_tokenizer(writer, folder, _PRE.get(config["model_type"], "qwen2"), tokenizer or {})
    tensors = {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}
    for name, values in stored_tensors(config, tensors):
        if (written := rename(name)) is not None:
            _add(writer, written, values, type_name if isinstance(type_name, str) else type_name(written))
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


_NEVER_QUANTIZED = ("_norm", "_inp", "ssm_conv1d", "shortconv.conv")
"""Parts of the names of tensors that are no vectors."""


def _add(writer: GGUFWriter, name: str, values: Array, type_name: str) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    is_matrix = values.ndim > 1 and not any(part in name for part in _NEVER_QUANTIZED) and values.shape[-1] % block == 0
    kind = type_name if is_matrix else "F32"
    writer.add_tensor(name, encode(values, kind), raw_dtype=GGMLQuantizationType[kind])


# -- tensors ---------------------------------------------------------------------------------------------------------


def stored_tensors(config: Config, tensors: Mapping[str, Any]) -> Iterator[Named]:
    """By their names in the file."""
    kind, count = config["model_type"], config["num_hidden_layers"]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[kind]], count + 1)
    for name, values in _stacked(tensors):
        for published, changed in _CHANGES[kind](config, _in_the_trunk(name, count), values):
            name = published.removeprefix(STORED)
            yield name if name != published else stored_name(table, name), np.ascontiguousarray(changed)


def stored_name(table: gguf.TensorNameMap, published: str) -> str:
    """By the package's table, for which a tensor of no kind is a weight."""
    name = table.get_name(published, try_suffixes=(".weight", ".bias"))
    assert name is not None, published
    return name


def _in_the_trunk(name: str, count: int) -> str:
    """The head that drafts is one more layer."""
    if (part := re.fullmatch(r"mtp\.(?:layers\.(\d+)\.)?(.+)\.(\w+)", name)) is None:
        return name
    layer, rest, kind = part.groups()
    renamed = {
        (None, "fc"): "nextn.eh_proj",
        (None, "pre_fc_norm_embedding"): "nextn.enorm",
        (None, "pre_fc_norm_hidden"): "nextn.hnorm",
        (None, "norm"): "nextn.shared_head_norm",
        ("0", "eh_proj"): "nextn.eh_proj",
        ("0", "enorm"): "nextn.enorm",
        ("0", "hnorm"): "nextn.hnorm",
        ("1", "norm"): "post_attention_norm",
        ("1", "final_layernorm"): "nextn.shared_head_norm",
    }
    if (layer, rest) in renamed:
        # The package's table has these for other architectures alone.
        return f"{STORED}blk.{count}.{renamed[layer, rest]}.{kind}"
    trunk = "backbone" if "mixer" in rest or (layer, rest) == ("0", "norm") else "model"
    return f"{trunk}.layers.{count}.{rest}.{kind}"


def _stacked(tensors: Mapping[str, Any]) -> Iterator[Named]:
    stacks: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if (expert := _EXPERT.fullmatch(name)) is None:
            yield name, values
        else:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = values
    for name, experts in stacks.items():
        yield name, np.stack([experts[number] for number in sorted(experts)])


def _as_it_is(config: Config, name: str, values: Array) -> Iterator[Named]:
    yield name, values


def _qwen3_5(config: Config, name: str, values: Array) -> Iterator[Named]:
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    head_dim, keys = config["linear_value_head_dim"], 2 * groups * config["linear_key_head_dim"]

    def tiled(rows: Array, width: int) -> Array:
        shape = (groups, heads // groups, width, *rows.shape[1:])
        return rows.reshape(shape).swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    elif name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
        values = values.squeeze(1) if "conv1d" in name else values
        values = np.concatenate([values[:keys], tiled(values[keys:], head_dim)])
    elif name.endswith(".in_proj_z.weight"):
        values = tiled(values, head_dim)
    elif name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        values = tiled(values, 1)
    elif name.endswith("linear_attn.out_proj.weight"):
        values = tiled(values.T, head_dim).T
    if name.endswith(".A_log"):
        values = -np.exp(values)
    yield name.replace(".dt_bias", ".dt_proj.bias"), values


def _llama_order(config: Config, name: str, values: Array) -> Array:
    """Neighbours are turned against each other."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    return values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def _mamba2(config: Config, groups: int, name: str, values: Array) -> Named:
    if name.endswith(".conv1d.weight"):
        values = values.squeeze(1)
    elif name.endswith((".A_log", ".D")):
        values = (-np.exp(values) if name.endswith(".A_log") else values).reshape(-1, 1)
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        values = values.reshape(groups, -1)
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def _granite(config: Config, name: str, values: Array) -> Iterator[Named]:
    values = _llama_order(config, name, values)
    name, values = _mamba2(config, config.get("mamba_n_groups", 1), name, values)
    if not name.endswith(("_mlp.input_linear.weight", "_moe.input_linear.weight")):
        yield name, values
        return
    # The package's table has no name for a half.
    layer, kind = name.split(".")[2], "shexp" if "shared_mlp" in name else "exps"
    for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
        yield f"{STORED}blk.{layer}.ffn_{part}_{kind}.weight", half


def _falcon_h1(config: Config, name: str, values: Array) -> Iterator[Named]:
    inner, bc = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    into, out = config["attention_in_multiplier"], config["attention_out_multiplier"]
    gate, down = config["mlp_multipliers"]
    factors = {
        "mamba.out_proj": config["ssm_out_multiplier"],
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": out,
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    for part, factor in factors.items():
        if name.endswith(f"{part}.weight"):
            values = values * np.float32(factor)
    if name.endswith("in_proj.weight"):
        sizes = (inner, inner, bc, bc, config["mamba_n_heads"])
        by = np.repeat(np.float32(config["ssm_multipliers"]), sizes)[:, None]
        values = values * np.float32(config["ssm_in_multiplier"]) * by
    yield _mamba2(config, config["mamba_n_groups"], name, values)


def _nemotron_h(config: Config, name: str, values: Array) -> Iterator[Named]:
    name = name.replace(".gate.e_score_correction_bias", ".gate.e_score_correction.bias")
    if ".experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    yield _mamba2(config, config["n_groups"], name, _llama_order(config, name, values))


def _lfm2(config: Config, name: str, values: Array) -> Iterator[Named]:
    if name.endswith("conv.conv.weight"):
        values = values.squeeze(1)
    if ".experts." in name:
        name = name.removeprefix("model.")
    yield name.replace(".expert_bias", ".expert_bias.bias"), values


_CHANGES: Mapping[str, Callable[[Config, str, Array], Iterator[Named]]] = {
    "qwen3": _as_it_is,
    "qwen3_moe": _as_it_is,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite,
    "granite": _granite,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
}


# -- metadata --------------------------------------------------------------------------------------------------------


def _decoder(writer: GGUFWriter, config: Config) -> None:
    heads = config.get("mtp_num_hidden_layers") or config.get("num_nextn_predict_layers") or 0
    writer.add_block_count(config["num_hidden_layers"] + heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config.get("norm_eps") or config["layer_norm_epsilon"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta")
    if theta is not None:
        writer.add_rope_freq_base(theta)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if heads:
        writer.add_nextn_predict_layers(heads)


def _write_qwen3(writer: GGUFWriter, config: Config) -> None:
    _decoder(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _write_qwen3_5(writer: GGUFWriter, config: Config) -> None:
    _write_qwen3(writer, config)
    rope = config["rope_parameters"]
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def _write_granite(writer: GGUFWriter, config: Config) -> None:
    _decoder(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_feed_forward_length(config["intermediate_size"])
    kinds = config.get("layer_types") or ["attention"]
    if set(kinds) == {"attention"}:
        writer.add_head_count_kv(config["num_key_value_heads"])
        return
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "attention" else 0 for kind in kinds])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    heads, head_dim = config["mamba_n_heads"], config["mamba_d_head"]
    _write_mamba2(writer, config["mamba_d_conv"], config["mamba_d_state"], config["mamba_n_groups"], heads, head_dim)


def _write_mamba2(writer: GGUFWriter, conv: int, state: int, groups: int, heads: int, head_dim: int) -> None:
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)


def _write_falcon_h1(writer: GGUFWriter, config: Config) -> None:
    _decoder(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    heads, head_dim = config["mamba_n_heads"], config["mamba_d_head"]
    _write_mamba2(writer, config["mamba_d_conv"], config["mamba_d_state"], config["mamba_n_groups"], heads, head_dim)


def _write_nemotron_h(writer: GGUFWriter, config: Config) -> None:
    _decoder(writer, config)
    pattern, sizes = (
        config["hybrid_override_pattern"],
        {"-": config["intermediate_size"], "E": config["moe_intermediate_size"]},
    )
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "*" else 0 for kind in pattern])
    writer.add_feed_forward_length([sizes.get(kind, 0) for kind in pattern])
    heads, head_dim = config["mamba_num_heads"], config["mamba_head_dim"]
    _write_mamba2(writer, config["conv_kernel"], config["ssm_state_size"], config["n_groups"], heads, head_dim)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _write_lfm2(writer: GGUFWriter, config: Config) -> None:
    _decoder(writer, config)
    writer.add_head_count_kv([config["num_key_value_heads"] if kind != "conv" else 0 for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_experts" not in config:
        writer.add_feed_forward_length(
            int(config["block_multiple_of"] * -(-(2 * config["block_ff_dim"] // 3) // config["block_multiple_of"]))
        )
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


_METADATA: Mapping[str, Callable[[GGUFWriter, Config], None]] = {
    "qwen3": _write_qwen3,
    "qwen3_moe": _write_qwen3,
    "qwen3_5_text": _write_qwen3_5,
    "qwen3_5_moe_text": _write_qwen3_5,
    "nemotron_h": _write_nemotron_h,
    "granitemoehybrid": _write_granite,
    "granite": _write_granite,
    "falcon_h1": _write_falcon_h1,
    "lfm2": _write_lfm2,
    "lfm2_moe": _write_lfm2,
}


def _write_tokenizer(writer: GGUFWriter, folder: Path, pre: str, changes: Mapping[str, Any]) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {each["id"]: each for each in saved["added_tokens"]}
    tokens = {number: token for token, number in saved["model"]["vocab"].items()}
    tokens |= {number: each["content"] for number, each in added.items()}
    kinds = [
        3 if number in added and added[number]["special"] else 4 if number in added else 1 for number in sorted(tokens)
    ]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [tokens[number] for number in sorted(tokens)],
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in saved["model"]["merges"]],
        "chat_template": settings["chat_template"],
        **changes,
    }
    ids = {token: number for number, token in tokens.items()}
    adders = {
        "model": writer.add_tokenizer_model,
        "pre": writer.add_tokenizer_pre,
        "tokens": writer.add_token_list,
        "token_type": writer.add_token_types,
        "merges": writer.add_token_merges,
        "chat_template": writer.add_chat_template,
        "bos_token_id": writer.add_bos_token_id,
        "add_bos_token": writer.add_add_bos_token,
    }
    for name, value in fields.items():
        if value is not None:
            adders[name](value)
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
