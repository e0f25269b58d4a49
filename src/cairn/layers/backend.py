"""Which kernels run a model."""

from importlib import import_module
from typing import Literal

from cairn.kernels.contract import Kernels

Backend = Literal["cpu", "exact", "reference"]


def kernels_of(backend: Backend) -> Kernels:
    """The kernel functions of a backend. `exact`: fixed shapes and orders; `reference`: the slow truth, for tests."""
    kernels: Kernels = import_module(f"cairn.kernels.{backend}")
    return kernels
