"""LFM2, dense: config.json -> a checked config, the checkpoint's tensors by name, and what is remembered.

The architecture is that of Liquid AI's checkpoints and transformers' `models/lfm2`: a doubly gated short convolution
or rotary attention with normed heads, then a SwiGLU. All that the convolutions remember is their last inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cairn.errors import ModelError
from cairn.layers.memory import ConvPart, RecurrentSpec
from cairn.models.attention_share import AttentionSizes
from cairn.models.config_fields import Fields
from cairn.models.contract import TensorLoader
from cairn.models.cut import Run, Share, even
from cairn.models.decoder_family import DecoderFamily
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.remembered import Remembered
from cairn.models.text_sizes import MAX_LAYERS, TextSizes, layer_kinds, read_attention, read_rope_theta, read_text

if TYPE_CHECKING:
    from cairn.layers.model import Model
    from cairn.models.decoder_builder import Execution

__all__ = ["ATTENTION", "CONV", "Lfm2Config", "family"]

CONV, ATTENTION = "conv", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config:
    """What config.json says, checked. `pattern`: `conv` or `full_attention` per layer; `conv_taps`: how many inputs the
    convolution sees; `conv_bias`: of convolution and projections."""

    text: TextSizes
    attention: AttentionSizes
    rope_theta: float
    pattern: tuple[str, ...]
    conv_taps: int
    conv_bias: bool
    intermediate_size: int

    def layers(self) -> dict[str, int]:
        """See `DecoderConfig`."""
        return {
            "short convolution with MLP": self.pattern.count(CONV),
            "attention with MLP": self.pattern.count(ATTENTION),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See `DecoderConfig`."""
        hidden, inner = self.text.hidden_size, self.intermediate_size
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.text.vocab_size, hidden)}
        for index, kind in enumerate(self.pattern):
            name = f"model.layers.{index}"
            found[f"{name}.operator_norm.weight"] = (hidden,)
            if kind == CONV:
                found |= self._conv_tensors(f"{name}.conv")
            else:
                found |= self.attention.tensors(f"{name}.self_attn")
            found[f"{name}.ffn_norm.weight"] = (hidden,)
            found |= {f"{name}.feed_forward.{part}.weight": (inner, hidden) for part in ("w1", "w3")}
            found[f"{name}.feed_forward.w2.weight"] = (hidden, inner)
        found["model.embedding_norm.weight"] = (hidden,)
        if not self.text.tied:
            found["lm_head.weight"] = (self.text.vocab_size, hidden)
        return found

    def _conv_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        hidden = self.text.hidden_size
        shapes = {"conv": (hidden, 1, self.conv_taps), "in_proj": (3 * hidden, hidden), "out_proj": (hidden, hidden)}
        found = {}
        for part, shape in shapes.items():
            found[f"{name}.{part}.weight"] = shape
            if self.conv_bias:
                found[f"{name}.{part}.bias"] = shape[:1]
        return found

    @property
    def unit_channels(self) -> int:
        """Of the convolution: as many units as there are query heads, so that it can be cut wherever attention can."""
        return self.text.hidden_size // self.attention.num_heads

    def conv_share(self, rank: int, size: int) -> Share:
        """The rank's units of the convolution's channels. Raises ConfigError."""
        return Share(*even("num_attention_heads", self.attention.num_heads, rank, size))

    def inner(self, rank: int, size: int) -> Run:
        """The rank's run of the MLP's channels. Raises ConfigError."""
        return even("intermediate_size", self.intermediate_size, rank, size)

    def forward_sizes(self) -> ForwardSizes:
        """See `DecoderConfig`."""
        return ForwardSizes.of(self.tensors(), self.pattern.count(ATTENTION) * self.attention.queries)

    def remembered(self, rank: int, size: int) -> Remembered:
        """See `DecoderConfig`."""
        self.inner(rank, size)
        recurrent = attention = None
        if count := self.pattern.count(CONV):
            units = self.conv_share(rank, size).count
            parts = (ConvPart(units * self.unit_channels),)
            recurrent = RecurrentSpec(count, self.conv_taps - 1, parts, state=(units, 0), units=units)
        if count := self.pattern.count(ATTENTION):
            attention = self.attention.remembered(count, self.attention.share(rank, size))
        return Remembered(self.text.hidden_size, recurrent, attention)


def _read(raw: Mapping[str, object]) -> Lfm2Config:
    fields = Fields(raw)
    text = read_text(fields, eps_field="norm_eps", eps=1e-5, tied=True)
    # The first published checkpoints say tie_embedding, which counts where both are said, as in transformers.
    text = replace(text, tied=fields.boolean("tie_embedding", default=text.tied))
    attention = read_attention(fields, text.hidden_size)
    if text.hidden_size % attention.num_heads:
        raise ModelError(
            f"config.json: hidden_size {text.hidden_size} must be a multiple of num_attention_heads "
            f"{attention.num_heads}"
        )
    return Lfm2Config(
        text=text,
        attention=replace(attention, head_norms=("q_layernorm", "k_layernorm"), out="out_proj"),
        rope_theta=read_rope_theta(raw, attention.head_dim, default=1e6),
        pattern=_pattern(fields),
        conv_taps=fields.integer("conv_L_cache", 2, 64, default=3),
        conv_bias=fields.boolean("conv_bias", default=False),
        intermediate_size=_intermediate_size(fields),
    )


def _pattern(fields: Fields) -> tuple[str, ...]:
    """`layer_types`, or of the first published checkpoints `full_attn_idxs`."""
    found = layer_kinds(fields, "layer_types", {CONV: CONV, ATTENTION: ATTENTION})
    if found is not None:
        return found
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    if not fields.has("full_attn_idxs"):
        return (ATTENTION,) * count
    attention = fields.integers("full_attn_idxs", 0, count - 1)
    return tuple(ATTENTION if index in attention else CONV for index in range(count))


def _intermediate_size(fields: Fields) -> int:
    """Of SwiGLU's three matrices: two thirds of what is given, unless that is said to be final already."""
    name = "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size"
    size = fields.integer(name, 1, 1 << 24, default=12288)
    if not fields.boolean("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    multiple = fields.integer("block_multiple_of", 1, 1 << 16, default=256)
    size = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0) * size)
    return multiple * -(-size // multiple)


def _execute(config: Lfm2Config, load: TensorLoader, execution: "Execution") -> "Model":
    from cairn.models import lfm2

    return lfm2.build(config, load, execution)


def family() -> DecoderFamily[Lfm2Config]:
    return DecoderFamily("lfm2", "Lfm2ForCausalLM", _read, _execute)
