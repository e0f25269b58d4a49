"""A scheduler whose requests are logged, with a runner of tags; and the replay of a log."""

from pathlib import Path

import numpy as np

from cairn.cache.audit import audit
from cairn.cache.eviction import eviction_for
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.lease import Namespace
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy
from cairn.engine.request_log import RequestJournal
from cairn.engine.request_log_cache import LoggedCache
from cairn.engine.request_log_file import LogFile
from cairn.engine.request_log_lines import LogLines
from cairn.replay.reenact import Reenactment
from cairn.replay.request_log import LoggedTrace
from cairn.replay.timed_cache import TimedCache
from cairn.runner.simulated import SimulatedRunner
from cairn.scheduler.books import SchedulerConfig
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Scheduler
from cairn.types import ManualClock, RequestId, SamplingParams

KEY = b"0123456789abcdef"
SHARED_TOKENS = 1 << 20


def layout(block_size: int = 16, pages_per_checkpoint: int = 3) -> CacheLayout:
    state_bytes = 64 * pages_per_checkpoint - 8 if pages_per_checkpoint else 0
    return CacheLayout(block_size, 64, 1, (AttentionGroup("full", block_size),), 8, state_bytes, 1)


def first_line(sizes: CacheLayout, num_pages: int, mode: str = "auto", eviction="value", exact=False) -> dict:
    return {
        "name": "made",
        "unit": sizes.block_size,
        "source": "cairn",
        "version": 1,
        "layout": {
            "block_size": sizes.block_size,
            "page_bytes": sizes.page_bytes,
            "page_units": sizes.page_units,
            "groups": [{"name": group.name, "tokens_per_page": group.tokens_per_page} for group in sizes.groups],
            "header_bytes": sizes.header_bytes,
            "state_bytes": sizes.state_bytes,
            "state_units": sizes.state_units,
        },
        "budget_bytes": num_pages * sizes.page_bytes,
        "policy": {"placement": mode, "eviction": eviction, "exact": exact},
        "max_num_batched_tokens": 256,
    }


class Logged:
    """Turned by hand; `close` before the log is read."""

    def __init__(
        self,
        path: Path,
        mode: str = "auto",
        num_pages: int = 1000,
        sizes: CacheLayout | None = None,
        exact: bool = False,
        eviction: str = "value",
        shared_tokens: int = SHARED_TOKENS,
        max_bytes: int = 1 << 30,
        **config,
    ) -> None:
        config = {"max_num_seqs": 8, "max_num_batched_tokens": 256} | config
        sizes = sizes or layout()
        first = first_line(sizes, num_pages, mode, eviction, exact)
        first["max_num_batched_tokens"] = config["max_num_batched_tokens"]
        self.clock = ManualClock(100.0)
        self.file = LogFile(path, max_bytes, lambda: LogLines(first, sizes.block_size, KEY, shared_tokens))
        self.journal = RequestJournal(self.file, self.clock, sizes.block_size)
        placement = None if mode == "none" else placement_for(mode, sizes.block_size, exact)
        policy = CachePolicy(placement, eviction_for(eviction), exact)
        self.cache = LoggedCache(sizes, num_pages, policy, self.journal, clock=self.clock)
        scheduling = SchedulerConfig(exact=exact, **config)
        self.scheduler = Scheduler(scheduling, self.cache, self.clock, observer=self.journal)
        self.runner = SimulatedRunner(sizes, 50, numerics=exact)
        self.requests: dict[str, Request] = {}

    def submit(self, name, prompt, max_tokens=4, namespace=Namespace(), boundaries=(), n=1) -> None:  # noqa: B008
        specs = [
            Spec(
                request_id=RequestId(own),
                prompt=np.array(prompt, np.int64),
                sampling=SamplingParams(seed=seed),
                max_tokens=max_tokens,
                namespace=namespace,
                boundaries=tuple(boundaries),
            )
            for seed, own in enumerate([name, *(f"{name}.{i}" for i in range(1, n))])
        ]
        self.scheduler.submit(specs[0], specs[1:])
        for spec in specs:
            self.requests[spec.request_id] = self.scheduler.books.requests[spec.request_id]

    def step(self) -> None:
        self.scheduler.apply(self.runner.run(self.scheduler.plan()))

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
        audit(self.cache)

    def close(self) -> None:
        self.run()
        self.journal.close()

    def hits(self) -> dict[str, int]:
        """Of those that were admitted, at their first admission."""
        return {name: each.first.hit for name, each in self.requests.items() if each.first is not None}


def replayed(trace: LoggedTrace, mode=None, budget_bytes=None, eviction=None) -> Reenactment:
    """Under the log's own rules, but for those given."""
    rules = trace.policy
    mode = mode or rules.placement
    placement = None if mode == "none" else placement_for(mode, trace.layout.block_size, rules.exact)
    policy = CachePolicy(placement, eviction_for(eviction or rules.eviction), rules.exact)
    budget_bytes = budget_bytes or trace.budget_bytes
    timed = TimedCache(trace.layout, budget_bytes, policy, ManualClock(), trace.max_num_batched_tokens)
    replay = Reenactment(timed)
    replay.run(trace)
    audit(replay.cache)
    assert not replay.cache.leases and not replay.cache.held and not replay.cache.holds
    return replay


def cached(trace: LoggedTrace, replay: Reenactment) -> dict[str, int]:
    """By request id, as the replay has it."""
    return {each.request_id: hit for each, hit in zip(trace.logged, replay.outcome.hits, strict=True)}


def logged(trace: LoggedTrace) -> dict[str, int | None]:
    """By request id, as the log has it."""
    return {each.request_id: each.cached_tokens for each in trace.logged}
