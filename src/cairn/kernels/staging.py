"""Copies between host and device: one for all arrays that a step needs, one for all results that the host reads."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

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
_NOTHING = torch.empty(0)


class StagedArray:
    """One array of a `Staging`; `tensor` is set by `Staging.send`."""

    def __init__(self, array: NDArray[Any], begin: int) -> None:
        self.array, self.begin = array, begin
        self.tensor: Tensor = _NOTHING


class Staging:
    """The arrays of one step, of any of the dtypes int64, int32, float64, float32, bool and uint8."""

    def __init__(self) -> None:
        self._staged: list[StagedArray] = []
        self._end = 0

    def add(self, array: NDArray[Any]) -> StagedArray:
        """Adds an array that is on the device after `send`, which is when it is read."""
        staged = StagedArray(array, self._end)
        self._staged.append(staged)
        self._end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return staged

    def send(self, device: torch.device) -> None:
        """One copy of everything that was added; none where nothing was. On the host the arrays themselves will do, but
        for those that may not be written to."""
        staged_arrays, self._staged = self._staged, []
        if device.type == "cpu":
            for staged in staged_arrays:
                flags = staged.array.flags
                own = staged.array if flags.c_contiguous and flags.writeable else staged.array.copy()
                staged.tensor = torch.from_numpy(own)
        elif staged_arrays:
            self._copy(staged_arrays, device)
        self._end = 0

    def _copy(self, staged_arrays: Sequence[StagedArray], device: torch.device) -> None:
        buffer = np.empty(max(self._end, 1), np.uint8)  # torch sees no dtype in nothing
        for staged in staged_arrays:
            array = np.ascontiguousarray(staged.array)
            buffer[staged.begin : staged.begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        whole = torch.from_numpy(buffer)
        if device.type == "cuda":
            whole = whole.pin_memory()  # from other memory the copy would wait until it has been made
        moved = whole.to(device, non_blocking=True)
        for staged in staged_arrays:
            part = moved[staged.begin : staged.begin + staged.array.nbytes]
            staged.tensor = part.view(_DTYPES[staged.array.dtype]).view(staged.array.shape)


class ReadbackArray:
    """One tensor of a `Readback`; `array` is set by `Readback.wait`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.array: NDArray[Any] = np.empty(0)


class Readback:
    """Results of one step that are copied to the host, of any of the dtypes of `Staging`."""

    def __init__(self) -> None:
        self._entries: list[ReadbackArray] = []
        self._moved: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> ReadbackArray:
        """Adds a tensor that the host reads after `wait`; it must not be written any more."""
        self._entries.append(ReadbackArray(tensor))
        return self._entries[-1]

    def send(self, device: torch.device) -> None:
        """One copy of everything that was added; none of what is on the host already. Also where nothing was added
        `wait` waits until all that was launched on `device` before is done: other servers may then read it."""
        tensors = [entry.tensor for entry in self._entries]
        if not all(tensor.device.type == "cpu" for tensor in tensors):
            self._copy(tensors)
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def _copy(self, tensors: Sequence[Tensor]) -> None:
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        whole = torch.cat(flat) if len(flat) > 1 else flat[0]
        if whole.device.type == "cuda":
            # The host goes on, and plans the next step: `wait` is where it needs the numbers.
            self._moved = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
            self._moved.copy_(whole, non_blocking=True)
        else:
            self._moved = whole.cpu()

    def wait(self) -> None:
        """Waits until the copy, and all that was launched before it, is complete. Raises EngineDead when the device has
        not done it in time."""
        if self._event is not None:
            self._wait_event(self._event)
        tensors = [entry.tensor for entry in self._entries]
        if self._moved is not None:
            parts = torch.split(self._moved, [tensor.nbytes for tensor in tensors])
            # A copy of its own begins where its numbers may begin.
            tensors = [
                part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
            ]
        for entry, tensor in zip(self._entries, tensors, strict=True):
            entry.array = tensor.numpy()

    @staticmethod
    def _wait_event(event: "torch.cuda.Event") -> None:
        deadline = time.monotonic() + _DEVICE_SECONDS
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise EngineDead(f"the GPU has not finished a step within {_DEVICE_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
