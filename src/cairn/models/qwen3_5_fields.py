"""Qwen3.5 and Qwen3-Next: which fields of config.json are read, and what each may be. Names are transformers'."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cairn.errors import ModelError
from cairn.models.config_fields import Fields
from cairn.models.text_sizes import rope_fields

__all__ = ["DELTA", "FULL", "MODEL_TYPES", "Form", "read"]

DELTA, FULL = "linear_attention", "full_attention"
"""The words of `layer_types`: gated delta net, and gated attention."""

MAX_LAYERS = 512
MAX_HEADS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How one model type differs from the others. `experts`: every layer that is not said to be dense has a mixture;
    `nested`: the text model's fields are in `text_config`; `next`: Qwen3-Next's tensors and positions."""

    experts: bool = False
    nested: bool = False
    next: bool = False


MODEL_TYPES: Mapping[str, Form] = MappingProxyType(
    {
        "qwen3_5": Form(nested=True),
        "qwen3_5_text": Form(),
        "qwen3_5_moe": Form(nested=True, experts=True),
        "qwen3_5_moe_text": Form(experts=True),
        "qwen3_next": Form(experts=True, next=True),
    }
)

# Settings of which one value is implemented; another one would change the model without a word.
_ONLY: Mapping[str, object] = MappingProxyType(
    {
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "use_sliding_window": False,
    }
)


def read(raw: Mapping[str, object], model_type: str) -> dict[str, Any]:
    """The arguments of `Qwen3_5Config`. Raises ModelError that names the field and the fix."""
    form = MODEL_TYPES[model_type]
    inner = raw.get("text_config") if form.nested else raw
    if not isinstance(inner, Mapping):
        raise ModelError(f"config.json: text_config is missing; {model_type} keeps the text model's fields there")
    fields, outer = Fields(inner), Fields(raw)
    for name, value in _ONLY.items():
        fields.only(name, value)
    layer_types = _layer_types(fields)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    ids = (*outer.token_ids("eos_token_id", vocab_size), *fields.token_ids("eos_token_id", vocab_size))
    tied = fields.boolean("tie_word_embeddings", default=False)
    found: dict[str, Any] = {
        "model_type": model_type,
        "prefix": "model.language_model." if form.nested else "model.",
        "layer_types": layer_types,
        "sparse_layers": _sparse_layers(fields, len(layer_types)) if form.experts else (),
        "packed_projections": form.next,
        "vocab_size": vocab_size,
        "hidden_size": fields.integer("hidden_size", 1, 1 << 20),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, 1 << 30),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-12, 1.0, default=1e-6),
        "tie_word_embeddings": outer.boolean("tie_word_embeddings", default=tied),
        "eos_token_ids": tuple(dict.fromkeys(ids)),
    }
    if FULL in layer_types:
        found |= _attention(fields, inner, not form.next)
    if DELTA in layer_types:
        found |= _delta(fields)
    if len(found["sparse_layers"]) < len(layer_types):
        found["intermediate_size"] = fields.integer("intermediate_size", 1, 1 << 24)
    if found["sparse_layers"]:
        found |= _experts(fields, form)
    return found


def _layer_types(fields: Fields) -> tuple[str, ...]:
    named = fields.texts("layer_types")
    if named is None:
        count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
        return tuple(DELTA if (index + 1) % interval else FULL for index in range(count))
    for word in named:
        if word not in (DELTA, FULL):
            raise ModelError(f"config.json: layer_types has {word!r}; each layer must be {DELTA} or {FULL}")
    if not 1 <= len(named) <= MAX_LAYERS:
        raise ModelError(f"config.json: layer_types names {len(named)} layers; a model has 1..{MAX_LAYERS}")
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS, default=len(named))
    if count != len(named):
        raise ModelError(f"config.json: num_hidden_layers is {count}, but layer_types names {len(named)} layers")
    return named


def _sparse_layers(fields: Fields, count: int) -> tuple[int, ...]:
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = fields.integers("mlp_only_layers", 0, count - 1)
    return tuple(index for index in range(count) if index not in dense and (index + 1) % step == 0)


def _attention(fields: Fields, inner: Mapping[str, object], by_three: bool) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    dim = fields.integer("head_dim", 2, 1 << 12, default=256)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim} | _rotary(
        fields, inner, dim, by_three
    )


def _rotary(fields: Fields, inner: Mapping[str, object], dim: int, by_three: bool) -> dict[str, Any]:
    rope = rope_fields(inner)
    rope.only("mrope_interleaved", True)
    share = rope.number("partial_rotary_factor", 0.0, 1.0, default=fields.number("partial_rotary_factor", 0, 1, 0.25))
    rotated = int(dim * share)
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"config.json: partial_rotary_factor {share:g} of head_dim {dim} must be an even number of elements"
        )
    sections = (rope.integers("mrope_section", 0, 1 << 12) or (11, 11, 10)) if by_three else None
    if sections is not None and (len(sections) != 3 or sum(sections) != rotated // 2):
        raise ModelError(
            f"config.json: mrope_section {list(sections)} must be three numbers that add up to {rotated // 2}, half of "
            "the rotated elements"
        )
    theta = rope.number("rope_theta", 1.0, 1e12, default=fields.number("rope_theta", 1.0, 1e12, 10000.0))
    return {"rotary_dim": rotated, "rope_theta": theta, "mrope_section": sections}


def _delta(fields: Fields) -> dict[str, Any]:
    keys = fields.integer("linear_num_key_heads", 1, MAX_HEADS)
    values = fields.integer("linear_num_value_heads", 1, MAX_HEADS)
    if values % keys:
        raise ModelError(
            f"config.json: linear_num_value_heads {values} must be a multiple of linear_num_key_heads {keys}"
        )
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": fields.integer("linear_key_head_dim", 1, 1 << 12),
        "linear_value_head_dim": fields.integer("linear_value_head_dim", 1, 1 << 12),
        "linear_conv_kernel_dim": fields.integer("linear_conv_kernel_dim", 2, 64, default=4),
    }


def _experts(fields: Fields, form: Form) -> dict[str, Any]:
    experts = fields.integer("num_experts", 1, 1 << 12)
    if not form.next:
        fields.only("norm_topk_prob", True)
    return {
        "num_experts": experts,
        "num_experts_per_tok": fields.integer("num_experts_per_tok", 1, experts),
        "moe_intermediate_size": fields.integer("moe_intermediate_size", 1, 1 << 24),
        "shared_expert_intermediate_size": fields.integer("shared_expert_intermediate_size", 1, 1 << 24),
        "norm_topk_prob": fields.boolean("norm_topk_prob", default=True),
    }
