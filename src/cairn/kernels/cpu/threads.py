"""The threads that compiled loops run on: torch's own team, and no second one.

Torch's products run on a team of OpenMP threads, which between two products spins for a while or sleeps, as
OMP_WAIT_POLICY says. A second team would be runnable at the same time, and on as many cores as there are threads
the two take the cores from each other at every barrier. So loops are handed to the team that is there anyway, by the
function that compilers call for `#pragma omp parallel`, in the very library that torch is linked with.
"""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


@cache
def team() -> int:
    """Address of `void GOMP_parallel(void (*)(void *), void *, unsigned threads, unsigned flags)` in the library that
    torch's threads come from; 0 where there is none, and then loops run on the calling thread."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            # Symbols are looked up in the library and in those that it is linked with.
            found = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(found, ctypes.c_void_p).value or 0
    logger.warning("torch's threads are no GNU OpenMP ones here: the CPU backend's loops run on one thread")
    return 0


@cache
def inline_limit() -> int:
    """Nanoseconds of work that are not worth a hand-over. To a thread that spins it takes some 2 µs; one that sleeps,
    because the environment asks for that, is woken in some 70."""
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    # A count that is given counts, whatever the policy.
    asleep = os.environ.get("GOMP_SPINCOUNT", "0" if passive else "") == "0"
    return 150_000 if asleep else 15_000
