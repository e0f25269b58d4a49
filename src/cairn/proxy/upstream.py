"""The configured servers: HTTP to them and to nobody else, which of them gets a request, and whether they are up.

No redirects are followed, no cookies kept, no proxies taken from the environment.
"""

import asyncio
import errno
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager

import httpx

from cairn.http.cookies import no_cookies
from cairn.proxy.options import ProxyOptions
from cairn.proxy.server_pool import Headers, UpstreamError, UpstreamResponse
from cairn.routing.index import PrefixIndex
from cairn.routing.rule import ReplicaLoad, RoutedRequest, RoutingOptions, RoutingRule
from cairn.types import Clock

_POOL_SECONDS = 5.0
_WRITE_SECONDS = 60.0
# uvicorn closes idle connections after 5 s; a request sent on one just then would be lost.
_KEEP_ALIVE_SECONDS = 2.0
_MAX_IDLE_CONNECTIONS = 256
_MAX_HEALTH_BYTES = 1 << 16

_MAX_PREFIXES = 1 << 18
_ROUTED_SECONDS = 3600.0
"""How long a prompt is expected to be cached where it went, as nobody tells."""

_LOCAL_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_PASSED_HEADERS = frozenset(
    (b"content-type", b"content-encoding", b"content-length", b"cache-control", b"retry-after", b"www-authenticate")
)

logger = logging.getLogger(__name__)


class UpstreamClient:
    """All connections to the servers."""

    def __init__(self, options: ProxyOptions) -> None:
        self._connect_seconds = options.connect_timeout
        self._http = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            cookies=no_cookies(),
            timeout=options.connect_timeout,
            limits=httpx.Limits(
                # Each open request has at most one connection, and each server at most one for its health.
                max_connections=options.max_open + len(options.prefill) + len(options.decode) + 16,
                max_keepalive_connections=_MAX_IDLE_CONNECTIONS,
                keepalive_expiry=_KEEP_ALIVE_SECONDS,
            ),
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def stream(
        self, url: str, content: bytes, headers: Headers, silence_seconds: float, method: str = "POST"
    ) -> AsyncIterator[UpstreamResponse]:
        """A response without its content: the rest comes in chunks as the server sends them, undecoded.

        Raises UpstreamError; so does iterating over the chunks.
        """
        timeout = httpx.Timeout(
            connect=self._connect_seconds, read=silence_seconds, write=_WRITE_SECONDS, pool=_POOL_SECONDS
        )
        # Undecoded bytes are passed on, so nothing may be compressed that the client did not ask to be.
        sent = [*headers, (b"accept-encoding", b"identity"), (b"user-agent", b"cairn-proxy")]
        request = self._http.build_request(method, url, content=content, headers=sent, timeout=timeout)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.PoolTimeout as error:
            raise UpstreamError("no connection was free", kind="timeout", sent=False) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            kind = "local" if _is_local(error) else "unreached"
            raise UpstreamError(f"cannot be reached: {_describe(error)}", kind=kind, sent=False) from error
        except httpx.TransportError as error:
            raise _broken(error) from error
        try:
            lower = ((key.lower(), value) for key, value in response.headers.raw)
            passed = [(key, value) for key, value in lower if key in _PASSED_HEADERS]
            async with aclosing(_chunks(response)) as chunks:
                yield UpstreamResponse(response.status_code, passed, rest=chunks)
        finally:
            await response.aclose()

    async def fetch(
        self, method: str, url: str, content: bytes, headers: Headers, seconds: float, max_bytes: int
    ) -> UpstreamResponse:
        """A response with all of its content, within `seconds`. Raises UpstreamError."""
        try:
            async with asyncio.timeout(seconds), self.stream(url, content, headers, seconds, method) as response:
                return await response.read(max_bytes)
        except TimeoutError:
            raise UpstreamError(f"no answer within {seconds:g} s", kind="timeout") from None


