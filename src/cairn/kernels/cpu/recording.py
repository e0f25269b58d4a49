"""A record of what a pass computes: its compiled loops with their arguments, and torch's operations between them.

Only addresses and numbers are in the arguments of a loop, so that it computes the same from what lies there later. All
memory that a pass allocates while it is recorded is the record's: it is used again within the pass as soon as nobody
has a tensor there, and by nobody else.

An operation whose loops, or whose number of them, follow from lengths or values of the batch is for `call_again`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")


class Code(Protocol):
    """A compiled loop: `compiled.Variant`. `address`: of a C function of the address of what it takes."""

    name: str
    address: int


Loop = tuple[Code, bytes]
"""And what it takes."""

Operation = Callable[[], object]

_EMPTY = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    }
)
_READ = frozenset({torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default})
_ALIGNMENT = 64


class PassMemory:
    """Blocks that passes have their tensors in, one pass at a time. `num_bytes`: of all."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._free: defaultdict[int, list[Any]] = defaultdict(list)

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def begin(self) -> None:
        """A pass begins: what tensors of passes before it have is free."""
        self._free = defaultdict(list)
        for block in self._blocks:
            self._free[block.nbytes].append(block)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Contiguous and uninitialized; in the pass its block is free again when the last tensor with its memory is
        gone."""
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        size = max(_ALIGNMENT, 1 << (count - 1).bit_length())
        free = self._free[size]
        block = free.pop() if free else self._allocate(size)
        # torch keeps this very object for as long as any tensor has its memory.
        lent = block[:count]
        finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def _allocate(self, size: int) -> Any:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        self._blocks.append(memory[begin : begin + size])
        return self._blocks[-1]


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What this thread computes within a `with`. `steps`: lists of loops, and operations between them, in order."""

    def __init__(self, memory: PassMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[list[Loop] | Operation] = []
        self._memory, self._paused = memory, False
        self._kept: list[object] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks here whether to keep its compiler out of each operation: nothing is compiled by it, and to load it
        for that takes longer than a thousand recorded steps."""
        return False

    def __enter__(self) -> "Recording":
        self._memory.begin()
        self._token = _recording.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        _recording.reset(self._token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func in _READ:
            raise RuntimeError(f"{func} in a pass that is recorded: what follows from a value would not follow later")
        with self._pause():
            result = func(*args, **kwargs)
            if func in _EMPTY and result.is_contiguous():
                return self._memory.empty(result.shape, result.dtype)
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
            self.steps.append(lambda: func(*args, **kwargs))
        elif func not in _EMPTY:
            return self._record(lambda: func(*args, **kwargs), result, (args, kwargs))
        return result

    def add_loop(self, code: Code, packed: bytes) -> None:
        """A compiled loop has run."""
        if self._paused:
            return
        last = self.steps[-1] if self.steps else None
        if isinstance(last, list):
            last.append((code, packed))
        else:
            self.steps.append([(code, packed)])

    def call(self, operation: Operation) -> None:
        """See `call_again`."""
        with self._pause():
            operation()
        self.steps.append(operation)

    def keep(self, make: Callable[[], Result]) -> Result:
        """What `make` returns, which does not change; it stays where it is as long as the record."""
        with self._pause():
            made = make()
        self._kept.append(made)
        return made

    def _record(self, operation: Callable[[], Result], result: Result, operands: object) -> Result:
        """An operation whose results, unless they are views of its operands, go to the same places each time. Returns
        them there."""
        viewed = {tensor.untyped_storage().data_ptr() for tensor in _tensors(operands)}
        results = _tensors(result)
        if results and all(tensor.untyped_storage().data_ptr() in viewed for tensor in results):
            return result
        placed: Result = tree.tree_map_only(Tensor, self._place, result)
        places = _tensors(placed)
        self.steps.append((lambda: _copy_results(places, operation())) if places else operation)
        return placed

    def _place(self, result: Tensor) -> Tensor:
        return self._memory.empty(result.shape, result.dtype).copy_(result) if result.is_contiguous() else result

    @contextmanager
    def _pause(self) -> Any:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


def recording() -> Recording | None:
    """This thread's."""
    return _recording.get()


def call_again(operation: Operation) -> None:
    """Calls it now, and so does a record of this pass, which has nothing of what it does: its loops follow from values,
    or from a batch's metadata."""
    record = recording()
    if record is None:
        operation()
    else:
        record.call(operation)


def kept(make: Callable[[], Result]) -> Result:
    """What `make` returns, which a record of this pass keeps."""
    record = recording()
    return make() if record is None else record.keep(make)


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _copy_results(places: Iterable[Tensor], results: object) -> None:
    for place, result in zip(places, _tensors(results), strict=True):
        place.copy_(result)
