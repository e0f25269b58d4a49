"""transformers' models in float64 from end to end."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class _TorchWithWideFloat:
    """The torch module, in which float32 and float mean float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def wide_float(module: ModuleType) -> Iterator[None]:
    """transformers casts to float32 inside norms, positions, router and scan; while in here, what `module` casts so is
    float64 instead."""
    narrow = torch.Tensor.float
    module.torch = _TorchWithWideFloat()
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        module.torch = torch
        torch.Tensor.float = narrow
