"""Qwen3, dense: config.json -> a checked config, the checkpoint's tensors by name, and what is remembered.

The architecture is that of arXiv 2505.09388 and transformers' `models/qwen3`: attention with a norm on every head of
queries and keys and rotary positions, then a SwiGLU. There is no recurrent state, so any matched length is a hit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cairn.models.attention_share import AttentionSizes
from cairn.models.config_fields import Fields
from cairn.models.contract import TensorLoader
from cairn.models.cut import Run, even
from cairn.models.decoder_family import DecoderFamily
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.remembered import Remembered
from cairn.models.text_sizes import MAX_LAYERS, TextSizes, layer_kinds, read_attention, read_rope_theta, read_text

if TYPE_CHECKING:
    from cairn.layers.model import Model
    from cairn.models.decoder_builder import Execution

__all__ = ["Qwen3Config", "family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """What config.json says, checked."""

    text: TextSizes
    attention: AttentionSizes
    rope_theta: float
    num_hidden_layers: int
    intermediate_size: int

    def layers(self) -> dict[str, int]:
        """See `DecoderConfig`."""
        return {"attention with MLP": self.num_hidden_layers}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See `DecoderConfig`."""
        hidden, inner = self.text.hidden_size, self.intermediate_size
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.text.vocab_size, hidden)}
        for index in range(self.num_hidden_layers):
            name = f"model.layers.{index}"
            found[f"{name}.input_layernorm.weight"] = (hidden,)
            found |= self.attention.tensors(f"{name}.self_attn")
            found[f"{name}.post_attention_layernorm.weight"] = (hidden,)
            found |= {f"{name}.mlp.{part}.weight": (inner, hidden) for part in ("gate_proj", "up_proj")}
            found[f"{name}.mlp.down_proj.weight"] = (hidden, inner)
        found["model.norm.weight"] = (hidden,)
        if not self.text.tied:
            found["lm_head.weight"] = (self.text.vocab_size, hidden)
        return found

    def inner(self, rank: int, size: int) -> Run:
        """The rank's run of the MLP's channels. Raises ConfigError."""
        return even("intermediate_size", self.intermediate_size, rank, size)

    def forward_sizes(self) -> ForwardSizes:
        """See `DecoderConfig`."""
        return ForwardSizes.of(self.tensors(), self.num_hidden_layers * self.attention.queries)

    def remembered(self, rank: int, size: int) -> Remembered:
        """See `DecoderConfig`."""
        self.inner(rank, size)
        share = self.attention.share(rank, size)
        return Remembered(self.text.hidden_size, None, self.attention.remembered(self.num_hidden_layers, share))


def _read(raw: Mapping[str, object]) -> Qwen3Config:
    fields = Fields(raw)
    fields.only("hidden_act", "silu")
    fields.only("use_sliding_window", False)
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    layer_kinds(fields, "layer_types", {"full_attention": "full_attention"})
    text = read_text(fields)
    attention = replace(read_attention(fields, text.hidden_size, head_dim=128), head_norms=("q_norm", "k_norm"))
    return Qwen3Config(
        text=text,
        attention=attention,
        rope_theta=read_rope_theta(raw, attention.head_dim),
        num_hidden_layers=count,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 24),
    )


def _execute(config: Qwen3Config, load: TensorLoader, execution: "Execution") -> "Model":
    from cairn.models import qwen3

    return qwen3.build(config, load, execution)


def family() -> DecoderFamily[Qwen3Config]:
    return DecoderFamily("qwen3", "Qwen3ForCausalLM", _read, _execute)
