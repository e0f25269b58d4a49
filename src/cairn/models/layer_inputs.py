"""Inputs of every layer that are not hidden states: their tensors, and how they are sharded; see
`cairn.layers.layer_inputs`. Without torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from cairn.models.feed_forward import FeedForwardSizes
from cairn.models.sharding import shard_vocabulary
from cairn.models.weight_specs import (
    MixerSpec,
    ProductSpec,
    StoredTensor,
    WeightSpec,
    column_parallel,
    matrix,
    row_parallel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec:
    """`embedding`, `projection`, `norm`: their names. `num_tokens`: of the embedding, as many as the model has or more.
    `hidden`: of hidden states; `width`: of one layer's input."""

    embedding: str
    projection: str
    norm: str
    num_tokens: int
    num_layers: int
    hidden: int
    width: int

    def vocabulary(self, vocab_size: int, rank: int, size: int) -> StoredTensor:
        """The rank's rows of the embedding."""
        tokens, _ = shard_vocabulary(vocab_size, rank, size)
        shape = (self.num_tokens, self.num_layers * self.width)
        return StoredTensor(f"{self.embedding}.weight", shape, (tokens,), is_matrix=True)

    @property
    def product(self) -> ProductSpec:
        """The projection of what the first layer gets, whole on every rank."""
        return ProductSpec((matrix(self.projection, (self.num_layers * self.width, self.hidden)),))

    @property
    def norm_weight(self) -> StoredTensor:
        return StoredTensor(f"{self.norm}.weight", (self.width,))

    def weights(self, vocab_size: int, rank: int, size: int) -> Iterator[WeightSpec]:
        """All of them, in the order of the checkpoint."""
        yield self.vocabulary(vocab_size, rank, size)
        yield self.product
        yield self.norm_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputLayer(MixerSpec):
    """What takes in the input of layer number `layer`. `gate`, `out`: the names of its products."""

    sizes: FeedForwardSizes
    gate: str
    out: str
    layer: int

    def weights(self, rank: int, size: int) -> dict[str, WeightSpec]:
        inner, shape = self.sizes.shard(rank, size), (self.sizes.inner, self.sizes.hidden)
        return {
            "gate": column_parallel(self.gate, shape, inner),
            "out": row_parallel(self.out, shape[::-1], inner, rank),
        }
