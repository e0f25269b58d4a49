"""The servers of a pool as the tries of one request see them: who is asked over HTTP, for how long, what is counted."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from cairn.http.handover import RELEASE_PATH
from cairn.proxy.server_pool import RELEASE_SECONDS, Headers, NoUpstream, UpstreamError, UpstreamResponse
from cairn.proxy.service import ProxyService
from cairn.proxy.upstream import Upstream, UpstreamPool
from cairn.routing.rule import RoutedRequest

_MAX_RELEASED_BYTES = 65536
"""Of the answer to a release, which nobody reads."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpstreamCalls:
    """A `ServerPool` for one request. `headers`: what the servers get; `prompt`: what is known of it; `seconds`: in
    which an answer has to be there, None for one that comes in chunks; `retries_404`: after a 404 another is tried."""

    service: ProxyService
    pool: UpstreamPool
    method: str
    path: str
    headers: Headers
    prompt: RoutedRequest
    seconds: float | None = None
    retries_404: bool = False

    @asynccontextmanager
    async def send(
        self, content: bytes, tried: Sequence[str], first: str | None, abandoned: bytes | None = None
    ) -> AsyncIterator[UpstreamResponse]:
        pool, prompt, metrics = self.pool, self.prompt, self.service.metrics
        upstream = self._choose(tried, first)
        if upstream is None:
            raise NoUpstream(f"no {pool.name} server is up")
        if tried:
            metrics.retries.labels(pool.name).inc()
        metrics.routed_tokens.labels(pool.name).inc(prompt.num_tokens)
        try:
            with pool.count_open(upstream, prompt) as cached:
                metrics.cached_tokens.labels(pool.name).inc(cached)
                async with AsyncExitStack() as stack:
                    # Nothing goes out before the server has something to say: until then another one can take over.
                    async with upstream.abort_if_down(lambda: self._may_abort([*tried, upstream.url])):
                        response = await self._call(stack, upstream.url + self.path, content)
                    if 300 <= response.status < 400:
                        # A redirect is never passed on: it is not for the client.
                        raise UpstreamError(f"it answers with {response.status}", kind="status")
                    pool.rule.record_prefilled(prompt, upstream.url)
                    yield replace(response, server=upstream.url)
        except BaseException as error:
            was_sent = not isinstance(error, UpstreamError) or error.sent
            if abandoned is not None and was_sent:
                self.release(upstream.url, abandoned)
            if isinstance(error, UpstreamError):
                error.server = upstream.url
                self.report_failure(upstream.url, error)
            raise

    def has_untried(self, tried: Sequence[str]) -> bool:
        return bool(self.pool.untried(tried))

    def should_retry(self, status: int) -> bool:
        return status == 429 or status >= 500 or (status == 404 and self.retries_404)

    def report_failure(self, server: str, error: UpstreamError) -> None:
        """A server that cannot be reached is down until its next health check succeeds."""
        self.service.metrics.failures.labels(self.pool.name, server, error.kind).inc()
        logger.debug("%s server %s: %s", self.pool.name, server, error)
        if error.kind == "unreached":
            self.pool.mark_gone(server, error)

    def release(self, server: str, content: bytes) -> None:
        self.service.releases.start(self._release(server, content))

    async def _release(self, server: str, content: bytes) -> None:
        client, url = self.service.client, server + RELEASE_PATH
        try:
            await client.fetch("POST", url, content, self.headers, RELEASE_SECONDS, _MAX_RELEASED_BYTES)
        except UpstreamError as error:
            logger.debug("%s server %s has not been told to release: %s", self.pool.name, server, error)

    async def _call(self, stack: AsyncExitStack, url: str, content: bytes) -> UpstreamResponse:
        """The response with its first bytes at least, and all of an error; the `stack` closes what is open then."""
        client, options = self.service.client, self.service.options
        if self.seconds is not None:
            started, max_bytes = self.service.clock.now(), options.max_body_bytes
            response = await client.fetch(self.method, url, content, self.headers, self.seconds, max_bytes)
            if self.pool is self.service.prefill and response.status == 200:
                self.service.metrics.prefill_seconds.observe(self.service.clock.now() - started)
            return response
        call = client.stream(url, content, self.headers, options.stall_timeout, self.method)
        response = await stack.enter_async_context(call)
        if response.status >= 400:
            return await response.read(options.max_body_bytes)
        if response.header(b"content-type").startswith(b"text/event-stream"):
            response = replace(response, headers=[*response.headers, (b"x-accel-buffering", b"no")])
        return response if response.rest is None else replace(response, content=await anext(response.rest, b""))

    def _may_abort(self, tried: Sequence[str]) -> bool:
        """Whether a server that is down, the last of `tried`, need not be waited for: a decode server can do a prefill
        server's work alone."""
        has_others = len(tried) < self.service.options.max_attempts and self.has_untried(tried)
        return has_others or self.pool is self.service.prefill

    def _choose(self, tried: Sequence[str], first: str | None) -> Upstream | None:
        return self.pool.untried(tried).get(first or "") or self.pool.choose(self.prompt, tried)
