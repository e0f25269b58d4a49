"""The numbers of published tensors out of a GGUF file, a few rows at a time: in codes, or dequantized to exactly what
the `gguf` package makes of them."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.quantized import QuantizedWeight
from cairn.models.sharding import Slice, TensorShard
from cairn.models.weights.compiled_loops import read_codes
from cairn.models.weights.gguf.checkpoint import open_gguf
from cairn.models.weights.gguf.codes import CODED, empty_codes, fill_codes, has_loops, pack_blocks, take_columns
from cairn.models.weights.gguf.header import GgufTensor
from cairn.models.weights.gguf.views import GgufView, Order
from cairn.models.weights.read_ahead import FileRange, ReadAhead, ReadingOrder

PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""ggml's types of numbers that each stand for themselves."""

_DEQUANTIZED: Final = ("Q2_K", "Q3_K")
"""ggml's types of blocks that do not become codes."""

_MOST_THREADS = 8
_CODES_AT_A_TIME = 1 << 19
_LOOP_CODES_AT_A_TIME = 1 << 22
"""For all threads together: rows in another order are copied before."""
_NUMBERS_AT_A_TIME = 1 << 15
"""In each thread. Of more numbers torch gives some to threads of its own, which would wait for each other."""


def find_type_problem(type_name: str) -> str | None:
    """What is wrong with a tensor's type, in a sentence, or None. `type_name`: of a view."""
    known = (*PLAIN, *CODED, *_DEQUANTIZED)
    unknown = [each for each in type_name.split("+") if each not in known]
    return f"is {unknown[0]}; only {', '.join(known)} can be read" if unknown else None


