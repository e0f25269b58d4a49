"""Which kernels run a model."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

from cairn.kernels.contract import Kernels

logger = logging.getLogger(__name__)

Backend = Literal["cpu", "exact", "reference"]


def kernels_of(backend: Backend) -> Kernels:
    """The kernel functions of a backend. `exact`: fixed shapes and orders, and what stands in for `cpu` where numba is
    missing; `reference`: the slow truth, for tests."""
    if backend == "cpu" and find_spec("numba") is None:
        logger.warning("numba cannot be imported: the CPU's kernels are replaced by plain ones, which are much slower")
        backend = "exact"
    kernels: Kernels = import_module(f"cairn.kernels.{backend}")
    return kernels
