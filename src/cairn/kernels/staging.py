"""Copies between host and device: one for all arrays that a step needs, one for all results that the host reads."""

import logging
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.errors import EngineDead

_DTYPES: Mapping[np.dtype[Any], torch.dtype] = MappingProxyType(
    {
        np.dtype(np.int64): torch.int64,
        np.dtype(np.int32): torch.int32,
        np.dtype(np.float64): torch.float64,
        np.dtype(np.float32): torch.float32,
        np.dtype(np.bool_): torch.bool,
        np.dtype(np.uint8): torch.uint8,
    }
)
_ALIGNMENT = 64
"""Bytes at which each array begins: a device reads it as if it had been allocated, and kernels are compiled for how
operands are aligned, and would be again when that changes."""


_DEVICE_SECONDS, _POLL_SECONDS = 300.0, 50e-6

_LEAST_BYTES, MOST_KEPT_BYTES = 1 << 16, 1 << 28
"""Of a buffer that is kept from step to step, one of four: what a step needs beyond the second it has for itself."""

logger = logging.getLogger(__name__)


class Event(Protocol):
    """As `torch.cuda.Event`: complete when the device has done all that it was given before `record`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


def make_event(device: torch.device) -> Event | None:
    """None where nothing is done later than it is asked for."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class StepBuffers:
    """What one step's copies go through: pinned memory on the host and memory on the device, for the way in and the way
    out, and the event of the step's end. Kept from step to step, and grown where a step needs more; a set belongs to
    one step until that step's event is complete.

    `done`: recorded once a step, after everything that the step does. That is one event for two questions, whether the
    tokens may be read and whether pages, states and checkpoints are written: all of a step is in one stream, and its
    last work is the draw and the copy of what was drawn. An earlier event for what the forward pass writes would be of
    no use, because a commit needs the tokens, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.done = make_event(device)
        self._device = device
        host = torch.device("cpu")
        self._host_in, self._device_in = _Buffer(host, device), _Buffer(device, device)
        self._device_out, self._host_out = _Buffer(device, device), _Buffer(host, device)

    def inputs(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """uint8 [num_bytes] on the host and on the device."""
        return self._host_in.take(num_bytes), self._device_in.take(num_bytes)

    def outputs(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """uint8 [num_bytes] on the device and on the host."""
        return self._device_out.take(num_bytes), self._host_out.take(num_bytes)


class _Buffer:
    def __init__(self, place: torch.device, device: torch.device) -> None:
        """`place`: where it lies; memory of the host is pinned if `device` is a GPU, or copies would wait."""
        self._place, self._pins = place, place.type == "cpu" and device.type == "cuda"
        self._memory = self._allocate(0)

    def take(self, num_bytes: int) -> Tensor:
        if num_bytes > MOST_KEPT_BYTES:
            return self._allocate(num_bytes)
        if num_bytes > len(self._memory):
            size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            self._memory = self._allocate(size)
            logger.debug("a step's buffer on %s grows to %d bytes", self._place.type, size)
        return self._memory[:num_bytes]

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._place, pin_memory=self._pins)


class StagedArray(msgspec.Struct, eq=False):
    """One array of a `Staging`; its `tensor` is there after `Staging.send`. `moved`: where it was copied to a
    device."""

    array: NDArray[Any]
    moved: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """On the host the array itself will do, unless it may not be written to."""
        if self.moved is None:
            flags = self.array.flags
            array = self.array if flags.c_contiguous and flags.writeable else self.array.copy()
            self.moved = torch.from_numpy(array)
        return self.moved


class Staging:
    """The arrays of one step, of any of the dtypes int64, int32, float64, float32, bool and uint8."""

    def __init__(self, buffers: StepBuffers | None = None) -> None:
        """`buffers`: what they are copied through, without which it is memory of this copy's own."""
        self._buffers = buffers
        self._staged: list[StagedArray] = []

    def add(self, array: NDArray[Any]) -> StagedArray:
        """Adds an array that is on the device after `send`, which is when it is read."""
        staged = StagedArray(array)
        self._staged.append(staged)
        return staged

    def send(self, device: torch.device) -> None:
        """One copy of everything that was added; none where nothing was, and none on the host."""
        staged_arrays, self._staged = self._staged, []
        if staged_arrays and device.type != "cpu":
            self._copy(staged_arrays, device)

    def _copy(self, staged_arrays: Sequence[StagedArray], device: torch.device) -> None:
        begins = [0]
        for staged in staged_arrays:
            begins.append(begins[-1] + -(-staged.array.nbytes // _ALIGNMENT) * _ALIGNMENT)
        # torch sees no dtype in nothing
        host, moved = (self._buffers or StepBuffers(device)).inputs(max(begins[-1], 1))
        buffer = host.numpy()
        for staged, begin in zip(staged_arrays, begins, strict=False):
            array = np.ascontiguousarray(staged.array)
            buffer[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        moved.copy_(host, non_blocking=True)
        for staged, begin in zip(staged_arrays, begins, strict=False):
            part = moved[begin : begin + staged.array.nbytes]
            staged.moved = part.view(_DTYPES[staged.array.dtype]).view(staged.array.shape)


_NO_ARRAY = np.empty(0)


class ReadbackArray(msgspec.Struct, eq=False):
    """One tensor of a `Readback`; `array` is set by `Readback.wait`."""

    tensor: Tensor
    array: NDArray[Any] = msgspec.field(default_factory=lambda: _NO_ARRAY)


class Readback:
    """Results of one step that are copied to the host, of any of the dtypes of `Staging`."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._entries: list[ReadbackArray] = []
        self._moved: Tensor | None = None

    def add(self, tensor: Tensor) -> ReadbackArray:
        """Adds a tensor that the host reads after `wait`; it must not be written any more."""
        self._entries.append(ReadbackArray(tensor))
        return self._entries[-1]

    def send(self) -> None:
        """One copy of everything that was added, none of what is on the host already; and the event of the step's
        end, also where there is nothing to copy."""
        tensors = [entry.tensor for entry in self._entries]
        if not all(tensor.is_cpu for tensor in tensors):
            flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
            whole, self._moved = self._buffers.outputs(sum(map(len, flat)))
            torch.cat(flat, out=whole)
            # The host goes on, and plans the next step: `wait` is where it needs the numbers.
            self._moved.copy_(whole, non_blocking=True)
        if self._buffers.done is not None:
            self._buffers.done.record()

    @property
    def is_complete(self) -> bool:
        """Whether `wait` would return at once."""
        return self._buffers.done is None or self._buffers.done.query()

    def wait(self) -> None:
        """Waits until the step is over. Raises EngineDead when the device has not done it in time."""
        if self._buffers.done is not None:
            self._wait_event(self._buffers.done)
        if self._moved is not None:
            parts = torch.split(self._moved, [entry.tensor.nbytes for entry in self._entries])
            for entry, part in zip(self._entries, parts, strict=True):
                # A copy of its own begins where its numbers may begin, and the buffer is the next step's.
                entry.tensor = part.clone().view(entry.tensor.dtype).view(entry.tensor.shape)
        for entry in self._entries:
            entry.array = entry.tensor.numpy()

    @staticmethod
    def _wait_event(event: Event) -> None:
        deadline = time.monotonic() + _DEVICE_SECONDS
        while not event.query():
            if time.monotonic() > deadline:
                raise EngineDead(f"the GPU has not finished a step within {_DEVICE_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
