"""Nemotron-H: which fields of config.json are read, and what each may be. Names and meanings are transformers'."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.errors import ModelError
from cairn.models.config_fields import Fields

__all__ = ["ATTENTION", "MAMBA", "MLP", "MOE", "read"]

MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
"""The letters of `hybrid_override_pattern`."""

MAX_LAYERS = 512
MAX_HEADS = 1 << 16

_KIND_BY_NAME: Mapping[str, str] = MappingProxyType(
    {
        "mamba": MAMBA,
        "linear_attention": MAMBA,
        "attention": ATTENTION,
        "full_attention": ATTENTION,
        "mlp": MLP,
        "moe": MOE,
    }
)

# Settings of which one value is implemented. transformers reads some of them and ignores others, so that another
# value would change the model in one program and not in the next: better refused than guessed.
_ONLY: Mapping[str, object] = MappingProxyType(
    {
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "attention_bias": False,
        "mamba_proj_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
)


def read(fields: Fields) -> dict[str, Any]:
    """The arguments of `NemotronHConfig`. Raises ModelError that names the field and the fix.

    The layers come from the published `hybrid_override_pattern` or from transformers' `layers_block_type` /
    `layer_types`; fields that only steer training or a kernel's tiling (`chunk_size`, `expand`, ...) are not read.
    """
    for name, value in _ONLY.items():
        fields.only(name, value)
    pattern = _pattern(fields)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    kinds = {ATTENTION: _attention, MAMBA: _mamba, MLP: _mlp, MOE: _moe}
    found: dict[str, Any] = {
        "pattern": pattern,
        "vocab_size": vocab_size,
        "hidden_size": fields.integer("hidden_size", 1, 1 << 20),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, 1 << 30),
        "layer_norm_epsilon": fields.number("layer_norm_epsilon", 1e-12, 1.0, default=1e-5),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size),
        "bos_token_id": fields.token_id("bos_token_id", vocab_size),
        "pad_token_id": fields.token_id("pad_token_id", vocab_size),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }
    for kind in sorted(set(pattern)):
        found |= kinds[kind](fields)
    return found


def _pattern(fields: Fields) -> tuple[str, ...]:
    published = fields.text("hybrid_override_pattern")
    wrong = sorted(set(published or "") - {MAMBA, ATTENTION, MLP, MOE})
    if wrong:
        raise ModelError(
            f"config.json: hybrid_override_pattern has {wrong[0]!r}; each layer must be one of "
            f"{MAMBA} (Mamba2), {ATTENTION} (attention), {MLP} (MLP), {MOE} (mixture of experts)"
        )
    found = {
        name: kinds for name in ("layers_block_type", "layer_types") if (kinds := _kinds(fields, name)) is not None
    }
    if published is not None:
        found["hybrid_override_pattern"] = tuple(published)
    if not found:
        raise ModelError("config.json: hybrid_override_pattern is missing (or layers_block_type): which layer is what?")
    (name, pattern), *others = found.items()
    for other, kinds in others:
        if kinds != pattern:
            raise ModelError(f"config.json: {name} and {other} name different layers; keep one of them")
    if not 1 <= len(pattern) <= MAX_LAYERS:
        raise ModelError(f"config.json: {name} names {len(pattern)} layers; a model has 1..{MAX_LAYERS}")
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS, default=len(pattern))
    if count != len(pattern):
        raise ModelError(f"config.json: num_hidden_layers is {count}, but {name} names {len(pattern)} layers")
    return pattern


def _kinds(fields: Fields, name: str) -> tuple[str, ...] | None:
    words = fields.texts(name)
    if words is None:
        return None
    for word in words:
        if word not in _KIND_BY_NAME:
            raise ModelError(f"config.json: {name} has {word!r}; each layer must be one of {', '.join(_KIND_BY_NAME)}")
    return tuple(_KIND_BY_NAME[word] for word in words)


def _attention(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    # The first published checkpoints say attention_head_dim.
    first = fields.has("attention_head_dim") and not fields.has("head_dim")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": fields.integer("attention_head_dim" if first else "head_dim", 1, 1 << 12),
    }


def _mlp(fields: Fields) -> dict[str, Any]:
    return {"intermediate_size": fields.integer("intermediate_size", 1, 1 << 24)}


def _mamba(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("mamba_num_heads", 1, MAX_HEADS)
    groups = fields.integer("n_groups", 1, MAX_HEADS)
    if heads % groups:
        raise ModelError(f"config.json: mamba_num_heads {heads} must be a multiple of n_groups {groups}")
    return {
        "mamba_num_heads": heads,
        "n_groups": groups,
        "mamba_head_dim": fields.integer("mamba_head_dim", 1, 1 << 12),
        "ssm_state_size": fields.integer("ssm_state_size", 1, 1 << 12),
        "conv_kernel": fields.integer("conv_kernel", 2, 64),
        "use_conv_bias": fields.boolean("use_conv_bias", default=True),
        "use_bias": fields.boolean("use_bias", default=False),
        "time_step_limit": fields.interval("time_step_limit", default=(0.0, float("inf"))),
    }


def _moe(fields: Fields) -> dict[str, Any]:
    fields.only("n_shared_experts", 1)
    experts = fields.integer("n_routed_experts", 2, 1 << 12)
    groups = fields.integer("n_group", 1, experts, default=1)
    # A group is rated by the sum of its two best experts.
    if experts % groups or experts // groups < 2:
        raise ModelError(
            f"config.json: n_routed_experts {experts} must make n_group {groups} equal groups of 2 or more"
        )
    chosen_groups = fields.integer("topk_group", 1, groups, default=1)
    return {
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": chosen_groups,
        "num_experts_per_tok": fields.integer("num_experts_per_tok", 1, experts // groups * chosen_groups),
        "moe_intermediate_size": fields.integer("moe_intermediate_size", 1, 1 << 24),
        "moe_shared_expert_intermediate_size": fields.integer("moe_shared_expert_intermediate_size", 1, 1 << 24),
        "moe_latent_size": fields.integer("moe_latent_size", 1, 1 << 20) if fields.has("moe_latent_size") else None,
        "norm_topk_prob": fields.boolean("norm_topk_prob", default=True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
    }
