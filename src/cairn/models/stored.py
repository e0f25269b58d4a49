"""How the numbers of a tensor are stored: as they are, or as FP8 with factors beside it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cairn.models.quantization import Quantization
from cairn.models.tensor_headers import TensorHeader

FP8: Final = "F8_E4M3"
"""safetensors' name of the one FP8 dtype that is read."""

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Stored:
    """`header`: the tensor of the file that has it. `scale`: the name of its factors."""

    header: TensorHeader
    scale: str | None = None


def stored(headers: Mapping[str, TensorHeader], name: str, quantization: Quantization | None) -> Stored | None:
    """Where the tensor `name` is, or None where it is nowhere."""
    header = headers.get(name)
    if header is None:
        return None
    if header.dtype == FP8 and quantization is not None and name.endswith(_WEIGHT) and len(header.shape) == 2:
        scale = f"{name.removesuffix(_WEIGHT)}.{quantization.scale}"
        return Stored(header, scale if scale in headers else None)
    return Stored(header)


def consumed(
    headers: Mapping[str, TensorHeader], expected: Iterable[str], quantization: Quantization | None
) -> set[str]:
    """The stored tensors that are `expected` or belong to such ones."""
    found = set()
    for name in expected:
        source = stored(headers, name, quantization)
        if source is None:
            continue
        found.add(name)
        if quantization is not None and name.endswith(_WEIGHT):
            found |= {each for each in _companions(name, quantization, source) if each in headers}
    return found


def _companions(name: str, quantization: Quantization, source: Stored) -> list[str]:
    """The factors of a weight. Those of keys and values are there whether the projection is quantized or not."""
    base = name.removesuffix(_WEIGHT)
    kept = [f"{base}.{base[-6]}_scale"] if base.endswith((".k_proj", ".v_proj")) else []
    if source.scale is None:
        return kept
    return [source.scale, *kept, *([f"{base}.input_scale"] if quantization.block is None else [])]


def scale_problem(
    headers: Mapping[str, TensorHeader], name: str, source: Stored, quantization: Quantization | None
) -> str | None:
    """What is wrong with an FP8 tensor's factors, in a sentence, or None."""
    if quantization is None:
        return f"is {FP8}, but config.json has no quantization_config that says how it is scaled"
    if not name.endswith(_WEIGHT):
        return f"is {FP8}, which only matrices named .weight are read as"
    if source.scale is None:
        return f"is {FP8}, but its {quantization.scale} is missing"
    header = headers[source.scale]
    wanted: tuple[tuple[int, ...], ...] = ((), (1,))
    if quantization.block is not None:
        wanted = (tuple(-(-n // size) for n, size in zip(source.header.shape, quantization.block, strict=True)),)
    if header.shape not in wanted or header.dtype not in ("F32", "BF16"):
        return (
            f"is {FP8} with {quantization.scale} {header.dtype} {list(header.shape)} instead of F32 {list(wanted[0])}"
        )
    return None


def dequantized(values: Tensor, scale: Tensor, rows: slice, columns: slice, block: tuple[int, int] | None) -> Tensor:
    """values: float8 [rows, columns] at these places of a weight; scale: its factors, all of them -> float32.

    A cut may begin and end inside a block.
    """
    wide = values.float()
    if block is None:
        return wide.mul_(scale.float().reshape(()))
    of_row = torch.arange(rows.start, rows.stop) // block[0]
    of_column = torch.arange(columns.start, columns.stop) // block[1]
    return wide.mul_(scale.float()[of_row][:, of_column])
