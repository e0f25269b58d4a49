"""The backends that hold the contract: a new one is a line here."""

import os
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from cairn.cpu_isa import max_cpu_isa
from cairn.kernels import cpu, exact, reference
from cairn.kernels.contract import Kernels
from tiers import more

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

BACKENDS: dict[ModuleType, tuple[torch.dtype, ...]] = {
    # Its float64 is the truth itself; what is checked here is that it holds the contract in the other ones, too.
    reference: (F64, F32, BF16),
    exact: (F64, F32, BF16),
    cpu: (F32, BF16),
}
"""Every backend and the models' dtypes that it takes."""

VERIFIES_DRAFTS: tuple[ModuleType, ...] = (reference, exact, cpu)
"""Those that have verifies and folds."""

if max_cpu_isa(os.environ) is not None:
    # Nothing that is served computes with the reference: what this processor's roundings make of it is shown without.
    del BACKENDS[reference]
    VERIFIES_DRAFTS = (exact, cpu)

FIRST: dict[ModuleType, torch.dtype] = {reference: F64, exact: F32}
"""What `make test` asks of those that are tried in more dtypes than that."""

DEVICES: dict[Kernels, torch.device] = {}
"""Where a backend's operands have to lie, if not on the CPU."""

BF16_PRODUCTS: dict[Kernels, dict[str, float]] = {}
"""Functions of a backend that in bfloat16 models have bfloat16 where others have float32, and how far off the largest
number they may be."""

EXACT: ModuleType = exact
"""The backend of `--exact` for what is tested here."""

INTERPRETED = False
"""Whether kernels are run by Triton's interpreter, some milliseconds each: a few examples must do."""

ON_GPU = False
"""Whether they are compiled, some seconds each."""

if find_spec("triton") is not None:
    from cairn.kernels import cuda, cuda_exact
    from cairn.kernels.cuda import device

    INTERPRETED = device.INTERPRETED
    ON_GPU = torch.cuda.is_available() and not INTERPRETED
    if INTERPRETED or ON_GPU:
        # Where it can run, nothing else has to be shown: the other ones are tested everywhere.
        BACKENDS = {cuda: (F32, BF16)}
        VERIFIES_DRAFTS = (cuda, cuda_exact)
        DEVICES[cuda] = DEVICES[cuda_exact] = device.device()
        EXACT = cuda_exact
        # More tokens than the random keys have dimensions: the inverse makes roundings larger.
        BF16_PRODUCTS[cuda] = {"conv": 1.5e-2, "ssd": 1.5e-2, "gdn": 5e-2}


def name_of(value: object) -> str:
    return (value.__name__ if isinstance(value, ModuleType) else str(value)).rpartition(".")[2]


exact_backend = pytest.mark.parametrize("kernels", [EXACT], ids=name_of)
every_backend = pytest.mark.parametrize("kernels", BACKENDS, ids=name_of)
every_backend_and_dtype = pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        # `exact` serves float32 alone, and stands in for `cpu` where numba is missing
        (kernels, dtype) if FIRST.get(kernels, dtype) == dtype else more(kernels, dtype)
        for kernels, dtypes in BACKENDS.items()
        for dtype in dtypes
    ],
    ids=name_of,
)
