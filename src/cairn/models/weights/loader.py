"""From a checkpoint folder to config fields, tensor headers and tensors. Only safetensors, only inside the folder.

A folder holds config.json and either `model.safetensors` or shards listed by `model.safetensors.index.json`. Nothing
in it is ever executed: pickle formats are refused, `auto_map` is not looked at.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from safetensors import safe_open

from cairn.errors import ModelError
from cairn.models.served_dtype import ServedDType, served_dtype
from cairn.models.sharding import TensorShard
from cairn.models.weights.quantization import FP8, Quantization, Stored, consumed, dequantized, scale_problem, stored
from cairn.models.weights.tensor_headers import READ_ERRORS, TensorHeader, read_headers, read_json

DType = Literal["auto", "float32", "bfloat16"]

_TORCH_DTYPES: Mapping[ServedDType, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16}
)

_COMPARED_ROWS = 4096
"""Of two tensors at a time, so that neither is in memory as a whole."""

READABLE = ("BF16", "F16", "F32")
"""safetensors' names of the dtypes that are converted to the serving dtype; FP8 needs factors, others are unknown."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """A checkpoint's tensors against the ones its config calls for, a sentence for each that is wrong.

    `ignored` counts those of parts that are not served, such as multi-token prediction heads.
    """

    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    misshapen: tuple[str, ...]
    unreadable: tuple[str, ...]
    ignored: int

    @property
    def problems(self) -> tuple[str, ...]:
        return self.misshapen + self.unreadable + self.missing + self.unknown


def read_config(folder: Path) -> dict[str, object]:
    """config.json, its `eos_token_id` extended by the ids that generation_config.json adds. Raises ModelError."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give one that holds config.json")
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    added = _ids(read_json(generation).get("eos_token_id")) if generation.exists() else []
    if added:
        raw["eos_token_id"] = [*_ids(raw.get("eos_token_id")), *added]
    return raw


def serving_dtype(raw: Mapping[str, object], wanted: DType) -> torch.dtype:
    """`auto`: as `served_dtype` has it. Raises ModelError."""
    return _TORCH_DTYPES[served_dtype(raw) if wanted == "auto" else wanted]


def account(
    headers: Mapping[str, TensorHeader],
    expected: Mapping[str, tuple[int, ...]],
    ignored: tuple[str, ...] = (),
    quantization: Quantization | None = None,
) -> Accounting:
    """Compare names, shapes and dtypes. `ignored`: name prefixes that are allowed and not served."""
    misshapen, unreadable, missing = [], [], []
    for name, shape in expected.items():
        source = stored(headers, name, quantization)
        if source is None:
            missing.append(f"{name} {list(shape)} is missing")
        elif source.header.shape != shape:
            misshapen.append(_misshapen(source, name, shape))
        elif problem := _unreadable(headers, source, name, quantization):
            unreadable.append(problem)
    used = consumed(headers, expected, quantization)
    extra = headers.keys() - used
    unknown = [name for name in extra if not name.startswith(ignored)]
    return Accounting(
        missing=tuple(sorted(missing)),
        unknown=tuple(f"{headers[name].file}: {name} is not part of this architecture" for name in sorted(unknown)),
        misshapen=tuple(sorted(misshapen)),
        unreadable=tuple(sorted(unreadable)),
        ignored=len(extra) - len(unknown),
    )


def _misshapen(source: Stored, name: str, shape: tuple[int, ...]) -> str:
    found = source.header
    return f"{found.file}: {name} has shape {list(found.shape)}, config.json makes it {list(shape)}"


def _unreadable(
    headers: Mapping[str, TensorHeader], source: Stored, name: str, quantization: Quantization | None
) -> str | None:
    found = source.header
    if found.dtype == FP8:
        problem = scale_problem(headers, name, source, quantization)
        return f"{found.file}: {name} {problem}" if problem else None
    if found.dtype in READABLE:
        return None
    return f"{found.file}: {name} is {found.dtype}; only {', '.join(READABLE)} can be read"


