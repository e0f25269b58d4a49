"""What this machine can do at most, by loops that do nothing else: reading memory, and arithmetic in registers.

    python -m benchmarks.machine_bounds [--threads 2] [--seconds 0.5] [--json]

Memory by a plain sum of more bytes than caches hold; float32 by fused multiplications and additions; int8, and bfloat16
where there is such an instruction, by the instructions that products with weights are made of; and the matrix unit's
where there is one. All threads do the same at the same time, and each figure is the best of its windows, by the
threads' processor time: others on the machine take nothing of it but memory's speed and the clock's. CAIRN_MAX_CPU_ISA
is heeded. A product or a sum counts as an operation: a fused one is two.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from cairn.kernels.cpu.compiled import intrinsic
from cairn.kernels.cpu.features import cpu_features

__all__ = ["Loop", "bounds", "loops_of"]

WINDOWS = 3
MEMORY_BYTES = 640 << 20
"""Twice that of a large cache's share, and about what a model with 333 M parameters in bfloat16 takes."""

_I64, _I8 = ir.IntType(64), ir.IntType(8)
_TILE_CONFIGURATION = bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8)
"""Eight tiles, each of 16 rows of 64 bytes."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of one instruction, or of one pair. `code`: lines of assembly, in which $0 is a sum and $1 and $2 are what
    is multiplied. `operations`: of one time through `code`. `tiles`: it works on tiles of the matrix unit, which the
    code names itself. `sums`: how often the code stands in the loop, each with a sum of its own."""

    name: str
    code: str
    bytes_of_vector: int
    operations: int
    tiles: bool = False
    sums: int = 12


def loops_of(found: Callable[[str], bool]) -> list[Loop]:
    """Those that a processor with these instructions (by LLVM's names) has: of each kind the fastest one."""
    loops = []
    if found("avx512f"):
        loops.append(Loop("float32_gflops", "vfmadd231ps $2, $1, $0", 64, 32))
    elif found("avx2") and found("fma"):
        loops.append(Loop("float32_gflops", "vfmadd231ps $2, $1, $0", 32, 16))
    if found("avx512vnni"):
        loops.append(Loop("int8_gops", "vpdpbusd $2, $1, $0", 64, 128))
    elif found("avx512bw"):
        loops.append(Loop("int8_gops", "vpmaddwd $2, $1, %zmm31\nvpaddd %zmm31, $0, $0", 64, 64))
    elif found("avx2"):
        loops.append(Loop("int8_gops", "vpmaddwd $2, $1, %ymm15\nvpaddd %ymm15, $0, $0", 32, 32))
    if found("avx512bf16"):
        loops.append(Loop("bfloat16_gflops", "vdpbf16ps $2, $1, $0", 64, 64))
    for feature, name, instruction, operations in (
        ("amx-bf16", "bfloat16_tile_gflops", "tdpbf16ps", 16 * 16 * 32 * 2),
        ("amx-int8", "int8_tile_gops", "tdpbssd", 16 * 16 * 64 * 2),
    ):
        if found(feature):
            code = "\n".join(f"{instruction} %tmm5, %tmm4, %tmm{sum_}" for sum_ in range(4))
            loops.append(Loop(name, code, 64, 4 * operations, tiles=True, sums=1))
    return loops


def bounds(threads: int, seconds: float) -> dict[str, float]:
    """GB/s and thousands of millions of operations a second, by name. `seconds`: of each of three windows."""
    found = {"memory_gb_per_s": _memory(threads)}
    for loop in loops_of(lambda name: bool(cpu_features().get(name))):
        run = _compiled(loop)
        # Compiled, and how many times a window has room for.
        start = time.thread_time()
        run(100_000)
        run(100_000)
        times = max(1, int(200_000 * seconds / (time.thread_time() - start)))
        each = times * loop.sums * loop.operations
        found[loop.name] = _rate(threads, each, lambda _, run=run, times=times: run(times))
    return found


def _memory(threads: int) -> float:
    numbers = np.ones(MEMORY_BYTES // 8, np.int64)
    parts = np.array_split(numbers, threads)
    _sum(parts[0][:8])
    return _rate(threads, numbers.nbytes // threads, lambda thread: _sum(parts[thread]))


@numba.njit(nogil=True)
def _sum(numbers: Any) -> Any:
    total = 0
    for number in numbers:
        total += number
    return total


def _rate(threads: int, work: int, do: Callable[[int], object]) -> float:
    """Thousands of millions a second of all threads together, of which each does `work` of them at the same time."""
    ready = Barrier(threads)

    def one(thread: int) -> float:
        ready.wait()
        start = time.thread_time()
        do(thread)
        return work / (time.thread_time() - start)

    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(one, range(threads))) for _ in range(WINDOWS)) / 1e9


def _compiled(loop: Loop) -> Callable[[int], None]:
    """A function of how many times it goes round."""

    @intrinsic
    def around(typingctx: Any, times: Any) -> Any:
        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            (_write_tiles if loop.tiles else _write_vectors)(loop, builder, args[0])
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64), code

    @numba.njit(nogil=True)
    def run(times: int) -> None:
        around(times)

    return run


def _write_vectors(loop: Loop, builder: Any, times: Any) -> None:
    """The sums are read back into their registers by each line, and nothing can be left out of what is volatile."""
    vector = ir.VectorType(ir.IntType(32), loop.bytes_of_vector // 4)
    function = ir.FunctionType(vector, [vector] * 3)
    zero = ir.Constant(vector, None)
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(loop.sums)]
    wide = loop.bytes_of_vector == 64
    place, spare = ("v", "~{xmm31}") if wide else ("x", "~{xmm15}")
    with cgutils.for_range(builder, times, intp=_I64):
        for each in sums:
            args = [zero, zero, builder.load(each)]
            constraints = f"={place},{place},{place},0,{spare}"
            builder.store(builder.asm(function, loop.code, constraints, args, side_effect=True), each)


def _write_tiles(loop: Loop, builder: Any, times: Any) -> None:
    nothing = ir.FunctionType(ir.VoidType(), [])
    shape = cgutils.alloca_once_value(builder, cgutils.make_bytearray(_TILE_CONFIGURATION))
    pointer = builder.bitcast(shape, _I8.as_pointer())
    configure = ir.FunctionType(ir.VoidType(), [_I8.as_pointer()])
    clear = "\n".join(f"tilezero %tmm{tile}" for tile in range(8))
    builder.asm(configure, f"ldtilecfg ($0)\n{clear}", "r,~{memory}", [pointer], side_effect=True)
    with cgutils.for_range(builder, times, intp=_I64):
        builder.asm(nothing, loop.code, "", [], side_effect=True)
    builder.asm(nothing, "tilerelease", "", [], side_effect=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each window; %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(words)
    found = bounds(arguments.threads, arguments.seconds)
    print(
        json.dumps(found) if arguments.json else "\n".join(f"{name:22} {value:12,.1f}" for name, value in found.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
