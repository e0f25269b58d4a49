"""config.json and the tensors of a checkpoint folder, or of a GGUF file. Only safetensors, only inside the folder.

A folder holds config.json and either `model.safetensors` or shards listed by `model.safetensors.index.json`. Nothing
in it is ever executed: pickle formats are refused, `auto_map` is ignored.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar

import torch

from cairn.errors import ModelError
from cairn.kernels.fp8 import Fp8Weight
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import StoredRows, memory_of
from cairn.models.config_schema import Fields
from cairn.models.decoder_config import ServedDType, served_dtype
from cairn.models.sharding import TensorShard
from cairn.models.weights.gguf.checkpoint import open_gguf
from cairn.models.weights.gguf.header import is_gguf
from cairn.models.weights.gguf.source import find_type_problem
from cairn.models.weights.packed_matrices import PackedMatrix, packed_tensors, resolve_matrix
from cairn.models.weights.quantization import (
    FP8,
    Quantization,
    dequantize,
    find_layouts,
    find_matrix,
    find_scale,
    find_scale_columns,
    find_scale_problem,
    name_form,
    row_scales,
    used_tensors,
)
from cairn.models.weights.read_ahead import ReadAhead
from cairn.models.weights.tensor_headers import READ_ERRORS, TensorHeader, read_headers, read_json
from cairn.models.weights.tensor_source import TensorSource, map_files, stored_bytes

GENERATION_FILE = "generation_config.json"

DType = Literal["auto", "float32", "bfloat16"]

_TORCH_DTYPES: Mapping[ServedDType, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16}
)

REMEDY = "download it again if config.json and tensors are not of one checkpoint or not whole, else take another one"
"""Where tensors are wrong."""

READABLE = ("BF16", "F16", "F32")
"""safetensors' names of the dtypes that are converted to the serving dtype; FP8 needs factors, others are unknown."""


_MOST_SMALL, _MOST_FIRST = 1 << 16, 1 << 11
"""Numbers of a tensor that is looked at by who asks for it, and so many of which are fetched before all others."""

Result = TypeVar("Result")

MatrixFinder = Callable[[str, tuple[int, ...]], PackedMatrix | str | None]
"""`find_matrix` of one checkpoint."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """A checkpoint's tensors against the ones that its config calls for. `problems`: a sentence for each that is wrong,
    and then for those that are missing and for those that are foreign, by turns.
    `num_ignored`: tensors of parts that are not served, such as multi-token prediction heads. `forms`: how many
    matrices are stored in each quantized form, by its name. `not_kept`: forms that do not stay, though others do."""

    problems: tuple[str, ...]
    num_ignored: int
    forms: Mapping[str, int]
    not_kept: frozenset[str] = frozenset()


def read_config(folder: Path) -> dict[str, object]:
    """config.json as it is, or what a GGUF file's metadata say in its words. Raises ModelError."""
    if is_gguf(folder):
        return dict(open_gguf(folder).config)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give one that holds config.json")
    return read_json(folder / "config.json")


