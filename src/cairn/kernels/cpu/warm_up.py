"""Everything compiled, or loaded from the cache, before the first request."""

import logging
import os
import subprocess
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from types import FunctionType, MappingProxyType, ModuleType

import torch

from cairn.kernels.cpu import panels
from cairn.kernels.cpu.compile_cache import cache_folder
from cairn.kernels.cpu.compiled import Kernel
from cairn.kernels.cpu.heap import keep_freed_memory
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.operations import names_in
from cairn.machine import Machine

logger = logging.getLogger(__name__)

MODULES: tuple[ModuleType, ...] = tuple(
    import_module(f"cairn.kernels.cpu.{name}")
    for name in (
        *("attention", "checkpoint_files", "conv", "elementwise", "experts", "gdn", "int4", "int8", "norms", "codes"),
        *("metadata", "panels", "routers", "ssd", "graphs"),
    )
)
"""Where the kernels are."""

KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {value.path: value for module in MODULES for value in vars(module).values() if isinstance(value, Kernel)}
)
"""All of them, by where they are."""

MOST_WORKERS = 3
"""Processes that compile beside this one. The largest kernel alone takes a third of the time of all that a model
needs, so more would wait for it."""

_WORKER = "cairn.kernels.cpu.compile_worker"


@dataclass(frozen=True, slots=True)
class Task:
    """A variant to be compiled: the name of its kernel in `KERNELS`, and its place among the kernel's keys."""

    name: str
    place: int

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.name]

    @property
    def key(self) -> Hashable:
        return list(self.kernel.argument_types)[self.place]

    def __str__(self) -> str:
        return f"{self.name}:{self.place}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """What `str` made."""
        name, _, place = text.rpartition(":")
        return cls(name, int(place))


def warm_up(
    dtype: torch.dtype | None = None, operations: Set[str] | None = None, state_dtype: torch.dtype = torch.float32
) -> int:
    """See `Kernels.warm_up`: the number of variants. What no earlier process compiled is compiled by several processes,
    as many as there are cores, and kept for the next one. Says in the log how long it took. From now on a step has as
    many of torch's threads as it is worth, and memory that it frees stays with the process."""
    begin = perf_counter()
    step_work().begin_serving()
    keep_freed_memory()
    tasks = tasks_for(dtype, operations, state_dtype)
    with compile_workers(tasks):
        compile_tasks(tasks)
    variants = [task.kernel[task.key] for task in tasks]
    loaded = sum(variant.from_cache for variant in variants)
    logger.info(
        "CPU kernels: %d ready in %.1f s, %d of them from %s",
        len(variants),
        perf_counter() - begin,
        loaded,
        cache_folder() or "nowhere",
    )
    return len(variants)


def tasks_for(
    dtype: torch.dtype | None, operations: Set[str] | None, state_dtype: torch.dtype = torch.float32
) -> Sequence[Task]:
    """The variants that operations of the contract use in models of a dtype, None: of any, with recurrent states of a
    dtype. Those that take longest to compile come first."""
    names = KERNELS.keys() if operations is None else _names_of(operations) - _unused_names()
    tasks = [
        Task(name, place)
        for name in names
        for place, key in enumerate(KERNELS[name].argument_types)
        if key in KERNELS[name].keys_for(dtype, state_dtype)
    ]
    return sorted(tasks, key=lambda task: (-task.kernel.size, str(task)))


def compile_tasks(tasks: Sequence[Task]) -> None:
    """All of these are ready when it returns. What another process is compiling is left for the end, to be loaded."""
    others = [task for task in tasks if not task.kernel.compile_if_free(task.key)]
    for task in others:
        task.kernel[task.key]


@contextmanager
def compile_workers(tasks: Sequence[Task], machine: Machine | None = None) -> Iterator[int]:
    """Processes that work on the same tasks while this one does, and how many: none where all has been compiled before,
    where nothing can be kept, or where there is one core."""
    missing = [task for task in tasks if not task.kernel.was_begun(task.key)]
    cores = (machine or Machine()).num_cores()
    count = 0 if cache_folder() is None else max(0, min(len(missing), cores, MOST_WORKERS + 1) - 1)
    if count:
        logger.info("CPU kernels: %d are compiled for this processor, once, by %d processes", len(missing), count + 1)
    command = (sys.executable, "-P", "-m", _WORKER, *map(str, missing))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            workers.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
            )
        yield count
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _unused_names() -> Set[str]:
    """Of the kernels for weights of which none has been packed."""
    layouts = step_work().packed_layouts
    unused: set[str] = set()
    for quantized in ("codes", "int4", "int8"):
        if not any(layout.startswith(quantized) for layout in layouts):
            unused |= {name for name in KERNELS if f".{quantized}:" in name}
    if "panels" not in layouts:
        unused |= {kernel.path for kernel in (panels._widen_rows, panels._multiply)}
        if not any(layout.startswith("codes") for layout in layouts):
            unused.add(panels._group_rows.path)
    return unused


def _names_of(operations: Set[str]) -> Set[str]:
    """Of the kernels that the CPU backend's functions, or classes, of these names use, themselves or through others."""
    backend = import_module("cairn.kernels.cpu")
    names: set[str] = set()
    seen: set[object] = set()
    left: list[object] = [getattr(backend, operation) for operation in operations]
    while left:
        each = left.pop()
        each = getattr(each, "__wrapped__", each)  # of a function whose results are kept
        if isinstance(each, Kernel):
            names.add(each.path)
        elif isinstance(each, type) and each.__module__.startswith(f"{backend.__name__}."):
            left += vars(each).values()
        elif isinstance(each, FunctionType) and each.__module__.startswith(f"{backend.__name__}.") and each not in seen:
            seen.add(each)
            left += [each.__globals__[name] for name in names_in(each.__code__) if name in each.__globals__]
    return names
