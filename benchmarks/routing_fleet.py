"""A simulated fleet: every replica is the shipped cache with a modelled server around it, and one router before them.

    arrival -> router's choice -> FIFO prefill queue -> lookup, prefill, answer in the cache -> decode -> slot is free
                  ^    ^                                          |
                  |    '-- loads, as old as they may be           |
                  '------- KV events of the cache, a while later -'

The server computes prompts one after the other at `prefill_speed`; the tokens that the cache has cost nothing. After
its prompt a request decodes at `decode_seconds` a token, whatever else runs, and holds one of `max_running` slots from
the begin of its prefill on. The cache serves each request at once when its prefill begins, as `cairn replay` does: with
one replica it hits what a replay hits. Its KV events leave when the prefill ends.

A session asks one thing after the other: a request that the trace has before the answer to the last one is complete
comes when it is. An overloaded fleet so slows its clients down.

Time is simulated; nothing depends on the machine but the measured microseconds of a decision.
"""

import gc
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from benchmarks.routing_trace import Arrival, RepeatedTrace
from numpy.typing import NDArray

from cairn.cache.events import DIGEST_BYTES, BlockEvents, BlockNames, Event, block_hash, root_digest
from cairn.cache.eviction import eviction_for
from cairn.cache.layout import CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace
from cairn.cache.tree_store import TreeObserver
from cairn.replay.replay import Replay
from cairn.replay.trace import Ids, TraceRequest, key_tokens
from cairn.routing.rule import ReplicaLoad, RoutedRequest
from cairn.types import ManualClock

__all__ = ["Fleet", "FleetOptions", "FleetOutcome", "ReplayCache", "Router", "ServerModel"]

MAX_NUM_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class ServerModel:
    """`prefill_speed`: prompt tokens a second; `decode_seconds`: per token of an answer; `max_running`: requests."""

    prefill_speed: float
    decode_seconds: float
    max_running: int


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """`budget_bytes`: memory of each replica. `event_delay`: seconds from a cache's event until the router knows it.
    `load_period`: seconds between two reports of a replica's load; 0: the router always knows it. `shares_cache`: all
    replicas have one cache with the memory of them all, at no cost: what no routing can do better than."""

    replicas: int
    layout: CacheLayout
    budget_bytes: int
    server: ServerModel
    event_delay: float = 0.1
    load_period: float = 1.0
    shares_cache: bool = False


class Router(Protocol):
    """What routes: the shipped rule with its index, or a baseline. `uses_index`: whether it looks at more than a
    prompt's first block, and hears of KV events."""

    uses_index: bool

    def choose(self, request: RoutedRequest, replicas: Mapping[str, ReplicaLoad], now: float) -> str: ...

    def record_routed(self, request: RoutedRequest, replica: str, now: float) -> None: ...

    def record_prefilled(self, request: RoutedRequest, replica: str) -> None: ...

    def record_finished(self, request: RoutedRequest, replica: str) -> None: ...

    def apply(self, replica: str, event: Event) -> None: ...

    @property
    def index_bytes(self) -> int: ...


class ReplayCache(Replay):
    """A replay without its books of what was lost to which reason: those know every prompt ever seen."""

    def __init__(self, layout: CacheLayout, budget_bytes: int, observer: TreeObserver | None = None) -> None:
        policy = CachePolicy(placement_for("auto", layout.block_size, exact=False), eviction_for("value"))
        super().__init__(layout, budget_bytes, policy, MAX_NUM_BATCHED_TOKENS, ManualClock())
        if observer is not None:
            self.cache.observe(observer)

    def _count_prompt(
        self, index: int, trace_request: TraceRequest, hit: int, received: int, lost: Mapping[Reason, int]
    ) -> None:
        self.outcome.hits[index] = hit


