"""Forwards one request: to a prefill server, with what it hands over to a decode server, and from there to the client.

prefill   429, 5xx, time-out, broken connection, down: the next prefill server; none left: the decode server alone
          what it hands over is nothing that a server would take: the decode server alone
          4xx about `kv_transfer_params`: once more without the second-turn hint; the next prefill server
          other 4xx: the client gets it as it is
decode    429, 5xx, time-out, broken connection before the first byte: the next decode server. What was handed over is
          good for one use, so the prompt is prefilled again, unless the server was not reached, or is full (429)
          down before the first byte: the same, if there is a next decode server; if not, this one is waited for
          4xx about `kv_transfer_params`, 413: the same server once more, without what was handed over
          after the first byte: no second try, ever; a stream ends with an error event
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec

from cairn.http.error_responses import make_error
from cairn.proxy.prefixes import is_batch, prefix_digests, routed_request
from cairn.proxy.protocol import (
    BadReference,
    bool_field,
    decode_body,
    handover_of,
    parse_body,
    prefill_body,
    refuses_params,
    stored_response_of,
)
from cairn.proxy.relay import ClientResponse
from cairn.proxy.service import ProxyService
from cairn.proxy.stream_inspector import AnswerRecorder, AnswerSummary, StreamInspector
from cairn.proxy.upstream import Headers, Upstream, UpstreamError, UpstreamResponse, read_all
from cairn.routing.rule import RoutedRequest

GeneratePath = Literal[
    "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
]

_FULL = 429
_TOO_LARGE = 413
_REFERENCE_REFUSALS = (400, _TOO_LARGE, 422)


class _ClientError(Exception):
    """A prefill server's 4xx that is the client's to see."""

    def __init__(self, response: UpstreamResponse) -> None:
        super().__init__()
        self.response = response


class RequestForwarder:
    """Answers one request. Used once."""

    def __init__(self, service: ProxyService, path: GeneratePath, content: bytes, headers: Headers) -> None:
        """`content`: the request's body; `headers`: what the servers get. Raises InvalidRequest."""
        self.body = parse_body(content)
        bool_field(self.body, "stream")
        self._service = service
        self._path = path
        self._headers = headers
        self._digests = prefix_digests(self.body)
        # Counting computes nothing that could be cached or handed over.
        counts = path == "/v1/messages/count_tokens"
        self._request = RoutedRequest() if counts else routed_request(self.body, self._digests)
        self._is_batch = path == "/v1/completions" and is_batch(self.body)
        self._arrival = service.clock.now()
        self._decode_only = counts
        self._stored = stored_response_of(self.body) if path == "/v1/responses" else ""
        self._handover: msgspec.Raw | None = None
        self._prefill_upstream: Upstream | None = None
        self._tried: list[Upstream] = []
        self._last_refusal: UpstreamResponse | None = None
        self._last_failure = ""

    async def run(self, client: ClientResponse) -> int:
        """Answer the client; returns the status of the answer when its last byte is out. Raises RequestError."""
        tried = self._tried
        try:
            while self._can_retry_decode():
                await self._prefill()
                # Only now: while the prompt was computed, the loads have changed.
                upstream = self._choose_decode()
                if upstream is None:
                    break
                if tried:
                    self._service.metrics.retries.labels("decode").inc()
                tried.append(upstream)
                status = await self._decode(upstream, client)
                if status is not None:
                    return status
        except _ClientError as error:
            return await client.send_whole(error.response.status, error.response.headers, error.response.content)
        if (refusal := self._last_refusal) is not None:
            return await client.send_whole(refusal.status, refusal.headers, refusal.content)
        if tried:
            raise make_error(f"no decode server could answer; the last one: {self._last_failure}", 502)
        raise make_error("no decode server is up: try again later", 503)

    def _choose_decode(self) -> Upstream | None:
        """The server that has the response which this one goes on from, or the next one that the prompt prefers."""
        decode = self._service.decode
        owner = decode.upstreams.get(self._service.response_owners.find(self._stored) or "")
        if owner is not None and owner.up and owner not in self._tried:
            return owner
        return decode.choose(self._request, self._tried)

    def _can_retry_decode(self) -> bool:
        """Whether there is a decode server that may be tried, or tried next."""
        max_attempts = self._service.options.max_attempts
        return len(self._tried) < max_attempts and self._service.decode.least_loaded(self._tried) is not None

    async def _prefill(self) -> None:
        """Set `_handover`, or `_decode_only` if there will be none."""
        if self._handover is not None or self._decode_only or not self._service.prefill.upstreams:
            return
        if self._is_batch or self._stored:
            # The conversation is where its last answer was stored.
            self._set_decode_only("batch" if self._is_batch else "stored_response")
            return
        pool, tried = self._service.prefill, list[Upstream]()
        while len(tried) < self._service.options.max_attempts:
            upstream = pool.choose(self._request, tried)
            if upstream is None:
                break
            if tried:
                self._service.metrics.retries.labels("prefill").inc()
            tried.append(upstream)
            try:
                response = await self._call_prefill(upstream)
                self._handover, self._prefill_upstream = handover_of(response.content), upstream
            except UpstreamError as error:
                self._service.report_failure(pool, upstream, error)
                continue
            except BadReference as error:
                self._drop_handover(upstream, str(error))
                return
            except ValueError as error:
                self._service.report_failure(pool, upstream, UpstreamError(f"cannot be read: {error}", kind="answer"))
                continue
            if self._handover is None:
                self._set_decode_only("not_offered")
            return
        self._set_decode_only("prefill_failed" if tried else "prefill_down")

    async def _call_prefill(self, upstream: Upstream) -> UpstreamResponse:
        """A 200 from a prefill server. Raises UpstreamError or, for 4xx, _ClientError."""
        service, digests = self._service, self._digests.digests if self._digests is not None else []
        hint = service.hints.find(digests)
        started = service.clock.now()
        # It may always be aborted: a decode server can do it alone.
        with service.count_open(service.prefill, upstream, self._request):
            async with upstream.abort_if_down(lambda: True):
                response = await self._post_prefill(upstream, hint)
                if hint is not None and refuses_params(response.status, response.content):
                    service.hints.remove(hint, digests)
                    response = await self._post_prefill(upstream, None)
        is_own = refuses_params(response.status, response.content)
        if 400 <= response.status < 500 and response.status != _FULL and not is_own:
            raise _ClientError(response)
        if response.status != 200:
            raise UpstreamError(f"it answers with {response.status}", kind="status")
        service.metrics.prefill_seconds.observe(service.clock.now() - started)
        return response

    async def _post_prefill(self, upstream: Upstream, hint: msgspec.Raw | None) -> UpstreamResponse:
        options, url = self._service.options, upstream.url + self._path
        if hint is not None:
            self._service.metrics.hints_sent.inc()
        body = prefill_body(self._path, self.body, hint)
        return await self._service.client.fetch(
            "POST", url, body, self._headers, options.prefill_timeout, options.max_body_bytes
        )

    async def _decode(self, upstream: Upstream, client: ClientResponse) -> int | None:
        """The status of the answer that the client has got, or None to try another server. Raises RequestError when the
        client has got a part of an answer."""
        try:
            with self._service.count_open(self._service.decode, upstream, self._request):
                status = await self._call_decode(upstream, client)
                # None only once: without a reference there is none to be refused.
                return await self._call_decode(upstream, client) if status is None else status
        except UpstreamError as error:
            self._last_failure = str(error)
            self._service.report_failure(self._service.decode, upstream, error)
            if client.started:
                raise make_error(f"the decode server failed in mid-answer: {error}", 502) from error
            if error.sent:
                self._handover = None
            return None

    async def _call_decode(self, upstream: Upstream, client: ClientResponse) -> int | None:
        """The status of the answer that the client has got, or None when the server has refused the reference, which is
        dropped then. Raises UpstreamError."""
        service, url = self._service, upstream.url + self._path
        max_bytes, content = service.options.max_body_bytes, decode_body(self.body, self._handover)
        async with AsyncExitStack() as stack:
            # Nothing goes out before the server has something to say: until then another one can take over.
            async with upstream.abort_if_down(self._can_retry_decode):
                response, chunks = await stack.enter_async_context(
                    service.client.stream(url, content, self._headers, service.options.stall_timeout)
                )
                if response.status >= 500 or response.status == _FULL:
                    # Kept in case nobody can do better. A full server has turned the request away and fetched nothing.
                    self._last_refusal = replace(response, content=await read_all(chunks, max_bytes))
                    sent = response.status != _FULL
                    raise UpstreamError(f"it answers with {response.status}", kind="status", sent=sent)
                if 300 <= response.status < 400:
                    # A redirect is never passed on: it is not for the client.
                    raise UpstreamError(f"it answers with {response.status}", kind="status")
                first: bytes | None
                if self._handover is not None and response.status in _REFERENCE_REFUSALS:
                    first = await read_all(chunks, max_bytes)
                    if response.status == _TOO_LARGE or refuses_params(response.status, first):
                        self._drop_handover(self._prefill_upstream, f"refused with {response.status} by {upstream.url}")
                        return None
                else:
                    first = await anext(chunks, None)
            await self._pass_through(upstream, response, first, chunks, client)
            return response.status

    async def _pass_through(
        self,
        upstream: Upstream,
        response: UpstreamResponse,
        first: bytes | None,
        chunks: AsyncGenerator[bytes, None],
        client: ClientResponse,
    ) -> None:
        service, length = self._service, response.header(b"content-length")
        stream = response.header(b"content-type").startswith(b"text/event-stream")
        inspector = StreamInspector(stream, int(length) if length.isdigit() else None)
        recorder = AnswerRecorder(inspector, partial(self._record_answer, upstream))
        service.decode.record_prefilled(upstream, self._request)
        service.metrics.first_byte_seconds.observe(service.clock.now() - self._arrival)
        unbuffered = [(b"x-accel-buffering", b"no")] if stream else []
        await client.start(response.status, [*response.headers, *unbuffered])
        chunk = first
        while chunk is not None:
            recorder.feed(chunk)
            await client.write(chunk)
            chunk = await anext(chunks, None)
        recorder.finish()
        await client.end()

    def _record_answer(self, upstream: Upstream, answer: AnswerSummary) -> None:
        """Remember where the pages of this conversation are, and its answer if that is stored."""
        if answer.response_id is not None:
            self._service.response_owners.store(answer.response_id, upstream.url)
        if self._service.hints.store_answer(self._digests, answer):
            self._service.metrics.hints_stored.inc()

    def _drop_handover(self, upstream: Upstream | None, reason: str) -> None:
        """Forget what this prefill server has handed over, for good: the decode server computes the prompt."""
        self._handover = None
        if upstream is not None:
            error = UpstreamError(f"bad reference: {reason}", kind="reference")
            self._service.report_failure(self._service.prefill, upstream, error)
        self._set_decode_only("bad_reference")

    def _set_decode_only(self, reason: str) -> None:
        self._decode_only = True
        self._service.metrics.decode_only.labels(reason).inc()
