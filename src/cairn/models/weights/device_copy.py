"""Weights from a checkpoint's files to a device, in the order of the files, through two pinned buffers.

    file --preadv--> buffer 0 or 1 --copy, on a stream of its own--> tensor       (cut or cast: --> landing --> tensor)

While one buffer is being copied the next bytes are read into the other, and a buffer is written again only after the
copies out of it are complete. So the host never has more of a model than the two buffers, however large it is.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor

from cairn.errors import EngineDead, ModelError
from cairn.layers.communicator import SINGLE_RANK, Communicator
from cairn.models.weights.compiled_loops import background_packing
from cairn.models.weights.gguf.header import is_gguf
from cairn.models.weights.load_progress import load_progress
from cairn.models.weights.loader import WeightReader
from cairn.models.weights.tensor_headers import TensorHeader, read_offsets
from cairn.models.weights.tensor_source import TORCH_DTYPES, PartRecorder, StoredPart, stored_part

logger = logging.getLogger(__name__)

BUFFER_BYTES: Final = 64 << 20
"""Of each of the two buffers."""

_LEAST_RUN = 16 << 10
"""Bytes of a run below which rows are read whole and cut on the device, instead of run by run."""

_LEAST_SHARE = 64
"""A buffer that has less than one such part of it left, and less than is wanted, is full."""

_ALIGNMENT = 64
_COPY_SECONDS, _POLL_SECONDS = 300.0, 50e-6


class CopyStream(Protocol):
    """Copies to a device, made one after the other beside what else the device does."""

    @property
    def device(self) -> torch.device: ...

    def make_buffer(self) -> Tensor:
        """Memory of the host, uint8 [bytes], from which copies are made while the host goes on."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the device to copy into. Copies asked for from now on are made after all that the device was given
        to do so far, which may still read what was there before."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Asks for a copy, and a cast where the dtypes differ. `target` is on the device, `source` there or in a
        buffer, and neither is to be changed before it is made."""

    def record(self) -> Any:
        """An event: all copies asked for so far."""

    def wait(self, event: Any) -> None:
        """The host waits until these copies are complete. Raises EngineDead when they are not in time."""

    def join(self) -> None:
        """What the device is given to do from now on begins after all copies asked for so far."""


class CudaCopyStream:
    """A `CopyStream` of an NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make_buffer(self) -> Tensor:
        return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> Any:
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        deadline = time.monotonic() + _COPY_SECONDS
        while not event.query():
            if time.monotonic() > deadline:
                raise EngineDead(f"the GPU has not copied {BUFFER_BYTES} bytes of weights within {_COPY_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream)


def stream_to(device: torch.device) -> CopyStream | None:
    """None for memory that is the host's, or that is written as it is asked for."""
    return CudaCopyStream(device) if device.type == "cuda" else None


def is_mapped(folder: Path, stream: CopyStream | None) -> bool:
    """Whether tensors come from files that are mapped into memory. What a GGUF file has is not copied byte by byte."""
    return stream is None or is_gguf(folder)


@contextmanager
def load_weights(
    reader: WeightReader,
    expected: Mapping[str, tuple[int, ...]],
    read_all: Callable[[], None],
    stream: CopyStream | None,
    communicator: Communicator = SINGLE_RANK,
    what: str = "weights",
) -> Iterator[None]:
    """Inside, `reader` gives tensors that `stream` copies to its device, or tensors of the host where that is None.
    Rank 0 shows the progress.

    `expected`: the tensors of all ranks. `read_all`: reads from `reader`, without memory, what will be read inside, in
    any order. `what`: what the log calls them. Raises ModelError naming a file that cannot be read.
    """
    total = reader.stored_bytes(expected) if communicator.size == 1 else None
    if stream is None or is_mapped(reader.folder, stream):
        reader.read_ahead(expected)
        with (
            load_progress(what, total, "the host", communicator.rank == 0) as advance,
            reader.telling(advance),
            background_packing(reader.when_there),
        ):
            yield
        return
    recorder = PartRecorder(reader.headers)
    with reader.read_from(recorder):
        read_all()
    total = sum(recorder.num_bytes(part) for part in set(recorder.parts))
    with (
        load_progress(what, total, str(stream.device), communicator.rank == 0) as advance,
        DeviceCopy(reader.folder, reader.headers, recorder.parts, stream, advance) as copy,
        reader.read_from(copy),
    ):
        yield
        if copy.num_unforeseen or copy.num_left:
            logger.warning("%s: %d parts read out of order, %d in vain", what, copy.num_unforeseen, copy.num_left)


class _Buffers:
    """The two buffers. Bytes are handed out of one until it is full, then out of the other."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._buffers = [stream.make_buffer() for _ in range(2)]
        self.num_bytes = len(self._buffers[0])
        self._copied: list[Any] = [None, None]
        self._number = self._used = 0

    def take(self, num_bytes: int, unit: int) -> Tensor:
        """Memory to write to, of `num_bytes` or fewer that are a multiple of `unit`; copies out of it have to be asked
        for before the next call."""
        if self.num_bytes - self._used < max(unit, min(num_bytes, self.num_bytes // _LEAST_SHARE)):
            self._copied[self._number] = self._stream.record()
            self._number, self._used = 1 - self._number, 0
            if self._copied[self._number] is not None:
                self._stream.wait(self._copied[self._number])
        begin = self._used
        taken = min(num_bytes, (self.num_bytes - begin) // unit * unit)
        self._used = min(self.num_bytes, begin + -(-taken // _ALIGNMENT) * _ALIGNMENT)
        return self._buffers[self._number][begin : begin + taken]


class DeviceCopy:
    """A `TensorSource` of a device: has the parts that are going to be read copied there, in the order in which the
    files have them, up to the one that is asked for. One thread; a context manager, at whose end all copies are made.

    `num_unforeseen`: parts that were asked for and not announced; they are read when they are asked for.
    """

    def __init__(
        self,
        folder: Path,
        headers: Mapping[str, TensorHeader],
        parts: Collection[StoredPart],
        stream: CopyStream,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        """`parts`: what will be read, in any order, as often as it will be. `advance`: called with the number of bytes
        of each piece. Raises ModelError naming a file that cannot be read."""
        self.num_unforeseen = 0
        self._folder = folder
        self._headers = headers
        self._stream = stream
        self._advance = advance
        self._buffers = _Buffers(stream)
        self._landing: Tensor | None = None
        self._places: dict[str, tuple[int, int]] = {}
        for file in sorted({headers[part.name].file for part in parts}):
            self._read_places(file)
        self._reads_left = Counter(parts)
        self._ahead = sorted(self._reads_left, key=self._file_order, reverse=True)
        self._copied: dict[StoredPart, Tensor] = {}
        self._file: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # What was read ahead, and the buffers, may be given back only when nothing is written there any more.
            self._stream.wait(self._stream.record())
        except EngineDead:
            if error is None:
                raise
        finally:
            self._copied.clear()
            if self._file is not None:
                os.close(self._file[1])
                self._file = None

    @property
    def device(self) -> torch.device:
        return self._stream.device

    @property
    def num_left(self) -> int:
        """Parts that were announced and not asked for."""
        return self._reads_left.total()

    def read(self, name: str, part: tuple[slice, ...], dtype: torch.dtype | None) -> Tensor:
        """See `TensorSource`; in `dtype`. Raises ModelError naming the tensor and the file of one that cannot be read,
        whichever is read on the way."""
        wanted = stored_part(name, part, dtype)
        if wanted not in self._copied and self._reads_left[wanted] == 0:
            self.num_unforeseen += 1
            self._read_places(self._headers[name].file)
            self._reads_left[wanted] = 1
            self._ahead.append(wanted)
        while wanted not in self._copied:
            ahead = self._ahead.pop()
            self._copied[ahead] = self._copy(ahead)
        self._stream.join()
        self._reads_left[wanted] -= 1
        return self._copied[wanted] if self._reads_left[wanted] else self._copied.pop(wanted)

    def _read_places(self, file: str) -> None:
        try:
            with (self._folder / file).open("rb") as opened:
                self._places |= read_offsets(opened)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ModelError(f"{self._folder / file}: cannot be read: {error}") from error

    def _file_order(self, part: StoredPart) -> tuple[str, int, int]:
        header = self._headers[part.name]
        return header.file, self._places[part.name][0], _Runs(header, part).first

    def _copy(self, part: StoredPart) -> Tensor:
        header = self._headers[part.name]
        runs = _Runs(header, part)
        offset, num_bytes = self._places[part.name]
        if num_bytes != prod(header.shape) * runs.itemsize:
            raise ModelError(f"{self._folder / header.file}: {part.name} has changed since its header was read")
        target = self._stream.empty(part.shape, part.dtype or runs.dtype)
        try:
            if runs.num_bytes < _LEAST_RUN and runs.count > 1 and runs.stride <= self._buffers.num_bytes:
                self._copy_rows(header.file, offset, runs, target)
            else:
                self._copy_runs(header.file, offset, runs, target)
        except OSError as error:
            raise ModelError(f"{self._folder / header.file}: {part.name} cannot be read: {error}") from error
        return target

    def _copy_runs(self, file: str, offset: int, runs: "_Runs", target: Tensor) -> None:
        """Byte range by byte range, as many into a piece as there is room for."""
        total, done, flat = runs.count * runs.num_bytes, 0, target.view(-1)
        while done < total:
            piece = self._buffers.take(total - done, runs.itemsize)
            filled = 0
            while filled < len(piece):
                run, inside = divmod(done + filled, runs.num_bytes)
                length = min(runs.num_bytes - inside, len(piece) - filled)
                self._fill(piece[filled : filled + length], file, offset + runs.first + run * runs.stride + inside)
                filled += length
            begin, end = done // runs.itemsize, (done + filled) // runs.itemsize
            source = piece.view(runs.dtype)
            self._stream.copy(flat[begin:end], source if runs.dtype == target.dtype else self._land(source))
            done += filled

    def _copy_rows(self, file: str, offset: int, runs: "_Runs", target: Tensor) -> None:
        """Rows from one run's beginning to the next one's, whole, and cut on the device."""
        cut, row = target.view(runs.count, -1), 0
        width = runs.num_bytes // runs.itemsize
        before = runs.first // runs.itemsize
        while row < runs.count:
            piece = self._buffers.take((runs.count - row) * runs.stride, runs.stride)
            self._fill(piece, file, offset + row * runs.stride)
            num_rows = len(piece) // runs.stride
            landed = self._land(piece.view(runs.dtype)).view(num_rows, -1)
            self._stream.copy(cut[row : row + num_rows], landed[:, before : before + width])
            row += num_rows

    def _land(self, source: Tensor) -> Tensor:
        """The same numbers on the device, until the copies asked for next are made: all are made in order."""
        if self._landing is None:
            self._landing = self._stream.empty((self._buffers.num_bytes,), torch.uint8)
        landed = self._landing[: source.nbytes].view(source.dtype)
        self._stream.copy(landed, source)
        return landed

    def _fill(self, piece: Tensor, file: str, offset: int) -> None:
        """Raises OSError."""
        if self._file is None or self._file[0] != file:
            if self._file is not None:
                os.close(self._file[1])
                self._file = None
            self._file = file, os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(self._file[1], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        memory: Any = piece.numpy()
        filled = 0
        while filled < len(memory):
            count = os.preadv(self._file[1], [memory[filled:]], offset + filled)
            if count == 0:
                raise OSError("the file was cut short")
            filled += count
        if self._advance is not None:
            self._advance(len(memory))


class _Runs:
    """Where the bytes of a part are in its tensor: `count` runs of `num_bytes` bytes, the first at `first`, from one's
    beginning to the next `stride`. At most one dimension of the part is cut."""

    def __init__(self, header: TensorHeader, part: StoredPart) -> None:
        self.dtype = TORCH_DTYPES[header.dtype]
        self.itemsize = self.dtype.itemsize
        cuts = [dim for dim, place in enumerate(part.place) if place != (0, header.shape[dim])]
        assert len(cuts) <= 1, f"{part.name} is cut along {cuts}"
        dim = cuts[0] if cuts else 0
        inner = prod(header.shape[dim + 1 :]) * self.itemsize
        begin, end = part.place[dim] if part.place else (0, 1)
        self.count = prod(header.shape[:dim])
        self.num_bytes = (end - begin) * inner
        self.first = begin * inner
        self.stride = (header.shape[dim] if part.place else 1) * inner
