"""Qwen3.5 and Qwen3-Next: config.json -> a checked config, the checkpoint's tensors by name, and the cache layout.

What config.json may say is in `qwen3_5_fields`. The architecture is the published checkpoints' and transformers'
(`models/qwen3_5`, `qwen3_5_moe`, `qwen3_next`): every layer is a gated delta net or gated attention, and then an MLP or
a mixture of experts with a shared one. Fields keep the names of config.json. Vision is not in here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from cairn.cache.layout import CacheLayout
from cairn.layers.memory import AttentionSpec, ConvPart, RecurrentSpec
from cairn.models.contract import ModelFacts
from cairn.models.cut import Units
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.qwen3_5_fields import DELTA, FULL, read
from cairn.models.qwen3_5_share import Qwen35Share, share_of
from cairn.models.remembered import STATE_BYTES, Remembered

__all__ = [
    "DELTA",
    "FLOAT32_TENSORS",
    "FULL",
    "IGNORED_TENSORS",
    "Qwen35Config",
    "facts",
    "forward_sizes",
    "layers",
    "layout",
    "parse",
    "remembered",
    "tensors",
    "transfer_facts",
    "units",
]

FLOAT32_TENSORS = ("A_log", "dt_bias")
"""Last name parts of the tensors that stay float32 whatever the serving dtype: a few numbers per head that act through
an exponential."""

IGNORED_TENSORS = ("mtp.", "model.visual.")
"""Multi-token prediction is not served; the vision tower is loaded by itself, where there are images to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config:
    """What config.json says, checked. Sizes of a layer kind that the model does not have are 0.

    `prefix`: how the text model's tensor names begin. `sparse_layers`: the layers that have a mixture of experts.
    `packed_projections`: the delta net's projections are stored head by head in two tensors. `rotary_dim`: how many
    elements of a head are rotated; `mrope_section` None: by one position.
    """

    model_type: str
    prefix: str
    layer_types: tuple[str, ...]
    sparse_layers: tuple[int, ...]
    packed_projections: bool
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    # gated attention
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rotary_dim: int = 0
    rope_theta: float = 0.0
    mrope_section: tuple[int, int, int] | None = None
    # gated delta net
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    # MLP and mixture of experts
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True

    @property
    def keys(self) -> int:
        """Channels of the delta net's q, and of its k."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        """Channels of the delta net's v, and of its gate."""
        return self.linear_num_value_heads * self.linear_value_head_dim


def parse(raw: Mapping[str, object], model_type: str) -> Qwen35Config:
    """config.json -> config. Raises ModelError that names the field and the fix."""
    return Qwen35Config(**read(raw, model_type))


def facts(config: Qwen35Config) -> ModelFacts:
    return ModelFacts(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
    )


def layers(config: Qwen35Config) -> dict[str, int]:
    """How many layers of each kind, in words."""
    words = {DELTA: "gated delta net", FULL: "gated attention"}
    return {word: count for kind, word in words.items() if (count := config.layer_types.count(kind))}


