"""Sequences of loops that threads run one after the other, in the order in which they are given. Between two of them a
thread needs no Python, which another one has meanwhile: to take turns with it costs either of them more than a loop."""

import ctypes
from functools import cache
from threading import Lock, Thread
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cairn.kernels.cpu.compiled import I64, INT, intrinsic, jit, kernel
from cairn.kernels.cpu.graphs import LoopSequence, run_table
from cairn.kernels.cpu.scalars import advance

_CAPACITY = 1024
"""Sequences that were added and are not done yet."""

_TAKEN, _GIVEN, _CLOSED, _FIELDS = range(4)
"""Of the queue's state: how many sequences threads have taken and may take, and whether no more come."""

_TABLE, _COUNT, _DONE, _ENTRY = range(4)
"""Of a sequence: see `LoopSequence.table`; `_DONE`: 1 when all have run, and one more than the place of one that
failed."""

_PAUSE = 50
"""Microseconds that a thread sleeps when there is nothing to take."""


class LoopQueue:
    """One that adds, and gives what is to be run; `num_threads` more that run it, until it is closed."""

    def __init__(self, num_threads: int) -> None:
        self.num_added = 0
        self._state = np.zeros(_FIELDS, np.int64)
        self._entries = np.zeros((_CAPACITY, _ENTRY), np.int64)
        self._giving = Lock()
        self._threads = [
            Thread(target=self._serve, args=(1,), name="cairn-packing", daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, sequence: LoopSequence) -> int:
        """Its number. It is to be kept until it is done; no more than `_CAPACITY` are not. By one thread."""
        number = self.num_added
        assert number < _CAPACITY or self.is_done(number - _CAPACITY)
        self._entries[number % _CAPACITY] = (*sequence.table, 0)
        self.num_added += 1
        return number

    def give(self) -> None:
        """The next one of those that were added may run. By any thread."""
        with self._giving:
            self._state[_GIVEN] += 1

    def run_next(self) -> bool:
        """Runs one that was given and that no thread has taken; whether there was one."""
        before = int(self._state[_TAKEN])
        self._serve(0)
        return int(self._state[_TAKEN]) > before

    def is_done(self, number: int) -> bool:
        return bool(self._entries[number % _CAPACITY, _DONE])

    def failed(self, number: int) -> int | None:
        """The place of a loop that failed, in a sequence that is done."""
        place = int(self._entries[number % _CAPACITY, _DONE]) - 2
        return place if place >= 0 else None

    def close(self) -> None:
        """Waits for what threads have taken; nothing else runs any more."""
        self._state[_CLOSED] = 1
        for thread in self._threads:
            thread.join()

    def _serve(self, stays: int) -> None:
        places = self._state.ctypes.data, self._entries.ctypes.data
        _take["any"](1, 0, *places, _CAPACITY, stays, _sleep_address())


@cache
def _sleep_address() -> int:
    """Of `int usleep(unsigned)` of the C library."""
    usleep: Any = ctypes.CDLL(None).usleep
    return ctypes.cast(usleep, ctypes.c_void_p).value or 0


@intrinsic
def _read(typingctx: Any, pointer: Any) -> Any:
    """A number that another thread may have written since it was read last."""
    return INT(I64), lambda context, builder, _, args: builder.load_atomic(args[0], "acquire", 8)


@intrinsic
def _write(typingctx: Any, pointer: Any, value: Any) -> Any:
    """After all that was written before."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store_atomic(args[1], args[0], "release", 8)
        return context.get_dummy_value()

    return types.void(I64, INT), code


@intrinsic
def _replace(typingctx: Any, pointer: Any, old: Any, new: Any) -> Any:
    """Whether the number was `old`, and is `new` now."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        changed = builder.cmpxchg(*args, "acq_rel", "acquire")
        return builder.zext(builder.extract_value(changed, 1), ir.IntType(64))

    return INT(I64, INT, INT), code


@intrinsic
def _call_with(typingctx: Any, function: Any, number: Any) -> Any:
    """int (*function)(unsigned)."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)]).as_pointer()
        result = builder.call(builder.inttoptr(args[0], kind), [builder.trunc(args[1], ir.IntType(32))])
        return builder.sext(result, ir.IntType(64))

    return INT(INT, INT), code


@intrinsic
def _numbers_at(typingctx: Any, address: Any) -> Any:
    return I64(INT), lambda context, builder, _, args: builder.inttoptr(args[0], ir.IntType(64).as_pointer())


@jit
def _take_number(state: Any) -> Any:
    """Of a sequence that was given, -1 where there is none."""
    while True:
        taken = _read(advance(state, _TAKEN))
        if taken >= _read(advance(state, _GIVEN)):
            return -1
        if _replace(advance(state, _TAKEN), taken, taken + 1):
            return taken


@kernel({"any": (I64, I64, INT, INT, INT)})
def _take(begin: int, end: int, state: Any, entries: Any, capacity: int, stays: int, sleep: int) -> None:
    """A single item: runs one sequence if there is one, or with `stays` all until the queue is closed."""
    for _ in range(begin, end):
        while not _read(advance(state, _CLOSED)):
            number = _take_number(state)
            if number >= 0:
                entry = advance(entries, number % capacity * _ENTRY)
                failed = run_table(_numbers_at(entry[_TABLE]), entry[_COUNT])
                _write(advance(entry, _DONE), 1 + failed)
            elif stays:
                _call_with(sleep, _PAUSE)
            if not stays:
                break
