"""The state that all requests of one proxy share: pools, hints, metrics (`cairn_proxy:`) and the time limit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cairn.errors import Overloaded
from cairn.http.error_responses import make_error
from cairn.http.middleware import Gate, random_id
from cairn.proxy.forward import RequestForwarder
from cairn.proxy.options import ProxyOptions
from cairn.proxy.prefixes import HintCache
from cairn.proxy.response_owners import ResponseOwners
from cairn.proxy.server_pool import ReleaseTasks
from cairn.proxy.upstream import HealthChecker, UpstreamClient, UpstreamPool
from cairn.types import Clock, SystemClock

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)


class ProxyMetrics:
    """The proxy's counters and histograms, in a registry of their own. docs/proxy.md lists the values of each label."""

    def __init__(self, pools: tuple[UpstreamPool, ...], hints: HintCache) -> None:
        self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry, buckets=_SECONDS)
        self.requests = counter("cairn_proxy:requests", "Requests by how they ended.", ["outcome"])
        self.decode_only = counter(
            "cairn_proxy:decode_only", "Requests answered without a hand-over, by why.", ["reason"]
        )
        self.retries = counter("cairn_proxy:retries", "Requests sent to one more server of a pool.", ["pool"])
        self.failures = counter(
            "cairn_proxy:upstream_failures", "Failed calls to a server, by why.", ["pool", "server", "kind"]
        )
        self.routed_tokens = counter(
            "cairn_proxy:routed_tokens", "Tokens of prompts that were sent to a server, estimated from text.", ["pool"]
        )
        self.cached_tokens = counter(
            "cairn_proxy:expected_cached_tokens", "Those of them that the server is expected to have cached.", ["pool"]
        )
        self.hints_stored = counter("cairn_proxy:hints_stored", "Second-turn hints remembered.")
        self.hints_sent = counter("cairn_proxy:hints_sent", "Second-turn hints sent to a prefill server.")
        self.prefill_seconds = histogram("cairn_proxy:prefill_seconds", "Time of successful prefill calls.")
        self.first_byte_seconds = histogram("cairn_proxy:first_byte_seconds", "Time from a request to its first byte.")
        self.request_seconds = histogram("cairn_proxy:request_seconds", "Time from a request to its last byte.")
        gauge("cairn_proxy:hints", "Second-turn hints that are remembered.").set_function(lambda: len(hints))
        up = gauge("cairn_proxy:upstream_up", "1 when a server is up, else 0.", ["pool", "server"])
        num_open = gauge("cairn_proxy:upstream_open", "Requests that a server has open.", ["pool", "server"])
        prefixes = gauge("cairn_proxy:prefixes", "Prefixes whose servers are remembered.", ["pool"])
        for pool in pools:
            prefixes.labels(pool.name).set_function(partial(getattr, pool.rule.index, "num_blocks"))
            for url, upstream in pool.upstreams.items():
                up.labels(pool.name, url).set_function(partial(getattr, upstream, "up"))
                num_open.labels(pool.name, url).set_function(partial(getattr, upstream, "num_open"))

    def record_forwarded(self, forwarder: RequestForwarder) -> None:
        """Count what has become of a request."""
        if forwarder.decode_only:
            self.decode_only.labels(forwarder.decode_only).inc()
        self.hints_sent.inc(forwarder.num_hints_sent)
        self.hints_stored.inc(forwarder.num_hints_stored)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class TimedGate(Gate):
    """A gate that also limits the time of the requests inside. `on_reject` is called for each that may not come in."""

    def __init__(self, max_open: int, request_seconds: float, on_reject: Callable[[], None]) -> None:
        super().__init__(max_open, "proxy")
        self._seconds = request_seconds
        self._on_reject = on_reject
        self._limits: set[asyncio.Timeout] = set()
        self._cut_short = False

    def enter(self) -> None:
        try:
            super().enter()
        except Overloaded:
            self._on_reject()
            raise

    @asynccontextmanager
    async def time_limit(self) -> AsyncIterator[None]:
        """Limits the time of one request. Raises RequestError when it is up."""
        try:
            async with asyncio.timeout(0 if self._cut_short else self._seconds) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._cut_short:
                raise Overloaded("the proxy is shutting down: the answer was cut short") from None
            raise make_error(f"the answer was not there within {self._seconds:g} s", 504) from None

    def cut_short(self) -> None:
        """End the requests that are still open, now."""
        self._cut_short = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)


class ProxyService:
    """One proxy's state. `clock` measures requests and ages hints and health checks; `new_id` names requests that come
    without an id; `body_seconds`: how long a client may take to send its request."""

    def __init__(
        self,
        options: ProxyOptions,
        clock: Clock | None = None,
        new_id: Callable[[], str] = random_id,
        body_seconds: float = 60.0,
    ) -> None:
        self.options = options
        self.body_seconds = body_seconds
        self.clock = clock or SystemClock()
        self.new_id = new_id
        self.prefill = UpstreamPool("prefill", options.prefill, self.clock, options.running_tokens)
        self.decode = UpstreamPool("decode", options.decode, self.clock, options.running_tokens)
        self.pools = (self.prefill, self.decode)
        self.hints = HintCache(options.max_hints, options.hint_timeout, self.clock)
        self.response_owners = ResponseOwners()
        self.releases = ReleaseTasks()
        self.metrics = ProxyMetrics(self.pools, self.hints)
        on_reject = self.metrics.requests.labels("turned_away").inc
        self.gate = TimedGate(options.max_open, options.request_timeout, on_reject)
        self.client = UpstreamClient(options)
        self.health = HealthChecker(self.pools, self.client, options, self.clock)

    @property
    def healthy(self) -> bool:
        return self.decode.num_up > 0 and not self.gate.closed
