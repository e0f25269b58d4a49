"""Names, shapes and dtypes of the tensors in a checkpoint folder or a GGUF file, without reading a tensor."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from cairn.errors import ModelError
from cairn.models.weights.gguf.checkpoint import open_gguf
from cairn.models.weights.gguf.header import is_gguf

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20
MAX_SHARDS = 10_000
_MAX_HEADER_BYTES = 100 << 20
"""What safetensors itself allows."""

# RuntimeError is what torch raises when a file cannot be mapped.
READ_ERRORS = (SafetensorError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor by its file's header; `dtype` in safetensors' spelling, or ggml's, with `+` between several.
    `num_bytes`: as it is stored, where that does not follow from the dtype."""

    shape: tuple[int, ...]
    dtype: str
    file: str
    num_bytes: int | None = None


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Name -> header of every tensor in the folder's safetensors files, or in the GGUF file that `folder` is, by their
    published names, without reading a tensor.

    Raises ModelError: no safetensors or GGUF, a file missing, damaged or cut short, an index that names files elsewhere
    or disagrees with its shards.
    """
    if is_gguf(folder):
        views = open_gguf(folder).views.items()
        return {name: TensorHeader(view.shape, view.type_name, view.file, view.num_bytes) for name, view in views}
    # The single file goes first where a folder has both forms, as in transformers.
    if (folder / SINGLE).exists():
        return _read_file_headers(folder, SINGLE)
    if not (folder / INDEX).exists():
        raise _no_weights(folder)
    return indexed_headers(folder, lambda file: _read_shard_headers(folder, file))


def first_file(folder: Path) -> Path | None:
    """Where a model's first tensors probably are, in the folder or in the GGUF file that `folder` is. Nothing is
    read."""
    if is_gguf(folder):
        return folder
    single = folder / SINGLE
    return single if single.exists() else next(folder.glob("model-00001-of-*.safetensors"), None)


def read_offsets(file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Name -> where in a safetensors file the tensor's bytes begin, and how many they are. Raises ValueError,
    LookupError or TypeError for a file that is none, which `read_headers` finds out first."""
    size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes")
    entries: dict[str, Any] = json.loads(file.read(size))
    places = {name: entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"}
    return {name: (8 + size + begin, end - begin) for name, (begin, end) in places.items()}


def indexed_files(folder: Path) -> list[str]:
    """The files that the folder's index names, each once, in order. Raises ModelError."""
    return sorted(set(_read_index(folder / INDEX).values()))


def indexed_headers(
    folder: Path, read_file_headers: Callable[[str], dict[str, TensorHeader]]
) -> dict[str, TensorHeader]:
    """Name -> header of every tensor in the files that the folder's index names, wherever those are.

    Raises ModelError when index and files disagree.
    """
    shard_of = _read_index(folder / INDEX)
    headers: dict[str, TensorHeader] = {}
    for file in sorted(set(shard_of.values())):
        for name, header in read_file_headers(file).items():
            if name in headers:
                raise ModelError(f"{folder}: {name} is both in {headers[name].file} and in {file}")
            headers[name] = header
    for name, file in shard_of.items():
        if name not in headers or headers[name].file != file:
            raise ModelError(f"{folder / INDEX}: {name} should be in {file}, but is not there")
    return headers


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size. Raises ModelError naming the file."""
    try:
        with path.open("rb") as file:
            # The size that is read, not that of `stat`: a device or pipe says 0, and never ends.
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, this is no such file")
        value = json.loads(text)
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
    shard_of = read_json(path).get("weight_map")
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


def _read_shard_headers(folder: Path, file_name: str) -> dict[str, TensorHeader]:
    path = folder / file_name
    if not path.is_file():
        name = next(name for name, file in _read_index(folder / INDEX).items() if file == file_name)
        raise ModelError(f"{path}: the shard is missing, and {name} with it, by {INDEX}: download it again")
    return _read_file_headers(folder, file_name)


def _read_file_headers(folder: Path, file_name: str) -> dict[str, TensorHeader]:
    path = folder / file_name
    try:
        # numpy's view is mapped read-only; torch's is charged to memory, which a whole checkpoint may exceed.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except READ_ERRORS as error:
        what = _describe_cut(path) or error
        raise ModelError(f"{path}: damaged or cut short: {what}: download it again") from error
    return {name: TensorHeader(tuple(each.get_shape()), each.get_dtype(), file_name) for name, each in slices.items()}


def _describe_cut(path: Path) -> str | None:
    """Which tensor of a safetensors file ends where the file does not go on; None where that is not what is wrong."""
    try:
        with path.open("rb") as file:
            places = read_offsets(file)
            file_bytes = file.seek(0, os.SEEK_END)
        ends = {begin + num_bytes: name for name, (begin, num_bytes) in places.items()}
        end = min(end for end in ends if end > file_bytes)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return f"{ends[end]} ends at byte {end}, and the file at {file_bytes}"
