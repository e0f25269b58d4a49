"""What layers are made of, before anything is read: one rank's tensors by their published names, and the products that
are made of them (the cuts of arXiv 1909.08053, section 3). Without torch.

whole              on every rank
column parallel    a share of the outputs, from the whole input
row parallel       from a share of the inputs a partial sum of all outputs; the bias is rank 0's
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.layers.memory import AttentionSpec
from cairn.models.layer_sizes import LayerSizes
from cairn.models.sharding import Slice, TensorShard

Precision = Literal["quantized", "dtype", "float32"]
"""Of a product's weight: quantized if all are, or in any case in the model's dtype or in float32, where small errors
choose among experts or scale all that one of them gives."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint. `shape`: of the whole; a rank has the `slices` of dimension `dim`, or all of it where
    there are none. `is_matrix`: a weight [out, in] of a product, or a stack of
    experts' ones, which may stay as it is stored."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...] = ()
    dim: int = 0
    is_matrix: bool = False

    @property
    def shard(self) -> TensorShard | None:
        """None where the slices are all there is, in order."""
        end = 0
        for begin, next_end in self.slices:
            if begin != end:
                return TensorShard(self.dim, self.slices)
            end = next_end
        return TensorShard(self.dim, self.slices) if self.slices and end != self.shape[self.dim] else None

    @property
    def rank_shape(self) -> tuple[int, ...]:
        return self.shape if (shard := self.shard) is None else shard.shape(self.shape)

    @property
    def tensors(self) -> Iterator["StoredTensor"]:
        yield self


@dataclass(frozen=True, slots=True)
class JoinedTensors:
    """Tensors one after the other, along their first dimension."""

    parts: tuple[StoredTensor, ...]

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.parts


@dataclass(frozen=True, slots=True)
class ProductSpec:
    """A matrix product of one input: the outputs of all `parts` one after the other, each with its bias if there are
    any. `gated_heads`: so many heads of the first part are each a query and its gate, and all gates go last."""

    parts: tuple[StoredTensor, ...]
    biases: tuple[StoredTensor, ...] = ()
    precision: Precision = "quantized"
    gated_heads: int = 0

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        for pair in zip_longest(self.parts, self.biases):
            yield from filter(None, pair)


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """The matrices of all experts as two tensors: into their inner channels [E, inner, in], and out of them. `biases`:
    of the former and, if it has any, of the latter, [E, out]. `by_turns`: gate and up have a row of the former by
    turns. `inputs_first`: matrices are [E, in, out]."""

    up: StoredTensor
    down: StoredTensor
    biases: tuple[StoredTensor, ...] = ()
    by_turns: bool = False
    inputs_first: bool = False

    @property
    def matrices(self) -> tuple[StoredTensor, StoredTensor]:
        """Both [E, out, in]."""
        return (transposed(self.up), transposed(self.down)) if self.inputs_first else (self.up, self.down)

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        for pair in zip_longest((self.up, self.down), self.biases):
            yield from filter(None, pair)


def transposed(stack: StoredTensor) -> StoredTensor:
    """Experts' matrices [E, out, in] as [E, in, out], or the reverse."""
    experts, rows, columns = stack.shape
    return replace(stack, shape=(experts, columns, rows), dim=3 - stack.dim)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """As `ExpertStacks`, of tensors of each expert: into its inner channels one or several, rows one after the other,
    and one out of them."""

    ups: tuple[tuple[StoredTensor, ...], ...]
    downs: tuple[StoredTensor, ...]

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        for ups, down in zip(self.ups, self.downs, strict=True):
            yield from (*ups, down)


WeightSpec = StoredTensor | JoinedTensors | ProductSpec | ExpertStacks | ExpertMatrices
"""A part of a layer. Each kind has `tensors`, what it is made of in the order of the checkpoint."""


class MixerSpec:
    """A layer as data: its kind, its sizes and its tensors' names. `sizes`: None where it is made of others alone.
    `rule`: of its attention."""

    __slots__ = ()

    sizes: LayerSizes | None
    rule: AttentionRule = FULL

    def weights(self, rank: int, size: int) -> Mapping[str, WeightSpec]:
        """What one of `size` ranks has of it, its `mixers` aside. Raises ConfigError naming --tensor-parallel-size."""
        return {}

    def attention_spec(self, rank: int, size: int) -> AttentionSpec | None:
        """What a rank keeps of it, if it is attention; its `mixers` aside."""
        return None

    @property
    def result_norms(self) -> tuple[str, ...]:
        """Names of the norms of the parts of what it gives, where these lie one after the other: see `NormOfSum`."""
        return ()

    @property
    def mixers(self) -> "tuple[MixerSpec, ...]":
        """Those it is made of besides."""
        return ()


def matrix(name: str, shape: tuple[int, int], *slices: Slice, dim: int = 0) -> StoredTensor:
    """The weight [out, in] of the layer's part `name`."""
    return StoredTensor(f"{name}.weight", shape, slices, dim, is_matrix=True)


def fused(parts: "tuple[Part, ...]", bias: bool = False, gated_heads: int = 0) -> ProductSpec:
    """Column parallel products of one input as a single one."""
    weights = tuple(matrix(name, shape, *outputs) for name, shape, outputs in parts)
    biases = tuple(StoredTensor(f"{name}.bias", shape[:1], outputs) for name, shape, outputs in parts)
    return ProductSpec(weights, biases if bias else (), gated_heads=gated_heads)


def column_parallel(name: str, shape: tuple[int, int], *outputs: Slice, bias: bool = False) -> ProductSpec:
    return fused(((name, shape, outputs),), bias)


def row_parallel(name: str, shape: tuple[int, int], inputs: Slice, rank: int, bias: bool = False) -> ProductSpec:
    biases = (StoredTensor(f"{name}.bias", shape[:1]),) if bias and rank == 0 else ()
    return ProductSpec((matrix(name, shape, inputs, dim=1),), biases)


def taps(name: str, shape: tuple[int, int, int], *channels: Slice, bias: bool = False) -> dict[str, WeightSpec]:
    """`conv` and, if there is one, `conv_bias` of a depthwise convolution [channels, 1, W]."""
    weights: dict[str, WeightSpec] = {"conv": StoredTensor(f"{name}.weight", shape, channels)}
    return weights | ({"conv_bias": StoredTensor(f"{name}.bias", shape[:1], channels)} if bias else {})


Part = tuple[str, tuple[int, int], tuple[Slice, ...]]
"""Of a fused product: the name of a layer's part, the shape of its weight, and which of its outputs."""
