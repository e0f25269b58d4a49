"""What stands before the tensors of a GGUF file (ggml's docs/gguf.md): metadata, and where each tensor is.

The `gguf` package knows the types by name and size. Its own reader makes several objects of every token's text and says
of a damaged file no more than that an index was out of range; here every length is checked before it is used.
"""

import mmap
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cairn.errors import ModelError

SUFFIX: Final = ".gguf"
VERSIONS: Final = (2, 3)

_MAGIC = b"GGUF"
_MAX_TENSORS, _MAX_FIELDS, _MAX_PARTS = 1 << 20, 1 << 16, 1 << 10
_MAX_DIMS, _MAX_NUMBERS = 4, 1 << 48
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = MappingProxyType({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"})
"""struct's letters by GGUF's numbers of its types."""
_LENGTH = struct.Struct("<Q")
"""Of a string, in bytes."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor. `shape`: rows before columns, as in torch; `type_name`: ggml's, as Q4_K; `begin`: its first
    byte in `file`, a name."""

    shape: tuple[int, ...]
    type_name: str
    file: str
    begin: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // prod(self.shape[:-1])

    def place(self, begin: int, end: int) -> tuple[int, int]:
        """Where rows [begin, end) of all matrices begin in the file, and their bytes."""
        return self.begin + begin * self.row_bytes, (end - begin) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Of a file, or of all parts of a model that is split. `metadata`: numbers, strings and lists; lists of strings are
    left out unless they were asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family. Raises ModelError where there is none."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"{self.path}: general.architecture is missing, which says what model this is")
        return name


def is_gguf(path: Path) -> bool:
    """Whether a path is called as a GGUF file is, and no folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read_header(path: Path, lists: Collection[str] = ()) -> GgufHeader:
    """The header of a file, and of its other parts where the model is split. `lists`: names of lists of strings that
    are wanted.

    Raises ModelError: no GGUF, a version, a type or a field that is not read, a part missing, damaged or cut short.
    """
    metadata, tensors = _read_part(path, lists)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or not 1 <= count <= _MAX_PARTS:
        raise ModelError(f"{path}: split.count must be an integer in 1..{_MAX_PARTS}, not {count!r}")
    for other in _other_parts(path, count):
        for name, tensor in _read_part(other, ())[1].items():
            if name in tensors:
                raise ModelError(f"{other}: {name} is in {tensors[name].file}, too")
            tensors[name] = tensor
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{path}: split.tensors.count is {expected}, but the parts have {len(tensors)} tensors")
    return GgufHeader(path, metadata, tensors)


def _other_parts(path: Path, count: int) -> list[Path]:
    """All but the first. Raises ModelError."""
    if count == 1:
        return []
    parts = _PART.fullmatch(path.name)
    if parts is None or int(parts[3]) != count:
        raise ModelError(
            f"{path}: the model is split into {count} files, which must be called NAME-00001-of-{count:05}.gguf"
        )
    if int(parts[2]) != 1:
        raise ModelError(f"{path}: name the first of the {count} files, {parts[1]}-00001-of-{count:05}.gguf")
    return [path.with_name(f"{parts[1]}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]


def _read_part(path: Path, lists: Collection[str]) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _Parser(path, memory).read(lists)
    except FileNotFoundError:
        raise ModelError(f"{path}: this file is missing") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:  # an empty file, which cannot be mapped
        raise ModelError(f"{path}: is empty, and no GGUF file") from None


class _Parser:
    """Reads a file from its beginning on."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path = path
        self._memory = memory
        self._place = 0

    def read(self, lists: Collection[str]) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Metadata and tensors. Raises ModelError."""
        if self._memory[:4] != _MAGIC:
            raise self._error("is no GGUF file: it does not begin with the four letters")
        self._place = 4
        (version,) = self._unpack("I")
        if version not in VERSIONS:
            what = "a big-endian file" if version & 0xFFFF == 0 else f"version {version} of GGUF"
            raise self._error(f"is {what}; read are versions {', '.join(map(str, VERSIONS))}: convert it again")
        num_tensors, num_fields = self._unpack("QQ")
        if num_tensors > _MAX_TENSORS or num_fields > _MAX_FIELDS:
            raise self._error(f"says that it has {num_tensors} tensors and {num_fields} fields, which no model has")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            if name in metadata:
                raise self._error(f"has {name} twice")
            metadata[name] = self._value(name, name in lists)
        return metadata, self._tensors(num_tensors, metadata.get("general.alignment", _ALIGNMENT))

    def _tensors(self, count: int, alignment: object) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two, not {alignment!r}")
        entries = [self._tensor() for _ in range(count)]
        first = -(-self._place // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in entries:
            if name in tensors:
                raise self._error(f"has {name} twice")
            type_name, num_bytes = self._stored(name, shape, number)
            begin, end = first + offset, first + offset + num_bytes
            if end > len(self._memory):
                raise self._cut_short(f"{name} ends at byte {end}, and the file at {len(self._memory)}")
            tensors[name] = GgufTensor(shape, type_name, self._path.name, begin, num_bytes)
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"{name} has {num_dims} dimensions; ggml's tensors have 1..{_MAX_DIMS}")
        shape = self._unpack(f"{num_dims}Q")[::-1]
        if not 0 < prod(shape) <= _MAX_NUMBERS:
            raise self._error(f"{name} has shape {list(shape)}, which no tensor has")
        number, offset = self._unpack("IQ")
        return name, shape, number, offset

    def _stored(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """The name of a tensor's type, and its bytes."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._error(f"{name} is of ggml's type {number}, which is not known") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._error(f"{name} has rows of {shape[-1]} numbers, and {kind.name} has blocks of {block}")
        return kind.name, prod(shape) // block * block_bytes

    def _value(self, name: str, wanted: bool) -> Any:
        (kind,) = self._unpack("I")
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(self._scalar(name, kind))[0]
        kind, count = self._unpack("IQ")
        if kind == _STRING:
            return self._strings(count, wanted)
        letter = self._scalar(name, kind)
        if count * struct.calcsize(f"<{letter}") > len(self._memory):
            raise self._header_cut_short()
        return list(self._unpack(f"{count}{letter}"))

    def _strings(self, count: int, wanted: bool) -> list[str] | None:
        if 8 * count > len(self._memory):
            raise self._header_cut_short()
        if wanted:
            return [self._string() for _ in range(count)]
        # A vocabulary and its merges are hundreds of thousands of them.
        memory, place, last, length_at = self._memory, self._place, len(self._memory) - 8, _LENGTH.unpack_from
        for _ in range(count):
            if place > last:
                raise self._header_cut_short()
            place += 8 + length_at(memory, place)[0]
        self._place = place
        self._skip(0)
        return None

    def _scalar(self, name: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._error(f"{name} is of GGUF's type {kind}, which is not read")
        return _SCALARS[kind]

    def _string(self) -> str:
        begin = self._skip(self._unpack("Q")[0])
        try:
            return self._memory[begin : self._place].decode()
        except UnicodeDecodeError:
            raise self._error(f"has a string at byte {begin} that is no UTF-8") from None

    def _unpack(self, letters: str) -> tuple[Any, ...]:
        letters = f"<{letters}"
        return struct.unpack_from(letters, self._memory, self._skip(struct.calcsize(letters)))

    def _skip(self, num_bytes: int) -> int:
        """Where these bytes begin."""
        begin = self._place
        if num_bytes > len(self._memory) - begin:
            raise self._header_cut_short()
        self._place = begin + num_bytes
        return begin

    def _header_cut_short(self) -> ModelError:
        return self._cut_short(f"its header goes on where the file ends, at byte {len(self._memory)}")

    def _cut_short(self, how: str) -> ModelError:
        return self._error(f"is cut short: {how}: download it again")

    def _error(self, text: str) -> ModelError:
        return ModelError(f"{self._path}: {text}")
