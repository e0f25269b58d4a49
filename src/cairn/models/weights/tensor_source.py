"""Where the stored numbers of tensors come from: files mapped into memory, or, in `device_copy`, copies to a device."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from cairn.models.sharding import Slice
from cairn.models.weights.gguf.header import is_gguf
from cairn.models.weights.gguf.source import GgufFiles
from cairn.models.weights.read_ahead import FileRange, ReadAhead, ReadingOrder
from cairn.models.weights.tensor_headers import TensorHeader, first_file, read_offsets

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
    bytes of each part.

    The safetensors package has checked the headers, but does not hand out the tensors: version 0.8.0 looks at the first
    number of each for torch, so whoever asks for one waits for the disk, and with it all who want Python.
    """

    device = torch.device("cpu")

    def __init__(self, folder: Path, headers: Mapping[str, TensorHeader], ahead: ReadAhead) -> None:
        """`ahead`: is closed with the files."""
        self.advance: Callable[[int], None] | None = None
        self._folder = folder
        self._headers = headers
        self._open: dict[str, tuple[Tensor, Mapping[str, tuple[int, int]]]] = {}
        self._offsets: dict[str, Mapping[str, tuple[int, int]]] = {}
        self._ahead = ahead

    def read_ahead(self, names: Sequence[str], small: Sequence[str]) -> None:
        """These tensors will be read, one after the other: see `ReadingOrder`."""
        files = {header.file for header in self._headers.values()}
        self._ahead.begin(ReadingOrder(names, self._places, [self._folder / file for file in files], small))

    def read(self, name: str, part: tuple[slice, ...], dtype: torch.dtype | None) -> Tensor:
        header = self._headers[name]
        self._ahead.reached(name)
        file, offsets = self._open.get(header.file) or self._map(header.file)
        (begin, num_bytes), stored = offsets[name], TORCH_DTYPES[header.dtype]
        numbers = file[begin : begin + num_bytes]
        # Where a header's length is no multiple of it.
        whole = (numbers.clone() if begin % stored.itemsize else numbers).view(stored).view(header.shape)
        # A part that is as long as the tensor is all of it.
        is_whole = tuple([each.stop - each.start for each in part]) == header.shape
        values = whole if is_whole else whole[part]
        if self.advance is not None:
            self.advance(values.nbytes)
        return values

    def close(self) -> None:
        self._open.clear()
        self._ahead.close()

    def _places(self, names: Iterable[str]) -> Iterator[tuple[str, FileRange]]:
        paths: dict[str, Path] = {}
        for name in names:
            file = self._headers[name].file
            path = paths.get(file) or paths.setdefault(file, self._folder / file)
            yield name, FileRange(path, *self._offsets_of(file)[name])

    def _offsets_of(self, file: str) -> Mapping[str, tuple[int, int]]:
        """See `read_offsets`. Both threads ask."""
        offsets = self._offsets.get(file)
        if offsets is None:
            with (self._folder / file).open("rb") as opened:
                offsets = self._offsets[file] = read_offsets(opened)
        return offsets

    def _map(self, file: str) -> tuple[Tensor, Mapping[str, tuple[int, int]]]:
        """Its bytes, and where tensors are in them."""
        with (self._folder / file).open("rb") as opened:
            # Nobody writes there, but torch warns of memory that cannot be written to.
            mapped = mmap(opened.fileno(), 0, access=ACCESS_COPY)
        self._open[file] = torch.frombuffer(mapped, dtype=torch.uint8), self._offsets_of(file)
        return self._open[file]


def map_files(folder: Path, headers: Mapping[str, TensorHeader], ahead: ReadAhead) -> MappedFiles | GgufFiles:
    """The files of a checkpoint folder, or the GGUF file that `folder` is, as `MappedFiles`."""
    return GgufFiles(folder, ahead) if is_gguf(folder) else MappedFiles(folder, headers, ahead)


@contextmanager
def reading_ahead(folder: Path, begins: bool) -> Iterator[ReadAhead]:
    """For a `WeightReader` of the folder, or of the GGUF file that it is. `begins`: whether its first file is wanted on
    the host, before any header has been read."""
    with closing(ReadAhead()) as ahead:
        if begins and (file := first_file(folder)) is not None:
            ahead.begin_blindly(file)
        yield ahead


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