class WeightReader:
    """Hands out tensors by name in the serving dtype. `load` is a `TensorLoader`.

    Tensors whose last name part is in `float32` keep full precision. Every tensor is a copy in memory of its own: the
    files may change or vanish afterwards, and alignment (so the rounding of vector kernels) is the allocator's. FP8
    weights are multiplied with their factors in float32 and then rounded to the serving dtype.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        float32: Collection[str] = (),
        quantization: Quantization | None = None,
    ) -> None:
        """Reads the headers. Raises ModelError as `read_headers` does."""
        self.headers = read_headers(folder)
        self._folder = folder
        self._dtype = dtype
        self._float32 = frozenset(float32)
        self._quantization = quantization
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def verify(self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """Raises ModelError naming tensors that are missing, unknown, misshapen or of a dtype that cannot be read."""
        problems = account(self.headers, expected, ignored, self._quantization).problems
        if problems:
            more = f"; and {len(problems) - 5} more, see `cairn check`" if len(problems) > 5 else ""
            raise ModelError(f"{self._folder}: {'; '.join(problems[:5])}{more}")

    def verify_copy(self, copy: str, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless `copy` has the numbers of `name`, both of this shape, as they would be served."""
        for begin in range(0, shape[0], _COMPARED_ROWS):
            rows = TensorShard(0, ((begin, min(begin + _COMPARED_ROWS, shape[0])),))
            if not torch.equal(self.load(copy, shape, rows), self.load(name, shape, rows)):
                raise ModelError(
                    f"{self._folder}: config.json ties {copy} to {name}, but both are stored and differ; set "
                    "tie_word_embeddings (or the older tie_embedding) to false there, or remove the one that is not "
                    "meant"
                )

    def load(self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None) -> torch.Tensor:
        """The tensor in the serving dtype, or a shard of it: then only that is read.

        Raises ModelError naming tensor and file.
        """
        source = stored(self.headers, name, self._quantization)
        if source is None:
            raise ModelError(f"{self._folder}: {name} {list(shape)} is missing")
        if source.header.shape != shape:
            raise ModelError(_misshapen(source, name, shape))
        if problem := _unreadable(self.headers, source, name, self._quantization):
            raise ModelError(problem)
        try:
            return self._read(name, source, shape, shard)
        except READ_ERRORS as error:
            raise ModelError(f"{self._folder / source.header.file}: {name} cannot be read: {error}") from error

    def _read(self, name: str, source: Stored, shape: tuple[int, ...], shard: TensorShard | None) -> torch.Tensor:
        dtype = torch.float32 if name.rpartition(".")[2] in self._float32 else self._dtype
        if shard is None:
            return self._numbers(name, source, tuple(slice(0, length) for length in shape)).to(dtype, copy=True)
        out = torch.empty(shard.shape(shape), dtype=dtype)
        place = 0
        for begin, end in shard.slices:
            if begin < end:
                wanted = [slice(0, length) for length in shape]
                wanted[shard.dim] = slice(begin, end)
                out.narrow(shard.dim, place, end - begin).copy_(self._numbers(name, source, tuple(wanted)))
            place += end - begin
        return out

    def _numbers(self, name: str, source: Stored, wanted: tuple[slice, ...]) -> torch.Tensor:
        """These places of a tensor, as they are stored, or in float32 where they are quantized."""
        file = self._file(source.header.file)
        if all(part == slice(0, length) for part, length in zip(wanted, source.header.shape, strict=True)):
            values: torch.Tensor = file.get_tensor(name)
        else:
            values = file.get_slice(name)[wanted]
        if source.scale is None or self._quantization is None:
            return values
        scale = self._file(self.headers[source.scale].file).get_tensor(source.scale)
        return dequantized(values, scale, wanted[0], wanted[1], self._quantization.block)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._open[name]


def _ids(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]