class PathHasher:
    """Block hashes of prompts, a block a unit, as the caches announce them. A session's next prompt begins mostly as
    its last one did: what is the same is not hashed again."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._names = BlockNames(unit)
        self._root = root_digest(Namespace())
        self._last: dict[str, tuple[Ids, bytes]] = {}

    def first_hash(self, arrival: Arrival) -> list[int]:
        """Of the first block alone."""
        chain = self._names.chain(self._root, key_tokens(arrival.request.path[:1], self._unit).tobytes())
        return [block_hash(digest) for digest in chain]

    def block_hashes(self, arrival: Arrival) -> list[int]:
        path = arrival.request.path
        before, digests = self._last.pop(arrival.session, (path[:0], b""))
        most = min(len(path), len(before))
        differs = np.flatnonzero(path[:most] != before[:most])
        same = int(differs[0]) if len(differs) else most
        chain = digests[: same * DIGEST_BYTES]
        chain += b"".join(
            self._names.chain(chain[-DIGEST_BYTES:] or self._root, key_tokens(path[same:], self._unit).tobytes())
        )
        if not arrival.is_last:
            self._last[arrival.session] = path, chain
        hashes: list[int] = np.frombuffer(chain, ">i8")[:: DIGEST_BYTES // 8].tolist()
        return hashes


class SimulatedReplica:
    """One server: its cache, its FIFO prefill queue and its slots. Requests must come in order of time."""

    def __init__(self, options: FleetOptions, unit: int, with_events: bool, cache: ReplayCache | None = None) -> None:
        self.events: list[Event] = []
        self._unit, self._server = unit, options.server
        observer = BlockEvents(unit, self.events.append) if with_events else None
        self._cache = cache or ReplayCache(options.layout, options.budget_bytes, observer)
        self._pool = self._cache.cache.pool
        self._prefill_ends = 0.0
        self._running: list[float] = []
        self._open: deque[tuple[float, float, int]] = deque()
        self._pending_tokens = 0
        self._decoding: list[float] = []
        self._computed_times, self._computed = [0.0], [0]

    def serve(self, trace_request: TraceRequest, now: float) -> "Served":
        """Serve a request that arrives `now`, after all that came before it."""
        server, start = self._server, max(now, self._prefill_ends)
        while self._running and self._running[0] <= start:
            heapq.heappop(self._running)
        if len(self._running) >= server.max_running:
            start = heapq.heappop(self._running)
        cached = self._cache.serve(
            TraceRequest(
                start,
                trace_request.num_prompt_tokens,
                trace_request.path,
                trace_request.answer,
                trace_request.boundaries,
            ),
            self._unit,
        )
        # the last token is always computed
        num_computed = max(1, trace_request.num_prompt_tokens - cached)
        self._prefill_ends = start + num_computed / server.prefill_speed
        num_output = len(trace_request.answer) * self._unit
        finished = self._prefill_ends + num_output * server.decode_seconds
        heapq.heappush(self._running, finished)
        heapq.heappush(self._decoding, finished)
        self._open.append((start, self._prefill_ends, num_computed))
        self._pending_tokens += num_computed
        self._computed_times += [start, self._prefill_ends]
        self._computed += [self._computed[-1], self._computed[-1] + num_computed]
        return Served(self._prefill_ends, finished, cached, num_computed)

    def load(self, now: float) -> ReplicaLoad:
        """As the server itself knows it."""
        while self._open and self._open[0][1] <= now:
            self._pending_tokens -= self._open.popleft()[2]
        while self._decoding and self._decoding[0] <= now:
            heapq.heappop(self._decoding)
        # FIFO: the first has begun at most
        num_begun = int(bool(self._open) and self._open[0][0] <= now)
        num_waiting, pending = len(self._open) - num_begun, float(self._pending_tokens)
        if num_begun:
            pending -= (now - self._open[0][0]) * self._server.prefill_speed
        return ReplicaLoad(
            num_running=len(self._decoding) - num_waiting,
            num_waiting=num_waiting,
            pending_tokens=int(pending),
            free_share=self._pool.num_free / self._pool.num_pages,
            as_of=now,
        )

    def computed_by(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Prompt tokens computed up to each time."""
        return np.interp(times, self._computed_times, self._computed)


@dataclass(frozen=True, slots=True)
class Served:
    """When the prompt is computed and the answer complete; cached and computed tokens of the prompt."""

    first_token_time: float
    finished_time: float
    cached: int
    num_computed: int


@dataclass(slots=True)
class FleetOutcome:
    """What a run gave: by request in the order in which they came, and in total.

    `arrived`, `ttft` in seconds, `prompt`, `cached` in tokens, `replica`: its number. `decision_seconds`: processor
    time of each decision, `record_seconds`: of all that the router had to be told. `index_bytes`: the most at any time.
    """

    arrived: NDArray[np.float64]
    ttft: NDArray[np.float64]
    prompt: NDArray[np.int64]
    cached: NDArray[np.int64]
    replica: NDArray[np.int64]
    decision_seconds: NDArray[np.float64]
    record_seconds: float = 0.0
    index_bytes: int = 0


