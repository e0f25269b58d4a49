"""What a model's weights take in memory, counted before any is read."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod

import torch

from cairn.kernels.int4 import int4_bytes
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import StoredRows, kind_of
from cairn.models.contract import Family, StoredLoader
from cairn.models.decoder_config import MADE_AT_LOAD, DecoderConfig, ServedQuantization
from cairn.models.weight_specs import (
    ExpertMatrices,
    ExpertStacks,
    JoinedTensors,
    Precision,
    ProductSpec,
    StoredTensor,
    WeightSpec,
)

PackedDtype = Callable[[torch.dtype], torch.dtype]
"""`Kernels.packed_dtype` of a backend."""


def count_weight_bytes(
    family: Family,
    config: DecoderConfig,
    stored: Collection[str],
    dtype: torch.dtype,
    quantization: ServedQuantization | None = None,
    load_stored: StoredLoader | None = None,
    num_ranks: int = 1,
    packed_dtype: PackedDtype | None = None,
) -> int:
    """Bytes of all weights as they are served on rank 0 of `num_ranks`, which has no fewer than any other, without the
    padding of packed ones: a tied embedding is there twice, as rows and as a packed output. `load_stored`: gives
    matrices that stay as they are stored, on the meta device. `packed_dtype`: of the backend, None where it keeps
    weights as they are. Raises ConfigError where the model cannot be sharded among so many."""
    config.cache_spec(0, num_ranks)
    counter = ByteCounter(family, dtype, quantization, load_stored, packed_dtype)
    return sum(counter.count(weight) for weight in family.spec(config, stored).weights(0, num_ranks))


@dataclass(frozen=True, eq=False)
class ByteCounter:
    """Counts the bytes of what `RankWeights` makes."""

    family: Family
    dtype: torch.dtype
    quantization: ServedQuantization | None
    load_stored: StoredLoader | None
    packed_dtype: PackedDtype | None

    @singledispatchmethod
    def count(self, weight: WeightSpec) -> int:
        raise TypeError(f"nothing is made of {weight!r:.200}")

    @count.register
    def rows(self, weight: StoredTensor) -> int:
        """Of an embedding, which may be in codes, or of what is no matrix."""
        (stored,) = self._stored((weight,)) if self.quantization not in MADE_AT_LOAD else (None,)
        return stored.nbytes if isinstance(stored, QuantizedWeight) else self.tensor(weight)

    def tensor(self, weight: StoredTensor) -> int:
        """As plain numbers."""
        return math.prod(weight.rank_shape) * self._dtype_of(weight).itemsize

    @count.register
    def joined(self, weight: JoinedTensors) -> int:
        return sum(map(self.tensor, weight.parts))

    @count.register
    def product(self, weight: ProductSpec) -> int:
        biases = sum(map(self.tensor, weight.biases))
        stored = self._stored(weight.parts)
        if self.quantization in MADE_AT_LOAD:
            return biases + self._made(weight.parts, stored, weight.precision)
        if any(stored):  # as they are, side by side
            return biases + sum(self._as_stored(*pair) for pair in zip(weight.parts, stored, strict=True))
        return biases + sum(self._packed(part, weight.precision) for part in weight.parts)

    @count.register
    def stacks(self, weight: ExpertStacks) -> int:
        return sum(map(self.tensor, weight.biases)) + sum(self._stacked(((each,),)) for each in weight.matrices)

    @count.register
    def experts(self, weight: ExpertMatrices) -> int:
        return sum(map(self._stacked, (weight.ups, [(down,) for down in weight.downs])))

    def _stacked(self, matrices: Sequence[Sequence[StoredTensor]]) -> int:
        """A stack of matrices, each of these parts: as they are stored if all are of one kind."""
        parts = [part for each in matrices for part in each]
        stored = self._stored(parts)
        if self.quantization in MADE_AT_LOAD:
            return self._made(parts, stored)
        if all(stored) and _is_one_kind(stored):
            return sum(self._as_stored(*pair) for pair in zip(parts, stored, strict=True))
        return sum(map(self._packed, parts))

    def _stored(self, parts: Sequence[StoredTensor]) -> list[StoredRows | None]:
        load = self.load_stored
        if load is None:
            return [None] * len(parts)
        return [load(part.name, part.shape, part.shard) if part.is_matrix else None for part in parts]

    def _made(
        self, parts: Sequence[StoredTensor], stored: Sequence[StoredRows | None], precision: Precision = "quantized"
    ) -> int:
        """Of one weight or stack in what is made at load: in the groups of its codes where these stay."""
        first = stored[0]
        if precision == "quantized" and isinstance(first, QuantizedWeight) and first.becomes_int4:
            if _is_one_kind(stored):
                return sum(int4_bytes(part.rank_shape, first.group) for part in parts)
        return sum(self._packed(part, precision) for part in parts)

    def _as_stored(self, weight: StoredTensor, stored: StoredRows | None) -> int:
        return self.tensor(weight) if stored is None else stored.nbytes

    def _packed(self, weight: StoredTensor, precision: Precision = "quantized") -> int:
        """A weight [..., out, in], not as it is stored."""
        shape, stored = weight.rank_shape, self.tensor(weight)
        numbers = math.prod(shape)
        if precision == "quantized" and self.quantization == "int4":
            return int4_bytes(torch.Size(shape))
        if precision == "quantized" and self.quantization == "int8":
            # One byte a number, and eight an output: its scale, and the sum of its row.
            return numbers + 8 * math.prod(shape[:-1])
        if self.packed_dtype is None:
            return stored
        dtype = torch.float32 if precision == "float32" else self._dtype_of(weight)
        return stored + numbers * (self.packed_dtype(dtype).itemsize - dtype.itemsize)

    def _dtype_of(self, weight: StoredTensor) -> torch.dtype:
        return torch.float32 if self.family.keeps_float32(weight.name) else self.dtype


def _is_one_kind(parts: Sequence[StoredRows | None]) -> bool:
    return len({None if part is None else kind_of(part) for part in parts}) == 1
