"""Granite 4.0: config.json -> a checked config, the checkpoint's tensors by name, and what is remembered.

The architecture is that of IBM's checkpoints and transformers' `models/granitemoehybrid`: Mamba2 or attention (with or
without rotary positions), then a mixture of SwiGLU experts beside a shared one, or the shared one alone, with constant
multipliers of embedding, residual branches, attention scores and logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from cairn.errors import ModelError
from cairn.models.attention_share import AttentionSizes
from cairn.models.config_fields import Fields
from cairn.models.contract import TensorLoader
from cairn.models.cut import Run, even
from cairn.models.decoder_family import DecoderFamily
from cairn.models.forward_sizes import ForwardSizes
from cairn.models.mamba2_fields import MAMBA2_FLOAT32, read_mamba2
from cairn.models.mamba2_share import Mamba2Sizes
from cairn.models.remembered import Remembered
from cairn.models.text_sizes import MAX_LAYERS, TextSizes, layer_kinds, read_attention, read_rope_theta, read_text

if TYPE_CHECKING:
    from cairn.layers.model import Model
    from cairn.models.decoder_builder import Execution

__all__ = ["ATTENTION", "MAMBA", "GraniteConfig", "family"]

MAMBA, ATTENTION = "mamba", "attention"

_KINDS: Mapping[str, str] = MappingProxyType(
    {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig:
    """What config.json says, checked. `pattern`: `mamba` or `attention` per layer. `rope_theta` None: attention without
    positions. `experts` 0: no mixture. `score_scale`: of queries times keys. Other scales: what is multiplied with."""

    text: TextSizes
    attention: AttentionSizes
    mamba2: Mamba2Sizes
    pattern: tuple[str, ...]
    rope_theta: float | None
    score_scale: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int

    def layers(self) -> dict[str, int]:
        """See `DecoderConfig`."""
        behind = "mixture of experts" if self.experts else "MLP"
        words = {MAMBA: "Mamba2", ATTENTION: "attention"}
        return {f"{word} with {behind}": self.pattern.count(kind) for kind, word in words.items()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See `DecoderConfig`."""
        hidden = self.text.hidden_size
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.text.vocab_size, hidden)}
        for index, kind in enumerate(self.pattern):
            name = f"model.layers.{index}"
            found[f"{name}.input_layernorm.weight"] = (hidden,)
            mamba = kind == MAMBA
            found |= self.mamba2.tensors(f"{name}.mamba") if mamba else self.attention.tensors(f"{name}.self_attn")
            found[f"{name}.post_attention_layernorm.weight"] = (hidden,)
            found |= {f"{name}.{part}.weight": shape for part, shape in self.feed_forward_shapes().items()}
        found["model.norm.weight"] = (hidden,)
        if not self.text.tied:
            found["lm_head.weight"] = (self.text.vocab_size, hidden)
        return found

    def feed_forward_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one layer, by the names below it; input projections have the gate's rows first, then up's."""
        hidden, experts = self.text.hidden_size, self.experts
        found: dict[str, tuple[int, ...]] = {}
        if experts:
            found["block_sparse_moe.router.layer"] = (experts, hidden)
            found["block_sparse_moe.input_linear"] = (experts, 2 * self.expert_size, hidden)
            found["block_sparse_moe.output_linear"] = (experts, hidden, self.expert_size)
        found["shared_mlp.input_linear"] = (2 * self.shared_size, hidden)
        found["shared_mlp.output_linear"] = (hidden, self.shared_size)
        return found

    def expert_inner(self, rank: int, size: int) -> Run:
        """The rank's run of every expert's channels. Raises ConfigError."""
        return even("intermediate_size", self.expert_size, rank, size) if self.experts else (0, 0)

    def shared_inner(self, rank: int, size: int) -> Run:
        """The rank's run of the shared expert's channels. Raises ConfigError."""
        return even("shared_intermediate_size", self.shared_size, rank, size)

    def forward_sizes(self) -> ForwardSizes:
        """See `DecoderConfig`."""
        scores = self.pattern.count(ATTENTION) * self.attention.queries
        return ForwardSizes.of(self.tensors(), scores, self.experts_per_token)

    def remembered(self, rank: int, size: int) -> Remembered:
        """See `DecoderConfig`."""
        self.expert_inner(rank, size)
        self.shared_inner(rank, size)
        recurrent = attention = None
        if count := self.pattern.count(MAMBA):
            recurrent = self.mamba2.remembered(count, self.mamba2.share(rank, size))
        if count := self.pattern.count(ATTENTION):
            attention = self.attention.remembered(count, self.attention.share(rank, size))
        return Remembered(self.text.hidden_size, recurrent, attention)


def _read(raw: Mapping[str, object]) -> GraniteConfig:
    fields = Fields(raw)
    fields.only("hidden_act", "silu")
    fields.only("normalization_function", "rmsnorm")
    text = read_text(fields)
    attention = read_attention(fields, text.hidden_size)
    # "nope" is what the checkpoints say, null what transformers writes.
    fields.only("position_embedding_type", "nope", "rope")
    rotary = fields.text("position_embedding_type") == "rope"
    experts = fields.integer("num_local_experts", 0, 1 << 12, default=8)
    return GraniteConfig(
        text=text,
        attention=attention,
        mamba2=read_mamba2(fields, text),
        pattern=_pattern(fields),
        rope_theta=read_rope_theta(raw, attention.head_dim) if rotary else None,
        score_scale=fields.number("attention_multiplier", 1e-9, 1e6, default=1.0),
        embedding_scale=fields.number("embedding_multiplier", 1e-9, 1e6, default=1.0),
        residual_scale=fields.number("residual_multiplier", 1e-9, 1e6, default=1.0),
        logit_scale=1 / fields.number("logits_scaling", 1e-9, 1e6, default=1.0),
        experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, experts, default=2) if experts else 0,
        expert_size=fields.integer("intermediate_size", 1, 1 << 24) if experts else 0,
        shared_size=fields.integer("shared_intermediate_size", 1, 1 << 24, default=1024),
    )


def _pattern(fields: Fields) -> tuple[str, ...]:
    found = {
        name: kinds
        for name in ("layer_types", "layers_block_type")
        if (kinds := layer_kinds(fields, name, _KINDS)) is not None
    }
    if len(set(found.values())) > 1:
        raise ModelError("config.json: layer_types and layers_block_type name different layers; keep one of them")
    if not found:
        return (MAMBA,) * fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    return next(iter(found.values()))


def _execute(config: GraniteConfig, load: TensorLoader, execution: "Execution") -> "Model":
    from cairn.models import granitemoehybrid

    return granitemoehybrid.build(config, load, execution)


def family() -> DecoderFamily[GraniteConfig]:
    return DecoderFamily("granitemoehybrid", "GraniteMoeHybridForCausalLM", _read, _execute, MAMBA2_FLOAT32)
