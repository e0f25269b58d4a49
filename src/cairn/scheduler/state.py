"""What the scheduler's parts share: who waits, who runs, which slots are free, and the counts."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cairn.cache.group_pages import page_numbers
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.reasons import Reason
from cairn.errors import ConfigError
from cairn.scheduler.in_flight import InFlight, SharedCounters
from cairn.scheduler.page_source import FetchTarget
from cairn.scheduler.parallel_sampling import ParallelSampling
from cairn.scheduler.peer_source import PeerSource
from cairn.scheduler.plan_builder import PlanBuilder
from cairn.scheduler.queue import RequestQueue, WaitingQueue
from cairn.scheduler.request import Phase, Request
from cairn.scheduler.slot_table import SlotTable
from cairn.scheduler.speculation import Drafter, SpecDecodeCounters
from cairn.scheduler.transfers import FetchKey, Transfers
from cairn.types import Clock, RequestId

__all__ = ["Counters", "RequestObserver", "SchedulerConfig", "SchedulerState", "SchedulingPolicy"]

SchedulingPolicy = Literal["fcfs", "priority", "session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds, in requests and tokens. `max_in_flight`: steps that may be out at once. `exact`: see DESIGN 6.
    `on_load_failure`: whether a request whose pages do not arrive from another server is computed here, or fails.
    `in_flight_sharing`: whether a request waits for one in prefill that computes its beginning. `policy`: whose turn it
    is, see `cairn.scheduler.turns`; `priority` is `fcfs`."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    max_model_len: int = 32768
    max_in_flight: int = 1
    exact: bool = False
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    in_flight_sharing: bool = True
    policy: SchedulingPolicy = "fcfs"

    @property
    def most_in_flight(self) -> int:
        """Tokens that may be being computed at a time."""
        return self.max_in_flight * self.max_num_batched_tokens

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_waiting", "max_model_len", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        least = self.max_num_seqs + 64
        if self.max_num_batched_tokens < least:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least {least} (--max-num-seqs + one chunk of 64 tokens), "
                f"not {self.max_num_batched_tokens}"
            )


@dataclass(slots=True)
class Counters:
    """Since the start. `bypasses`: how often a request went before another one that had come earlier.
    `recomputed_tokens`: tokens computed again because of a preemption. `external_queries` and `external_hits`: prompt
    tokens asked of other servers and received from them; `tier_hits`: those of started requests that came from this
    server's own tiers. `refused_kv_exports`: by why: the bound of all leases (`total`), that of one client (`client`),
    or no lease room in time (`timeout`)."""

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    bypasses: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    external_queries: int = 0
    external_hits: int = 0
    tier_hits: int = 0
    failed_pulls: int = 0
    expired_offers: int = 0
    refused_kv_exports: Counter[str] = field(default_factory=lambda: Counter(total=0, client=0, timeout=0))
    shared: SharedCounters = field(default_factory=SharedCounters)
    spec_decode: SpecDecodeCounters = field(default_factory=SpecDecodeCounters)


class RequestObserver:
    """Told what the scheduler does with requests, right after it has: `cairn.engine.request_log.log.RequestLog`.
    Called by the scheduler's thread; must neither block nor call back."""

    def submitted(self, request: Request) -> None:
        """It waits, and nothing has been planned for it."""

    def planned(self, builder: PlanBuilder) -> None:
        """A step is complete: its rows, and the pages of the checkpoints that they keep."""

    def ended(self, request: Request) -> None:
        """It holds nothing any more, and no step names it."""

    def tools_awaited(self, request_id: RequestId) -> None:
        """Its answer was a call, which the cache has been told."""


_LEARNED_STEPS = 8
"""While the drafter is not asked, it learns from one of so many steps."""


@dataclass(slots=True)
class Drafting:
    """`drafter`: None where nothing is drafted. `pending_folds`: by how many tokens a request's state is behind its
    `num_computed`, from the result of its verify row to the next plan. `idle_steps`: in so many steps the drafter is
    not asked, as long as those run that ran at `idle_version`. `learns`: whether it is told how long this step takes,
    one of several of those in which it is not asked."""

    drafter: Drafter | None = None
    pending_folds: dict[Request, int] = field(default_factory=dict)
    idle_steps: int = 0
    idle_version: int = 0
    learns: bool = False

    def asks(self, version: int) -> bool:
        """Whether the drafter is asked in a step, of those that run at this version."""
        # most steps of a text that cannot be predicted: each microsecond is a thousandth of a small model's
        if self.idle_steps and self.idle_version == version:
            self.idle_steps -= 1
            self.learns = not self.idle_steps % _LEARNED_STEPS
            return False
        self.learns = self.drafter is not None
        return self.learns


