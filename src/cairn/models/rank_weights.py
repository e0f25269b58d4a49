"""One rank's share of a checkpoint's tensors, drawn by name (the cuts of arXiv 1909.08053, section 3).

whole              on every rank
column parallel    a share of the outputs, from the whole input
row parallel       from a share of the inputs a partial sum of all outputs; the bias is rank 0's
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.contract import Kernels, Weight
from cairn.layers.communicator import Communicator
from cairn.layers.linear import Linear
from cairn.models.contract import TensorLoader
from cairn.models.decoder_config import ServedQuantization
from cairn.models.sharding import Slice, TensorShard


class RankWeights:
    """Draws tensors and collects the matrix products that are made of them. Raises whatever `load` raises.

    `linears`: the products so far; `num_bytes`: the memory of all weights so far, without the padding of packed ones.
    """

    def __init__(
        self,
        load: TensorLoader,
        kernels: Kernels,
        communicator: Communicator,
        device: torch.device,
        quantization: ServedQuantization | None = None,
    ) -> None:
        """What `load` gives is on `device`, or on the host and copied there. `quantization`: of matrices, all but
        those of `unquantized`."""
        self.kernels = kernels
        self.communicator = communicator
        self.device = device
        self.linears: list[Linear] = []
        self.num_bytes = 0
        self._load = load
        self._quantization = quantization

    def tensor(self, name: str, shape: tuple[int, ...], *slices: Slice, dim: int = 0) -> Tensor:
        """The slices of dimension `dim`, or all of the tensor when none are given."""
        loaded = self._load(name, shape, _shard(dim, slices, shape[dim]))
        self.num_bytes += loaded.nbytes
        return loaded if self.device.type == "cpu" else loaded.to(self.device)

    def column_parallel(self, name: str, shape: tuple[int, int], *outputs: Slice, bias: bool = False) -> Linear:
        return self.fused([(name, shape, outputs)], bias)

    def fused(
        self, parts: "Sequence[Part]", bias: bool = False, reorder: Callable[[Tensor], Tensor] | None = None
    ) -> Linear:
        """Column parallel products of one input as a single one, their outputs one behind the other, or as `reorder`
        puts the rows of weights and biases."""
        weights, biases = [], []
        for name, shape, outputs in parts:
            weights.append(self.tensor(f"{name}.weight", shape, *outputs))
            if bias:
                biases.append(self.tensor(f"{name}.bias", shape[:1], *outputs))
        rows, added = _concatenated(weights), _concatenated(biases) if bias else None
        if reorder is not None:
            rows, added = reorder(rows), None if added is None else reorder(added)
        return self.linear(rows, added)

    def row_parallel(self, name: str, shape: tuple[int, int], inputs: Slice, bias: bool = False) -> Linear:
        weight = self.tensor(f"{name}.weight", shape, inputs, dim=1)
        has_bias = bias and self.communicator.rank == 0
        return self.linear(weight, self.tensor(f"{name}.bias", shape[:1]) if has_bias else None)

    def taps(
        self, name: str, shape: tuple[int, int, int], *channels: Slice, bias: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """A depthwise convolution [channels, 1, W] as float32 taps [W, channels], oldest first, and its bias."""
        weight = self.tensor(f"{name}.weight", shape, *channels)
        added = self.tensor(f"{name}.bias", shape[:1], *channels).float() if bias else None
        return weight[:, 0].t().float().contiguous(), added

    def vocabulary(self, name: str, shape: tuple[int, int], tokens: Slice, rows: int) -> Tensor:
        """The tokens' rows, with zeros up to `rows`: [rows, hidden]."""
        weight = self.tensor(name, shape, tokens)
        missing = rows - weight.shape[0]
        return F.pad(weight, (0, 0, 0, missing)) if missing else weight

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with a weight [out, in] of this rank."""
        return self._linear(weight, bias, self.pack(weight))

    def unquantized(self, weight: Tensor) -> Linear:
        """As `linear`, for a product whose small errors choose among experts, or scale all that one of them gives."""
        return self._linear(weight, None, self.kernels.pack(weight))

    def pack(self, weight: Tensor) -> Weight:
        """A weight [out, in], or a stack of experts' [E, out, in], for the kernels' products, quantized if all are."""
        if self._quantization is None:
            return self.kernels.pack(weight)
        # One byte a number, and eight an output: its scale, and the sum of its row.
        self.num_bytes += weight.numel() + 8 * math.prod(weight.shape[:-1]) - weight.nbytes
        return weight if weight.is_meta else self.kernels.pack_int8(weight)

    def _linear(self, weight: Tensor, bias: Tensor | None, packed: Weight) -> Linear:
        linear = Linear(self.kernels, packed, bias, (weight.shape[0], weight.shape[1]))
        self.linears.append(linear)
        return linear


Part = tuple[str, tuple[int, int], tuple[Slice, ...]]
"""Of a fused product: the name of a layer's part, the shape of its weight, and which of its outputs."""


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _shard(dim: int, slices: tuple[Slice, ...], length: int) -> TensorShard | None:
    """None where the slices are all there is, in order."""
    end = 0
    for begin, next_end in slices:
        if begin != end:
            return TensorShard(dim, slices)
        end = next_end
    return TensorShard(dim, slices) if slices and end != length else None
