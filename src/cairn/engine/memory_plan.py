"""How memory is divided: the machine's, or a GPU's, among weights, steps, graphs, running requests and the pool.

A size that was asked for is taken, or refused where it cannot work; one that nobody asked for is chosen to fit.
"""

import logging
from dataclasses import dataclass, replace

from cairn.cache.layout import CacheLayout
from cairn.engine.contract import EngineConfig
from cairn.errors import ConfigError
from cairn.kernels.cuda_support import sampling_bytes
from cairn.layers.memory import MemorySpec
from cairn.layers.model import logits_room
from cairn.runner.input_batch import TABLE_ENTRY_BYTES, pages_of_table
from cairn.runner.runner import slot_bytes

STEPS_IN_FLIGHT = 2
"""On a GPU, where the host plans one step while the device computes another."""

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

_LEAST_CHUNK = 64
"""Tokens of prompts for which a step must have room besides one token a request."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """In bytes, of a GPU, which one rank has alone, or of the machine, which all ranks share.

    `usable`: what there is to be divided, None where nothing tells. Of it take `weights` their share, with the vision
    tower's; `process`: what CUDA itself and other processes take; `step`: the most that a step takes beside all that is
    kept; `logits`, with what is made of them to draw tokens; `images`: encoded ones that are kept; `graphs`: CUDA
    graphs; `host_cache`: the tier below the pool.

    `slot`: what a running request takes on a rank besides pages; `num_slots`: requests computed at once, and one slot
    more is there for rows that are nobody's; `pool`: of each rank.
    """

    on_gpu: bool
    usable: int | None
    weights: int = 0
    process: int = 0
    step: int = 0
    logits: int = 0
    images: int = 0
    graphs: int = 0
    host_cache: int = 0
    slot: int = 0
    num_slots: int = 0
    pool: int = 0

    @property
    def fixed(self) -> int:
        """All but pool and slots."""
        named = self.weights + self.process + self.step + self.logits + self.images
        return named + self.graphs + self.host_cache

    @property
    def left(self) -> int:
        """For pool and slots; 0 where nothing tells."""
        return 0 if self.usable is None else self.usable - self.fixed

    @property
    def states(self) -> int:
        """All slots of a rank."""
        return (self.num_slots + 1) * self.slot


def least_pages(layout: CacheLayout) -> int:
    """Pages of the smallest pool that can serve."""
    return layout.pages_per_checkpoint + layout.pages_for(LEAST_TOKENS) + len(layout.groups)


def choose_max_model_len(asked: int | None, model_limit: int) -> int:
    """Tokens of the longest sequence. Raises ConfigError for more than the model takes."""
    if asked is not None and asked > model_limit:
        raise ConfigError(f"--max-model-len {asked} is more than the model's {model_limit}: lower it")
    return asked or model_limit


def count_pages(pool: int, layout: CacheLayout) -> int:
    """Of a pool. Raises ConfigError where these are too few to serve."""
    num_pages, least = pool // layout.page_bytes, least_pages(layout)
    if num_pages < least:
        raise ConfigError(
            f"--kv-cache-memory-bytes {pool} gives {max(0, num_pages)} pages of "
            f"{layout.page_bytes} bytes; one checkpoint and {LEAST_TOKENS} tokens need {least}: "
            f"set at least {least * layout.page_bytes}"
        )
    return num_pages


def count_slot(
    spec: MemorySpec, layout: CacheLayout, most_pages: int, max_model_len: int, *, on_gpu: bool = False
) -> int:
    """Bytes that a running request takes besides pages, and the slot of rows that are nobody's likewise: states, block
    tables and tokens. On a GPU also room for its block tables in the copies of all steps in flight, whose buffers are
    as large as the next power of two. `most_pages`: of the pool."""
    num_bytes = slot_bytes(spec, layout, most_pages, max_model_len)
    if not on_gpu:
        return num_bytes
    entries = len(layout.groups) * pages_of_table(layout, most_pages, max_model_len)
    return num_bytes + STEPS_IN_FLIGHT * 2 * TABLE_ENTRY_BYTES * entries


def count_logits(num_seqs: int, vocab_size: int, num_ranks: int) -> int:
    """Bytes that drawing a token for each of so many sequences takes with the CUDA backend; see `logits_room`."""
    return logits_room(num_seqs, vocab_size, num_ranks, sampling_bytes(num_seqs, vocab_size, num_seqs))


def guess_process_bytes(num_ranks: int) -> int:
    """What CUDA's context, the libraries and their workspaces take of each GPU before anything is loaded, and among
    several ranks NCCL's buffers. A server finds them taken; these are guesses, not measured."""
    return (768 << 20) + (512 << 20 if num_ranks > 1 else 0)


def guess_graph_bytes(num_layers: int, num_sizes: int) -> int:
    """What CUDA graphs of so many sizes take, each of all layers, where there is no GPU to capture any on. A guess, not
    measured."""
    return num_sizes * num_layers * (128 << 10)


def plan_memory(
    plan: MemoryPlan, config: EngineConfig, layout: CacheLayout, spec: MemorySpec, max_model_len: int
) -> MemoryPlan:
    """With slots and pool; see `divide_memory`."""
    most_pages = max(0, plan.left) // layout.page_bytes
    slot = count_slot(spec, layout, most_pages, max_model_len, on_gpu=plan.on_gpu)
    return divide_memory(replace(plan, slot=slot), config, layout)


def divide_memory(plan: MemoryPlan, config: EngineConfig, layout: CacheLayout) -> MemoryPlan:
    """With as many slots and as large a pool as `config` says, or as fit. Logged. `layout`: of one rank; on a GPU, of
    that which has least.

    Raises ConfigError where what was asked for, or the least that can serve, does not fit.
    """
    defaults = _GPU if plan.on_gpu else _HOST
    num_ranks = 1 if plan.on_gpu else config.tensor_parallel_size
    slot = plan.slot * num_ranks
    states = slot * (1 + (config.max_num_seqs or 1))
    if plan.usable is None:
        left, message = None, "nothing here tells how much memory is available"
    else:
        left = plan.left - states
        if plan.on_gpu and config.max_num_seqs is None:
            left = min(left, int((1 - _STATES_SHARE) * plan.left))
        taken = f"{_size(plan.fixed - plan.host_cache)} of weights, {_size(states)} of running states"
        if plan.host_cache:
            taken += f", {_size(plan.host_cache)} of --host-cache-bytes"
        message = f"{_size(plan.usable)} available, {taken}"
    pool = _pool_bytes(config, layout, left, message, defaults, num_ranks)
    num_slots = config.max_num_seqs
    if num_slots is None:
        most_states = None if left is None else int(_STATES_SHARE * left) // max(1, slot) - 1
        num_slots = _num_seqs(config, layout, pool, most_states, defaults)
    else:
        logger.info("--max-num-seqs %d: as asked", num_slots)
    return replace(plan, num_slots=num_slots, pool=pool)


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
    pages = layout.pages_per_checkpoint + layout.running_pages_for(_TOKENS_PER_SEQ, 1)
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
