"""Which kernels run on which device."""

from typing import Literal

from cairn.kernels import cpu, reference
from cairn.kernels.contract import Kernels

Backend = Literal["cpu", "reference"]


def kernels_of(backend: Backend) -> Kernels:
    """The kernel functions of a backend. `reference` is the slow truth, for tests."""
    return reference if backend == "reference" else cpu
