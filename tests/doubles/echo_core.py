"""The engine's core with a runner that echoes: scheduler, cache, transfers and books are the real ones, and there is no
model. For tests of everything above the core."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import msgspec
import numpy as np

from cairn.cache.eviction import eviction_for
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.contract import CacheInfo, EngineConfig, EngineInfo, GenerateOutput, GenerateRequest
from cairn.engine.core import Core
from cairn.engine.grammars.worker import byte_tokenizer, find_grammar_error
from cairn.engine.multimodal_keys import ImageKeys
from cairn.engine.transfers.kv_transfer import KvTransfer, RankMemory, build_transfer
from cairn.errors import AuditError, InvalidRequest, ModelError
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.transfer.geometry import AttentionUnits, ModelUnits
from cairn.transfer.memory import PoolMemory
from cairn.types import Clock, SystemClock
from doubles.byte_tokenizer import END_OF_SEQUENCE, VOCAB_SIZE, ByteTokenizer
from doubles.echo_runner import EchoRunner, EchoSpecs
from doubles.faults import Faults
from doubles.memory_link import MemoryFabric

__all__ = ["BYTES_PER_TOKEN", "EchoCore", "build_echo_core"]

BYTES_PER_TOKEN = 8192
_STATE_BYTES = 1024
_UNITS = ModelUnits((AttentionUnits(kv_heads=1, layers=1, row_bytes=BYTES_PER_TOKEN // 2),), state_units=1)
_LAYOUT_HASH = b"echo" * 8
_PAUSED_SECONDS = 0.002

# Joins the cores of one process; the side channels between them are real.
_fabric = MemoryFabric()
_numbers = count()


class EchoCore(Core):
    """`sleep` is called where it has to wait, `clock` gives the timings. Grammars are tried, but no answer is held to
    one."""

    def __init__(
        self,
        config: EngineConfig,
        faults: Faults | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        clock = clock or SystemClock()
        self._faults = faults or Faults()
        self._sleep = sleep
        self._turns = 0
        layout = _layout(config.block_size)
        # No memory stands behind the pages, so there is nothing that they could be fitted to.
        num_pages = (config.kv_cache_memory_bytes or 1 << 30) // layout.page_bytes
        max_num_seqs = config.max_num_seqs or 64
        cached = config.enable_prefix_caching and config.mamba_cache_mode != "none"
        placement = placement_for(config.mamba_cache_mode, config.block_size, config.exact) if cached else None
        transfer = _transfer(config, layout, num_pages, clock, self._faults)
        max_model_len = config.max_model_len or 4096
        info = EngineInfo(
            model=config.model,
            architecture="EchoForCausalLM",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_waiting=config.max_waiting,
            exact=config.exact,
            tensor_parallel_size=config.tensor_parallel_size,
            side_channel=None if transfer is None else f"{transfer.host}:{transfer.side_port}",
            cache=CacheInfo(
                block_size=config.block_size,
                num_pages=num_pages,
                page_bytes=layout.page_bytes,
                bytes_per_token=layout.bytes_per_token,
                checkpoint_bytes=layout.checkpoint_bytes,
                pages_per_checkpoint=layout.pages_per_checkpoint,
                min_cacheable_tokens=placement.min_cacheable if placement is not None else 0,
                mamba_cache_mode=config.mamba_cache_mode,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
        )
        scheduling = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            max_model_len=max_model_len,
            exact=config.exact,
            in_flight_sharing=config.in_flight_sharing,
            on_load_failure="recompute" if config.kv_transfer is None else config.kv_transfer.on_failure,
        )
        policy = CachePolicy(placement, eviction_for(config.eviction), config.exact)
        cache = PrefixCache(layout, num_pages, policy, clock=clock)
        scheduler = Scheduler(scheduling, cache, clock, None if transfer is None else transfer.transfers)
        eos, keys = (END_OF_SEQUENCE,), ImageKeys(0)
        super().__init__(
            info, scheduler, EchoRunner(), ByteTokenizer(), eos, config.seed, transfer=transfer, image_keys=keys
        )
        self._specs = EchoSpecs(VOCAB_SIZE, frozenset(eos), config.seed, keys)

    def submit(self, *requests: GenerateRequest) -> None:
        for structure in {request.structure for request in requests} - {None}:
            if (reason := find_grammar_error(structure, byte_tokenizer())) is not None:
                raise InvalidRequest(reason, structure.field.partition(".")[0])
        super().submit(*(msgspec.structs.replace(request, structure=None) for request in requests))

    def step(self) -> list[GenerateOutput]:
        self._turns += 1
        self._misbehave(self._turns)
        if self._is_paused():
            self._sleep(_PAUSED_SECONDS)
            return []
        return super().step()

    def idle(self) -> None:
        if self._faults.bad_audit:
            raise AuditError("the echoing core's accounting was told not to add up")
        super().idle()

    def resume(self) -> None:
        """Let paused answers grow on. May be called from another thread."""
        self._faults = msgspec.structs.replace(self._faults, pause_after=None)

    def _is_paused(self) -> bool:
        limit, state = self._faults.pause_after, self._scheduler.state
        if limit is None or state.ending or not state.running or (len(state.waiting) and state.slots.free):
            return False
        return all(len(request.output) >= limit for request in state.running)

    def _misbehave(self, turn: int) -> None:
        faults = self._faults
        if turn == faults.fail_at_step:
            raise RuntimeError("the echoing core's step was told to fail")
        if turn == faults.die_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if turn == faults.stall_at_step:
            self._sleep(faults.stall_seconds)


def _layout(block_size: int) -> CacheLayout:
    groups = (AttentionGroup("full", block_size),)
    return CacheLayout(block_size, BYTES_PER_TOKEN * block_size, 1, groups, 8, _STATE_BYTES, 1)


def _transfer(
    config: EngineConfig, layout: CacheLayout, num_pages: int, clock: Clock, faults: Faults
) -> KvTransfer | None:
    if config.kv_transfer is None:
        return None
    pool = np.zeros((num_pages, layout.page_bytes), np.uint8)
    memory = RankMemory(PoolMemory(pool), layout, _UNITS)
    name = f"echo {next(_numbers)}"
    settings = config.kv_transfer
    if faults.no_lease_room:
        settings = settings.model_copy(update={"lease_share": 1e-9})
    made = build_transfer(settings, memory, _LAYOUT_HASH, clock, make_link=lambda host: _fabric.link(name))
    if faults.no_lease_room:
        made.transfers.quota = replace(made.transfers.quota, wait_seconds=0.0)
    return made


def build_echo_core(config: EngineConfig) -> EchoCore:
    """An EchoCore whose faults stand in the model's name: `echo`, `echo:die_at_step=3`."""
    faults = Faults.parse(config.model)
    time.sleep(faults.build_seconds)
    if faults.refuse:
        raise ModelError(f"{config.model}: the echoing model was told to refuse")
    if faults.crash:
        raise RuntimeError("the echoing core's build was told to crash")
    return EchoCore(config.model_copy(update={"model": "echo"}), faults)
