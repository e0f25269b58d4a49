"""One rank's share of a checkpoint's tensors, drawn by name (the cuts of arXiv 1909.08053, section 3).

whole              on every rank
column parallel    a share of the outputs, from the whole input
row parallel       from a share of the inputs a partial sum of all outputs; the bias is rank 0's
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.contract import Kernels, Weight
from cairn.kernels.fp8 import Fp8Weight, WeightRows, dequantize_rows, join_rows, stack_experts
from cairn.kernels.int4 import int4_bytes, quantize_int4
from cairn.layers.communicator import Communicator
from cairn.layers.linear import Linear
from cairn.models.contract import Fp8Loader, TensorLoader
from cairn.models.decoder_config import ServedQuantization
from cairn.models.sharding import Slice, TensorShard

logger = logging.getLogger(__name__)


PackedDtype = Callable[[torch.dtype], torch.dtype]
"""`Kernels.packed_dtype` of a backend."""


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
        load_fp8: Fp8Loader | None = None,
        packed_dtype: PackedDtype | None = None,
    ) -> None:
        """What `load` gives is on `device`, or on the host and copied there. `quantization`: of matrices, all but
        those of `unquantized`. `load_fp8`: gives matrices that stay in FP8, if there may be any. `packed_dtype`: of
        the backend whose bytes are counted, if it keeps weights in another one; see `Kernels.packed_dtype`."""
        self.kernels = kernels
        self.communicator = communicator
        self.device = device
        self.linears: list[Linear] = []
        self.num_bytes = 0
        self._load = load
        self._quantization = quantization
        self._load_fp8 = load_fp8
        self._packed_dtype = packed_dtype

    def tensor(self, name: str, shape: tuple[int, ...], *slices: Slice, dim: int = 0) -> Tensor:
        """The slices of dimension `dim`, or all of the tensor when none are given."""
        loaded = self._load(name, shape, _shard(dim, slices, shape[dim]))
        self.num_bytes += loaded.nbytes
        return loaded if self.device.type == "cpu" else loaded.to(self.device)

    def matrix(self, name: str, shape: tuple[int, int], *slices: Slice, dim: int = 0) -> WeightRows:
        """As `tensor`, of a weight [out, in] that goes into `linear`, `rows` or `pack_experts`."""
        stored = None if self._load_fp8 is None else self._load_fp8(name, shape, _shard(dim, slices, shape[dim]))
        if stored is None:
            return self.tensor(name, shape, *slices, dim=dim)
        self.num_bytes += stored.nbytes
        return stored if self.device.type == "cpu" else stored.changed(lambda tensor: tensor.to(self.device))

    def column_parallel(self, name: str, shape: tuple[int, int], *outputs: Slice, bias: bool = False) -> Linear:
        return self.fused([(name, shape, outputs)], bias)

    def fused(
        self, parts: "Sequence[Part]", bias: bool = False, reorder: Callable[[Tensor], Tensor] | None = None
    ) -> Linear:
        """Column parallel products of one input as a single one, their outputs one behind the other, or as `reorder`
        puts the rows of weights and biases."""
        weights, biases = [], []
        for name, shape, outputs in parts:
            weights.append(self.matrix(f"{name}.weight", shape, *outputs))
            if bias:
                biases.append(self.tensor(f"{name}.bias", shape[:1], *outputs))
        return self.linear(weights, _concatenated(biases) if bias else None, reorder)

    def row_parallel(self, name: str, shape: tuple[int, int], inputs: Slice, bias: bool = False) -> Linear:
        weight = self.matrix(f"{name}.weight", shape, inputs, dim=1)
        has_bias = bias and self.communicator.rank == 0
        return self.linear([weight], self.tensor(f"{name}.bias", shape[:1]) if has_bias else None)

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

    def linear(
        self,
        weights: Sequence[WeightRows],
        bias: Tensor | None = None,
        reorder: Callable[[Tensor], Tensor] | None = None,
    ) -> Linear:
        """A product with the rows of weights of this rank, one behind the other; or as `reorder` puts the rows of all
        weights and of the bias."""
        rows = join_rows(weights)
        if reorder is not None:
            whole = self.rows(rows)
            rows = (whole.changed(reorder) if isinstance(whole, Fp8Weight) else reorder(whole),)
            bias = None if bias is None else reorder(bias)
        outputs, inputs = sum(part.shape[0] for part in rows), rows[0].shape[1]
        packed = self.pack(rows[0]) if len(rows) == 1 else self._pack_fp8(rows)
        return self._linear(packed, bias, (outputs, inputs))

    def rows(self, weights: Sequence[WeightRows]) -> WeightRows:
        """The rows of several weights in one, which is in FP8 if all are."""
        joined = join_rows(weights)
        return joined[0] if len(joined) == 1 else torch.cat(self._dequantize(joined))

    def pack_experts(self, matrices: Sequence[WeightRows]) -> Weight:
        """A stack of the matrices of all experts, packed."""
        stack = stack_experts(matrices)
        return self.pack(torch.stack(self._dequantize(matrices)) if stack is None else stack)

    def _dequantize(self, parts: Sequence[WeightRows]) -> list[Tensor]:
        logger.warning("weights in FP8 are dequantized: they are in one product with others that are not")
        plain = [dequantize_rows([part]) for part in parts]
        self.num_bytes += sum(new.nbytes - old.nbytes for new, old in zip(plain, parts, strict=True))
        return plain

    def unquantized(self, weight: Tensor) -> Linear:
        """As `linear`, for a product whose small errors choose among experts, or scale all that one of them gives."""
        return self._linear(self._pack_plain(weight), None, (weight.shape[0], weight.shape[1]))

    def pack(self, weight: WeightRows) -> Weight:
        """A weight [out, in], or a stack of experts' [E, out, in], for the kernels' products, quantized if all are."""
        if isinstance(weight, Fp8Weight):
            return self._pack_fp8([weight])
        if self._quantization == "int4":
            self.num_bytes += int4_bytes(weight.shape) - weight.nbytes
            return weight if weight.is_meta else self.kernels.pack_int4(quantize_int4(weight))
        if self._quantization != "int8":
            return self._pack_plain(weight)
        # One byte a number, and eight an output: its scale, and the sum of its row.
        self.num_bytes += weight.numel() + 8 * math.prod(weight.shape[:-1]) - weight.nbytes
        return weight if weight.is_meta else self.kernels.pack_int8(weight)

    def _pack_plain(self, weight: Tensor) -> Weight:
        if self._packed_dtype is not None:
            self.num_bytes += weight.numel() * self._packed_dtype(weight.dtype).itemsize - weight.nbytes
        return self.kernels.pack(weight)

    def _pack_fp8(self, rows: Sequence[WeightRows]) -> Weight:
        return tuple(rows) if self.device.type == "meta" else self.kernels.pack_fp8(rows)

    def _linear(self, packed: Weight, bias: Tensor | None, shape: tuple[int, int]) -> Linear:
        linear = Linear(self.kernels, packed, bias, shape)
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
