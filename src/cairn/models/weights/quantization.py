"""Which quantization a checkpoint says it has. Two are read, both with FP8 (e4m3) weights:

fp8         Qwen's and DeepSeek's: `weight_scale_inv`, one factor for each block of 128 x 128 numbers
            (transformers' FineGrainedFP8Config; `quantization_config` of config.json)
modelopt    NVIDIA ModelOpt's FP8: `weight_scale`, one factor for a tensor; `input_scale`, `k_scale` and `v_scale` are
            for those who also compute or cache in FP8 (`hf_quant_config.json`, or `quantization_config`)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from cairn.errors import ModelError
from cairn.models.config_schema import Fields
from cairn.models.weights.tensor_headers import TensorHeader, read_json

MODELOPT_FILE = "hf_quant_config.json"
MAX_BLOCK = 1 << 16

FP8: Final = "F8_E4M3"
"""safetensors' name of the one FP8 dtype that is read."""

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Quantization:
    """`block`: the rows and columns of a weight that have one factor; None where all of it has one."""

    block: tuple[int, int] | None

    @property
    def scale(self) -> str:
        """The last part of a factor's name; what is before it is the weight's."""
        return "weight_scale" if self.block is None else "weight_scale_inv"


def read_quantization(folder: Path, raw: Mapping[str, object]) -> Quantization | None:
    """From config.json's fields and, where they say nothing, from hf_quant_config.json. None: not quantized.

    Raises ModelError that names the field of a quantization that is not read.
    """
    given = raw.get("quantization_config")
    if given is None:
        path = folder / MODELOPT_FILE
        return _modelopt(MODELOPT_FILE, read_json(path).get("quantization")) if path.exists() else None
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: quantization_config must be an object, not {type(given).__name__}")
    method = given.get("quant_method")
    if method == "modelopt":
        return _modelopt("config.json: quantization_config", given)
    if method != "fp8":
        raise ModelError(f"config.json: quant_method {method!r} is not read; known: fp8, modelopt")
    fields = Fields(given)
    fields.only("fmt", "e4m3")
    block = fields.integers("weight_block_size", 1, MAX_BLOCK)
    if len(block) != 2:
        raise ModelError(f"config.json: weight_block_size must be two numbers, as [128, 128], not {list(block)}")
    return Quantization((block[0], block[1]))


def _modelopt(where: str, given: object) -> Quantization:
    algorithm = given.get("quant_algo") if isinstance(given, Mapping) else None
    if algorithm != "FP8":
        raise ModelError(f"{where}: quant_algo {algorithm!r} is not read; known: FP8")
    return Quantization(None)


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
