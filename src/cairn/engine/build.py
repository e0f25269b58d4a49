"""From an EngineConfig to a running core: model, pool, scheduler, runner, tokenizer. Imports torch."""

from pathlib import Path

from cairn.cache.events import BlockEvents
from cairn.cache.eviction import eviction_for
from cairn.cache.layout import CacheLayout
from cairn.cache.placement import Placement, placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.contract import EngineConfig, EngineInfo
from cairn.engine.core import Core
from cairn.engine.event_publisher import EventPublisher
from cairn.engine.tokenizer import ModelTokenizer
from cairn.errors import ConfigError
from cairn.models.registry import OpenModel, open_model
from cairn.runner.runner import Observe, Runner
from cairn.scheduler.books import SchedulerConfig
from cairn.scheduler.scheduler import Scheduler
from cairn.types import Clock, SystemClock

__all__ = ["build_core"]

LEAST_TOKENS = 64
"""A pool that cannot hold a checkpoint and this many tokens serves nobody."""


def build_core(config: EngineConfig, clock: Clock | None = None, observe: Observe | None = None) -> Core:
    """Load the model and allocate its memory. Raises ConfigError or ModelError naming the flag or the file.

    `observe` is called with each sampled row's logits.
    """
    opened = open_model(Path(config.model), config.dtype)
    layout = opened.layout(config.block_size)
    num_pages = _num_pages(config, layout)
    max_model_len = _max_model_len(config, opened)
    scheduling = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        max_model_len=max_model_len,
        exact=config.exact,
    )
    placement = _placement(config)
    policy = CachePolicy(placement, eviction_for(config.eviction), config.exact)
    tokenizer = ModelTokenizer(Path(config.model))
    runner = Runner(
        opened.build(exact=config.exact), layout, num_pages, config.max_num_seqs, config.exact, observe=observe
    )
    runner.self_test()
    info = EngineInfo(
        model=config.model,
        architecture=opened.facts.model_type,
        dtype=str(opened.dtype).removeprefix("torch."),
        vocab_size=opened.facts.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_pages=num_pages,
        page_bytes=layout.page_bytes,
        bytes_per_token=layout.bytes_per_token,
        checkpoint_bytes=layout.checkpoint_bytes,
        pages_per_checkpoint=layout.pages_per_checkpoint,
        max_num_seqs=config.max_num_seqs,
        min_cacheable_tokens=placement.min_cacheable if placement is not None else 0,
        mamba_cache_mode=config.mamba_cache_mode,
        enable_prefix_caching=placement is not None,
        exact=config.exact,
    )
    publisher = EventPublisher(config.kv_events) if config.kv_events is not None and placement is not None else None
    events = _events(publisher, layout, config.exact) if publisher is not None else None
    scheduler = Scheduler(scheduling, PrefixCache(layout, num_pages, policy, events), clock or SystemClock())
    after_step = publisher.flush if publisher is not None else None
    return Core(info, scheduler, runner, tokenizer, opened.facts.eos_token_ids, config.seed, after_step)


def _events(publisher: EventPublisher, layout: CacheLayout, exact: bool) -> BlockEvents:
    return BlockEvents(layout.block_size, publisher.publish, exact, resumes_anywhere=layout.state_bytes == 0)


def _placement(config: EngineConfig) -> Placement | None:
    if not config.enable_prefix_caching or config.mamba_cache_mode == "none":
        return None
    return placement_for(config.mamba_cache_mode, config.block_size, config.exact)


def _num_pages(config: EngineConfig, layout: CacheLayout) -> int:
    num_pages = config.kv_cache_memory_bytes // layout.page_bytes
    least = layout.pages_per_checkpoint + layout.pages_for(LEAST_TOKENS) + len(layout.groups)
    if num_pages < least:
        raise ConfigError(
            f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes} gives {max(0, num_pages)} pages of "
            f"{layout.page_bytes} bytes; one checkpoint and {LEAST_TOKENS} tokens need {least}: "
            f"set at least {least * layout.page_bytes}"
        )
    return num_pages


def _max_model_len(config: EngineConfig, opened: OpenModel) -> int:
    longest = opened.facts.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"--max-model-len {config.max_model_len} is more than the model's {longest}: lower it")
    return config.max_model_len or longest
