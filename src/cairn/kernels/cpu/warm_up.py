"""Everything compiled, or loaded from the cache, before the first request."""

import logging
from importlib import import_module
from time import perf_counter
from types import ModuleType

import torch

from cairn.kernels.cpu.compile_cache import cache_folder
from cairn.kernels.cpu.compiled import Kernel
from cairn.kernels.cpu.threads import step_work

logger = logging.getLogger(__name__)

MODULES: tuple[ModuleType, ...] = tuple(
    import_module(f"cairn.kernels.cpu.{name}")
    for name in ("attention", "conv", "elementwise", "experts", "gdn", "int8", "norms", "panels", "routers", "ssd")
)
"""Where the kernels are."""


def warm_up(dtype: torch.dtype | None = None) -> int:
    """Compiles every variant of every kernel that a model of this dtype may want, or of both: their number. Says in the
    log how long it took. From now on a step has as many of torch's threads as it is worth."""
    begin = perf_counter()
    step_work().begin_serving()
    kernels = [value for module in MODULES for value in vars(module).values() if isinstance(value, Kernel)]
    variants = [variant for kernel in kernels for variant in kernel.compile(dtype)]
    loaded = sum(variant.from_cache for variant in variants)
    logger.info(
        "CPU kernels: %d ready in %.1f s, %d of them from %s",
        len(variants),
        perf_counter() - begin,
        loaded,
        cache_folder() or "nowhere",
    )
    return len(variants)