class Fleet:
    """Replicas behind one router, and the one run that they serve."""

    def __init__(self, options: FleetOptions, router: Router, unit: int) -> None:
        self._options, self._router, self._unit = options, router, unit
        names = [f"replica-{number}" for number in range(options.replicas)]
        shared = None
        if options.shares_cache:
            shared = ReplayCache(options.layout, options.replicas * options.budget_bytes)
        self.replicas = {name: SimulatedReplica(options, unit, router.uses_index, shared) for name in names}
        self._numbers = {name: number for number, name in enumerate(names)}
        self._loads = {name: replica.load(0.0) for name, replica in self.replicas.items()}
        self._loads_as_of = 0.0
        # what the router is going to hear: when, a number for those of one time, and the call
        self._news: list[tuple[float, int, Callable[[], None]]] = []
        self._num_news = 0
        self._record_seconds = 0.0
        # when a session has its last answer, and its requests that wait for that
        self._answered: dict[str, float] = {}
        self._late: dict[str, deque[Arrival]] = {}
        self._late_times: list[tuple[float, str]] = []

    def run(
        self, repeated: RepeatedTrace, speedup: float, progress: Callable[[int], None] | None = None
    ) -> FleetOutcome:
        """Serve all requests, `speedup` times as fast as the trace has them."""
        count = len(repeated)
        outcome = FleetOutcome(
            *(np.zeros(count) for _ in range(2)),
            *(np.zeros(count, np.int64) for _ in range(3)),
            decision_seconds=np.zeros(count),
        )
        hasher = PathHasher(self._unit)
        # what a collection would look through are the caches' millions of nodes, all of them in use
        gc.collect()
        gc.disable()
        try:
            for number, (now, arrival) in enumerate(self._arrivals(repeated, speedup)):
                outcome.arrived[number] = now
                self._serve(number, arrival, now, hasher, outcome)
                if number % 256 == 0 or number == count - 1:
                    outcome.index_bytes = max(outcome.index_bytes, self._router.index_bytes)
                    if progress is not None:
                        progress(number + 1)
        finally:
            gc.enable()
        outcome.record_seconds = self._record_seconds
        return outcome

    def _arrivals(self, repeated: RepeatedTrace, speedup: float) -> Iterator[tuple[float, Arrival]]:
        """Each request at its time: that of the trace, or when its session has the answer to the one before."""
        for arrival in repeated.arrivals():
            now = arrival.time / speedup
            yield from self._late_arrivals(now)
            if self._answered.get(arrival.session, 0.0) <= now:
                yield now, arrival
                continue
            if arrival.session not in self._late:
                self._late[arrival.session] = deque()
                heapq.heappush(self._late_times, (self._answered[arrival.session], arrival.session))
            self._late[arrival.session].append(arrival)
        yield from self._late_arrivals(math.inf)

    def _late_arrivals(self, now: float) -> Iterator[tuple[float, Arrival]]:
        while self._late_times and self._late_times[0][0] <= now:
            when, session = heapq.heappop(self._late_times)
            yield when, self._late[session].popleft()
            if self._late[session]:
                heapq.heappush(self._late_times, (self._answered[session], session))
            else:
                del self._late[session]

    def computed_by(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Prompt tokens that each replica has computed by each time, shape [replicas, times]."""
        return np.array([replica.computed_by(times) for replica in self.replicas.values()])

    def _serve(self, number: int, arrival: Arrival, now: float, hasher: PathHasher, outcome: FleetOutcome) -> None:
        request, options = arrival.request, self._options
        hashes = hasher.block_hashes(arrival) if self._router.uses_index else hasher.first_hash(arrival)
        routed = RoutedRequest(hashes, self._unit, request.num_prompt_tokens, arrival.session)
        self._tell_router(now)
        since = time.thread_time()
        name = self._router.choose(routed, self._loads, now)
        decided = time.thread_time()
        self._router.record_routed(routed, name, now)
        self._record_seconds += time.thread_time() - decided
        outcome.decision_seconds[number] = decided - since
        replica = self.replicas[name]
        served = replica.serve(request, now)
        for event in replica.events:
            self._add_news(served.first_token_time + options.event_delay, partial(self._router.apply, name, event))
        replica.events.clear()
        self._add_news(served.first_token_time, partial(self._router.record_prefilled, routed, name))
        self._add_news(served.finished_time, partial(self._router.record_finished, routed, name))
        self._answered[arrival.session] = served.finished_time
        outcome.ttft[number] = served.first_token_time - now
        outcome.prompt[number], outcome.cached[number] = request.num_prompt_tokens, served.cached
        outcome.replica[number] = self._numbers[name]

    def _add_news(self, when: float, call: Callable[[], None]) -> None:
        self._num_news += 1
        heapq.heappush(self._news, (when, self._num_news, call))

    def _tell_router(self, now: float) -> None:
        """All that the router has heard by `now`: events, ends of prefills and of answers, and reports of load."""
        since = time.thread_time()
        while self._news and self._news[0][0] <= now:
            heapq.heappop(self._news)[2]()
        self._record_seconds += time.thread_time() - since
        period = self._options.load_period
        reported = now // period * period if period else now
        if reported > self._loads_as_of or not period:
            self._loads_as_of = reported
            self._loads = {name: replica.load(reported) for name, replica in self.replicas.items()}
