"""What every family's config.json says, and all that follows from it without torch."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from cairn.cache.layout import CacheLayout
from cairn.errors import ModelError
from cairn.kernels.state_encoding import STATE_DTYPES, StateEncoding
from cairn.models.attention import AttentionSizes
from cairn.models.config_schema import Fields, boolean, custom, integer, number, token_ids, transfer_facts, unread
from cairn.models.decoder_spec import DecoderSpec, HeadSpec
from cairn.models.feed_forward import ExpertSizes, FeedForwardSizes
from cairn.models.layer_sizes import CacheSpec, ForwardSizes
from cairn.models.rotary import RopeScaling

ServedDType = Literal["float32", "bfloat16"]

StoredQuantization = Literal["fp8", "modelopt", "compressed-tensors", "awq", "gptq", "auto-round", "mxfp4", "gguf"]
"""The method by which a checkpoint is quantized, by its name in config.json and in vLLM's flag."""

ServedQuantization = Literal["int4", "int8"] | StoredQuantization
"""What the weights of matrix products are in, while all else is in the dtype: brought to four bits or to int8 when they
are loaded, or as a checkpoint of that method has them."""

ONLY_CODES: Set[StoredQuantization] = frozenset(("awq", "gptq", "auto-round", "mxfp4", "gguf"))
"""Of those, which have no weights in FP8."""

MADE_AT_LOAD: Set[ServedQuantization] = frozenset(("int4", "int8"))
"""Of those, which are made of any checkpoint."""

AskedQuantization = ServedQuantization
"""What may be asked for: what is made at load, or what a checkpoint is stored in, which says no more than that does."""

