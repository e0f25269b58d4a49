"""Where the numbers of a tensor are stored: under its own name, as FP8 with factors beside it, or as one of many in a
tensor of all experts."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from cairn.models.quantization import Quantization
from cairn.models.tensor_headers import TensorHeader

__all__ = ["FP8", "Stored", "consumed", "dequantized", "scale_problem", "stored"]

FP8: Final = "F8_E4M3"
"""safetensors' name of the one FP8 dtype that is read."""

_WEIGHT = ".weight"
_OF_ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Stored:
    """`header`: the tensor as it would be alone. `name`: the tensor of the file that has it. `entry` None: all of it;
    otherwise that entry of the first dimension, its rows from `first_row` on. `scale`: the name of the factors."""

    header: TensorHeader
    name: str
    entry: int | None = None
    first_row: int = 0
    scale: str | None = None


def stored(headers: Mapping[str, TensorHeader], name: str, quantization: Quantization | None) -> Stored | None:
    """Where the tensor `name` is, or None where it is nowhere.

    transformers keeps all experts of a layer in `experts.gate_up_proj` [experts, 2 * inner, hidden] and
    `experts.down_proj` [experts, hidden, inner], and some checkpoints are published so; others have a tensor for each
    expert, which are the names that families ask for.
    """
    header = headers.get(name)
    if header is None:
        return _of_pack(headers, name)
    if header.dtype == FP8 and quantization is not None and name.endswith(_WEIGHT) and len(header.shape) == 2:
        scale = f"{name.removesuffix(_WEIGHT)}.{quantization.scale}"
        return Stored(header, name, scale=scale if scale in headers else None)
    return Stored(header, name)


def _of_pack(headers: Mapping[str, TensorHeader], name: str) -> Stored | None:
    found = _OF_ONE_EXPERT.fullmatch(name)
    if found is None:
        return None
    base, entry, part = found[1], int(found[2]), found[3]
    pack = f"{base}.{'down' if part == 'down' else 'gate_up'}_proj"
    header = headers.get(pack)
    if header is None or len(header.shape) != 3 or entry >= header.shape[0]:
        return None
    _, rows, columns = header.shape
    if part != "down":
        rows //= 2
    alone = replace(header, shape=(rows, columns))
    return Stored(alone, pack, entry, first_row=rows if part == "up" else 0)


def consumed(
    headers: Mapping[str, TensorHeader], expected: Iterable[str], quantization: Quantization | None
) -> dict[str, int]:
    """The stored tensors that `expected` ones are made of or that belong to them, each with how many of its entries are
    asked for (0 where it is not a pack)."""
    found: dict[str, int] = {}
    for name in expected:
        source = stored(headers, name, quantization)
        if source is None:
            continue
        entries = 0 if source.entry is None else source.entry + 1
        found[source.name] = max(found.get(source.name, 0), entries)
        if quantization is not None and name.endswith(_WEIGHT):
            found |= {other: 0 for other in _companions(name, quantization, source) if other in headers}
    return found


def _companions(name: str, quantization: Quantization, source: Stored) -> list[str]:
    """The factors of a weight. Those of keys and values are there whether the projection is quantized or not."""
    base = name.removesuffix(_WEIGHT)
    kept = [f"{base}.{base[-6]}_scale"] if base.endswith((".k_proj", ".v_proj")) else []
    if source.scale is None:
        return kept
    return [source.scale, *kept, *([f"{base}.input_scale"] if quantization.block is None else [])]


def scale_problem(headers: Mapping[str, TensorHeader], source: Stored, quantization: Quantization | None) -> str | None:
    """What is wrong with an FP8 tensor's factors, in a sentence, or None."""
    if quantization is None:
        return f"is {FP8}, but config.json has no quantization_config that says how it is scaled"
    if source.entry is not None or not source.name.endswith(_WEIGHT):
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
