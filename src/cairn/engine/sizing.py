"""Sizes that nobody has asked for, chosen to fit the machine: threads, the pool of pages, requests computed at once.

A size that was asked for is taken, or refused where it cannot work; it is never changed.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from cairn.cache.layout import CacheLayout
from cairn.engine.contract import EngineConfig
from cairn.errors import ConfigError
from cairn.machine import Machine

LEAST_TOKENS = 64
"""A pool that cannot hold a checkpoint and this many tokens serves nobody."""


@dataclass(frozen=True, slots=True)
class _Defaults:
    """`pool_share`: of the available memory; `num_seqs`: requests at once where there is room for more."""

    pool_share: float
    most_pool_bytes: int | None
    num_seqs: int


_HOST = _Defaults(0.4, 8 << 30, 64)
"""Two servers that are started at the same moment still fit."""

MOST_SEQS_ON_GPU = 256
"""Unless asked for more."""

_GPU = _Defaults(1.0, None, MOST_SEQS_ON_GPU)

_STATES_SHARE = 0.1
_TOKENS_PER_SEQ = 1024
"""What a running request should find room for in the pool, besides a checkpoint."""

_SPINS = "10000"
"""How often GNU OpenMP's threads look before they sleep, some 100 microseconds: enough for the next operation's loop,
which a sleeping thread would begin 50 to 100 microseconds later, and short beside any time slice."""

_LEAST_CHUNK = 64
"""Tokens of prompts for which a step must have room besides one token a request."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySizes:
    """`kv_cache_memory_bytes`: the pool of each rank. `max_num_seqs`: requests computed at once."""

    kv_cache_memory_bytes: int
    max_num_seqs: int


def least_pages(layout: CacheLayout) -> int:
    """Pages of the smallest pool that can serve."""
    return layout.pages_per_checkpoint + layout.pages_for(LEAST_TOKENS) + len(layout.groups)


def choose_max_model_len(asked: int | None, model_limit: int) -> int:
    """Tokens of the longest sequence. Raises ConfigError for more than the model takes."""
    if asked is not None and asked > model_limit:
        raise ConfigError(f"--max-model-len {asked} is more than the model's {model_limit}: lower it")
    return asked or model_limit


def choose_memory_sizes(
    config: EngineConfig,
    layout: CacheLayout,
    slot_bytes: int,
    fixed_bytes: int,
    available: int | None,
    on_gpu: bool = False,
) -> MemorySizes:
    """What `config` says, or what fits the `available` bytes of memory; None where nothing tells how many. Logged.

    `layout`: of one rank. `slot_bytes`: what a running request takes on one rank besides pages; one more is there for
    rows that are nobody's. `fixed_bytes`: the weights, and all else that all ranks together will have besides pool and
    running states. `on_gpu`: the memory is one rank's alone, that of the GPU which has least, and all of it is taken.

    Raises ConfigError where what was asked for, or the least that can serve, does not fit.
    """
    defaults = _GPU if on_gpu else _HOST
    num_ranks = 1 if on_gpu else config.tensor_parallel_size
    slot_bytes *= num_ranks
    states = slot_bytes * (1 + (config.max_num_seqs or 1))
    if available is None:
        available_memory, message = None, "nothing here tells how much memory is available"
    else:
        available_memory = available - fixed_bytes - states
        message = f"{_size(available)} available, {_size(fixed_bytes)} of weights, {_size(states)} of running states"
    if on_gpu and available_memory is not None and config.max_num_seqs is None:
        available_memory = min(available_memory, int((1 - _STATES_SHARE) * (available_memory + states)))
    pool = _pool_bytes(config, layout, available_memory, message, defaults, num_ranks)
    num_seqs = config.max_num_seqs
    if num_seqs is None:
        most_states = (
            None if available_memory is None else int(_STATES_SHARE * available_memory) // max(1, slot_bytes) - 1
        )
        num_seqs = _num_seqs(config, layout, pool, most_states, defaults)
    else:
        logger.info("--max-num-seqs %d: as asked", num_seqs)
    return MemorySizes(kv_cache_memory_bytes=pool, max_num_seqs=num_seqs)


def _pool_bytes(
    config: EngineConfig,
    layout: CacheLayout,
    available_memory: int | None,
    message: str,
    defaults: "_Defaults",
    num_ranks: int,
) -> int:
    """Of one rank. `available_memory`: bytes for the pools of the `num_ranks` that share the memory."""
    asked = config.kv_cache_memory_bytes
    least = least_pages(layout) * layout.page_bytes
    if available_memory is None:
        if asked is None:
            raise ConfigError(f"--kv-cache-memory-bytes: {message}: set it")
        return asked
    if available_memory < least * num_ranks:
        raise ConfigError(
            f"the smallest pool, {_size(least * num_ranks)} for one checkpoint and {LEAST_TOKENS} tokens, does not fit "
            f"into memory ({message}): free some, or lower --max-num-seqs"
        )
    each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    if asked is None:
        pool, why = int(defaults.pool_share * available_memory), f"{defaults.pool_share:.0%} of what is left"
        if defaults.most_pool_bytes is not None:
            pool = min(pool, defaults.most_pool_bytes)
            why += f", at most {_size(defaults.most_pool_bytes)}"
        pool = max(least, pool // num_ranks)
    elif asked * num_ranks <= available_memory:
        pool, why = asked, "as asked"
    else:
        raise ConfigError(
            f"--kv-cache-memory-bytes {asked}: a pool of {_size(asked)}{each} does not fit into memory: lower it to at "
            f"most {available_memory // num_ranks} ({message})"
        )
    logger.info("--kv-cache-memory-bytes %d (%s%s): %s (%s)", pool, _size(pool), each, why, message)
    return pool


def _num_seqs(
    config: EngineConfig, layout: CacheLayout, pool: int, most_states: int | None, defaults: "_Defaults"
) -> int:
    """`most_states`: how many running states there is memory for."""
    pages = layout.pages_per_checkpoint + layout.pages_for(_TOKENS_PER_SEQ)
    bounds = [
        (defaults.num_seqs, "there is room for more"),
        (config.max_num_batched_tokens - _LEAST_CHUNK, "what --max-num-batched-tokens allows"),
        (pool // layout.page_bytes // pages, f"each finds {_TOKENS_PER_SEQ} tokens and a checkpoint in the pool"),
    ]
    if most_states is not None:
        bounds.append((most_states, f"running states take up to {_STATES_SHARE:.0%} of the memory"))
    num_seqs, why = min(bounds)
    logger.info("--max-num-seqs %d: %s", max(1, num_seqs), why)
    return max(1, num_seqs)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
