"""Gemma 2 and Gemma 3 (Google's checkpoints and transformers' `models/gemma2` and `models/gemma3`): attention that sees
a window of tokens in some layers and all of them in the others, then a GeGLU, with norms before and after each. Gemma 3
has norms of heads and turns by another base where there is a window; Gemma 2 bounds scores and logits. There is no
recurrent state, so any matched length is a hit. Of a checkpoint that also sees the text model alone is served."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from cairn.kernels.attention_rule import AttentionRule
from cairn.models.attention import AttentionLayer
from cairn.models.config_schema import (
    MAX_LAYERS,
    Fields,
    boolean,
    by_layer,
    custom,
    integer,
    layer_kinds,
    number,
    only,
    reach,
    token_ids,
)
from cairn.models.contract import Family
from cairn.models.decoder_config import MAX_HEADS, MAX_WIDTH, DecoderConfig
from cairn.models.decoder_spec import DecoderSpec, EmbeddingScale
from cairn.models.feed_forward import GatedMLPLayer
from cairn.models.nested_config import INNER_EOS, is_nested, parts_beside, text_config, text_prefix
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import SCALED, RopeKind, RopeScaling, RotarySpec, rope_scaling, rope_theta
from cairn.models.weight_specs import MixerSpec

WINDOWED, FULL = "sliding_attention", "full_attention"
KINDS = WINDOWED, FULL

FULL_ROPE = RopeKind(FULL, ("default", *SCALED), theta="rope_theta", scaling="rope_scaling")
WINDOWED_ROPE = RopeKind(WINDOWED, theta="rope_local_base_freq")


def every(period: int, count: int) -> Callable[[Fields], tuple[str, ...]]:
    """See `by_layer`. The last of so many layers sees all tokens."""
    return by_layer(lambda index: WINDOWED if (index + 1) % period else FULL, count)


def _by_pattern(fields: Fields) -> tuple[str, ...]:
    return every(fields.integer("sliding_window_pattern", 1, MAX_LAYERS, default=6), 26)(fields)


def softcap(default: float | None) -> Any:
    """A field: null is none."""

    def reader(fields: Fields, name: str, config: Any) -> float | None:
        if fields.has(name):
            return fields.number(name, 1e-6, 1e9)
        return None if fields.says(name) else default

    return custom(reader, default=default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """Defaults are transformers'. `sliding_window`: 0 in a model without windows."""

    layer_types: tuple[str, ...] = layer_kinds(KINDS, default=every(2, 26))
    vocab_size: int = integer(1, 1 << 24, default=256_000)
    hidden_size: int = integer(1, 1 << 20, default=2304)
    max_position_embeddings: int = integer(1, 1 << 30, default=8192, fact=False)
    tie_word_embeddings: bool = boolean(default=True)
    num_attention_heads: int = integer(1, MAX_HEADS, default=8)
    num_key_value_heads: int = integer(1, MAX_HEADS, default=4, divides="num_attention_heads")
    head_dim: int = integer(1, 1 << 12, default=256)
    sliding_window: int = reach(WINDOWED, default=4096)
    query_pre_attn_scalar: float = number(1e-6, 1e9, default=256.0)
    attn_logit_softcapping: float | None = softcap(50.0)
    final_logit_softcapping: float | None = softcap(30.0)
    use_bidirectional_attention: bool = only(False)
    rope_theta: float = rope_theta()
    rope_scaling: RopeScaling | None = rope_scaling()
    intermediate_size: int = integer(1, MAX_WIDTH, default=9216)
    hidden_activation: str = only("gelu_pytorch_tanh")
    nested: bool = is_nested()

    head_norms: ClassVar[tuple[str, ...]] = ()

    def rotary(self, kind: str) -> RotarySpec:
        """Of layers of this kind."""
        return RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling)

    def rule(self, kind: str) -> AttentionRule:
        """Of layers of this kind."""
        usual = self.query_pre_attn_scalar == self.head_dim
        return AttentionRule(
            window=self.sliding_window if kind == WINDOWED else None,
            scale=None if usual else self.query_pre_attn_scalar**-0.5,
            softcap=self.attn_logit_softcapping,
        )

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        """See `DecoderConfig`. All norms are centred."""
        prefix = text_prefix(stored, nested=self.nested)
        layers = tuple(self._layers(prefix))
        return DecoderSpec(
            config=self,
            embedding=f"{prefix}.embed_tokens.weight",
            layers=tuple((before, mixer) for before, mixer, _ in layers),
            norms_after=MappingProxyType({before: after for before, _, after in layers}),
            final_norm=f"{prefix}.norm",
            centred=True,
            rotary=self.rotary(FULL),
            embedding_scale=EmbeddingScale(self.hidden_size**0.5, rounded=True),
            logit_cap=self.final_logit_softcapping,
        )

    def _layers(self, prefix: str) -> Iterator[tuple[str, MixerSpec, str]]:
        """Each with the name of the norm after it."""
        for index, kind in enumerate(self.layer_types):
            name = f"{prefix}.layers.{index}"
            attention = AttentionLayer(
                self.attention,
                f"{name}.self_attn",
                self.head_norms,
                centred=True,
                rotary=self.rotary(kind),
                rule=self.rule(kind),
            )
            yield f"{name}.input_layernorm", attention, f"{name}.post_attention_layernorm"
            mlp = GatedMLPLayer(self.feed_forward("intermediate_size"), f"{name}.mlp", activation="gelu")
            yield f"{name}.pre_feedforward_layernorm", mlp, f"{name}.post_feedforward_layernorm"

    def layer_counts(self) -> dict[str, int]:
        words = {WINDOWED: "windowed attention with MLP", FULL: "attention with MLP"}
        return {word: count for kind, word in words.items() if (count := self.layer_types.count(kind))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """`rope_theta`, `rope_scaling`: of layers that see all tokens; `rope_local_base_freq`: the base of the others."""

    layer_types: tuple[str, ...] = layer_kinds(KINDS, default=_by_pattern)
    vocab_size: int = integer(1, 1 << 24, default=262_208)
    max_position_embeddings: int = integer(1, 1 << 30, default=131_072, fact=False)
    eos_token_ids: tuple[int, ...] = token_ids(names=("eos_token_id", INNER_EOS), fact=False)
    # transformers reads it and leaves scores as they are.
    attn_logit_softcapping: float | None = only(None)
    final_logit_softcapping: float | None = softcap(None)
    rope_local_base_freq: float = rope_theta(1e4, WINDOWED_ROPE)
    rope_theta: float = rope_theta(1e6, FULL_ROPE)
    rope_scaling: RopeScaling | None = rope_scaling(FULL_ROPE)

    head_norms: ClassVar[tuple[str, ...]] = ("q_norm", "k_norm")
    scaling_extends: ClassVar[bool] = False

    def rotary(self, kind: str) -> RotarySpec:
        if kind == FULL:
            return RotarySpec(self.head_dim, self.rope_theta, scaling=self.rope_scaling)
        return RotarySpec(self.head_dim, self.rope_local_base_freq)


FAMILIES = (
    Family(model_type="gemma2", architecture="Gemma2ForCausalLM", config=Gemma2Config),
    Family(model_type="gemma3_text", architecture="Gemma3ForCausalLM", config=Gemma3Config),
    Family(
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        config=Gemma3Config,
        ignored_tensors=parts_beside("vision_tower", "multi_modal_projector"),
        flatten=text_config(tied=True),
    ),
)

_FINAL = 10.0

_SPREADS = MappingProxyType(
    # Weights of norms are stored less 1. Queries are long enough for attention that looks at a few tokens.
    {"q_norm.weight": (1.0, 0.2), "model.norm.weight": (_FINAL - 1, 0.1), "norm.weight": (0.0, 0.1)}
)

_GAINS = MappingProxyType(
    # Tied to the output and scaled by the root of the width: as small as that the next token is not the last one again.
    {"embed_tokens.weight": LOGIT_STD / _FINAL}
)

GEMMA3_RECIPE = Recipe(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    # About 5 M parameters with windows of 40 tokens; about 300 M.
    sizes={
        "num_hidden_layers": by_size(6, 18),
        "hidden_size": by_size(256, 1024),
        "num_attention_heads": by_size(4, 8),
        "num_key_value_heads": by_size(2, 2),
        "head_dim": by_size(64, 128),
        "intermediate_size": by_size(512, 4096),
        "query_pre_attn_scalar": by_size(64, 128),
        "sliding_window": by_size(40, 512),
    },
    fields={
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window_pattern": by_size(3, 6),
    },
    spreads=_SPREADS,
    gains=_GAINS,
)

GEMMA2_RECIPE = Recipe(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    # About 5 M parameters with windows of 40 tokens; about 300 M.
    sizes=GEMMA3_RECIPE.sizes,
    fields={
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
    },
    spreads=_SPREADS,
    gains=_GAINS,
)
