"""From a checkpoint folder to config fields, tensor headers and tensors. Only safetensors, only inside the folder.

A folder holds config.json and either `model.safetensors` or shards listed by `model.safetensors.index.json`. Nothing
in it is ever executed: pickle formats are refused, `auto_map` is not looked at.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError, safe_open

from cairn.errors import ModelError
from cairn.models.cut import Cut

__all__ = [
    "Accounting",
    "DType",
    "TensorHeader",
    "WeightReader",
    "account",
    "read_config",
    "read_headers",
    "serving_dtype",
]

DType = Literal["auto", "float32", "bfloat16"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20
MAX_SHARDS = 10_000
READABLE = ("BF16", "F16", "F32")
"""safetensors' names of the dtypes that are converted to the serving dtype; others are quantized or integer."""

# RuntimeError is what torch raises when a file cannot be mapped.
_READ_ERRORS = (SafetensorError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its file announces it; `dtype` in safetensors' spelling."""

    shape: tuple[int, ...]
    dtype: str
    file: str


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
        raise ModelError(f"{folder}: no such folder; nothing is downloaded, give a folder that holds config.json")
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    added = _ids(_read_json(generation).get("eos_token_id")) if generation.exists() else []
    if added:
        raw["eos_token_id"] = [*_ids(raw.get("eos_token_id")), *added]
    return raw


def serving_dtype(raw: Mapping[str, object], wanted: DType) -> torch.dtype:
    """`auto` is the dtype config.json was saved with; float16 is widened to float32, which holds it exactly."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
    saved = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    known = {"float32": torch.float32, "float16": torch.float32, "bfloat16": torch.bfloat16}
    if not isinstance(saved, str) or saved not in known:
        raise ModelError(f"config.json: torch_dtype {saved!r} is none of {', '.join(known)}; choose one with --dtype")
    return known[saved]


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Name -> header of every tensor in the folder's safetensors files, without reading a tensor.

    Raises ModelError: no safetensors, a shard missing, damaged or cut short, an index that names files elsewhere or
    disagrees with its shards.
    """
    # The single file goes first where a folder has both forms, as in transformers.
    if (folder / SINGLE).exists():
        return _read_file_headers(folder, SINGLE)
    if not (folder / INDEX).exists():
        raise _no_weights(folder)
    shard_of = _read_index(folder / INDEX)
    headers: dict[str, TensorHeader] = {}
    for file in sorted(set(shard_of.values())):
        for name, header in _read_file_headers(folder, file).items():
            if name in headers:
                raise ModelError(f"{folder}: {name} is both in {headers[name].file} and in {file}")
            headers[name] = header
    for name, file in shard_of.items():
        if name not in headers or headers[name].file != file:
            raise ModelError(f"{folder / INDEX}: {name} should be in {file}, but is not there")
    return headers


def account(
    headers: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()
) -> Accounting:
    """Compare names, shapes and dtypes. `ignored`: name prefixes that are allowed and not served."""
    misshapen, unreadable = [], []
    for name in expected.keys() & headers.keys():
        header, shape = headers[name], expected[name]
        if header.shape != shape:
            misshapen.append(
                f"{header.file}: {name} has shape {list(header.shape)}, config.json makes it {list(shape)}"
            )
        if header.dtype not in READABLE:
            unreadable.append(f"{header.file}: {name} is {header.dtype}; only {', '.join(READABLE)} can be read")
    extra = headers.keys() - expected.keys()
    unknown = [name for name in extra if not name.startswith(ignored)]
    return Accounting(
        missing=tuple(f"{name} {list(expected[name])} is missing" for name in sorted(expected.keys() - headers.keys())),
        unknown=tuple(f"{headers[name].file}: {name} is not part of this architecture" for name in sorted(unknown)),
        misshapen=tuple(sorted(misshapen)),
        unreadable=tuple(sorted(unreadable)),
        ignored=len(extra) - len(unknown),
    )


class WeightReader:
    """Hands out tensors by name in the serving dtype. `load` is a `TensorLoader`.

    Tensors whose last name part is in `float32` keep full precision. Every tensor is a copy in memory of its own: the
    files may change or vanish afterwards, and alignment (so the rounding of vector kernels) is the allocator's.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, float32: Collection[str] = ()) -> None:
        """Reads the headers. Raises ModelError as `read_headers` does."""
        self.headers = read_headers(folder)
        self._folder = folder
        self._dtype = dtype
        self._float32 = frozenset(float32)
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def verify(self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """Raises ModelError naming tensors that are missing, unknown, misshapen or of a dtype that cannot be read."""
        problems = account(self.headers, expected, ignored).problems
        if problems:
            more = f"; and {len(problems) - 5} more, see `cairn check`" if len(problems) > 5 else ""
            raise ModelError(f"{self._folder}: {'; '.join(problems[:5])}{more}")

    def load(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> torch.Tensor:
        """The tensor in the serving dtype, or what `cut` leaves of it: then only that is read.

        Raises ModelError naming tensor and file.
        """
        if name not in self.headers:
            raise ModelError(f"{self._folder}: {name} {list(shape)} is missing")
        header = self.headers[name]
        problems = account({name: header}, {name: shape}).problems
        if problems:
            raise ModelError(problems[0])
        try:
            if header.file not in self._open:
                mapped = safe_open(self._folder / header.file, framework="pt")
                self._open[header.file] = self._stack.enter_context(mapped)
            return self._read(self._open[header.file], name, shape, cut)
        except _READ_ERRORS as error:
            raise ModelError(f"{self._folder / header.file}: {name} cannot be read: {error}") from error

    def _read(self, file: Any, name: str, shape: tuple[int, ...], cut: Cut | None) -> torch.Tensor:
        dtype = torch.float32 if name.rpartition(".")[2] in self._float32 else self._dtype
        if cut is None:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor.to(dtype, copy=True)
        out = torch.empty(cut.shape(shape), dtype=dtype)
        source, place = file.get_slice(name), 0
        everything = (slice(None),) * cut.dim
        for begin, end in cut.runs:
            if begin < end:
                out[(*everything, slice(place, place + end - begin))] = source[(*everything, slice(begin, end))]
            place += end - begin
        return out


def _ids(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, this is no such file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: {path.name} is missing; this is not a Hugging Face checkpoint") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in folder.glob(suffix))
    if pickles:
        return ModelError(f"{folder}: {pickles[0]} is a pickle, which could run code; convert it to safetensors first")
    return ModelError(f"{folder}: neither {SINGLE} nor {INDEX} is there")


def _read_index(path: Path) -> dict[str, str]:
    shard_of = _read_json(path).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ModelError(f"{path}: weight_map must be an object of tensor names and file names")
    for name, file in shard_of.items():
        # A plain name: no parent folders, no absolute paths. Links are followed, as hub caches are made of them.
        if (
            not isinstance(file, str)
            or PurePath(file).name != file
            or "\\" in file
            or not file.endswith(".safetensors")
        ):
            raise ModelError(f"{path}: {name} is said to be in {file!r}; it must be a .safetensors file of this folder")
    if len(set(shard_of.values())) > MAX_SHARDS:
        raise ModelError(f"{path}: more than {MAX_SHARDS} shards")
    return shard_of


def _read_file_headers(folder: Path, name: str) -> dict[str, TensorHeader]:
    path = folder / name
    if not path.is_file():
        raise ModelError(f"{path}: the shard is missing; the download is incomplete")
    try:
        # numpy's view is mapped read-only; torch's is charged to memory, which a whole checkpoint may exceed.
        with safe_open(path, framework="np") as file:
            found = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118
    except _READ_ERRORS as error:
        raise ModelError(f"{path}: damaged or cut short: {error}") from error
    return {tensor: TensorHeader(tuple(entry.get_shape()), entry.get_dtype(), name) for tensor, entry in found.items()}
