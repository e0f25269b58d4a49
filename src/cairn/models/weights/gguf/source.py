"""The numbers of published tensors out of a GGUF file, a few rows at a time: what is quantized is dequantized by the
`gguf` package's own rules."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.models.weights.gguf.checkpoint import open_gguf
from cairn.models.weights.gguf.header import GgufTensor
from cairn.models.weights.gguf.views import GgufView

PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""ggml's types of numbers that each stand for themselves."""

QUANTIZED: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""ggml's types of blocks that are read."""

_MOST_THREADS = 8
_NUMBERS_AT_A_TIME = 1 << 19
"""In each thread."""


def find_type_problem(type_name: str) -> str | None:
    """What is wrong with a tensor's type, in a sentence, or None. `type_name`: of a view."""
    unknown = [each for each in type_name.split("+") if each not in PLAIN and each not in QUANTIZED]
    return f"is {unknown[0]}; only {', '.join((*PLAIN, *QUANTIZED))} can be read" if unknown else None


class GgufFiles:
    """The files of a GGUF model, mapped into memory. A `TensorSource`; a context manager, or to be closed."""

    device = torch.device("cpu")

    def __init__(self, path: Path, advance: Callable[[int], None] | None = None) -> None:
        """`advance`: called with the number of bytes of each tensor, or part of one. Raises ModelError as
        `open_gguf`."""
        self._folder = path.parent
        self._checkpoint = open_gguf(path)
        self._advance = advance
        self._open: dict[str, NDArray[np.uint8]] = {}
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "cairn-gguf")

    def read(self, name: str, part: tuple[slice, ...], dtype: torch.dtype | None) -> Tensor:
        """See `TensorSource`; in `dtype`, or where that is None as it is stored, in float32 if it is quantized."""
        view = self._checkpoint.views[name]
        shape = tuple(each.stop - each.start for each in part)
        if self._advance is not None:
            self._advance(view.num_bytes * prod(shape) // prod(view.shape))
        if view.is_small:
            return _restore(view, self._rows(view))[part]
        values = torch.empty(shape, dtype=dtype or PLAIN.get(view.type_name, torch.float32))
        *leading, rows, columns = part
        matrices = range(leading[0].start, leading[0].stop) if leading else range(1)
        height = view.shape[-2]
        for target, number in zip(values.view(len(matrices), *shape[-2:]), matrices, strict=True):
            self._fill(target, view, number * height + rows.start, columns)
        return values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown()
        self._open.clear()

    def _fill(self, target: Tensor, view: GgufView, begin: int, columns: slice) -> None:
        """These columns of the rows from `begin` on, as many as `target` has."""
        order = None if view.column_order is None else torch.from_numpy(view.column_order[columns])
        step = max(1, _NUMBERS_AT_A_TIME // view.shape[-1])

        def fill(first: int) -> None:
            part = target[first : first + step]
            rows = self._rows(view, begin + first, begin + first + len(part))
            part.copy_(rows[:, columns] if order is None else rows[:, order])

        for _ in self._threads.map(fill, range(0, len(target), step)):
            pass

    def _rows(self, view: GgufView, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows [begin, end) of a view, whole, in the order in which they are published, but for small ones."""
        if view.row_order is not None and not view.is_small:
            (piece,) = view.pieces
            return self._decode(self._checkpoint.tensors[piece.tensor], piece.begin + view.row_order[begin:end])
        parts = [
            self._decode(self._checkpoint.tensors[name], slice(first, last))
            for name, first, last in _overlaps(view, begin, end)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, tensor: GgufTensor, rows: NDArray[np.int64] | slice) -> Tensor:
        """Rows of a stored tensor, as they are stored, or in float32 if they are quantized."""
        raw = np.array(self._raw_rows(tensor)[rows])
        if tensor.type_name in PLAIN:
            return torch.from_numpy(raw).view(PLAIN[tensor.type_name])
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        # Where a factor should be a file may have any bytes.
        with np.errstate(all="ignore"):
            return torch.from_numpy(dequantize(raw, GGMLQuantizationType[tensor.type_name]))

    def _raw_rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """All rows of a stored tensor, [rows, bytes]."""
        file = self._open.get(tensor.file)
        if file is None:
            file = self._open[tensor.file] = np.memmap(self._folder / tensor.file, dtype=np.uint8, mode="r")
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
