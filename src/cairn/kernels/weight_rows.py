"""Rows of weights as they are loaded, in the model's dtype or as a checkpoint stores them, joined and stacked."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cairn.kernels.fp8 import Fp8Weight
from cairn.kernels.quantized import QuantizedWeight, as_bytes

StoredRows = Fp8Weight | QuantizedWeight
"""Rows of a weight [out, in] as they are stored."""

WeightRows = Tensor | StoredRows
"""Rows of a weight [out, in], as they are stored or in the model's dtype."""

WhenThere = Callable[[Callable[[], None]], None]
"""Calls something once all rows have been fetched that were asked for until now, in the order of these calls."""


def runs_of(parts: Sequence[WeightRows]) -> list[list[WeightRows]]:
    """Neighbours of one kind, of whose rows one weight can be made."""
    if len(parts) == 1:
        return [[*parts]]
    runs: list[tuple[object, list[WeightRows]]] = []
    for part in parts:
        kind = kind_of(part)
        if runs and runs[-1][0] == kind:
            runs[-1][1].append(part)
        else:
            runs.append((kind, [part]))
    return [run for _, run in runs]


def join_rows(parts: Sequence[WeightRows]) -> tuple[WeightRows, ...]:
    """The rows of several weights one after the other: neighbours of one kind become one part."""
    return tuple(run[0] if len(run) == 1 else _combine(_cat, run) for run in runs_of(parts))


def stack_experts(matrices: Sequence[WeightRows]) -> WeightRows | None:
    """A matrix [out, in] of each expert as a stack [E, out, in]; None where they are not all of one kind."""
    return _combine(_stack, matrices) if len({kind_of(matrix) for matrix in matrices}) == 1 else None


def dequantize_rows(parts: Sequence[WeightRows]) -> Tensor:
    """The rows of all parts in the model's dtype."""
    plain = [part if isinstance(part, Tensor) else part.dequantize() for part in parts]
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def kind_of(part: WeightRows) -> object:
    """Equal for weights of which one can be made."""
    if isinstance(part, Fp8Weight):
        return part.dtype, part.scales.shape[-1]
    return part.kind if isinstance(part, QuantizedWeight) else "plain"


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.mT for part in parts], dim=-1).mT if all(map(lies_across, parts)) else torch.cat(parts)


def _stack(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.mT for part in parts]).mT if all(map(lies_across, parts)) else torch.stack(parts)


def lies_across(part: Tensor) -> bool:
    """Whether its rows lie side by side, as in some files: copied number by number torch takes much longer."""
    return part.dim() == 2 and part.stride(0) == 1 < part.stride(1)


def memory_of(part: Tensor) -> int:
    """Where its memory begins, equal for all views of it."""
    return part.untyped_storage().data_ptr()


def _combine(function: Callable[[list[Tensor]], Tensor], parts: Sequence[WeightRows]) -> WeightRows:
    """Of parts of one kind."""
    first = parts[0]
    if isinstance(first, Tensor):
        return function([part for part in parts if isinstance(part, Tensor)])
    if isinstance(first, Fp8Weight):
        fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
        numbers, scales = ([getattr(part, field) for part in fp8] for field in ("numbers", "scales"))
        return Fp8Weight(function(numbers), function(scales), first.dtype)
    rows = [part.row_tensors() for part in parts if isinstance(part, QuantizedWeight)]
    return first.with_rows(
        {name: function([as_bytes(each[name]) for each in rows]).view(part.dtype) for name, part in rows[0].items()}
    )
