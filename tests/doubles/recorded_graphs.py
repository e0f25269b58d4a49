"""CUDA graphs without CUDA: launches are recorded, with their tensors and numbers, and made again from the record. The
code that made them is not run again, so whatever it took from the host at its first run stays what it was.

A collective of gloo's is a launch like others: each rank that replays makes it again and waits in it for the others, on
the host, as NCCL's kernels in a graph do on the device.

As a GPU would, a replay uses the memory that was there at the recording. Of what was there before, it must still be
there; what was allocated meanwhile is filled with rubbish before and after every replay, as if another graph had used
it. What would wait for a number, and what copies from the host, is refused.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from doubles.counted_device import SHAPED_BY_NUMBERS, HostRead

__all__ = ["GRAPHS_LOG", "GraphMemoryGone", "LoggedGraphs", "RecordedGraphs"]

GRAPHS_LOG = "GRAPHS_LOG"
"""The variable with the folder of `LoggedGraphs`."""

_READ = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
)
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty.default)


class GraphMemoryGone(AssertionError):
    """A graph is replayed over memory that nobody has kept."""


@dataclass(frozen=True)
class _Kept:
    """A tensor of memory that is not the graph's own."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise GraphMemoryGone(f"a tensor of {self.dtype} {list(self.size)} is gone")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass
class _Graph(TorchDispatchMode):
    """`launches`: what is made again, of arguments in the form of `_stored`, and where its result has to lie."""

    launches: list[tuple[Callable[..., Any], Any, Any, Any]] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)
    is_in_kernel: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_in_kernel:
            return func(*args, **kwargs)
        if func in _READ or func in SHAPED_BY_NUMBERS:
            raise HostRead(f"{func}: a graph cannot wait for the host")
        given = {_storage_of(each) for each in tree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        found = func(*args, **kwargs)
        new = [
            each
            for each in tree.tree_leaves(found)
            if isinstance(each, Tensor) and _storage_of(each) not in given | self._storages
        ]
        for each in new:
            self._storages.add(_storage_of(each))
            self.own.append(each)
        if func._schema.is_mutable:
            self.launches.append((func, self._stored(args), self._stored(kwargs), None))
        elif new and func not in _EMPTY:
            self.launches.append((func, self._stored(args), self._stored(kwargs), found))
        return found

    def launch_kernel(self, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.launches.append((run, self._stored(args), self._stored(kwargs), None))
        self.is_in_kernel = True
        run(*args, **kwargs)
        self.is_in_kernel = False

    def _stored(self, values: Any) -> Any:
        def stored(each: Tensor) -> Any:
            if _storage_of(each) in self._storages or (not each.dim() and each.numel()):
                return each
            return _Kept(
                StorageWeakRef(each.untyped_storage()),
                each.dtype,
                tuple(each.shape),
                each.stride(),
                each.storage_offset(),
            )

        return tree.tree_map_only(Tensor, stored, values)

    def replay(self) -> None:
        with torch.inference_mode():
            self.spoil()
            for run, args, kwargs, target in self.launches:
                args, kwargs = tree.tree_map_only(_Kept, _Kept.tensor, (args, kwargs))
                found = run(*args, **kwargs)
                if target is not None:
                    for old, made in zip(tree.tree_leaves(target), tree.tree_leaves(found), strict=True):
                        old.copy_(made)
            self.spoil()

    def spoil(self) -> None:
        for each in self.own:
            each.fill_(float("nan") if each.is_floating_point() else 1)


class RecordedGraphs:
    """See `cairn.runner.decode_graphs.Graphs`. `num_captured`, `num_replays`: so far."""

    def __init__(self) -> None:
        self.num_captured = self.num_replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = _Graph()
        with graph, _recorded_kernels(graph), _recorded_collectives(graph):
            run()
        self.num_captured += 1
        has_collected = False

        def replay() -> None:
            nonlocal has_collected
            if not has_collected:
                # what nobody has kept is gone, also where it was part of a circle
                gc.collect()
                has_collected = True
            self.num_replays += 1
            graph.replay()

        return replay


class LoggedGraphs(RecordedGraphs):
    """Of several ranks, each a process: what this one captures and replays is a line each in a file of its own."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(run)
        number = self.num_captured
        self._log(f"captured {number}")

        def logged() -> None:
            replay()
            self._log(f"replayed {number}")

        return logged

    def _log(self, line: str) -> None:
        with (Path(os.environ[GRAPHS_LOG]) / str(os.getpid())).open("a") as file:
            file.write(f"{line}\n")


@contextmanager
def _recorded_collectives(graph: _Graph) -> Iterator[None]:
    """Those of gloo, which torch's dispatch does not see."""

    def recorded(begin: Callable[..., dist.Work]) -> Callable[..., None]:
        def wait(*arguments: Any) -> None:
            begin(*arguments).wait()

        def launch(*arguments: Any) -> None:
            graph.launch_kernel(wait, arguments, {})

        return launch

    with ExitStack() as patches:
        for name in ("allreduce", "_allgather_base", "broadcast"):
            collective = recorded(getattr(dist.ProcessGroupGloo, name))
            patches.enter_context(patch.object(dist.ProcessGroupGloo, name, collective))
        yield


def _recorded_kernels(graph: _Graph) -> Any:
    """Launches of Triton's kernels, which torch does not see, are recorded, too."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        graph.launch_kernel(lambda *more, **named: launch(self, *more, **named), args, kwargs)

    return patch.object(InterpretedFunction, "run", run)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
