"""One rank's weights, drawn from a checkpoint and made ready for the kernels' products."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.contract import Kernels, Weight
from cairn.kernels.fp8 import Fp8Weight
from cairn.kernels.int4 import quantize_int4
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import WeightRows, dequantize_rows, join_rows, stack_experts
from cairn.layers.linear import Linear
from cairn.models.contract import StoredLoader, TensorLoader
from cairn.models.decoder_config import MADE_AT_LOAD, ServedQuantization
from cairn.models.weight_specs import ExpertMatrices, ExpertStacks, JoinedTensors, ProductSpec, StoredTensor, WeightSpec
from cairn.models.weights.compiled_loops import kept_copy

logger = logging.getLogger(__name__)


def read_weight(weight: StoredTensor, load: TensorLoader, load_stored: StoredLoader | None) -> WeightRows:
    """The rank's share, as it is stored where that stays."""
    place = weight.name, weight.shape, weight.shard
    rows = load_stored(*place) if load_stored is not None and weight.is_matrix else None
    return load(*place) if rows is None else rows


RowsLoader = Callable[[StoredTensor], WeightRows]
"""Gives the rank's share of a matrix."""


@dataclass(eq=False)
class RankWeights:
    """Draws tensors and collects the matrix products that are made of them, `linears`. Raises what `load` raises.

    What `load` gives is on `device`, or on the host and copied there. `quantization`: of products' weights.
    `load_stored`: gives matrices that stay as they are stored, if there may be any. `lend_rows`: gives either in memory
    that is only there until products have been made of it; None: there is nothing of this kind."""

    load: TensorLoader
    kernels: Kernels
    device: torch.device
    quantization: ServedQuantization | None = None
    load_stored: StoredLoader | None = None
    lend_rows: RowsLoader | None = None
    linears: list[Linear] = field(init=False, default_factory=list)

    @singledispatchmethod
    def make(self, weight: WeightSpec) -> Any:
        """A tensor, a product as a `Linear`, or the packed matrices of all experts, into and out of their inner
        channels."""
        raise TypeError(f"nothing is made of {weight!r:.200}")

    @make.register
    def tensor(self, weight: StoredTensor) -> Tensor:
        """As it is loaded, on the device."""
        return self.load(weight.name, weight.shape, weight.shard).to(self.device)

    @make.register
    def joined(self, weight: JoinedTensors) -> Tensor:
        """As they are loaded, on the device."""
        return torch.cat([self.tensor(part) for part in weight.parts])

    @make.register
    def product(self, weight: ProductSpec) -> Linear:
        """Its rows packed, with their biases."""
        parts = [self._rows(part) for part in weight.parts]
        biases: list[WeightRows] = [self.tensor(part) for part in weight.biases]
        if weight.gated_heads:
            parts, biases = (_gates_last(each, weight.gated_heads) for each in (parts, biases))
        bias = dequantize_rows(biases) if biases else None
        if weight.precision == "float32":
            parts = [part.to(torch.float32, copy=True) for part in parts if isinstance(part, Tensor)]
            bias = None if bias is None else bias.float()
        return self.linear(parts, bias, weight.precision == "quantized")

    def linear(self, rows: Sequence[WeightRows], bias: Tensor | None = None, quantized: bool = True) -> Linear:
        """A product of rows one after the other, which are as they are stored or not."""
        shape = sum(part.shape[0] for part in rows), rows[0].shape[1]
        if self.quantization in MADE_AT_LOAD:
            joined = join_rows(rows)
            packed = self._pack(joined[0] if len(joined) == 1 else dequantize_rows(joined), quantized)
        else:
            packed = self.kernels.pack_stored(rows)
        linear = Linear(self.kernels, packed, bias, shape)
        self.linears.append(linear)
        return linear

    @make.register
    def stacks(self, weight: ExpertStacks) -> tuple[Any, ...]:
        """Both packed, and their biases."""
        up, down = (self._stack(stack, weight.inputs_first) for stack in (weight.up, weight.down))
        biases = [self.tensor(bias) for bias in weight.biases]
        if weight.by_turns:
            up = _gate_first(up) if isinstance(up, Tensor) else up.changed(_gate_first)
            biases[:1] = map(_gate_first, biases[:1])
        return self._pack(up), self._pack(down), *biases

    def _stack(self, weight: StoredTensor, inputs_first: bool) -> WeightRows:
        rows = self._rows(weight)
        return rows.transpose(1, 2).contiguous() if inputs_first and isinstance(rows, Tensor) else rows

    @make.register
    def experts(self, weight: ExpertMatrices) -> tuple[Weight, Weight]:
        """Stacked, and both packed."""
        ups = [_joined([self._rows(part) for part in parts]) for parts in weight.ups]
        return self._pack(_stacked(ups)), self._pack(_stacked([self._rows(part) for part in weight.downs]))

    def vocabulary(self, weight: StoredTensor, stays: bool = True) -> Tensor | QuantizedWeight:
        """The rows of an embedding or an output, in codes if they are stored so and weights stay as they are stored.
        `stays`: they are for more than a product that is made of them now."""
        if self.quantization in MADE_AT_LOAD:
            plain: Tensor = self.tensor(weight)
            return plain
        rows = self._rows(weight)
        if stays and self.lend_rows is not None:
            rows = kept_copy(rows) if isinstance(rows, Tensor) else self._read(weight)
        return rows.dequantize() if isinstance(rows, Fp8Weight) else rows

    def _rows(self, weight: StoredTensor) -> WeightRows:
        """Of a product."""
        return (self.lend_rows or self._read)(weight).to(self.device)

    def _read(self, weight: StoredTensor) -> WeightRows:
        return read_weight(weight, self.load, self.load_stored)

    def _pack(self, weight: WeightRows, quantized: bool = True) -> Weight:
        """A weight [out, in], or a stack of experts' [E, out, in], for the kernels' products."""
        if not isinstance(weight, Tensor):
            if self.quantization not in MADE_AT_LOAD:
                return self.kernels.pack_stored([weight])
            if quantized and isinstance(weight, QuantizedWeight) and weight.becomes_int4:
                return self.kernels.pack_int4(weight.as_int4())
            weight = weight.dequantize()
        if quantized and self.quantization == "int4":
            return self.kernels.pack_int4(quantize_int4(weight))
        if quantized and self.quantization == "int8":
            return self.kernels.pack_int8(weight)
        return self.kernels.pack(weight)