async def _chunks(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError as error:
        raise _broken(error) from error


def _broken(error: httpx.TransportError) -> UpstreamError:
    if isinstance(error, httpx.TimeoutException):
        return UpstreamError("it has been silent for too long", kind="timeout")
    return UpstreamError(f"the connection broke: {_describe(error)}", kind="broken")


def _is_local(error: BaseException | None) -> bool:
    """Whether this process could not connect, for lack of descriptors or memory: that says nothing of the server."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _LOCAL_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


class Upstream:
    """One server. `up`: its last health check succeeded and no connection to it has broken since. `num_open`: requests
    of this proxy that it is answering."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.up = False
        self.num_open = 0
        self._waits: dict[asyncio.Timeout, Callable[[], bool]] = {}

    @asynccontextmanager
    async def abort_if_down(self, may_abort: Callable[[], bool]) -> AsyncIterator[None]:
        """Inside, a wait for this server ends with UpstreamError when `abort_waits` is called and `may_abort` is true
        then."""
        try:
            async with asyncio.timeout(None) as wait:
                self._waits[wait] = may_abort
                try:
                    yield
                finally:
                    self._waits.pop(wait, None)
        except TimeoutError:
            if not wait.expired():
                raise
            raise UpstreamError("it has not answered its health checks", kind="down") from None

    def abort_waits(self) -> None:
        """End the waits for this server, which does not even answer its health checks. Call it in the event loop."""
        now = asyncio.get_running_loop().time()
        for wait in [wait for wait, may_abort in self._waits.items() if may_abort()]:
            # Once: a wait that is ending cannot be ended again.
            del self._waits[wait]
            wait.reschedule(now)


class UpstreamPool:
    """Servers for one part of the work, and which of them gets a request: `cairn.routing`'s rule, over an index of what
    the proxy itself has sent where. `running_tokens`: of the rule."""

    def __init__(self, name: str, urls: Sequence[str], clock: Clock, running_tokens: float = 64.0) -> None:
        self.name = name
        self.upstreams = {url: Upstream(url) for url in urls}
        self.rule = RoutingRule(
            RoutingOptions(running_tokens=running_tokens), PrefixIndex(_MAX_PREFIXES, _ROUTED_SECONDS)
        )
        self._clock = clock

    @property
    def num_up(self) -> int:
        return len(self.untried())

    def untried(self, tried: Collection[str] = ()) -> dict[str, Upstream]:
        """The servers that are up, but for those `tried`, by their URLs."""
        return {url: each for url, each in self.upstreams.items() if each.up and url not in tried}

    def choose(self, request: RoutedRequest, tried: Collection[str] = ()) -> Upstream | None:
        """The server for a request; None when all that are up have been `tried`."""
        untried = self.untried(tried)
        loads = {url: ReplicaLoad(num_running=upstream.num_open) for url, upstream in untried.items()}
        order = self.rule.rank(request, loads, self._clock.now(), limit=1)
        return untried[order[0]] if order else None

    @contextmanager
    def count_open(self, upstream: Upstream, request: RoutedRequest) -> Iterator[int]:
        """Counts a request as open at a server while inside, which is expected to have its prompt cached from then on.
        Gives the tokens that are expected to be cached there already."""
        cached = self.rule.record_routed(request, upstream.url, self._clock.now())
        upstream.num_open += 1
        try:
            yield cached
        finally:
            upstream.num_open -= 1
            self.rule.record_finished(request, upstream.url)

    def mark_gone(self, url: str, error: UpstreamError) -> None:
        """Nobody listens there: the process is gone, and what it had cached."""
        self.rule.remove(url)
        if self.upstreams[url].up:
            self.upstreams[url].up = False
            logger.warning("%s server %s is down: %s", self.name, url, error)


class HealthChecker:
    """GET /health of all servers: 200 is up, everything else is down.

    A server that is up and only slow to answer gets a second chance: it may be busy with its first long prompt. Waits
    for a server that is down and says nothing are aborted. A server that answers with 503 is draining: it finishes
    what it has begun.
    """

    def __init__(
        self, pools: Sequence[UpstreamPool], client: UpstreamClient, options: ProxyOptions, clock: Clock
    ) -> None:
        self._upstreams = [(pool, upstream) for pool in pools for upstream in pool.upstreams.values()]
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
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self.seconds_left)
            try:
                await self.check_if_due()
            except Exception:
                logger.exception("a bug in the health checks")

    async def check_if_due(self) -> None:
        """One round over all servers, if the interval is over."""
        if self._clock.now() < self._next:
            return
        self._next = self._clock.now() + self._interval
        slow = await asyncio.gather(*(self._check(pool, upstream) for pool, upstream in self._upstreams))
        self._slow = frozenset(
            upstream for (_, upstream), is_slow in zip(self._upstreams, slow, strict=True) if is_slow
        )

    async def _check(self, pool: UpstreamPool, upstream: Upstream) -> bool:
        """Check one server. True if it did not answer in time."""
        reason, slow, silent = "", False, False
        try:
            url = f"{upstream.url}/health"
            response = await self._client.fetch("GET", url, b"", [], self._timeout, _MAX_HEALTH_BYTES)
            reason = "" if response.status == 200 else f"it answers /health with {response.status}"
        except UpstreamError as error:
            if error.kind == "local":
                logger.warning("%s server %s could not be asked for its health: %s", pool.name, upstream.url, error)
                return upstream in self._slow
            reason, slow, silent = str(error), error.kind == "timeout", True
            if error.kind == "unreached":
                pool.rule.remove(upstream.url)
        up = not reason or (slow and upstream.up and upstream not in self._slow)
        if up != upstream.up:
            level = logging.INFO if up else logging.WARNING
            logger.log(level, "%s server %s is %s%s", pool.name, upstream.url, "up" if up else "down: ", reason)
        upstream.up = up
        if silent and not up:
            upstream.abort_waits()
        return slow