@dataclass(eq=False)
class SchedulerState:
    """What the scheduler's parts share.

    `requests`: all that have not ended. `running`, and `ending`: those whose state is being saved, or that are finished
    while steps still name them. `slots`: the fields of those with a slot. `pending_saves`: the position of the state to
    be saved for a request once no step names it any more. `transfers`: what is under way between this server and
    others. `parallel_sampling`: prompts with several answers. `in_flight`: who waits for what another one computes.
    """

    config: SchedulerConfig
    cache: PrefixCache
    clock: Clock
    waiting: WaitingQueue
    requests: dict[RequestId, Request] = field(default_factory=dict)
    running: RequestQueue = field(default_factory=RequestQueue)
    ending: RequestQueue = field(default_factory=RequestQueue)
    pending_saves: dict[Request, int] = field(default_factory=dict)
    drafting: Drafting = field(default_factory=Drafting)
    transfers: Transfers = field(default_factory=Transfers)
    observer: RequestObserver | None = None
    counters: Counters = field(default_factory=Counters)
    parallel_sampling: ParallelSampling = field(init=False)
    in_flight: InFlight = field(init=False)
    slots: SlotTable = field(init=False)

    def __post_init__(self) -> None:
        self.slots = SlotTable(self.config.max_num_seqs)
        self.parallel_sampling = ParallelSampling(self.cache, self.waiting)
        config, transfers = self.config, self.transfers
        if transfers.side is not None:
            transfers.peers = PeerSource(transfers.side, self.cache.layout, config.exact, self.clock)
            transfers.sources = (transfers.peers, *transfers.sources)
        self.in_flight = InFlight(self.cache, self.counters.shared, config.exact, config.in_flight_sharing)

    @property
    def num_waiting(self) -> int:
        """Requests that have not been admitted, or wait again."""
        return (
            len(self.waiting)
            + self.parallel_sampling.num_deferred
            + len(self.transfers.fetching)
            + len(self.transfers.ready)
        )

    @property
    def num_deferred(self) -> int:
        """Those of the waiting that it is not only slots, pages and turns that they wait for: another answer to their
        prompt, a request that computes their beginning, another server's pages, or room among the leases."""
        num_sharing = sum(request.transfer.no_lease_room_since is None for request in self.in_flight.waiting)
        num_transfers = len(self.transfers.fetching) + len(self.waiting.kv_exports)
        return self.parallel_sampling.num_deferred + num_sharing + num_transfers

    @property
    def num_leases(self) -> int:
        """Prompts that are leased to other servers, or are going to be."""
        return len(self.transfers.offers) + sum(request.is_to_be_leased for request in self.requests.values())

    def free_slot(self, request: Request) -> None:
        """Give back the slot of a request that no step names any more."""
        assert request.num_in_flight == 0
        if request.slot >= 0:
            self.slots.free.append(request.slot)
            request.release_slot()
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
        elif request.phase in (Phase.PREEMPTING, Phase.FINISHING):
            self.ending.remove(request)

    def quarantine(self, key: FetchKey, target: FetchTarget) -> None:
        """The source of a fetch may still write to its target: nobody gets these pages before it says that it is
        over."""
        pages = np.concatenate([target.state_pages, page_numbers(target.pages)])
        self.transfers.quarantine[key] = self.cache.pin(pages)

    def requeue(self, request: Request, loss: Reason | None = None) -> None:
        """Release everything a request holds and let it wait: also the state for another server, which it comes by
        again, because what waits must not keep from those that run what they were promised when they were submitted."""
        self._release(request, loss)
        request.set_phase(Phase.WAITING)
        self.waiting.put(request)

    def _release(self, request: Request, loss: Reason | None = None) -> None:
        request.stats.max_computed = max(request.stats.max_computed, request.num_computed)
        self.drafting.pending_folds.pop(request, None)
        if request.sequence is not None:
            self.cache.release(request.sequence, loss)
            request.sequence = None
        if request.transfer.pinned_checkpoint is not None:
            self.cache.unpin(request.transfer.pinned_checkpoint)
            request.transfer.pinned_checkpoint = None
        self.free_slot(request)

    def drop(self, request: Request) -> None:
        """The end of a request: nothing is held for it any more."""
        if self.drafting.drafter is not None:
            self.drafting.drafter.end(request)
        self._release(request)
        self.transfers.prefill_speed.learn(request.stats)
        self.waiting.sessions.add(request.spec, len(request.output))
        request.set_phase(Phase.FINISHED)
        self.requests.pop(request.id, None)
        self.parallel_sampling.remove(request)
        self.in_flight.remove(request)
        if self.observer is not None:
            self.observer.ended(request)
