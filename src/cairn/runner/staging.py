"""What a step needs of the host, on its way to the device: gathered here, and taken there in one copy."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "int64": torch.int64,
        "int32": torch.int32,
        "float64": torch.float64,
        "float32": torch.float32,
        "bool": torch.bool,
        "uint8": torch.uint8,
    }
)
_ALIGNMENT = 64
"""Bytes at which each array begins: a device reads it as if it had been allocated."""


class Staged:
    """One array on its way; `tensor` is there once `Staging.send` has been called."""

    def __init__(self, array: NDArray[Any], begin: int) -> None:
        self.array, self.begin = array, begin
        self.tensor: Tensor = torch.empty(0)


class Staging:
    """The arrays of one step, of any of the dtypes int64, int32, float64, float32, bool and uint8."""

    def __init__(self) -> None:
        self._staged: list[Staged] = []
        self._end = 0

    def add(self, array: NDArray[Any]) -> Staged:
        """An array that is to be on the device after `send`; it is read then."""
        staged = Staged(array, self._end)
        self._staged.append(staged)
        self._end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return staged

    def send(self, device: torch.device) -> None:
        """One copy of everything that was added."""
        buffer = np.empty(self._end, np.uint8)
        for staged in self._staged:
            array = np.ascontiguousarray(staged.array)
            buffer[staged.begin : staged.begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        moved = torch.from_numpy(buffer).to(device)
        for staged in self._staged:
            part = moved[staged.begin : staged.begin + staged.array.nbytes]
            staged.tensor = part.view(_DTYPES[staged.array.dtype.name]).view(staged.array.shape)
        self._staged, self._end = [], 0
