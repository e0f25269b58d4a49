"""Qwen3.5 and Qwen3-Next (the published checkpoints and transformers' `models/qwen3_5`, `qwen3_5_moe`, `qwen3_next`):
every layer is a gated delta net or gated attention, and then an MLP or a mixture of experts with a shared one. What
images are read with is in `qwen3_5_vision`."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

from cairn.errors import ModelError
from cairn.models.attention import AttentionLayer, AttentionSizes
from cairn.models.config_schema import (
    MAX_LAYERS,
    Fields,
    boolean,
    custom,
    integer,
    layer_kinds,
    only,
    token_ids,
    unread,
)
from cairn.models.contract import Family
from cairn.models.decoder_config import HAS_ATTENTION, MAX_WIDTH
from cairn.models.decoder_spec import DecoderSpec, HeadSpec, NamedMixer
from cairn.models.feed_forward import ExpertsLayer, GatedMLPLayer, SoftmaxRule
from cairn.models.gated_delta_net import DELTA, DeltaNetConfig, DeltaNetLayer
from cairn.models.nested_config import INNER_EOS, is_nested, text_config
from cairn.models.random_weights.recipe import LOGIT_STD, Recipe, by_size
from cairn.models.rotary import RopeScaling, RotarySpec, rope_fields, rope_scaling

FULL = "full_attention"


def _by_interval(fields: Fields) -> tuple[str, ...]:
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
    return tuple(DELTA if (index + 1) % interval else FULL for index in range(count))


def sparse_layers(fields: Fields, name: str, config: Any) -> tuple[int, ...]:
    """Every layer, or every so many of them, that is not said to be dense. Raises ModelError that names the field."""
    count = len(config.layer_types)
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = fields.integers("mlp_only_layers", 0, count - 1)
    return tuple(index for index in range(count) if index not in dense and (index + 1) % step == 0)


def _rope_number(fields: Fields, name: str, low: float, high: float, default: float) -> float:
    return rope_fields(fields).number(name, low, high, default=fields.number(name, low, high, default))


def _rotary_dim(fields: Fields, name: str, config: Any) -> int:
    share = _rope_number(fields, "partial_rotary_factor", 0.0, 1.0, 0.25)
    rotated = int(config.head_dim * share)
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"config.json: partial_rotary_factor {share:g} of head_dim {config.head_dim} must be an even number of "
            "elements"
        )
    return rotated


def _mrope_section(fields: Fields, name: str, config: Any) -> tuple[int, ...] | None:
    """How many pairs turn by time, height and width. Of text all three are one: what does not fit then, as
    transformers' default does not with small heads, changes nothing."""
    rope = rope_fields(fields)
    rope.only("mrope_interleaved", True)
    sections, pairs = rope.integers(name, 0, 1 << 12) or (11, 11, 10), config.rotary_dim // 2
    if len(sections) == 3 and sum(sections) == pairs:
        return sections
    if not fields.has("vision_config"):
        return None
    raise ModelError(
        f"config.json: {name} {list(sections)} must be three numbers that add up to {pairs}, half of the rotated "
        "elements"
    )


def _normed(fields: Fields, name: str, config: Any) -> bool:
    fields.only(name, True)
    return fields.boolean(name, default=True)


HAS_SPARSE = attrgetter("sparse_layers")


