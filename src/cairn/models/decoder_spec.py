"""A decoder as data, which families yield: its norms and mixers in order, with their tensors' names. Without torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cairn.models.decoder_config import DecoderConfig
from cairn.models.sharding import shard_vocabulary
from cairn.models.weight_specs import MixerSpec, ProductSpec, StoredTensor, WeightSpec

OUTPUT = "lm_head.weight"
"""The output's tensor, in every family."""


NamedMixer = tuple[str, MixerSpec]
"""A layer: the name of its norm, and its mixer."""


@dataclass(frozen=True, slots=True)
class ScaledMixer(MixerSpec):
    """after * mixer(before * x)."""

    mixer: MixerSpec
    after: float
    before: float = 1.0

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """See `MixerSpec`."""
        return (self.mixer,)


@dataclass(frozen=True, slots=True)
class ParallelMixers(MixerSpec):
    """The sum of several mixers of the same input."""

    parts: tuple[MixerSpec, ...]

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """See `MixerSpec`."""
        return self.parts


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """How positions turn queries and keys, in all attention of the model; see `make_rotary`."""

    dim: int
    theta: float
    sections: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """`centred`: the norms' weights are stored less 1.
    `output`: the output's tensor, which is the embedding's where they are tied and none is stored."""

    config: DecoderConfig
    embedding: str
    layers: tuple[NamedMixer, ...]
    final_norm: str
    centred: bool = False
    rotary: RotarySpec | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    output: str = OUTPUT

    def vocabulary(self, name: str, rank: int, size: int) -> StoredTensor:
        """The rank's rows of an embedding or an output."""
        tokens, _ = shard_vocabulary(self.config.vocab_size, rank, size)
        return StoredTensor(name, (self.config.vocab_size, self.config.hidden_size), (tokens,))

    def norm(self, name: str) -> StoredTensor:
        """The weight of a norm over hidden states."""
        return StoredTensor(f"{name}.weight", (self.config.hidden_size,))

    def weights(self, rank: int, size: int) -> Iterator[WeightSpec]:
        """All that one of `size` ranks has, in the order of the checkpoint. Raises ConfigError naming
        --tensor-parallel-size and the field that does not divide."""
        yield self.vocabulary(self.embedding, rank, size)
        for norm, mixer in self.layers:
            yield self.norm(norm)
            yield from _weights((mixer,), rank, size)
        yield self.norm(self.final_norm)
        yield ProductSpec((self.vocabulary(self.output, rank, size),))

    def tensors(self, rank: int, size: int) -> dict[str, StoredTensor]:
        """All that these are made of, by name."""
        return {tensor.name: tensor for weight in self.weights(rank, size) for tensor in weight.tensors}


def _weights(mixers: Iterable[MixerSpec], rank: int, size: int) -> Iterator[WeightSpec]:
    for mixer in mixers:
        yield from mixer.weights(rank, size).values()
        yield from _weights(mixer.mixers, rank, size)
