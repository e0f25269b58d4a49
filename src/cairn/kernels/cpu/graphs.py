"""Decode steps that are recorded once and repeated: see `recording`. A step of a small model has hundreds of loops of a
few microseconds, and to call each from Python takes longer than it takes itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cairn.kernels.batch import HostBatch
from cairn.kernels.cpu.compiled import I64, intrinsic, jit, kernel
from cairn.kernels.cpu.metadata import CpuMetadata, build_metadata
from cairn.kernels.cpu.recording import Code, Loop, Operation, PassMemory, Recording
from cairn.kernels.staging import Staging


class CpuGraphs:
    """See `StepGraphs`."""

    def __init__(self) -> None:
        self._memory = PassMemory()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Graphs.capture`."""
        with Recording(self._memory) as recording:
            run()
        operations = [LoopSequence(step) if isinstance(step, list) else step for step in recording.steps]
        return _Repeat(operations, recording)

    def set_lengths(self, metadata: object, host: HostBatch) -> None:
        """See `StepGraphs.set_lengths`."""
        assert isinstance(metadata, CpuMetadata)
        metadata.become(build_metadata(host, Staging()))


class _Repeat:
    """`recording`: whose memory the operations use."""

    def __init__(self, operations: Sequence[Operation], recording: Recording) -> None:
        self._operations, self._recording = operations, recording

    def __call__(self) -> None:
        for operation in self._operations:
            operation()


class LoopSequence:
    """Loops one after the other, in one call. `table`: the address of int64 [loops, 2], each one's and that of what it
    takes, and how many there are."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        self._codes, arguments = zip(*loops, strict=True)
        addresses = [code.address for code in self._codes]
        words = [packed.ljust(-(-len(packed) // 8) * 8, b"\0") for packed in arguments]
        self._arguments = np.frombuffer(b"".join(words), np.int64).copy()
        firsts = np.cumsum([0, *map(len, words[:-1])])
        self._table = np.array([addresses, self._arguments.ctypes.data + firsts], np.int64).T.copy()
        self._failed = np.zeros(1, np.int64)
        self.table = int(self._table.ctypes.data), len(self._codes)

    def name(self, place: int) -> str:
        """Of a loop."""
        code: Code = self._codes[place]
        return code.name

    def __call__(self) -> None:
        """Raises RuntimeError where one fails."""
        address, count = self.table
        _run_loops["any"](count, 0, address, self._failed.ctypes.data)
        if self._failed[0]:
            raise RuntimeError(f"{self.name(self._failed[0] - 1)} failed")


@kernel({"any": (I64, I64)})
def _run_loops(begin: int, end: int, table: Any, failed: Any) -> None:
    """On one thread; each loop takes its own."""
    failed[0] = run_table(table, end)


@jit
def run_table(table: Any, count: int) -> Any:
    """Of `LoopSequence`: all of them; the number of the first that failed, from 1 on, or 0."""
    failed = np.int64(0)
    for i in range(count):
        if _call(table[2 * i], table[2 * i + 1]) and not failed:
            failed = np.int64(i + 1)
    return failed


@intrinsic
def _call(typingctx: Any, function: Any, packed: Any) -> Any:
    """int64 (*function)(packed)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(8).as_pointer()]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], ir.IntType(8).as_pointer())])

    return types.int64(types.int64, types.int64), code
