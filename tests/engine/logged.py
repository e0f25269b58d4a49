"""A real core whose requests are logged, with a runner of tags; and the replay of a log."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cairn.cache.audit import audit
from cairn.cache.eviction import eviction_for
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.contract import CacheInfo, CacheReport, EngineConfig, EngineInfo, RequestLogConfig
from cairn.engine.core import Core, StepRunner
from cairn.engine.request_log.log import open_log
from cairn.models.layer_sizes import ForwardSizes
from cairn.replay.replay import Replay
from cairn.replay.trace import Trace
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.types import ManualClock
from doubles.engine_requests import generate_request
from doubles.simulated_runner import SimulatedRunner

VOCAB = 50
SIZES = ForwardSizes(1000, 8)


class Ticking(ManualClock):
    """A microsecond passes with each look: what comes later has a later time, as with a real clock."""

    def now(self) -> float:
        self.advance(1e-6)
        return super().now()


class _NoText:
    """A tokenizer for those who look at ids alone."""

    def stream(self, skip_special_tokens: bool = True) -> "_NoText":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def layout(block_size: int = 16, pages_per_checkpoint: int = 3) -> CacheLayout:
    state_bytes = 64 * pages_per_checkpoint - 8 if pages_per_checkpoint else 0
    return CacheLayout(block_size, 64, 1, (AttentionGroup("full", block_size),), 8, state_bytes, 1)


class LoggedServer:
    """Turned by hand; `close` before the log is read. `reports`: of requests that have ended, by name; `sequences`:
    their prompts and what was told of their answers."""

    def __init__(
        self,
        path: Path,
        mode: str = "auto",
        num_pages: int = 1000,
        sizes: CacheLayout | None = None,
        runner: StepRunner | None = None,
        max_bytes: int = 1 << 30,
        max_in_flight: int = 1,
        **fields,
    ) -> None:
        fields = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "mamba_cache_mode": mode} | fields
        log = RequestLogConfig(path=str(path), max_bytes=max_bytes)
        config = EngineConfig(model="/models/made", request_log=log, **fields)
        sizes = sizes or layout(config.block_size)
        placement = None if mode == "none" else placement_for(mode, sizes.block_size, config.exact)
        info = EngineInfo(
            model=config.model,
            architecture="simulated",
            dtype="float32",
            vocab_size=1 << 30,
            max_model_len=1 << 16,
            max_num_seqs=config.max_num_seqs,
            exact=config.exact,
            cache=CacheInfo(
                block_size=sizes.block_size,
                num_pages=num_pages,
                page_bytes=sizes.page_bytes,
                bytes_per_token=sizes.bytes_per_token,
                checkpoint_bytes=sizes.checkpoint_bytes,
                pages_per_checkpoint=sizes.pages_per_checkpoint,
                min_cacheable_tokens=1,
                mamba_cache_mode=mode,
                enable_prefix_caching=placement is not None,
            ),
        )
        self.clock = Ticking(100.0)
        self.log = open_log(config, info, sizes, SIZES, self.clock)
        assert self.log is not None
        policy = CachePolicy(placement, eviction_for(config.eviction), config.exact)
        self.cache = PrefixCache(sizes, num_pages, policy, clock=self.clock)
        scheduling = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            exact=config.exact,
            in_flight_sharing=config.in_flight_sharing,
            policy=config.scheduling_policy,
            max_in_flight=max_in_flight,
        )
        self.scheduler = Scheduler(scheduling, self.cache, self.clock, observer=self.log)
        runner = runner or SimulatedRunner(sizes, num_pages, config.max_num_seqs, VOCAB, numerics=config.exact)
        self.core = Core(info, self.scheduler, runner, _NoText(), (), 0, request_log=self.log)
        self.reports: dict[str, CacheReport] = {}
        self.sequences: dict[str, list[int]] = {}

    def submit(self, name: str, prompt, max_tokens: int = 4, salt: str | None = None, **fields) -> None:
        """Further answers, with `n`, are called NAME/1, NAME/2, ..."""
        fields = {"temperature": 0.0, "ignore_eos": True} | fields
        raw = np.array(prompt, np.int64).tobytes()
        self.core.submit(
            generate_request(request_id=name, prompt=raw, max_tokens=max_tokens, cache_salt=salt, **fields)
        )
        for index in range(fields.get("n", 1)):
            self.sequences[f"{name}/{index}" if index else name] = list(prompt)

    def step(self) -> list[str]:
        """Requests that have ended by it."""
        ended = []
        for output in self.core.step():
            name = f"{output.request_id}/{output.index}" if output.index else output.request_id
            self.sequences[name] += output.token_ids
            if output.finish_reason is not None:
                ended.append(name)
                if output.cache is not None:
                    self.reports[name] = output.cache
        return ended

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        self.core.idle()

    def close(self) -> None:
        self.run()
        self.core.close()

    @property
    def cached_tokens(self) -> int:
        """What the server has counted."""
        return self.cache.counters.hits


def replayed(
    trace: Trace, mode: str | None = None, budget_bytes: int | None = None, eviction: str | None = None
) -> Replay:
    """Under the log's own rules, but for those given."""
    server = trace.header
    assert server is not None
    rules, mode = server.policy, mode or server.policy.placement
    placement = None if mode == "none" else placement_for(mode, server.layout.block_size, rules.exact)
    policy = CachePolicy(placement, eviction_for(eviction or rules.eviction), rules.exact)
    budget_bytes = budget_bytes or server.budget_bytes
    replay = Replay(server.layout, budget_bytes, policy, server.max_num_batched_tokens, ManualClock(), server)
    outcome = replay.run(trace)
    audit(replay.cache)
    assert not replay.cache.pinned.sequences and not replay.cache.pinned.steps and not replay.cache.pinned.pins
    assert outcome.hit_tokens + sum(outcome.lost.values()) == outcome.prompt_tokens - replay.cache.counters.received
    return replay


def hits_by_name(trace: Trace, replay: Replay) -> Mapping[str, int]:
    """As the replay has it."""
    return {each.name: hit for each, hit in zip(trace.requests, replay.outcome.hits, strict=True)}


def logged_hits(trace: Trace) -> Mapping[str, int]:
    """As the log has it."""
    return {each.name: each.timeline.cached_tokens for each in trace.requests}