def has_dense(config: Any) -> bool:
    """Whether there are layers without a mixture of experts."""
    return len(config.sparse_layers) < len(config.layer_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(DeltaNetConfig):
    """Sizes of a layer kind that the model does not have are 0.

    `nested`: the text model is a part of one that also sees, in config.json as in tensors' names; `packed`: the delta
    net's projections are stored head by head in two tensors. `sparse_layers`: the layers that have a mixture of
    experts. `rotary_dim`: how many elements of a head are rotated; `mrope_section` None: by one position.
    `sliding_window` counts where `use_sliding_window` is true.
    """

    layer_types: tuple[str, ...] = layer_kinds((DELTA, FULL), default=_by_interval)
    sparse_layers: tuple[int, ...] = custom(lambda fields, name, config: ())
    eos_token_ids: tuple[int, ...] = token_ids(names=("eos_token_id", INNER_EOS), fact=False)
    # gated attention
    has_attention: bool = custom(lambda fields, name, config: FULL in config.layer_types, fact=False)
    head_dim: int = integer(2, 1 << 12, default=256, when=HAS_ATTENTION)
    rotary_dim: int = custom(_rotary_dim, when=HAS_ATTENTION)
    rope_theta: float = custom(
        lambda fields, name, config: _rope_number(fields, name, 1.0, 1e12, 10000.0), default=0.0, when=HAS_ATTENTION
    )
    rope_scaling: RopeScaling | None = rope_scaling(when=HAS_ATTENTION)
    mrope_section: tuple[int, int, int] | None = custom(_mrope_section, default=None, when=HAS_ATTENTION)
    # MLP and mixture of experts
    intermediate_size: int = integer(1, MAX_WIDTH, when=has_dense)
    num_experts: int = integer(1, 1 << 12, when=HAS_SPARSE)
    num_experts_per_tok: int = integer(1, lambda config: config.num_experts, when=HAS_SPARSE)
    moe_intermediate_size: int = integer(1, MAX_WIDTH, when=HAS_SPARSE)
    shared_expert_intermediate_size: int = integer(1, MAX_WIDTH, when=HAS_SPARSE)
    norm_topk_prob: bool = custom(_normed, default=True, when=HAS_SPARSE)
    hidden_act: str = only("silu")
    attention_bias: bool = only(False)
    attn_output_gate: bool = only(True)
    use_sliding_window: bool = only(False)
    sliding_window: int | None = unread()
    nested: bool = is_nested()

    @property
    def attention(self) -> AttentionSizes:
        """Of one attention layer."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        return AttentionSizes(self.hidden_size, heads, kv_heads, self.head_dim, gated=True)

    def decoder(self, stored: Collection[str] = ()) -> DecoderSpec:
        """See `DecoderConfig`. Norms are centred, but for the one in the delta net."""
        # A text model that was cut out of one that also sees may be stored under the names that it had there, which
        # transformers takes, too.
        names = ("model", "model.language_model")[:: -1 if self.nested else 1]
        prefix = next((name for name in names if f"{name}.embed_tokens.weight" in stored), names[0])
        rotary = RotarySpec(self.rotary_dim, self.rope_theta, self.mrope_section, self.rope_scaling)
        return DecoderSpec(
            config=self,
            embedding=f"{prefix}.embed_tokens.weight",
            layers=tuple(self._layers(prefix, stored)),
            final_norm=f"{prefix}.norm",
            centred=True,
            rotary=rotary if FULL in self.layer_types else None,
        )

    def head(self, stored: Collection[str] = ()) -> HeadSpec | None:
        """See `DecoderConfig`. `mtp.*`, which transformers does not read, as vLLM has it (qwen3_5_mtp.py,
        qwen3_next_mtp.py): one layer with attention, whose experts may be stored in the other form than the
        model's."""
        if not self.has_attention:
            return None
        return HeadSpec(
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            projection="mtp.fc",
            attention_norm="mtp.layers.0.input_layernorm",
            attention=self._attention("mtp.layers.0"),
            others=(self._feed_forward("mtp.layers.0", 0 in self.sparse_layers, stored),),
            final_norm="mtp.norm",
        )

    def _layers(self, prefix: str, stored: Collection[str]) -> Iterator[NamedMixer]:
        for index, kind in enumerate(self.layer_types):
            name = f"{prefix}.layers.{index}"
            delta = DeltaNetLayer(self.delta_net, f"{name}.linear_attn")
            yield f"{name}.input_layernorm", self._attention(name) if kind == FULL else delta
            yield self._feed_forward(name, index in self.sparse_layers, stored)

    def _attention(self, layer: str) -> AttentionLayer:
        return AttentionLayer(self.attention, f"{layer}.self_attn", ("q_norm", "k_norm"), centred=True)

    def _feed_forward(self, layer: str, sparse: bool, stored: Collection[str]) -> NamedMixer:
        """Experts are published as a tensor for each expert and matrix, and as two stacks."""
        norm, name = f"{layer}.post_attention_layernorm", f"{layer}.mlp"
        if not sparse:
            return norm, GatedMLPLayer(self.feed_forward("intermediate_size"), name)
        experts, shared = f"{name}.experts", f"{name}.shared_expert"
        sizes = self.feed_forward("shared_expert_intermediate_size", extra_weights=self.hidden_size)
        stacks = f"{experts}.gate_up_proj", f"{experts}.down_proj"
        mixture = ExpertsLayer(
            sizes=self.mixture("moe_intermediate_size", self.num_experts, self.num_experts_per_tok),
            hidden=self.hidden_size,
            router=f"{name}.gate",
            routing=SoftmaxRule(self.norm_topk_prob),
            experts=experts,
            stacks=stacks if stacks[0] in stored else None,
            shared=GatedMLPLayer(sizes, shared, outcome_gate=f"{shared}_gate.weight"),
        )
        return norm, mixture

    def layer_counts(self) -> dict[str, int]:
        words = {DELTA: "gated delta net", FULL: "gated attention"}
        return {word: count for kind, word in words.items() if (count := self.layer_types.count(kind))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    """Every layer that is not said to be dense has a mixture."""

    sparse_layers: tuple[int, ...] = custom(sparse_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """Qwen3-Next's tensors and positions."""

    packed: ClassVar[bool] = True

    mrope_section: None = custom(lambda fields, name, config: None, default=None)
    norm_topk_prob: bool = boolean(default=True, when=HAS_SPARSE)


def _family(model_type: str, architecture: str, config: type[Qwen35Config], *, nested: bool = False) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        config=config,
        float32_tensors=("A_log", "dt_bias"),
        # Multi-token prediction may not be served; the vision tower is loaded by itself, where there are images to see.
        ignored_tensors=("mtp.", "model.visual."),
        flatten=text_config(tied=False) if nested else Fields,
        reads_images=True,
    )


FAMILIES = (
    _family("qwen3_5", "Qwen3_5ForConditionalGeneration", Qwen35Config, nested=True),
    _family("qwen3_5_text", "Qwen3_5ForCausalLM", Qwen35Config),
    _family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", Qwen35MoeConfig, nested=True),
    _family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", Qwen35MoeConfig),
    _family("qwen3_next", "Qwen3NextForCausalLM", Qwen3NextConfig),
)

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Control tokens that Qwen3.5's tokenizer has beside those of any chat."""

_SIZES = MappingProxyType(
    {
        "hidden_size": by_size(256, 1024),
        "num_hidden_layers": by_size(4, 16),
        "num_attention_heads": by_size(4, 8),
        "num_key_value_heads": by_size(2, 1),
        "head_dim": by_size(64, 128),
        "linear_num_key_heads": by_size(2, 8),
        "linear_num_value_heads": by_size(4, 16),
        "linear_key_head_dim": by_size(32, 128),
        "linear_value_head_dim": by_size(32, 128),
    }
)

DENSE_RECIPE = Recipe(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    dtype_field="dtype",
    # About 4 M parameters (7 M with experts), a checkpoint is 4 pages of 16 tokens in float32; about 300 M parameters,
    # with the ratio of state to keys and values of the published models: a checkpoint is worth 3,000 tokens.
    sizes={**_SIZES, "intermediate_size": by_size(512, 3584)},
    fields={
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "layer_types": by_size([DELTA, DELTA, DELTA, FULL], [DELTA, DELTA, DELTA, FULL] * 4),
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": by_size([4, 2, 2], [6, 5, 5]),
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
    },
    # Weights of norms are stored less 1, but for the one after the delta rule.
    spreads={
        "layernorm.weight": (0.0, 0.1),
        "pre_fc_norm_embedding.weight": (0.0, 0.1),
        "pre_fc_norm_hidden.weight": (0.0, 0.1),
        "q_norm.weight": (0.0, 0.1),
        "k_norm.weight": (0.0, 0.1),
        "linear_attn.norm.weight": (1.0, 0.1),
        ".norm.weight": (0.0, 0.1),
        "embed_tokens.weight": (0.0, 1.0),
    },
    gains={"lm_head.weight": LOGIT_STD},
    float32=("A_log",),
    tokens=IMAGE_TOKENS,
    mtp_fields={"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
)

MOE_RECIPE = replace(
    DENSE_RECIPE,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    sizes={
        **_SIZES,
        "num_experts": by_size(8, 16),
        "num_experts_per_tok": by_size(2, 4),
        "moe_intermediate_size": by_size(128, 512),
        "shared_expert_intermediate_size": by_size(256, 1024),
    },
)
