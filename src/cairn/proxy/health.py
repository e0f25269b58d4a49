"""Asks every server how it is, at an interval."""

import asyncio
import logging
from collections.abc import Sequence

from cairn.proxy.options import ProxyOptions
from cairn.proxy.pool import Pool, Upstream
from cairn.proxy.upstream import CallFailed, UpstreamClient
from cairn.types import Clock

_MAX_ANSWER_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class HealthChecks:
    """GET /health of all servers: 200 is up, everything else is down.

    A server that is up and only slow to answer gets a second chance: it may be busy with its first long prompt. Nobody
    waits any longer for one that is down and says nothing. One that answers with 503 is shutting down, and finishes
    what it has begun.
    """

    def __init__(self, pools: Sequence[Pool], client: UpstreamClient, options: ProxyOptions, clock: Clock) -> None:
        self._pools = pools
        self._client = client
        self._interval = options.health_interval
        self._timeout = options.health_timeout
        self._clock = clock
        self._next = clock.now()
        self._slow: frozenset[Upstream] = frozenset()

    @property
    def seconds_left(self) -> float:
        """Until the next round."""
        return max(0.0, self._next - self._clock.now())

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(self.seconds_left)
            try:
                await self.check_if_due()
            except Exception:
                logger.exception("a bug in the health checks")

    async def check_if_due(self) -> bool:
        """One round, when it is time for one."""
        if self._clock.now() < self._next:
            return False
        self._next = self._clock.now() + self._interval
        asked = [(pool, upstream) for pool in self._pools for upstream in pool.upstreams.values()]
        slow = await asyncio.gather(*(self._check(pool, upstream) for pool, upstream in asked))
        self._slow = frozenset(upstream for (_, upstream), was_slow in zip(asked, slow, strict=True) if was_slow)
        return True

    async def _check(self, pool: Pool, upstream: Upstream) -> bool:
        """Asks one server. True when it was too slow to say anything."""
        reason, slow, silent = "", False, False
        try:
            reply = await self._client.whole("GET", f"{upstream.url}/health", b"", [], self._timeout, _MAX_ANSWER_BYTES)
            reason = "" if reply.status == 200 else f"it answers /health with {reply.status}"
        except CallFailed as error:
            if error.kind == "local":
                logger.warning("%s server %s could not be asked for its health: %s", pool.name, upstream.url, error)
                return upstream in self._slow
            reason, slow, silent = str(error), error.kind == "timeout", True
        up = not reason or (slow and upstream.up and upstream not in self._slow)
        if up != upstream.up:
            level = logging.INFO if up else logging.WARNING
            logger.log(level, "%s server %s is %s%s", pool.name, upstream.url, "up" if up else "down: ", reason)
        upstream.up = up
        if silent and not up:
            upstream.wake_waiting()
        return slow