def read_generation_eos(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json, none where there is no such file. Raises ModelError."""
    path = folder / GENERATION_FILE
    return Fields(read_json(path), GENERATION_FILE).token_ids("eos_token_id", vocab_size) if path.exists() else ()


def serving_dtype(raw: Mapping[str, object], dtype: DType) -> torch.dtype:
    """`auto`: as `served_dtype` has it. Raises ModelError."""
    return _TORCH_DTYPES[served_dtype(raw) if dtype == "auto" else dtype]


def account(
    headers: Mapping[str, TensorHeader],
    expected: Mapping[str, tuple[int, ...]],
    ignored: tuple[str, ...] = (),
    quantization: Quantization | None = None,
) -> Accounting:
    """Compare names, shapes and dtypes. `ignored`: name prefixes that are allowed and not served."""
    used = used_tensors(headers, expected, quantization)
    problems, num_ignored = _find_problems(headers, expected, used, ignored, quantization)
    forms = Counter(filter(None, (name_form(headers, *each, quantization) for each in expected.items())))
    return Accounting(problems, num_ignored, dict(sorted(forms.items())))


def _find_problems(
    headers: Mapping[str, TensorHeader],
    expected: Mapping[str, tuple[int, ...]],
    used: Set[str],
    ignored: tuple[str, ...],
    quantization: Quantization | None,
    find: MatrixFinder | None = None,
) -> tuple[tuple[str, ...], int]:
    """`problems` and `num_ignored` of an `Accounting`. `used`: the stored tensors that are `expected`."""
    mismatches = filter(None, (find_problem(headers, *each, quantization, find) for each in expected.items()))
    problems = sorted(mismatches, key=lambda problem: (problem.endswith("is missing"), problem))
    num_wrong = sum(not problem.endswith("is missing") for problem in problems)
    extra = headers.keys() - used
    unknown = sorted(name for name in extra if not name.startswith(ignored))
    foreign = [f"{headers[name].file}: {name} is not part of this architecture" for name in unknown]
    # By turns: what is missing may be there under another name, and of a long list only the beginning is shown.
    pairs = chain.from_iterable(zip_longest(problems[num_wrong:], foreign))
    return (*problems[:num_wrong], *filter(None, pairs)), len(extra) - len(unknown)


def _format_of(headers: Mapping[str, TensorHeader], quantization: Quantization | None) -> str:
    """What errors call the format of a checkpoint."""
    first = next(iter(headers.values()), None)
    # A GGUF file of plain numbers is not quantized.
    if first is not None and first.num_bytes is not None:
        return "GGUF"
    return "safetensors" if quantization is None else quantization.method


def find_problem(
    headers: Mapping[str, TensorHeader],
    name: str,
    shape: tuple[int, ...],
    quantization: Quantization | None,
    find: MatrixFinder | None = None,
) -> str | None:
    """Why the tensor `name` cannot be read with this shape, in a sentence, or None. `find`: of this checkpoint."""
    matrix = find_matrix(headers, name, shape, quantization) if find is None else find(name, shape)
    if matrix is not None:
        return matrix if isinstance(matrix, str) else None
    header = headers.get(name)
    if header is None:
        return f"{name} {list(shape)} ({_format_of(headers, quantization)}) is missing"
    if header.shape != shape:
        return f"{header.file}: {name} has shape {list(header.shape)}, config.json makes it {list(shape)}"
    if header.dtype == FP8:
        problem = find_scale_problem(headers, name, quantization)
        return f"{header.file}: {name} {problem}" if problem else None
    if header.num_bytes is not None:
        problem = find_type_problem(header.dtype)
        return f"{header.file}: {name} {problem}" if problem else None
    if header.dtype in READABLE:
        return None
    return f"{header.file}: {name} is {header.dtype}; only {', '.join(READABLE)} can be read"


class WeightReader:
    """Hands out tensors by name in the serving dtype. `load` is a `TensorLoader`, `load_fp8` and
    `load_codes` are `StoredLoader`s.

    Tensors whose last name part is in `float32` keep full precision. Every tensor is a copy in memory of its own: the
    files may change or vanish afterwards, and alignment (so the rounding of vector kernels) is the allocator's. Only
    without `copy`, which all loads take, it may be the file's memory: to be read at once. FP8
    weights are multiplied with their factors in float32 and then rounded to the serving dtype.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        float32: Collection[str] = (),
        quantization: Quantization | None = None,
        ahead: ReadAhead | None = None,
    ) -> None:
        """Reads the headers. `ahead`: what may have begun to fetch files. Raises ModelError as `read_headers` does."""
        self.headers = read_headers(folder)
        self.folder = folder
        self._dtype = dtype
        self._float32 = frozenset(float32)
        self._quantization = quantization
        self._is_gguf = is_gguf(folder)
        self._layouts = find_layouts(self.headers, quantization)
        self._matrices: dict[tuple[str, tuple[int, ...]], PackedMatrix | str] = {}
        self._verified: dict[str, tuple[int, ...]] = {}
        self._used: set[str] = set()
        self._ahead = ahead or ReadAhead()
        self._files = map_files(folder, self.headers, self._ahead)
        self._source: TensorSource = self._files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read_ahead(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Has a thread fetch the tensors that these are read from, in this order, if it has not begun before."""
        order = list(self._reading_order(expected))
        small = (name for name, is_looked_at in order if is_looked_at)
        self._files.read_ahead([name for name, _ in order], list(islice(small, _MOST_FIRST)))

    def when_there(self, act: Callable[[], None]) -> None:
        """See `ReadAhead`."""
        self._ahead.when_there(act)

    @contextmanager
    def telling(self, advance: Callable[[int], None]) -> Iterator[None]:
        """Inside, `advance` is called with the number of bytes of each part that is read from the files."""
        self._files.advance = advance
        try:
            yield
        finally:
            self._files.advance = None

    @contextmanager
    def read_from(self, source: TensorSource) -> Iterator[None]:
        """Inside, tensors come from `source` and lie on its device, instead of from the files and on the host."""
        before, self._source = self._source, source
        try:
            yield
        finally:
            self._source = before

    @property
    def names(self) -> Set[str]:
        """Of all tensors, and of matrices in codes as if they were not."""
        return self.headers.keys() | self._layouts.keys()

    def stored_bytes(self, expected: Mapping[str, tuple[int, ...]]) -> int:
        """Of the tensors that these are read from."""
        used = self._used if expected == self._verified else used_tensors(self.headers, expected, self._quantization)
        return sum(stored_bytes(self.headers[name]) for name in used)

    def _reading_order(self, expected: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, bool]]:
        """The tensors that these are read from, one after the other, and whether they are small, and looked at by who
        asks for them."""
        for name, shape in expected.items():
            if (layout := self._layouts.get(name)) is not None:
                for stored in packed_tensors(self.headers, name, layout):
                    yield stored, False
            elif (header := self.headers.get(name)) is not None:
                yield name, prod(shape) <= _MOST_SMALL
                if header.dtype == FP8 and (scale := find_scale(self.headers, name, self._quantization)) is not None:
                    yield scale.name, True

    def verify(self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> None:
        """Raises ModelError naming tensors that are missing, unknown, misshapen or of a dtype that cannot be read."""
        used = used_tensors(self.headers, expected, self._quantization, self._layouts)
        problems, _ = _find_problems(self.headers, expected, used, ignored, self._quantization, self._matrix)
        if problems:
            more = f"; and {len(problems) - 5} more, see `cairn check`" if len(problems) > 5 else ""
            raise ModelError(f"{self.folder}: {'; '.join(problems[:5])}{more}: {REMEDY}")
        self._verified, self._used = dict(expected), used

    def load(
        self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None, copy: bool = True
    ) -> torch.Tensor:
        """The tensor in the serving dtype, or a shard of it: then only that is read.

        Raises ModelError naming tensor and file.
        """
        dtype = torch.float32 if name.rpartition(".")[2] in self._float32 else self._dtype
        matrix = self._matrix(name, shape)
        if matrix is not None and not isinstance(matrix, str):
            # What is dequantized is in memory of its own.
            return self._read(
                name, shape, shard, dtype, lambda _, part: matrix.read_part(self._stored, part, dtype), copy=False
            )
        return self._read(name, shape, shard, dtype, partial(self._numbers, dtype), copy)

    def load_fp8(
        self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None, copy: bool = True
    ) -> Fp8Weight | None:
        """A matrix as it is stored in FP8, or a shard of it; None where it is not, or is cut inside a block.

        Raises ModelError as `load` does.
        """
        scale = find_scale(self.headers, name, self._quantization) if name in self.headers else None
        if scale is None or scale.block is None or self._quantization is None or not self._quantization.can_stay:
            return None
        if (columns := find_scale_columns(name, shape, shard, scale.block)) is None:
            return None
        # All are looked at before products are made of them.
        self._ahead.wait_for((name,))
        numbers = self._read(name, shape, shard, torch.uint8, lambda *part: self._stored(*part).view(torch.uint8), copy)
        rows = shard.slices if shard is not None and shard.dim == 0 else ((0, shape[0]),)
        factors = self._read(scale.name, self.headers[scale.name].shape, None, torch.float32, self._stored)
        return Fp8Weight(numbers, row_scales(factors, rows, columns, shape, scale.block), self._dtype)

    def load_codes(
        self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None, copy: bool = True
    ) -> QuantizedWeight | None:
        """A matrix, or a stack of experts', in codes as it is stored, or a shard of it; None where it is not, or is cut
        inside a group.

        Raises ModelError as `load` does.
        """
        if self._is_gguf:
            return self._gguf_codes(name, shape, shard)
        matrix = self._matrix(name, shape)
        if matrix is None:
            return None
        given: set[int] = set()

        def read_stored(stored: str, part: tuple[slice, ...]) -> torch.Tensor:
            if len(part) == 1:
                # An order of inputs is looked at now.
                self._ahead.wait_for((stored,))
            return self._stored(stored, part)

        def read_part(stored: str, part: tuple[slice, ...]) -> torch.Tensor:
            values = read_stored(stored, part)
            given.add(memory_of(values))
            return values

        def copy_given(part: torch.Tensor) -> torch.Tensor:
            return part.clone() if memory_of(part) in given else part

        def read() -> QuantizedWeight | None:
            if isinstance(matrix, str):
                raise ModelError(matrix)
            return matrix.read_shard(read_part if copy else read_stored, shard, self._dtype)

        weight = self._naming(name, read)
        # Parts may still be the files' memory.
        return weight.settled().changed(copy_given) if copy and weight is not None else weight

    def load_stored(
        self, name: str, shape: tuple[int, ...], shard: TensorShard | None = None, copy: bool = True
    ) -> StoredRows | None:
        """As `load_codes` or as `load_fp8`, whichever of the two the matrix is stored in."""
        codes = self.load_codes(name, shape, shard, copy)
        return codes if codes is not None else self.load_fp8(name, shape, shard, copy)

    def _matrix(self, name: str, shape: tuple[int, ...]) -> PackedMatrix | str | None:
        """See `find_matrix`."""
        layout = self._layouts.get(name)
        if layout is None:
            return None
        matrix = self._matrices.get((name, shape))
        if matrix is None:
            matrix = self._matrices[name, shape] = resolve_matrix(self.headers, name, shape, layout)
        return matrix

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError for a tensor that cannot be read with this shape."""
        if self._verified.get(name) == shape:
            return
        if problem := find_problem(self.headers, name, shape, self._quantization, self._matrix):
            raise ModelError(f"{self.folder}: {problem}")

    def _gguf_codes(self, name: str, shape: tuple[int, ...], shard: TensorShard | None) -> QuantizedWeight | None:
        self._check(name, shape)
        source: Any = self._source  # which is `GgufFiles`
        codes: QuantizedWeight | None = self._naming(name, lambda: source.read_codes(name, shard, self._dtype))
        return codes

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        shard: TensorShard | None,
        dtype: torch.dtype,
        read: Callable[[str, tuple[slice, ...]], torch.Tensor],
        copy: bool = True,
    ) -> torch.Tensor:
        """A tensor or a shard of it, part by part as `read` gives it; `copy`: in other memory. Raises ModelError."""
        self._check(name, shape)
        if copy:
            self._ahead.wait_for((name,))
        return self._naming(name, lambda: self._read_parts(shape, shard, dtype, partial(read, name), copy))

    def _naming(self, name: str, read: Callable[[], Result]) -> Result:
        """What goes wrong there names the tensor, and its file if it has one of its own."""
        try:
            return read()
        except torch.OutOfMemoryError:
            raise
        except (ModelError, *READ_ERRORS) as error:
            header = self.headers.get(name)
            place = self.folder if header is None else self.folder / header.file
            raise ModelError(f"{place}: {name} cannot be read: {error}") from error

    def _read_parts(
        self,
        shape: tuple[int, ...],
        shard: TensorShard | None,
        dtype: torch.dtype,
        read: Callable[[tuple[slice, ...]], torch.Tensor],
        copy: bool,
    ) -> torch.Tensor:
        everything = tuple(slice(0, length) for length in shape)
        if shard is None:
            numbers = read(everything)
            return numbers.to(dtype, copy=copy and numbers.device.type == "cpu")
        out = torch.empty(shard.shape(shape), dtype=dtype, device=self._source.device)
        place = 0
        for begin, end in shard.slices:
            if begin < end:
                part = (*everything[: shard.dim], slice(begin, end), *everything[shard.dim + 1 :])
                out.narrow(shard.dim, place, end - begin).copy_(read(part))
            place += end - begin
        return out

    def _numbers(self, dtype: torch.dtype, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, as it is stored or already in `dtype`, or in float32 where it is quantized."""
        scale = find_scale(self.headers, name, self._quantization)
        if scale is None or scale.block is None:
            return self._source.read(name, part, dtype)
        values = self._stored(name, part)
        factors = self._stored(scale.name, tuple(slice(0, length) for length in self.headers[scale.name].shape))
        return dequantize(values, factors, part[0], part[1], self.headers[name].shape, scale.block)

    def _stored(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        return self._source.read(name, part, None)
