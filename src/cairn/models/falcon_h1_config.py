"""Falcon-H1: config.json -> a checked config, the checkpoint's tensors by name, and what is remembered.

The architecture is that of arXiv 2507.22448 and transformers' `models/falcon_h1`: every layer has Mamba2 and rotary
attention side by side on the same normed input, then a SwiGLU, with constant multipliers almost everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
from cairn.models.text_sizes import MAX_LAYERS, TextSizes, read_attention, read_rope_theta, read_text

if TYPE_CHECKING:
    from cairn.layers.model import Model
    from cairn.models.decoder_builder import Execution

__all__ = ["FalconH1Config", "Multipliers", "family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """config.json's `*_multiplier` and `*_multipliers`. `ssm`: of gate, x, B, C and dt; `mlp`: of the gate before its
    silu, and of the output."""

    embedding: float
    lm_head: float
    key: float
    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]
    mlp: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config:
    """What config.json says, checked."""

    text: TextSizes
    attention: AttentionSizes
    mamba2: Mamba2Sizes
    multipliers: Multipliers
    rope_theta: float
    num_hidden_layers: int
    intermediate_size: int
    mlp_bias: bool

    def layers(self) -> dict[str, int]:
        """See `DecoderConfig`."""
        return {"Mamba2 beside attention with MLP": self.num_hidden_layers}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See `DecoderConfig`."""
        hidden, inner = self.text.hidden_size, self.intermediate_size
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.text.vocab_size, hidden)}
        for index in range(self.num_hidden_layers):
            name = f"model.layers.{index}"
            found[f"{name}.input_layernorm.weight"] = (hidden,)
            found |= self.mamba2.tensors(f"{name}.mamba")
            found |= self.attention.tensors(f"{name}.self_attn")
            found[f"{name}.pre_ff_layernorm.weight"] = (hidden,)
            for part, shape in mlp.items():
                found[f"{name}.feed_forward.{part}.weight"] = shape
                if self.mlp_bias:
                    found[f"{name}.feed_forward.{part}.bias"] = shape[:1]
        found["model.final_layernorm.weight"] = (hidden,)
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
        count = self.num_hidden_layers
        return Remembered(
            self.text.hidden_size,
            self.mamba2.remembered(count, self.mamba2.share(rank, size)),
            self.attention.remembered(count, self.attention.share(rank, size)),
        )


def _read(raw: Mapping[str, object]) -> FalconH1Config:
    fields = Fields(raw)
    fields.only("hidden_act", "silu")
    text = read_text(fields, eps=1e-5)
    attention = read_attention(fields, text.hidden_size)
    normed = fields.boolean("mamba_rms_norm", default=False)
    # Where config.json is silent the norm comes first; false is always written out, as it is not the default.
    if normed and fields.boolean("mamba_norm_before_gate", default=True):
        raise ModelError(
            "config.json: mamba_norm_before_gate is true (which it also is where it is missing), but with "
            "mamba_rms_norm only false is implemented"
        )
    inner = fields.integer("mamba_d_ssm", 1, 1 << 24) if fields.has("mamba_d_ssm") else None
    out_bias = fields.boolean("projectors_bias", default=False)
    return FalconH1Config(
        text=text,
        attention=attention,
        mamba2=read_mamba2(fields, text, inner=inner, out_bias=out_bias, normed=normed),
        multipliers=_multipliers(fields),
        rope_theta=read_rope_theta(raw, attention.head_dim),
        num_hidden_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 24),
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )


def _multipliers(fields: Fields) -> Multipliers:
    def one(name: str) -> float:
        return fields.number(f"{name}_multiplier", -1e6, 1e6, default=1.0)

    return Multipliers(
        embedding=one("embedding"),
        lm_head=one("lm_head"),
        key=one("key"),
        attention_in=one("attention_in"),
        attention_out=one("attention_out"),
        ssm_in=one("ssm_in"),
        ssm_out=one("ssm_out"),
        ssm=fields.numbers("ssm_multipliers", 5, -1e6, 1e6, default=1.0),
        mlp=fields.numbers("mlp_multipliers", 2, -1e6, 1e6, default=1.0),
    )


def _execute(config: FalconH1Config, load: TensorLoader, execution: "Execution") -> "Model":
    from cairn.models import falcon_h1

    return falcon_h1.build(config, load, execution)


def family() -> DecoderFamily[FalconH1Config]:
    return DecoderFamily("falcon_h1", "FalconH1ForCausalLM", _read, _execute, MAMBA2_FLOAT32)
