"""What all requests of one proxy share."""

import logging
from collections.abc import Callable

from cairn.http.middleware import random_id
from cairn.proxy.gate import TimedGate
from cairn.proxy.health import HealthChecks
from cairn.proxy.hints import Hints
from cairn.proxy.metrics import ProxyMetrics
from cairn.proxy.options import ProxyOptions
from cairn.proxy.pool import Pool, Upstream
from cairn.proxy.upstream import CallFailed, UpstreamClient
from cairn.types import Clock, SystemClock

logger = logging.getLogger(__name__)


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