def tensors(config: Qwen35Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model by its published name, in the order of the model, with its shape."""
    prefix, hidden = config.prefix, config.hidden_size
    found: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (config.vocab_size, hidden)}
    for index, kind in enumerate(config.layer_types):
        name = f"{prefix}layers.{index}"
        found[f"{name}.input_layernorm.weight"] = (hidden,)
        mixer = _delta_tensors(config) if kind == DELTA else _attention_tensors(config)
        found |= {f"{name}.{part}": shape for part, shape in mixer}
        found[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        if index in config.sparse_layers:
            found |= {f"{name}.mlp.{part}": shape for part, shape in _moe_tensors(config)}
        else:
            found |= {f"{name}.mlp.{part}": shape for part, shape in _mlp_tensors(config, config.intermediate_size)}
    found[f"{prefix}norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    return found


def layout(
    config: Qwen35Config, block_size: int, dtype_bytes: int, tp_size: int = 1, state_bytes: int = STATE_BYTES
) -> CacheLayout:
    """Bytes of pages and checkpoints on one rank; `dtype_bytes` of keys, values, convolution and hidden state.

    page        [kv head][attention layer][k|v][block_size][head_dim]
    checkpoint  header: final hidden state [hidden_size]
                unit:   [delta net layer][conv [kernel - 1][own q | k | v] | state [value heads][key dim][value dim]]
                        of one key head with its value heads

    All ranks have the same layout. Raises ConfigError naming --tensor-parallel-size and the field that does not divide.
    """
    return remembered(config, share_of(config, 0, tp_size)).layout(block_size, dtype_bytes, state_bytes)


def remembered(config: Qwen35Config, share: Qwen35Share) -> Remembered:
    """What the rank with this share remembers."""
    recurrent = attention = None
    if count := config.layer_types.count(DELTA):
        heads, key_dim = share.key_heads.count, config.linear_key_head_dim
        recurrent = RecurrentSpec(
            num_layers=count,
            columns=config.linear_conv_kernel_dim - 1,
            parts=(ConvPart(heads * key_dim), ConvPart(heads * key_dim), ConvPart(heads * share.unit_values)),
            state=(heads * share.unit_heads, key_dim, config.linear_value_head_dim),
            units=heads,
        )
    if count := config.layer_types.count(FULL):
        attention = AttentionSpec(count, share.kv_heads.count, config.head_dim)
    return Remembered(config.hidden_size, recurrent, attention)


def units(config: Qwen35Config) -> Units:
    """What tensor parallelism shares out, counted over the whole model."""
    return remembered(config, share_of(config, 0, 1)).units()


def forward_sizes(config: Qwen35Config) -> ForwardSizes:
    """What computing a prompt's token takes."""
    scores = config.layer_types.count(FULL) * config.num_attention_heads * config.head_dim
    return ForwardSizes.of(tensors(config), scores, config.num_experts_per_tok)


def transfer_facts(config: Qwen35Config) -> dict[str, str | int]:
    """All fields that decide what keys, values and states are: not how long a prompt may be, which ids end it or how
    tensors are named."""
    left_out = ("max_position_embeddings", "eos_token_ids", "prefix", "packed_projections", "model_type")
    found: dict[str, str | int] = {}
    for name in (field.name for field in fields(config)):
        if name not in left_out:
            value = getattr(config, name)
            found[name] = value if type(value) is int else repr(value)
    return found


_Tensors = Iterator[tuple[str, tuple[int, ...]]]


def _delta_tensors(config: Qwen35Config) -> _Tensors:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    conv = 2 * config.keys + config.values
    projections = {"qkv": conv, "z": config.values, "b": heads, "a": heads}
    if config.packed_projections:
        projections = {"qkvz": conv + config.values, "ba": 2 * heads}
    yield from ((f"linear_attn.{name}", (heads,)) for name in ("dt_bias", "A_log"))
    yield "linear_attn.conv1d.weight", (conv, 1, config.linear_conv_kernel_dim)
    yield from ((f"linear_attn.in_proj_{name}.weight", (rows, hidden)) for name, rows in projections.items())
    yield "linear_attn.norm.weight", (config.linear_value_head_dim,)
    yield "linear_attn.out_proj.weight", (hidden, config.values)


def _attention_tensors(config: Qwen35Config) -> _Tensors:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    yield "self_attn.q_proj.weight", (2 * queries, hidden)
    yield from ((f"self_attn.{name}.weight", (keys, hidden)) for name in ("k_proj", "v_proj"))
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield from ((f"self_attn.{name}.weight", (dim,)) for name in ("q_norm", "k_norm"))


def _mlp_tensors(config: Qwen35Config, inner: int) -> _Tensors:
    yield from ((f"{name}.weight", (inner, config.hidden_size)) for name in ("gate_proj", "up_proj"))
    yield "down_proj.weight", (config.hidden_size, inner)


def _moe_tensors(config: Qwen35Config) -> _Tensors:
    yield "gate.weight", (config.num_experts, config.hidden_size)
    for expert in range(config.num_experts):
        for part, shape in _mlp_tensors(config, config.moe_intermediate_size):
            yield f"experts.{expert}.{part}", shape
    for part, shape in _mlp_tensors(config, config.shared_expert_intermediate_size):
        yield f"shared_expert.{part}", shape
    yield "shared_expert_gate.weight", (1, config.hidden_size)
