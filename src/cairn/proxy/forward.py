"""One request's way: to a prefill server, with what it hands over to a decode server, and from there to the client.

prefill   429, 5xx, time-out, broken connection, down: the next prefill server; none left: the decode server alone
          what it hands over is nothing that a server would take: the decode server alone
          4xx about `kv_transfer_params`: once more without the second-turn hint; the next prefill server
          other 4xx: the client gets it as it is
decode    429, 5xx, time-out, broken connection before the first byte: the next decode server. What was handed over is
          good for one use, so it is prefilled again, unless the server was not reached, or is full (429)
          down before the first byte: the same, if there is a next decode server; if not, this one is waited for
          4xx about `kv_transfer_params`, 413: the same server once more, without what was handed over
          after the first byte: no second try, ever; a stream ends with an error event
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

import msgspec

from cairn.http.error_responses import make_error
from cairn.proxy.affinity import affinity_key, is_batch
from cairn.proxy.hints import PrefixDigests, prefix_digests
from cairn.proxy.pool import Pool, Upstream
from cairn.proxy.protocol import (
    BadReference,
    Body,
    bool_field,
    decode_body,
    handover_of,
    parse_body,
    prefill_body,
    refuses_params,
)
from cairn.proxy.relay import ClientSide
from cairn.proxy.service import ProxyService
from cairn.proxy.stream_inspector import StreamInspector
from cairn.proxy.upstream import CallFailed, Headers, Reply, read_whole

GeneratePath = Literal["/v1/completions", "/v1/chat/completions"]

_FULL = 429
_TOO_LARGE = 413
_REFERENCE_REFUSALS = (400, _TOO_LARGE, 422)


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request as far as the proxy understands it. `arrived`: seconds of the service's clock."""

    path: GeneratePath
    body: Body
    headers: Headers
    key: bytes
    digests: PrefixDigests | None
    batch: bool
    arrived: float


def forwarded_request(service: ProxyService, path: GeneratePath, content: bytes, headers: Headers) -> ForwardedRequest:
    """Raises InvalidRequest."""
    body = parse_body(content)
    bool_field(body, "stream")
    key = affinity_key(body, service.options.affinity_bytes)
    batch = path == "/v1/completions" and is_batch(body)
    return ForwardedRequest(path, body, headers, key, prefix_digests(body), batch, service.clock.now())


