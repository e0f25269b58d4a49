"""A decoder as data, which families yield: its norms and mixers in order, with their tensors' names. Without torch."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from cairn.layers.memory import AttentionSpec
from cairn.models.attention import AttentionLayer
from cairn.models.layer_inputs import LayerInputsSpec
from cairn.models.layer_sizes import CacheSpec, ForwardSizes, LayerSizes, LimitedScores
from cairn.models.rotary import RotarySpec
from cairn.models.sharding import check_rank, shard_even, shard_vocabulary
from cairn.models.weight_specs import MixerSpec, ProductSpec, StoredTensor, WeightSpec, column_parallel

OUTPUT = "lm_head.weight"
"""The output's tensor, in every family."""


class DecoderSizes(Protocol):
    """What a config says of all layers."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def eps(self) -> float: ...

    @property
    def state_dtype(self) -> str: ...

    @property
    def keeps_all_tokens(self) -> bool: ...


NamedMixer = tuple[str, MixerSpec]
"""A layer: the name of its norm, and its mixer."""


@dataclass(frozen=True, slots=True)
class ScaledMixer(MixerSpec):
    """after * mixer(before * x)."""

    mixer: MixerSpec
    after: float
    before: float = 1.0
    sizes: None = field(default=None, init=False)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return (self.mixer,)


@dataclass(frozen=True, slots=True)
class ParallelMixers(MixerSpec):
    """The sum of several mixers of the same input."""

    parts: tuple[MixerSpec, ...]
    sizes: None = field(default=None, init=False)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return self.parts


@dataclass(frozen=True, slots=True)
class NormedMixer(MixerSpec):
    """A part of a layer that has a norm of its own, over `hidden` channels."""

    norm: str
    hidden: int
    mixer: MixerSpec
    sizes: None = field(default=None, init=False)

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        return {"norm": StoredTensor(f"{self.norm}.weight", (self.hidden,))}

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return (self.mixer,)


@dataclass(frozen=True, slots=True)
class SideBySideMixers(MixerSpec):
    """Several mixers of the same input: what they give is normed, each by its own of `result_norms`, and then added."""

    parts: tuple[MixerSpec, ...]
    result_norms: tuple[str, ...]
    sizes: None = field(default=None, init=False)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head of multi-token prediction, which drafts; see `cairn.layers.mtp_head`. `embedding_norm`, `hidden_norm`: of
    the token's embedding and of the hidden state before it, which `projection` takes side by side, in this order, to
    one hidden state. Then come `attention_norm` and `attention`, and `others`, which are as the model's layers."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    attention_norm: str
    attention: AttentionLayer
    others: tuple[NamedMixer, ...]
    final_norm: str

    @property
    def layers(self) -> tuple[NamedMixer, ...]:
        return ((self.attention_norm, self.attention), *self.others)


@dataclass(frozen=True, slots=True)
class EmbeddingScale:
    """What embeddings are multiplied with; `rounded` to the model's dtype."""

    value: float = 1.0
    rounded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """`centred`: the norms' weights are stored less 1. `post_norms`: those that are of what their mixers give, which
    get hidden states as they are. `norms_after`: of what mixers give that get normed hidden states, by the name of the
    norm before. `sum_scales`: the tensors of what hidden states are multiplied with, by the name of the norm that is of
    them then: see `ScaledSum`. `rotary`: of attention layers without one of their own. `logit_cap`: see `Softcap`.
    `layer_inputs`: what layers get besides hidden states. `output`: the output's tensor, which is the embedding's where
    they are tied and none is stored. `head`: what drafts, where that is served."""

    config: DecoderSizes
    layers: tuple[NamedMixer, ...]
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm"
    centred: bool = False
    post_norms: frozenset[str] = frozenset()
    norms_after: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sum_scales: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    rotary: RotarySpec | None = None
    embedding_scale: EmbeddingScale = EmbeddingScale()
    logit_scale: float = 1.0
    logit_cap: float | None = None
    layer_inputs: LayerInputsSpec | None = None
    output: str = OUTPUT
    head: HeadSpec | None = None

    def vocabulary(self, name: str, rank: int, size: int) -> StoredTensor:
        """The rank's rows of an embedding or an output."""
        tokens, _ = shard_vocabulary(self.config.vocab_size, rank, size)
        return StoredTensor(name, (self.config.vocab_size, self.config.hidden_size), (tokens,), is_matrix=True)

    def norm(self, name: str) -> StoredTensor:
        """The weight of a norm over hidden states."""
        return StoredTensor(f"{name}.weight", (self.config.hidden_size,))

    def product(self, name: str, rank: int, size: int) -> ProductSpec:
        """The rank's outputs of the head's projection of an embedding and a hidden state. Raises ConfigError naming
        --tensor-parallel-size and hidden_size."""
        hidden = self.config.hidden_size
        return column_parallel(name, (hidden, 2 * hidden), shard_even("hidden_size", hidden, rank, size))

    def layer_sizes(self) -> Counter[LayerSizes]:
        """How many layers of each kind there are, and their sizes, without the head's."""
        return _count_sizes(self.layers)

    @property
    def head_share(self) -> float:
        """What a head takes of each token's products while it does not draft."""
        if self.head is None:
            return 0.0
        products = self.product(self.head.projection, 0, 1), self.head.attention.keys_and_values(0, 1)
        weights = sum(math.prod(part.shape) for product in products for part in product.parts)
        return weights / self.forward_sizes().active_weights

    def cache_spec(self, rank: int, size: int) -> CacheSpec:
        """See `DecoderConfig.cache_spec`."""
        check_rank(rank, size)
        recurrent = None
        layers = self.layers if self.head is None else (*self.layers, *self.head.layers)
        for sizes, count in sorted(_count_sizes(layers).items(), key=lambda pair: pair[0].check_order):
            sizes.check_size(size)
            recurrent = recurrent or sizes.recurrent_spec(count, rank, size)
        if recurrent is not None:
            recurrent = recurrent.with_states_in(self.config.state_dtype)
        mixers = _all(mixer for _, mixer in layers)
        kinds = Counter(kind for each in mixers if (kind := self.attention_spec(each, rank, size)) is not None)
        groups = [replace(kind, num_layers=count) for kind, count in kinds.items()]
        attention = tuple(sorted(groups, key=lambda group: group.reach is not None))
        return CacheSpec(self.config.hidden_size, recurrent, attention)

    def attention_spec(self, mixer: MixerSpec, rank: int, size: int) -> AttentionSpec | None:
        """What a rank keeps of a mixer that is attention, as layers of its group have it."""
        spec = mixer.attention_spec(rank, size)
        return replace(spec, reach=None, chunked=False) if spec is not None and self.config.keeps_all_tokens else spec

    def forward_sizes(self) -> ForwardSizes:
        """See `DecoderConfig.forward_sizes`."""
        active = sum(count * sizes.active_weights for sizes, count in self.layer_sizes().items())
        scores = Counter[tuple[int | None, int | None]]()
        for mixer in _mixers(self.layers):
            reach = mixer.rule.window, mixer.rule.chunk
            scores[reach] += 0 if mixer.sizes is None else mixer.sizes.score_numbers
        full = scores.pop((None, None), 0)
        return ForwardSizes(active, full, tuple(LimitedScores(count, *reach) for reach, count in scores.items()))

    def weights(self, rank: int, size: int) -> Iterator[WeightSpec]:
        """All that one of `size` ranks has, in the order of the checkpoint. Raises ConfigError naming
        --tensor-parallel-size and the field that does not divide."""
        yield self.vocabulary(self.embedding, rank, size)
        if self.layer_inputs is not None:
            yield from self.layer_inputs.weights(self.config.vocab_size, rank, size)
        yield from self._layer_weights(self.layers, rank, size)
        yield from self._norm_weights(self.final_norm)
        yield ProductSpec((self.vocabulary(self.output, rank, size),))
        yield from self.head_weights(rank, size)

    def head_weights(self, rank: int, size: int) -> Iterator[WeightSpec]:
        """Those of `weights` that are the head's."""
        head = self.head
        if head is not None:
            yield self.norm(head.embedding_norm)
            yield self.norm(head.hidden_norm)
            yield self.product(head.projection, rank, size)
            yield head.attention.keys_and_values(rank, size)
            yield from self._layer_weights(head.layers, rank, size)
            yield self.norm(head.final_norm)

    def tensors(self, rank: int, size: int) -> dict[str, StoredTensor]:
        """All that these are made of, by name."""
        return {tensor.name: tensor for weight in self.weights(rank, size) for tensor in weight.tensors}

    def _layer_weights(self, layers: Iterable[NamedMixer], rank: int, size: int) -> Iterator[WeightSpec]:
        for norm, mixer in layers:
            yield from self._norm_weights(norm)
            for each in _all((mixer,)):
                yield from each.weights(rank, size).values()
            yield from map(self.norm, mixer.result_norms)
            if norm in self.norms_after:
                yield self.norm(self.norms_after[norm])

    def _norm_weights(self, name: str) -> Iterator[StoredTensor]:
        """Of the norm, and of the scale of what it is of."""
        if name in self.sum_scales:
            yield scalar(self.sum_scales[name])
        yield self.norm(name)


def scalar(name: str) -> StoredTensor:
    """A tensor of one number."""
    return StoredTensor(name, (1,))


def _count_sizes(layers: Iterable[NamedMixer]) -> Counter[LayerSizes]:
    return Counter(each.sizes for each in _mixers(layers) if each.sizes is not None)


def _mixers(layers: Iterable[NamedMixer]) -> Iterator[MixerSpec]:
    return _all(mixer for _, mixer in layers)


def _all(mixers: Iterable[MixerSpec]) -> Iterator[MixerSpec]:
    """These, each with those it is made of."""
    for mixer in mixers:
        yield mixer
        yield from _all(mixer.mixers)
