"""The engine without its kernels: scheduler, cache, runner and sampler are the real ones, the model computes nothing.

`build_core` is what `cairn serve` can be given as its core; NO_MODEL_STEP_SECONDS paces its steps.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cairn.cache.eviction import eviction_for
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.contract import CacheInfo, EngineConfig, EngineInfo, GenerateOutput
from cairn.engine.core import Core
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.models.registry import open_model
from cairn.runner.runner import Runner
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.types import SystemClock

__all__ = ["STEP_SECONDS", "NoModel", "NoModelEngine", "build_core", "build_engine"]

STEP_SECONDS = "NO_MODEL_STEP_SECONDS"

CALLS = 256
"""After so many calls logits come again."""


class NoModel:
    """A loaded model but for its forward pass, whose hidden states are zeros, and its logits, which were drawn before.
    Each call has others, so that answers are ordinary tokens of all kinds.

    `entered` and `left`: when the last forward pass began and ended, in seconds of time.thread_time.
    """

    def __init__(self, model: Any, max_num_seqs: int) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(max_num_seqs + CALLS, model.vocab_size, generator=generator)
        self._calls = 0
        # what a step asks for: it is to cost what it costs of a model
        self.kernels, self.communicator, self.head = model.kernels, model.communicator, model.head
        self.spec, self.vocab_size = model.spec, model.vocab_size
        self.entered = self.left = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any, memory: Any) -> Tensor:
        """Zeros, [rows, hidden]."""
        self.entered = time.thread_time()
        spec = self._model.spec
        hidden = torch.zeros(len(batch.tokens), spec.hidden_size, dtype=spec.dtype)
        self.left = time.thread_time()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of what was drawn, float32 [n, vocab]."""
        self._calls += 1
        first = self._calls % (len(self._logits) - len(hidden) + 1)
        return self._logits[first : first + len(hidden)]


class PacedCore(Core):
    """Takes `seconds` for a step at least, as a model would."""

    seconds = 0.0

    def step(self) -> list[GenerateOutput]:
        due = time.monotonic() + self.seconds
        outputs = super().step()
        left = due - time.monotonic()
        if self.seconds and left > 0:
            time.sleep(left)
        return outputs


@dataclass(frozen=True, slots=True)
class NoModelEngine:
    """A core and its parts."""

    core: PacedCore
    scheduler: Scheduler
    runner: Runner
    model: NoModel


def build_engine(config: EngineConfig) -> NoModelEngine:
    """On the checkpoint in `config.model`, without transfers, events, images and grammars."""
    opened = open_model(Path(config.model), config.dtype)
    layout = opened.layout(config.block_size)
    num_pages = (config.kv_cache_memory_bytes or 1 << 30) // layout.page_bytes
    num_slots = config.max_num_seqs or 256
    max_model_len = config.max_model_len or opened.config.max_position_embeddings
    placement = placement_for(config.mamba_cache_mode, config.block_size, config.exact)
    info = EngineInfo(
        model=config.model,
        architecture=opened.family.model_type,
        dtype=str(opened.dtype).removeprefix("torch."),
        vocab_size=opened.config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=num_slots,
        exact=config.exact,
        cache=CacheInfo(
            block_size=config.block_size,
            num_pages=num_pages,
            page_bytes=layout.page_bytes,
            bytes_per_token=layout.bytes_per_token,
            checkpoint_bytes=layout.checkpoint_bytes,
            pages_per_checkpoint=layout.pages_per_checkpoint,
            min_cacheable_tokens=placement.min_cacheable,
            mamba_cache_mode=config.mamba_cache_mode,
            enable_prefix_caching=True,
        ),
    )
    scheduling = SchedulerConfig(
        max_num_seqs=num_slots,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        max_model_len=max_model_len,
        exact=config.exact,
    )
    clock = SystemClock()
    policy = CachePolicy(placement, eviction_for(config.eviction), config.exact)
    scheduler = Scheduler(scheduling, PrefixCache(layout, num_pages, policy, clock=clock), clock)
    model = NoModel(opened.build(exact=config.exact), num_slots)
    runner = Runner(model, layout, num_pages, num_slots, config.exact)
    tokenizer = ModelTokenizer(Path(config.model))
    eos_token_ids = opened.eos_token_ids(tokenizer.eos_token_id)
    core = PacedCore(info, scheduler, runner, tokenizer, eos_token_ids, config.seed)
    core.seconds = float(os.environ.get(STEP_SECONDS, "0"))
    return NoModelEngine(core, scheduler, runner, model)


def build_core(config: EngineConfig) -> Core:
    """For `cairn.cli.main(core="benchmarks.no_model:build_core")`."""
    torch.set_num_threads(1)
    return build_engine(config).core
