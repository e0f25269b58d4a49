"""Where the stored numbers of tensors come from: files mapped into memory, or, in `device_copy`, copies to a device."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from cairn.models.sharding import Slice
from cairn.models.weights.gguf.header import is_gguf
from cairn.models.weights.gguf.source import GgufFiles
from cairn.models.weights.read_ahead import FileRange, ReadAhead
from cairn.models.weights.tensor_headers import TensorHeader, read_offsets

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "I64": torch.int64,
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
    }
)
"""By safetensors' names: all that is read."""


class TensorSource(Protocol):
    """Gives parts of stored tensors. `device`: where they lie."""

    @property
    def device(self) -> torch.device: ...

    def read(self, name: str, part: tuple[slice, ...], dtype: torch.dtype | None) -> Tensor:
        """The part that has these slices, one a dimension; on the host a view of the file. `dtype`: what the caller
        will bring the numbers to, which may have been done already; None where they are wanted as they are stored."""
        ...


class MappedFiles:
    """The files of a folder, mapped into memory. A `TensorSource`; to be closed. `advance`: called with the number of
    bytes of each part."""

    device = torch.device("cpu")

    def __init__(self, folder: Path, headers: Mapping[str, TensorHeader]) -> None:
        self.advance: Callable[[int], None] | None = None
        self._folder = folder
        self._headers = headers
        self._open: dict[str, _MappedFile] = {}
        self._ahead = ReadAhead()

    def read_ahead(self, order: Iterable[str]) -> None:
        """These tensors will be read, one after the other: see `ReadAhead.begin`."""
        self._ahead.begin(self._places(order))

    def read(self, name: str, part: tuple[slice, ...], dtype: torch.dtype | None) -> Tensor:
        header = self._headers[name]
        self._ahead.reached(name)
        values = self._file(header.file).tensor(name, header)
        for each, length in zip(part, header.shape, strict=True):
            if each.stop - each.start != length:
                values = values[part].contiguous()
                break
        if self.advance is not None:
            self.advance(values.nbytes)
        return values

    def close(self) -> None:
        self._ahead.close()
        self._open.clear()

    def _places(self, order: Iterable[str]) -> Iterator[tuple[str, FileRange]]:
        for name in order:
            file = self._file(self._headers[name].file)
            yield name, FileRange(file.path, *file.offsets[name])

    def _file(self, name: str) -> "_MappedFile":
        file = self._open.get(name)
        # Another thread may open it as well: then one of the two stays.
        return file or self._open.setdefault(name, _MappedFile(self._folder / name))


class _MappedFile:
    """A safetensors file. All tensors of it are in one mapping; the package makes another one for each."""

    __slots__ = "_mapped", "offsets", "path"

    def __init__(self, path: Path) -> None:
        with path.open("rb") as opened:
            self.path, self.offsets = path, read_offsets(opened)
            # Private: torch has no tensors that cannot be written to.
            self._mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str, header: TensorHeader) -> Tensor:
        """The file's memory, wherever it begins. Raises OSError where there is less of it."""
        begin, num_bytes = self.offsets[name]
        dtype = TORCH_DTYPES[header.dtype]
        if not num_bytes:
            return torch.empty(header.shape, dtype=dtype)
        if begin + num_bytes > len(self._mapped):
            raise OSError(f"it ends at byte {begin + num_bytes}, and the file at {len(self._mapped)}")
        values = torch.frombuffer(self._mapped, dtype=dtype, count=num_bytes // dtype.itemsize, offset=begin)
        return values.view(header.shape)


def map_files(folder: Path, headers: Mapping[str, TensorHeader]) -> MappedFiles | GgufFiles:
    """The files of a checkpoint folder, or the GGUF file that `folder` is, as `MappedFiles`."""
    return GgufFiles(folder) if is_gguf(folder) else MappedFiles(folder, headers)


def stored_bytes(header: TensorHeader) -> int:
    """Of a tensor as it is stored."""
    return prod(header.shape) * TORCH_DTYPES[header.dtype].itemsize if header.num_bytes is None else header.num_bytes


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a stored tensor, [begin, end) of each dimension, and the dtype that its numbers are brought to; None
    for that in which they are stored."""

    name: str
    place: tuple[Slice, ...]
    dtype: torch.dtype | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.place)


def stored_part(name: str, part: tuple[slice, ...], dtype: torch.dtype | None) -> StoredPart:
    """What `TensorSource.read` is asked for, as a record."""
    return StoredPart(name, tuple((each.start, each.stop) for each in part), dtype)


class PartRecorder:
    """Writes down what is read, and gives tensors without memory. A `TensorSource`. `parts`: in the order of reading,
    as often as each was read."""

    device = torch.device("meta")

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.parts: list[StoredPart] = []
        self._headers = headers

    def read(self, name: str, part: tuple[slice, ...], dtype: torch.dtype | None) -> Tensor:
        stored = stored_part(name, part, dtype)
        self.parts.append(stored)
        return torch.empty(stored.shape, dtype=dtype or TORCH_DTYPES[self._headers[name].dtype], device=self.device)

    def num_bytes(self, part: StoredPart) -> int:
        """As it is stored."""
        return prod(part.shape) * TORCH_DTYPES[self._headers[part.name].dtype].itemsize
