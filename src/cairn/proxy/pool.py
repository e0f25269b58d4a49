"""The servers of one kind, and which of them gets a request."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from cairn.proxy.affinity import ranked
from cairn.proxy.upstream import CallFailed


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
