"""The least that the loops of a prompt could take which read activations and write others: by memory, and by their own
instructions. For `benchmarks.step_parts`.

By memory: what a call reads and writes once, at the speed of a plain sum of memory (`benchmarks.machine_bounds`). By
instructions: the call's first rows once more, again and again, so that all of it lies in the core's own caches.
"""

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cairn.kernels.cpu.compiled import Variant

__all__ = ["LoopBounds", "bounded_loops"]

ROWS = 12
"""That a loop is repeated for, or an item of it where that has more."""

REPEATS = 12

Arguments = Sequence[float]


def _rows_of_groups(count: int, arguments: Arguments) -> int:
    """Of so many groups, int32 pairs of a first row and a number of rows."""
    return sum((ctypes.c_int32 * (2 * count)).from_address(int(arguments[0]))[1::2])


BYTES: Mapping[str, Callable[[int, Arguments], float]] = {
    "_conv_prefill": lambda count, a: a[-1] * a[7] * (2 + 4),
    "_silu_mul": lambda count, a: count * a[5] * 6,
    "_sigmoid_mul": lambda count, a: count * (4 * a[6] + 2 * a[4]),
    "_rms_norm": lambda count, a: count * a[6] * 4,
    "_rms_norm_then_gate": lambda count, a: count * a[8] * (4 + 2 + 2),
    "_group_rows": lambda count, a: _rows_of_groups(count, a) * a[6] * 4,
    "_widen_rows": lambda count, a: _rows_of_groups(count, a) * a[6] * (2 + 4),
    "_quantize_groups": lambda count, a: _rows_of_groups(count, a) * a[6] * (2 + 1 + 16 / a[7]),
}
"""That a call with so many items and these arguments reads and writes once, with activations in bfloat16. All of these
loops only write what they do not read, so that they may be repeated."""


@dataclass(slots=True)
class LoopBounds:
    """By loops' names: bytes, and nanoseconds in the core's own caches, of all calls."""

    bytes: Counter[str] = field(default_factory=Counter)
    in_caches: Counter[str] = field(default_factory=Counter)


def least_time(do: Callable[[], object]) -> int:
    """Nanoseconds."""

    def once() -> int:
        begin = time.thread_time_ns()
        do()
        return time.thread_time_ns() - begin

    return min(once() for _ in range(REPEATS))


@contextmanager
def bounded_loops(bounds: LoopBounds, tokens: int) -> Iterator[None]:
    """Adds to `bounds` what is called meanwhile, which is a prompt of so many tokens on one thread."""
    call = Variant.__call__

    def repeated(self: Variant, count: int, cost: int, *arguments: float) -> None:
        call(self, count, cost, *arguments)
        if self.name not in BYTES:
            return
        few = max(1, count * ROWS // tokens)
        # A call without items is none of the loop's work.
        alone = least_time(lambda: call(self, few, 0, *arguments)) - least_time(lambda: call(self, 0, 0, *arguments))
        bounds.bytes[self.name] += round(BYTES[self.name](count, arguments))
        bounds.in_caches[self.name] += round(alone * count / few)

    Variant.__call__ = repeated  # type: ignore[method-assign]
    try:
        yield
    finally:
        Variant.__call__ = call  # type: ignore[method-assign]
