"""What all requests of one proxy share, and how long they may go on."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cairn.errors import Overloaded
from cairn.http.error_responses import make_error
from cairn.http.middleware import Gate, random_id
from cairn.proxy.hints import Hints
from cairn.proxy.metrics import ProxyMetrics
from cairn.proxy.options import ProxyOptions
from cairn.proxy.pool import HealthChecks, Pool, Upstream
from cairn.proxy.upstream import CallFailed, UpstreamClient
from cairn.types import Clock, SystemClock

logger = logging.getLogger(__name__)


class TimedGate(Gate):
    """Ends the requests inside when their time is up. `turned_away` is called for each that may not come in."""

    def __init__(self, max_open: int, request_seconds: float, turned_away: Callable[[], None]) -> None:
        super().__init__(max_open, "proxy")
        self._seconds = request_seconds
        self._turned_away = turned_away
        self._limits: set[asyncio.Timeout] = set()
        self._cut_short = False

    def enter(self) -> None:
        try:
            super().enter()
        except Overloaded:
            self._turned_away()
            raise

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """The time that one answer may take. Raises RequestError when it is up."""
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
            raise make_error(f"the answer was not there within {self._seconds:g} s", 504, "deadline_exceeded") from None

    def cut_short(self) -> None:
        """End what is still open, now."""
        self._cut_short = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)


class ProxyService:
    """One proxy's state. `clock` measures and ages hints and health, `new_id` names requests that come without one."""

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
        self.prefill = Pool("prefill", options.prefill, options.load_factor, options.load_slack)
        self.decode = Pool("decode", options.decode, options.load_factor, options.load_slack)
        self.pools = (self.prefill, self.decode)
        self.hints = Hints(options.max_hints, options.hint_timeout, self.clock)
        self.metrics = ProxyMetrics(self.pools, self.hints)
        turned_away = self.metrics.requests.labels("turned_away").inc
        self.gate = TimedGate(options.max_open, options.request_timeout, turned_away)
        self.client = UpstreamClient(options)
        self.health = HealthChecks(self.pools, self.client, options, self.clock)

    @property
    def healthy(self) -> bool:
        return self.decode.num_up > 0 and not self.gate.closed

    def failed(self, pool: Pool, upstream: Upstream, error: CallFailed) -> None:
        """Note a failed call. A server that cannot be reached is down until its next health check says otherwise."""
        self.metrics.failures.labels(pool.name, upstream.url, error.kind).inc()
        logger.debug("%s server %s: %s", pool.name, upstream.url, error)
        if error.kind == "unreached" and upstream.up:
            upstream.up = False
            logger.warning("%s server %s is down: %s", pool.name, upstream.url, error)