class GgufFiles:
    """The files of a GGUF model, mapped into memory. A `TensorSource`; to be closed. `advance`: called with the number
    of bytes of each tensor, or part of one."""

    device = torch.device("cpu")

    def __init__(self, path: Path, ahead: ReadAhead) -> None:
        """`ahead`: is closed with the files. Raises ModelError as `open_gguf`."""
        self.advance: Callable[[int], None] | None = None
        self._folder = path.parent
        self._checkpoint = open_gguf(path)
        self._open: dict[str, NDArray[np.uint8]] = {}
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "cairn-gguf")
        self._ahead = ahead

    def read_ahead(self, names: Sequence[str], small: Sequence[str]) -> None:
        """See `MappedFiles`."""
        files = {tensor.file for tensor in self._checkpoint.tensors.values()}
        self._ahead.begin(ReadingOrder(names, self._places, [self._folder / file for file in files], small))

    def read(self, name: str, part: tuple[slice, ...], dtype: torch.dtype | None) -> Tensor:
        """See `TensorSource`; in `dtype`, or where that is None as it is stored, in float32 if it is quantized."""
        self._ahead.reached(name)
        self._ahead.wait_for((name,))
        view = self._checkpoint.views[name]
        shape = tuple(each.stop - each.start for each in part)
        if self.advance is not None:
            self.advance(view.num_bytes * prod(shape) // prod(view.shape))
        if view.is_small:
            return _restore(view, self._rows(view))[part]
        values = torch.empty(shape, dtype=dtype or PLAIN.get(view.type_name, torch.float32))
        *leading, rows, columns = part
        matrices = range(leading[0].start, leading[0].stop) if leading else range(1)
        height = view.shape[-2]
        for target, number in zip(values.view(len(matrices), *shape[-2:]), matrices, strict=True):
            self._fill(target, view, number * height + rows.start, columns)
        return values

    def close(self) -> None:
        self._ahead.close()
        self._threads.shutdown()
        self._open.clear()

    def read_codes(self, name: str, shard: TensorShard | None, dtype: torch.dtype) -> QuantizedWeight | None:
        """A matrix, or a stack of them, in codes, or a shard of it; None where it is stored in no codes, or in several
        kinds, or is cut inside a block, or its columns are in another order inside groups."""
        self._ahead.reached(name)
        view = self._checkpoint.views[name]
        if view.column_order is not None or view.row_order is not None:
            # They are put in order now.
            self._ahead.wait_for((name,))
        if view.column_order is not None:
            return self._read_ordered(view, shard, dtype)
        cut = _cut_blocks(view.shape, view.type_name, view.num_bytes, shard)
        if cut is None or view.is_small:
            return None
        ranges, columns = cut
        num_rows = sum(end - begin for begin, end in ranges)
        if self.advance is not None:
            self.advance(view.num_bytes * num_rows // prod(view.shape[:-1]))
        made = empty_codes(view.type_name, num_rows, columns.stop - columns.start, dtype)

        def fill(place: tuple[int, int, int]) -> None:
            first, begin, end = place
            fill_codes(view.type_name, self._raw(view, begin, end)[:, columns], made, first)

        at_a_time, run = (_LOOP_CODES_AT_A_TIME, map) if has_loops() else (_CODES_AT_A_TIME, self._threads.map)

        def read() -> QuantizedWeight:
            for _ in run(fill, _steps(ranges, max(1, at_a_time // view.shape[-1]))):
                pass
            return made

        return _stacked(read_codes(read), view.shape)

    def _places(self, names: Iterable[str]) -> Iterator[tuple[str, FileRange]]:
        paths = {tensor.file: self._folder / tensor.file for tensor in self._checkpoint.tensors.values()}
        for name in names:
            for piece in self._checkpoint.views[name].pieces:
                tensor = self._checkpoint.tensors[piece.tensor]
                row = tensor.num_bytes // prod(tensor.shape[:-1])
                place = tensor.begin + piece.begin * row, (piece.end - piece.begin) * row
                yield name, FileRange(paths[tensor.file], *place)

    def _read_ordered(self, view: GgufView, shard: TensorShard | None, dtype: torch.dtype) -> QuantizedWeight | None:
        """A matrix whose columns are stored in another order, run by run."""
        if view.type_name not in CODED or view.column_order is None:
            return None
        height, width = view.shape
        rows = list(shard.slices) if shard is not None and shard.dim == 0 else [(0, height)]
        columns = shard.slices if shard is not None and shard.dim == 1 else ((0, width),)
        blocks = np.concatenate([self._raw(view, begin, end) for begin, end in rows])
        if self.advance is not None:
            self.advance(blocks.nbytes)
        whole = empty_codes(view.type_name, len(blocks), blocks.shape[1], dtype)
        fill_codes(view.type_name, blocks, whole, 0)
        taken = np.concatenate([view.column_order[begin:end] for begin, end in columns])
        unit = _run_of(taken)
        return None if unit % whole.group else take_columns(whole, taken[::unit] // unit, unit)

    def _fill(self, target: Tensor, view: GgufView, begin: int, columns: slice) -> None:
        """These columns of the rows from `begin` on, as many as `target` has."""
        order = None if view.column_order is None else torch.from_numpy(view.column_order[columns])

        def fill(place: tuple[int, int, int]) -> None:
            first, *rows = place
            values = self._rows(view, *rows)
            target[first : first + len(values)].copy_(values[:, columns] if order is None else values[:, order])

        step = max(1, _NUMBERS_AT_A_TIME // view.shape[-1])
        for _ in self._threads.map(fill, _steps([(begin, begin + len(target))], step)):
            pass

    def _rows(self, view: GgufView, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows [begin, end) of a view, whole, in the order in which they are published, but for small ones."""
        if view.row_order is not None and not view.is_small:
            (piece,) = view.pieces
            tensor = self._checkpoint.tensors[piece.tensor]
            return _decode(tensor.type_name, self._raw(view, begin, end))
        parts = []
        for name, first, last in _overlaps(view, begin, end):
            tensor = self._checkpoint.tensors[name]
            parts.append(_decode(tensor.type_name, np.array(self._raw_rows(tensor)[first:last])))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _raw(self, view: GgufView, begin: int, end: int | None) -> NDArray[np.uint8]:
        """The bytes of rows [begin, end) of a view of one type, in the order in which they are published; to be read,
        as they may be the file's memory."""
        if view.row_order is not None:
            (piece,) = view.pieces
            return self._raw_rows(self._checkpoint.tensors[piece.tensor])[piece.begin + view.row_order[begin:end]]
        parts = [
            self._raw_rows(self._checkpoint.tensors[name])[first:last]
            for name, first, last in _overlaps(view, begin, end)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _raw_rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """All rows of a stored tensor, [rows, bytes]."""
        file = self._open.get(tensor.file)
        if file is None:
            mapped = np.memmap(self._folder / tensor.file, dtype=np.uint8, mode="r")
            # Parts of a plain array cost a tenth of what those of its subclass do.
            file = self._open[tensor.file] = np.asarray(mapped)
        return file[tensor.begin : tensor.begin + tensor.num_bytes].reshape(prod(tensor.shape[:-1]), -1)


def _overlaps(view: GgufView, begin: int, end: int | None) -> Iterator[tuple[str, int, int]]:
    """The stored rows that rows [begin, end) of a view are made of."""
    place = 0
    for piece in view.pieces:
        length = piece.end - piece.begin
        first, last = max(begin - place, 0), length if end is None else min(end - place, length)
        if first < last:
            yield piece.tensor, piece.begin + first, piece.begin + last
        place += length


def _decode(type_name: str, raw: NDArray[np.uint8]) -> Tensor:
    """Rows of a stored tensor, [rows, bytes], as they are stored, or in float32 if they are quantized."""
    if type_name in PLAIN:
        return torch.from_numpy(raw).view(PLAIN[type_name])
    if type_name in CODED:
        return pack_blocks(type_name, raw, torch.float32).dequantize()
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # Where a factor should be a file may have any bytes.
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(raw, GGMLQuantizationType[type_name]))


def _restore(view: GgufView, stored: Tensor) -> Tensor:
    """A small tensor in its shape and order, with its own numbers; in float32 if they were changed."""
    values = stored.reshape(view.shape[0], -1)
    if view.row_order is not None:
        values = values[torch.from_numpy(view.row_order)]
    if view.change == "plus one":
        values = values.float() - 1
    elif view.change == "decay":
        values = values.float().neg().log()
    return values.reshape(view.shape)


# -- codes -----------------------------------------------------------------------------------------------------------


def describe_blocks(
    shape: Sequence[int], type_name: str, num_bytes: int, shard: TensorShard | None, dtype: torch.dtype
) -> QuantizedWeight | None:
    """As `GgufFiles.read_codes`, of a tensor of this type and of so many bytes, without memory, on the meta device."""
    cut = _cut_blocks(shape, type_name, num_bytes, shard)
    if cut is None:
        return None
    ranges, columns = cut
    num_rows = sum(end - begin for begin, end in ranges)
    made = empty_codes(type_name, num_rows, columns.stop - columns.start, dtype, torch.device("meta"))
    return _stacked(made, shape)


def _cut_blocks(
    shape: Sequence[int], type_name: str, num_bytes: int, shard: TensorShard | None
) -> tuple[list[Slice], slice] | None:
    """The rows, counted over all matrices, and the bytes of each that a shard has; None for one without codes."""
    if type_name not in CODED:
        return None
    *outer, height, width = shape
    count, block_bytes = prod(outer), CODED[type_name][0]
    block = width * block_bytes * count * height // num_bytes
    rows, columns = [(0, height)], (0, width)
    if shard is not None and shard.dim == len(shape) - 1:
        if len(shard.slices) > 1 or any(end % block for end in shard.slices[0]):
            return None
        columns = shard.slices[0]
    elif shard is not None:
        rows = list(shard.slices)
    ranges = [(number * height + begin, number * height + end) for number in range(count) for begin, end in rows]
    first, last = (place // block * block_bytes for place in columns)
    return [each for each in ranges if each[0] < each[1]], slice(first, last)


def _stacked(made: QuantizedWeight, shape: Sequence[int]) -> QuantizedWeight:
    """The rows of all matrices as a stack of them, if they are one."""
    if len(shape) == 2:
        return made
    return made.viewed(lambda part: part.view(shape[0], -1, part.shape[-1]))


def _run_of(order: Order) -> int:
    """The longest runs of neighbours, of one length and at multiples of it, of which an order is made."""
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    return int(np.gcd.reduce([len(order), *breaks, *order[breaks], order[0]]))


def _steps(ranges: Sequence[Slice], step: int) -> Iterator[tuple[int, int, int]]:
    """Where rows go, and [begin, end) of them, a few at a time."""
    place = 0
    for begin, end in ranges:
        for first in range(begin, end, step):
            yield place + first - begin, first, min(first + step, end)
        place += end - begin
