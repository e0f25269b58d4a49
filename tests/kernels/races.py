"""Data races in kernels that Triton's interpreter runs. It runs one program after the other, and all of a program's
threads together, so results are right whatever a GPU would make of it; but every address is seen."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from triton.runtime import interpreter

Numbers = NDArray[np.int64]

_READ, _WRITE, _ATOMIC = range(3)


class Race(AssertionError):
    """Two programs of a launch, or two threads of a program, at one address, and at least one of them writes."""


class RaceDetector:
    """Looks at what is launched while it is installed, and raises `Race` at the end of a launch. `num_launches`: those
    without one.

    Programs of a launch come in any order, so what one writes no other one may read or write; atomics go together with
    atomics alone. Threads of a program wait for each other at barriers: between two of these, an address that is
    written belongs to one thread. Elements at the same place of blocks of the same shape are taken for one thread's;
    other barriers, such as those within a sum, are not counted.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_launches = 0
        self._program = 0
        self._launch: list[tuple[int, Numbers, int]] = []
        self._since_barrier: list[tuple[int, Numbers, Numbers]] = []
        self._found = 0
        builder = interpreter.InterpreterBuilder
        for name, kind, mask in (
            ("create_masked_load", _READ, 1),
            ("create_masked_store", _WRITE, 2),
            ("create_atomic_rmw", _ATOMIC, 3),
        ):
            patch.setattr(builder, name, self._recorded(getattr(builder, name), kind, mask))
        set_grid_idx, call = builder.set_grid_idx, interpreter.GridExecutor.__call__

        def begin_program(own: Any, *index: int) -> None:
            self._meet()
            self._program += 1
            set_grid_idx(own, *index)

        def launch(own: Any, *operands: Any, **more: Any) -> None:
            self._launch.clear()
            self._since_barrier.clear()
            self._found = 0
            call(own, *operands, **more)
            self._meet()
            self._check(own.fn.__name__)
            self.num_launches += 1

        patch.setattr(builder, "create_barrier", lambda own: self._meet())
        patch.setattr(builder, "set_grid_idx", begin_program)
        patch.setattr(interpreter.GridExecutor, "__call__", launch)

    def _recorded(self, access: Callable[..., Any], kind: int, mask_at: int) -> Callable[..., Any]:
        """`mask_at`: the mask's place among the operands, behind the one that is the pointers."""
        pointers_at = 1 if kind == _ATOMIC else 0

        def recorded(own: Any, *operands: Any) -> Any:
            pointers, mask = np.atleast_1d(operands[pointers_at].data), operands[mask_at].data
            lanes = np.flatnonzero(np.broadcast_to(mask, pointers.shape))
            addresses = pointers.reshape(-1)[lanes].astype(np.int64)
            self._launch.append((kind, addresses, self._program))
            shape = hash(pointers.shape) & 0x7FFFFFFF
            self._since_barrier.append((kind, addresses, (shape << 31) ^ lanes))
            return access(own, *operands)

        return recorded

    def _meet(self) -> None:
        """Here threads of the program wait for each other."""
        entries, self._since_barrier = self._since_barrier, []
        written = _joined(entry[1] for entry in entries if entry[0] == _WRITE)
        if not len(written):
            return
        addresses, lanes = (_joined(entry[place] for entry in entries) for place in (1, 2))
        self._found += len(_shared(written, addresses, lanes))

    def _check(self, kernel: str) -> None:
        if self._found:
            raise Race(f"{kernel}: {self._found} addresses of several threads, without a barrier, of which one writes")
        written = _joined(addresses for kind, addresses, _ in self._launch if kind != _READ)
        addresses = _joined(addresses for _, addresses, _ in self._launch)
        # All atomics are as one program's.
        owners = _joined(
            np.full(len(addresses), -1 if kind == _ATOMIC else program) for kind, addresses, program in self._launch
        )
        if len(found := _shared(written, addresses, owners)):
            raise Race(f"{kernel}: {len(found)} addresses of several programs, of which one writes them")


def _joined(parts: Iterable[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _shared(written: Numbers, addresses: Numbers, owners: Numbers) -> Numbers:
    """Those of `written` that several owners have among their addresses."""
    inside = np.isin(addresses, written)
    pairs = np.unique(np.stack([addresses[inside], owners[inside]]), axis=1)
    found, counts = np.unique(pairs[0], return_counts=True)
    return found[counts > 1]
