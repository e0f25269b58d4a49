"""The servers of one kind: which of them gets a request, and how each of them is."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from cairn.proxy.affinity import ranked
from cairn.proxy.options import ProxyOptions
from cairn.proxy.upstream import CallFailed, UpstreamClient
from cairn.types import Clock

_MAX_ANSWER_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class Upstream:
    """One server. `up`: it said so when it was last asked, and no connection to it has broken since."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.up = False
        self.num_open = 0
        self._waits: dict[asyncio.Timeout, Callable[[], bool]] = {}

    @asynccontextmanager
    async def unless_silent(self, may_leave: Callable[[], bool]) -> AsyncIterator[None]:
        """A wait for this server that ends with CallFailed when `wake_waiting` is called and `may_leave` says yes."""
        try:
            async with asyncio.timeout(None) as wait:
                self._waits[wait] = may_leave
                try:
                    yield
                finally:
                    self._waits.pop(wait, None)
        except TimeoutError:
            if not wait.expired():
                raise
            raise CallFailed("it has not answered its health checks", kind="down") from None

    def wake_waiting(self) -> None:
        """End the waits for this server: it does not even answer its health checks. To be called in the event loop."""
        now = asyncio.get_running_loop().time()
        for wait in [wait for wait, may_leave in self._waits.items() if may_leave()]:
            # Once: a wait that is ending cannot be ended again.
            del self._waits[wait]
            wait.reschedule(now)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Counts one request as open."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class Pool:
    """Prefix-affine choice with bounded load.

    A server takes no more than `load_factor` times the mean of those that are up, or `load_slack` requests when that
    is more; what it cannot take goes to the next in the prefix's own order (Mirrokni, Thorup and Zadimoghaddam,
    "Consistent hashing with bounded loads", 2018).
    """

    def __init__(self, name: str, urls: Sequence[str], load_factor: float = 1.5, load_slack: int = 4) -> None:
        self.name = name
        self.upstreams = {url: Upstream(url) for url in urls}
        self._load_factor = load_factor
        self._load_slack = load_slack

    @property
    def num_up(self) -> int:
        return sum(upstream.up for upstream in self.upstreams.values())

    def choose(self, key: bytes, tried: Collection[Upstream] = ()) -> Upstream | None:
        """A server for the prefix of this key; None when all that are up have been `tried`."""
        up = {url: upstream for url, upstream in self.upstreams.items() if upstream.up}
        free = {url: upstream for url, upstream in up.items() if upstream not in tried}
        if not free:
            return None
        total = sum(upstream.num_open for upstream in up.values()) + 1
        limit = max(self._load_slack, math.ceil(self._load_factor * total / len(up)))
        for url in ranked(key, list(free)):
            if free[url].num_open < limit:
                return free[url]
        return self.least_busy(tried)

    def least_busy(self, tried: Collection[Upstream] = ()) -> Upstream | None:
        """The server with the fewest open requests; None when all that are up have been `tried`."""
        free = [upstream for upstream in self.upstreams.values() if upstream.up and upstream not in tried]
        return min(free, key=lambda upstream: upstream.num_open, default=None)


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