def _joined(rows: Sequence[WeightRows]) -> WeightRows:
    """In one weight, which is as it is stored if all are of one kind."""
    joined = join_rows(rows)
    return joined[0] if len(joined) == 1 else torch.cat(_dequantize(joined))


def _stacked(matrices: Sequence[WeightRows]) -> WeightRows:
    stack = stack_experts(matrices)
    return torch.stack(_dequantize(matrices)) if stack is None else stack


def _dequantize(parts: Sequence[WeightRows]) -> list[Tensor]:
    logger.warning("quantized weights are dequantized: they are in one product with others of another kind")
    return [dequantize_rows([part]) for part in parts]


def _gate_first(stack: Tensor) -> Tensor:
    """[E, 2 * inner, ...] with rows of gate and up by turns -> gate and then up."""
    experts, rows, *row = stack.shape
    return stack.reshape(experts, rows // 2, 2, *row).transpose(1, 2).reshape(stack.shape)


def _gates_last(parts: list[WeightRows], heads: int) -> list[WeightRows]:
    """Each head's query and then its gate, and keys and values -> queries | keys | values | gates."""
    if not parts:
        return parts

    size = parts[0].shape[0] // (2 * heads)

    def half_of(which: int) -> list[WeightRows]:
        return [parts[0][begin : begin + size] for begin in range(which * size, parts[0].shape[0], 2 * size)]

    return [*half_of(0), *parts[1:], *half_of(1)]