class _PassOn(Exception):
    """The prefill server's answer is the client's."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


class Forwarding:
    """Answers one request. Used once."""

    def __init__(self, service: ProxyService, request: ForwardedRequest, client: ClientSide) -> None:
        self._service = service
        self._request = request
        self._client = client
        self._decode_only = ""
        self._handover: msgspec.Raw | None = None
        self._handed_over_by: Upstream | None = None
        self._tried: list[Upstream] = []
        self._last_answer: Reply | None = None
        self._last_failure = ""

    async def run(self) -> int:
        """The status of the answer, when its last byte is out. Raises RequestError."""
        decode, key, tried = self._service.decode, self._request.key, self._tried
        try:
            while self._has_next():
                await self._prefill()
                # Only now: while the prompt was computed, others have come and gone.
                upstream = decode.choose(key, tried)
                if upstream is None:
                    break
                if tried:
                    self._service.metrics.retries.labels("decode").inc()
                tried.append(upstream)
                status = await self._decode(upstream)
                if status is not None:
                    return status
        except _PassOn as refusal:
            return await self._answer_whole(refusal.reply)
        if self._last_answer is not None:
            return await self._answer_whole(self._last_answer)
        if tried:
            raise make_error(f"no decode server could answer; the last one: {self._last_failure}", 502, "bad_gateway")
        raise make_error("no decode server is up: try again later", 503, "service_unavailable")

    def _has_next(self) -> bool:
        """Whether there is a decode server that may be tried, or tried next."""
        most = self._service.options.max_attempts
        return len(self._tried) < most and self._service.decode.least_busy(self._tried) is not None

    async def _prefill(self) -> None:
        """See to it that there is something to hand over, or that everybody knows that there will not be."""
        if self._handover is not None or self._decode_only or not self._service.prefill.upstreams:
            return
        if self._request.batch:
            self._go_without("batch")
            return
        tried: list[Upstream] = []
        while len(tried) < self._service.options.max_attempts:
            upstream = self._service.prefill.choose(self._request.key, tried)
            if upstream is None:
                break
            if tried:
                self._service.metrics.retries.labels("prefill").inc()
            tried.append(upstream)
            try:
                reply = await self._call_prefill(upstream)
                self._handover, self._handed_over_by = handover_of(reply.content), upstream
            except CallFailed as error:
                self._failed(self._service.prefill, upstream, error)
                continue
            except BadReference as error:
                self._drop_reference(upstream, str(error))
                return
            except ValueError as error:
                self._failed(self._service.prefill, upstream, CallFailed(f"cannot be read: {error}", kind="answer"))
                continue
            if self._handover is None:
                self._go_without("not_offered")
            return
        self._go_without("prefill_failed" if tried else "prefill_down")

    async def _call_prefill(self, upstream: Upstream) -> Reply:
        """A 200 from a prefill server. Raises CallFailed or, for 4xx, _PassOn."""
        service, marks = self._service, self._request.digests.marks if self._request.digests is not None else []
        hint = service.hints.find(marks)
        started = service.clock.now()
        with upstream.hold():
            # It may always be left: a decode server can do it alone.
            async with upstream.unless_silent(lambda: True):
                reply = await self._post_prefill(upstream, hint)
                if hint is not None and _is_about_params(reply):
                    service.hints.forget(hint, marks)
                    reply = await self._post_prefill(upstream, None)
        if 400 <= reply.status < 500 and reply.status != _FULL and not _is_about_params(reply):
            raise _PassOn(reply)
        if reply.status != 200:
            raise CallFailed(f"it answers with {reply.status}", kind="status")
        service.metrics.prefill_seconds.observe(service.clock.now() - started)
        return reply

    async def _post_prefill(self, upstream: Upstream, hint: msgspec.Raw | None) -> Reply:
        service, request, options = self._service, self._request, self._service.options
        if hint is not None:
            service.metrics.hints_sent.inc()
        return await service.client.whole(
            "POST",
            upstream.url + request.path,
            prefill_body(request.body, hint),
            request.headers,
            options.prefill_timeout,
            options.max_body_bytes,
        )

    async def _decode(self, upstream: Upstream) -> int | None:
        """The status of the answer that the client has got, or None. Raises RequestError when it has got a part."""
        try:
            with upstream.hold():
                status = await self._ask_decode(upstream)
                # None only once: without a reference there is none to be refused.
                return await self._ask_decode(upstream) if status is None else status
        except CallFailed as error:
            self._failed(self._service.decode, upstream, error)
            if self._client.started:
                raise make_error(f"the decode server failed in mid-answer: {error}", 502, "bad_gateway") from error
            if error.sent:
                self._handover = None
            return None

    async def _ask_decode(self, upstream: Upstream) -> int | None:
        """As `_decode`, but None when the server has refused the reference, which is gone then. Raises CallFailed."""
        service, request = self._service, self._request
        content = decode_body(request.body, self._handover)
        url, silence = upstream.url + request.path, service.options.stall_timeout
        async with AsyncExitStack() as stack:
            # Nothing goes out before the server has something to say: until then another one can take over.
            async with upstream.unless_silent(self._has_next):
                reply, chunks = await stack.enter_async_context(
                    service.client.open(url, content, request.headers, silence)
                )
                if reply.status >= 500 or reply.status == _FULL or 300 <= reply.status < 400:
                    await self._keep_failure(reply, chunks)
                    # A server that is full has turned the request away, and fetched nothing.
                    begun = reply.status != _FULL
                    raise CallFailed(f"it answers with {reply.status}", kind="status", sent=begun)
                first: bytes | None
                if self._handover is not None and reply.status in _REFERENCE_REFUSALS:
                    first = await read_whole(chunks, service.options.max_body_bytes)
                    if reply.status == _TOO_LARGE or refuses_params(first):
                        self._drop_reference(self._handed_over_by, f"refused with {reply.status} by {upstream.url}")
                        return None
                else:
                    first = await anext(chunks, None)
            await self._pass_through(reply, first, chunks)
            return reply.status

    async def _pass_through(self, reply: Reply, first: bytes | None, chunks: AsyncGenerator[bytes, None]) -> None:
        service, request = self._service, self._request
        length = reply.header(b"content-length")
        stream = reply.header(b"content-type").startswith(b"text/event-stream")
        inspector = StreamInspector(stream, int(length) if length.isdigit() else None)
        chunk = first
        service.metrics.first_byte_seconds.observe(service.clock.now() - request.arrived)
        await self._client.start(reply.status, reply.headers)
        noted = False
        while chunk is not None:
            inspector.feed(chunk)
            # Before the last bytes go out: the client's next turn may be quicker than the end of this connection.
            if inspector.done and not noted:
                noted = True
                self._note(inspector)
            await self._client.write(chunk)
            chunk = await anext(chunks, None)
        if not noted:
            self._note(inspector)
        await self._client.end()

    def _note(self, inspector: StreamInspector) -> None:
        """Remember where the pages of this conversation are."""
        found, digests = inspector.findings(), self._request.digests
        mark = None if found.hint is None or digests is None else digests.end(found)
        if mark is not None and found.hint is not None:
            self._service.hints.remember(mark, found.hint)
            self._service.metrics.hints_stored.inc()

    async def _keep_failure(self, reply: Reply, chunks: AsyncGenerator[bytes, None]) -> None:
        """Keep a 429 or 5xx, in case nobody can do better. A redirect is never passed on: it is not for the client."""
        if reply.status >= 500 or reply.status == _FULL:
            content = await read_whole(chunks, self._service.options.max_body_bytes)
            self._last_answer = Reply(reply.status, reply.headers, content)

    async def _answer_whole(self, reply: Reply) -> int:
        await self._client.start(reply.status, reply.headers)
        await self._client.write(reply.content)
        await self._client.end()
        return reply.status

    def _drop_reference(self, upstream: Upstream | None, reason: str) -> None:
        """Forget what this prefill server has handed over, for good: the decode server computes the prompt."""
        self._handover = None
        if upstream is not None:
            self._failed(self._service.prefill, upstream, CallFailed(f"bad reference: {reason}", kind="reference"))
        self._go_without("bad_reference")

    def _go_without(self, reason: str) -> None:
        self._decode_only = reason
        self._service.metrics.decode_only.labels(reason).inc()

    def _failed(self, pool: Pool, upstream: Upstream, error: CallFailed) -> None:
        self._last_failure = str(error)
        self._service.failed(pool, upstream, error)


def _is_about_params(reply: Reply) -> bool:
    return reply.status in (400, 422) and refuses_params(reply.content)
