"""The threads that compiled loops run on: torch's own team, and no second one.

Torch's products run on a team of OpenMP threads, which between two products spins for a while or sleeps, as
OMP_WAIT_POLICY says. A second team would be runnable at the same time, and on as many cores as there are threads
the two take the cores from each other at every barrier. So loops are handed to the team that is there anyway, by the
function that compilers call for `#pragma omp parallel`, in the very library that torch is linked with.
"""

import ctypes
import logging
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from cairn.kernels.cpu.features import cpu_features
from cairn.machine import Machine

logger = logging.getLogger(__name__)


@cache
def team() -> int:
    """Address of `void GOMP_parallel(void (*)(void *), void *, unsigned threads, unsigned flags)` in the library that
    torch's threads come from; 0 where there is none, and then loops run on the calling thread."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            # Symbols are looked up in the library and in those that it is linked with.
            parallel = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(parallel, ctypes.c_void_p).value or 0
    logger.warning("torch's threads are no GNU OpenMP ones here: the CPU backend's loops run on one thread")
    return 0


SMALL_STEP = 4_000_000
"""Nanoseconds of a step on one thread below which it stays there, where its threads are to have all cores."""

SMALL_STEP_BESIDE_SPARE_CORES = 1_000_000
"""The same where a core is left for others: what is lost then is the hand-overs of a step's operations."""

LARGE_LOOP = 2_000_000
"""Nanoseconds of a single loop that goes to the team all the same."""


def _rates() -> tuple[int, int]:
    """What one thread reads of weights in a nanosecond, and how many bytes of weights it multiplies with a row.

    Measured with `panels` on a processor with AVX512-BF16, weights of 50 MB: 46 bytes in bfloat16 and 52 in int8 for
    one row, and 290 to 400 in both for 16 to 256 rows; what a step does beside its products is made up for by the lower
    of them. Without its instructions for bfloat16: 17, and 170 of weights in the cache; on one with AVX2 alone 14, and
    50 to 56 for 16 to 1,200 rows.
    """
    features = cpu_features()
    if not features.get("avx512f"):
        return 14, 50
    return (35, 350) if any(features.get(name) for name in ("avx512bf16", "amx-bf16")) else (17, 110)


BYTES_PER_NS, PRODUCTS_PER_NS = _rates()


@dataclass(slots=True)
class StepWork:
    """How many threads a step is worth. `packed_bytes`: of all weights, each read once a step; `packed_layouts`: in
    which of the layouts they are. `num_threads`: torch's when serving began, 0 before. `small_step`: nanoseconds on one
    thread below which a step stays there.

    Each operation ends where its slowest thread ends, and a thread whose core was taken, by the HTTP process or by
    another server, comes milliseconds late. A small model has a hundred operations a step, of which none is worth that.
    """

    packed_bytes: int = 0
    packed_layouts: set[str] = field(default_factory=set)
    num_threads: int = 0
    small_step: int = SMALL_STEP

    def add_weight(self, num_bytes: int, layout: str) -> None:
        """A weight of so many bytes has been packed."""
        self.packed_bytes += num_bytes
        self.packed_layouts.add(layout)

    def begin_serving(self, machine: Machine | None = None) -> None:
        """From now on the threads of a step are chosen for it, among as many as torch has now."""
        self.num_threads = torch.get_num_threads()
        spare = (machine or Machine()).num_cores() > self.num_threads
        self.small_step = SMALL_STEP_BESIDE_SPARE_CORES if spare else SMALL_STEP

    def threads_for(self, cost: float) -> int:
        """Of a loop of so many nanoseconds in the step at hand."""
        threads = torch.get_num_threads()
        return max(threads, self.num_threads) if cost >= LARGE_LOOP else threads

    def begin_step(self, num_rows: int) -> None:
        """Sets torch's threads for a step of so many rows: one, or all. One without rows reads no weights but the
        head's, which is a large loop where it is worth all threads, unless it is no loop."""
        if self.num_threads > 1:
            nanoseconds = self.packed_bytes / BYTES_PER_NS + num_rows * self.packed_bytes / PRODUCTS_PER_NS
            has_loops_alone = not num_rows and "onednn" not in self.packed_layouts
            is_small = has_loops_alone or nanoseconds < self.small_step
            torch.set_num_threads(1 if is_small else self.num_threads)


@cache
def step_work() -> StepWork:
    """One for the process, as the team is."""
    return StepWork()


def begin_step(num_rows: int) -> None:
    """See `Kernels.begin_step`."""
    step_work().begin_step(num_rows)


@cache
def inline_limit() -> int:
    """Nanoseconds of work that are not worth a hand-over. To a thread that spins it takes some 2 µs; one that sleeps,
    because the environment asks for that, is woken in some 70."""
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    # A count that is given counts, whatever the policy.
    asleep = os.environ.get("GOMP_SPINCOUNT", "0" if passive else "") == "0"
    return 150_000 if asleep else 15_000
