"""Threads of computation, where nobody has asked for a number: chosen to fit the machine."""

import logging
from collections.abc import Mapping

from cairn.errors import ConfigError
from cairn.machine import Machine

_SPINS = "10000"
"""How often GNU OpenMP's threads look before they sleep, some 100 microseconds: enough for the next operation's loop,
which a sleeping thread would begin 50 to 100 microseconds later, and short beside any time slice."""

logger = logging.getLogger(__name__)


def choose_cpu_threads(
    asked: int | None, num_ranks: int, environ: Mapping[str, str], machine: Machine | None = None
) -> int:
    """Threads of each rank's computation. OMP_NUM_THREADS in `environ` can make them fewer.

    Raises ConfigError where more are asked for than there are cores.
    """
    num_cores = (machine or Machine()).num_cores()
    each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    if asked is not None:
        # One thread a rank is the least there is, also where ranks outnumber the cores.
        if asked > max(1, num_cores // num_ranks):
            raise ConfigError(
                f"--cpu-threads {asked}{each}: there are {num_cores} cores for this process, and more threads than "
                f"cores wait for each other: set at most {max(1, num_cores // num_ranks)}"
            )
        logger.info("--cpu-threads %d%s: as asked, of %d cores", asked, each, num_cores)
        return asked
    spare = 1 if num_cores > 2 else 0
    num_threads = max(1, (num_cores - spare) // num_ranks)
    reason = f"{num_cores} cores" + (", one of them for HTTP" if spare else "")
    wanted = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdecimal() and 0 < int(wanted) < num_threads:
        num_threads, reason = int(wanted), f"as OMP_NUM_THREADS says, of {reason}"
    logger.info("--cpu-threads %d%s: %s", num_threads, each, reason)
    return num_threads


def thread_variables(num_threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of a process that computes with so many threads, which wait for each other asleep.

    Threads that spin take the cores that another server, or the HTTP process, is waiting for, and the thread that
    they wait for may be the one without a core. What `environ` says of waiting is left as it is.
    """
    variables = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    if "OMP_WAIT_POLICY" not in environ and "GOMP_SPINCOUNT" not in environ:
        variables |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": _SPINS}
    return variables