DTYPE_BYTES: Mapping[ServedDType, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
"""Of one number."""

_BY_SAVED: Mapping[str, ServedDType] = MappingProxyType(
    {"float32": "float32", "float16": "float32", "bfloat16": "bfloat16"}
)

MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 24


HAS_ATTENTION = attrgetter("has_attention")


def head_dim_by_hidden_size(config: Any) -> int:
    """What a missing head_dim means. Raises ModelError that names the fields."""
    if config.hidden_size % config.num_attention_heads:
        raise ModelError(
            f"config.json: hidden_size {config.hidden_size} must be a multiple of num_attention_heads "
            f"{config.num_attention_heads}, unless there is head_dim"
        )
    return int(config.hidden_size // config.num_attention_heads)


def _state_dtype(fields: Fields, name: str, config: Any) -> str:
    fields.only(name, "auto", *STATE_DTYPES)
    named = str(fields.get(name))
    return named if named in STATE_DTYPES else "float32"


@dataclass(frozen=True, slots=True)
class AskedParts:
    """What is asked of a model that has been opened, and config.json does not say. `serves_mtp`: whether the first of
    its heads that predict further tokens is a part of it; `keeps_all_tokens`: whether keys and values behind a layer's
    reach are kept as if it had none."""

    serves_mtp: bool = False
    keeps_all_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ABC):
    """A family's fields of config.json, checked. A family declares a field again where it differs.

    `has_attention`: whether any layer has it; otherwise its sizes are not read, and are 0. `eps`: of all norms.
    `attention_bias`: of all four projections; `rope_scaling`: of rotary positions, where the family has them.
    `num_mtp_layers`: heads that predict further tokens, as config.json has it. `state_dtype`: what recurrent
    states are in while they run, a name of `STATE_DTYPES`; of a model that has been opened, what was asked for.
    `scaling_extends`: whether sequences may be as long as `rope_scaling` says; else `max_position_embeddings` is with
    it already, or positions turn but a part of each head.
    """

    scaling_extends: ClassVar[bool] = True

    has_attention: bool = custom(lambda fields, name, config: True, fact=False)

    vocab_size: int = integer(1, 1 << 24)
    hidden_size: int = integer(1, 1 << 20)
    max_position_embeddings: int = integer(1, 1 << 30, fact=False)
    eos_token_ids: tuple[int, ...] = token_ids(names=("eos_token_id",), fact=False)
    eps: float = number(1e-12, 1.0, default=1e-6, names=("rms_norm_eps",))
    tie_word_embeddings: bool = boolean(default=False)
    num_attention_heads: int = integer(1, MAX_HEADS, when=HAS_ATTENTION)
    num_key_value_heads: int = integer(
        1,
        MAX_HEADS,
        default=lambda config: config.num_attention_heads,
        divides="num_attention_heads",
        when=HAS_ATTENTION,
    )
    head_dim: int = integer(1, 1 << 12, default=head_dim_by_hidden_size, when=HAS_ATTENTION)
    attention_bias: bool = boolean(default=False)
    rope_scaling: RopeScaling | None = unread()
    num_mtp_layers: int = integer(
        0, 1 << 8, default=0, names=("mtp_num_hidden_layers", "num_nextn_predict_layers"), fact=False
    )
    asked: AskedParts = custom(lambda fields, name, config: AskedParts(), default=AskedParts(), fact=False)
    state_dtype: str = custom(
        _state_dtype, default="float32", names=("mamba_ssm_cache_dtype", "mamba_ssm_dtype"), fact=False
    )

    def asking(self, **parts: bool) -> Self:
        """The same with other `AskedParts`."""
        return replace(self, asked=replace(self.asked, **parts))

    @property
    def serves_mtp(self) -> bool:
        return self.asked.serves_mtp

    @property
    def keeps_all_tokens(self) -> bool:
        return self.asked.keeps_all_tokens

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that the model takes."""
        scaling = self.rope_scaling if self.scaling_extends else None
        return self.max_position_embeddings if scaling is None else scaling.max_positions

    @abstractmethod
    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        """The model as data. `stored`: the checkpoint's tensors, where the family is published in several forms."""

    def head(self, stored: Collection[str] = ()) -> HeadSpec | None:
        """The head that drafts, as data; None where the family is published without any. `stored`: as of `decoder`."""
        return None

    def unused(self, stored: Collection[str] = ()) -> Iterable[str]:
        """Beginnings of the names of tensors that checkpoints have and nothing is computed with. `stored`: as of
        `decoder`."""
        return ()

    def served(self, stored: Collection[str] = ()) -> DecoderSpec:
        """`decoder` with the head, where that is served."""
        spec = self.decoder(stored)
        return replace(spec, head=self.head(stored)) if self.serves_mtp else spec

    @abstractmethod
    def layer_counts(self) -> dict[str, int]:
        """How many layers of each kind, in words."""

    def feed_forward(
        self, field: str, hidden: int | None = None, matrices: int = 3, extra_weights: int = 0
    ) -> FeedForwardSizes:
        """Of a feed-forward layer, or of one expert, whose inner size is `field`; `hidden` None: of hidden states."""
        return FeedForwardSizes(field, hidden or self.hidden_size, getattr(self, field), matrices, extra_weights)

    def mixture(self, field: str, count: int, top_k: int) -> ExpertSizes:
        """Of `count` experts, whose inner size is `field`, and the router, a product of hidden states."""
        return ExpertSizes(count, top_k, self.feed_forward(field), count * self.hidden_size)

    @property
    def attention(self) -> AttentionSizes:
        """Of one attention layer."""
        return AttentionSizes(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            bias=self.attention_bias,
        )

    def cache_spec(self, rank: int = 0, size: int = 1) -> CacheSpec:
        """What one of `size` ranks keeps of a sequence. Raises ConfigError naming --tensor-parallel-size and the field
        that does not divide, whatever that field belongs to."""
        return self.served().cache_spec(rank, size)

    def layout(
        self, block_size: int, dtype_bytes: int, tp_size: int = 1, encoding: StateEncoding | None = None
    ) -> CacheLayout:
        """Pages and checkpoints of one of `tp_size` ranks, the same on every rank: see `CacheSpec.layout`. Raises
        ConfigError as `cache_spec` does."""
        return self.cache_spec(0, tp_size).layout(block_size, dtype_bytes, encoding, tp_size)

    def forward_sizes(self) -> ForwardSizes:
        """What computing a prompt's token takes, counted over the whole model."""
        return self.decoder().forward_sizes()

    def transfer_facts(self) -> dict[str, str | int]:
        """All fields that decide what keys, values and states are: not how long a prompt may be or which ids end it."""
        facts = transfer_facts(self)
        return facts | {"mtp": 1} if self.serves_mtp else facts


def served_dtype(raw: Mapping[str, object]) -> ServedDType:
    """By `dtype` or `torch_dtype`, also those of `text_config`. float16 is widened to float32, which holds it exactly;
    a config.json that names none is served in float32, or where experts are in MXFP4 in bfloat16, as gpt-oss is
    published. Raises ModelError for any other dtype."""
    inner = raw.get("text_config")
    places = {"": raw, "text_config.": inner if isinstance(inner, Mapping) else {}}
    named = {f"{path}{name}": place.get(name) for path, place in places.items() for name in ("dtype", "torch_dtype")}
    quantization = raw.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    silent = "bfloat16" if method == "mxfp4" else "float32"
    field, saved = next(((field, value) for field, value in named.items() if value), ("", silent))
    if not isinstance(saved, str) or saved not in _BY_SAVED:
        raise ModelError(
            f"config.json: {field} {saved!r:.60} is none of {', '.join(_BY_SAVED)}; set it to one of these, or "
            "serve with --dtype"
        )
    return _BY_SAVED[saved]
