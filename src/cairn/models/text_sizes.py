"""What all decoder families' config.json have in common, and how it is read."""

from collections.abc import Mapping
from dataclasses import dataclass

from cairn.errors import ModelError
from cairn.models.attention_share import AttentionSizes
from cairn.models.config_fields import Fields

__all__ = ["MAX_LAYERS", "TextSizes", "layer_kinds", "read_attention", "read_rope_theta", "read_text", "rope_fields"]

MAX_LAYERS = 512
MAX_HEADS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """`eps`: of all norms. `tied`: the output's weight is the embedding's."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eps: float
    tied: bool
    eos_token_ids: tuple[int, ...]


def read_text(fields: Fields, eps_field: str = "rms_norm_eps", eps: float = 1e-6, tied: bool = False) -> TextSizes:
    """`eps`, `tied`: what holds where config.json is silent. Raises ModelError that names the field and the fix."""
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    return TextSizes(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", 1, 1 << 20),
        max_position_embeddings=fields.integer("max_position_embeddings", 1, 1 << 30),
        eps=fields.number(eps_field, 1e-12, 1.0, default=eps),
        tied=fields.boolean("tie_word_embeddings", default=tied),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
    )


def read_attention(fields: Fields, hidden_size: int, head_dim: int | None = None) -> AttentionSizes:
    """Grouped-query attention. `head_dim`: where config.json has none; None stands for an equal part of `hidden_size`.
    Raises ModelError that names the field and the fix."""
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim is None and not fields.has("head_dim"):
        if hidden_size % heads:
            raise ModelError(
                f"config.json: hidden_size {hidden_size} must be a multiple of num_attention_heads {heads}, "
                "unless there is head_dim"
            )
        head_dim = hidden_size // heads
    return AttentionSizes(
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", 1, 1 << 12, default=head_dim),
        bias=fields.boolean("attention_bias", default=False),
    )


def rope_fields(raw: Mapping[str, object]) -> Fields:
    """Where the settings of rotary positions are: in transformers' `rope_parameters`, or beside the other fields, as
    they were published first. Raises ModelError for any scaling, and for settings of their own by kind of layer."""
    fields = Fields(raw)
    fields.only("rope_scaling", None)
    nested = raw.get("rope_parameters")
    if nested is None:
        fields.only("rope_type", "default")
        return fields
    if not isinstance(nested, Mapping):
        raise ModelError("config.json: rope_parameters must be an object")
    rope = Fields(nested)
    for name in nested:
        if isinstance(nested[name], Mapping):
            raise ModelError(f"config.json: rope_parameters has settings for {name} alone, which is not implemented")
    # `type` is the older name, which transformers reads where there is no other.
    rope.only("rope_type" if rope.has("rope_type") else "type", "default")
    return rope


def read_rope_theta(raw: Mapping[str, object], head_dim: int, default: float = 10000.0) -> float:
    """The base of unscaled rotary embeddings over whole heads: `rope_theta` as published, or transformers'
    `rope_parameters`. Raises ModelError for any scaling."""
    fields, rope = Fields(raw), rope_fields(raw)
    for each in (fields, rope):
        each.only("partial_rotary_factor", 1.0)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} must be even, as its elements are turned in pairs")
    return rope.number("rope_theta", 1.0, 1e15, default=fields.number("rope_theta", 1.0, 1e15, default))


def layer_kinds(fields: Fields, name: str, words: Mapping[str, str]) -> tuple[str, ...] | None:
    """The layers' kinds by their words in `name`, as many as `num_hidden_layers`; None where the field is absent.
    Raises ModelError."""
    found = fields.texts(name)
    if found is None:
        return None
    for word in found:
        if word not in words:
            raise ModelError(f"config.json: {name} has {word!r}; each layer must be one of {', '.join(words)}")
    if not 1 <= len(found) <= MAX_LAYERS:
        raise ModelError(f"config.json: {name} names {len(found)} layers; a model has 1..{MAX_LAYERS}")
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS, default=len(found))
    if count != len(found):
        raise ModelError(f"config.json: num_hidden_layers is {count}, but {name} names {len(found)} layers")
    return tuple(words[word] for word in found)
