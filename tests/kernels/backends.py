"""The backends that hold the contract: a new one is a line here."""

from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from cairn.kernels import cpu, exact, reference

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

BACKENDS: Mapping[ModuleType, tuple[torch.dtype, ...]] = {
    # Its float64 is the truth itself; what is checked here is that it holds the contract in the other ones, too.
    reference: (F64, F32, BF16),
    exact: (F64, F32, BF16),
    cpu: (F32, BF16),
}
"""Every backend and the models' dtypes that it takes."""


def name_of(value: object) -> str:
    return (value.__name__ if isinstance(value, ModuleType) else str(value)).rpartition(".")[2]


every_backend = pytest.mark.parametrize("kernels", BACKENDS, ids=name_of)
every_backend_and_dtype = pytest.mark.parametrize(
    ("kernels", "dtype"), [(kernels, dtype) for kernels, dtypes in BACKENDS.items() for dtype in dtypes], ids=name_of
)
