"""Forwards one request: to a prefill server, with what it hands over to a decode server, and from there to the client.

prefill   429, 5xx, time-out, broken connection, down: the next prefill server; none left: the decode server alone
          what it hands over is nothing that a server would take: the decode server alone
          4xx about `kv_transfer_params`: once more without the second-turn hint; the next prefill server
          other 4xx: the client gets it as it is
decode    a status that the pool retries (429; over HTTP 5xx, else 503), time-out, broken connection before the first
          byte: the next decode server. What was handed over is good for one use, so the prompt is prefilled again,
          unless the server was not reached, or is full (429)
          down before the first byte: the same, if there is a next decode server; if not, this one is waited for
          4xx about `kv_transfer_params`, 413: the same server once more, without what was handed over
          after the first byte: no second try, ever; a stream ends with an error event

What was handed over and is not fetched, because a decode server has refused the request or the client has gone, the
prefill server is told to release.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from cairn.http.error_responses import RESPONSES_PATH
from cairn.proxy.prefixes import HintCache, PrefixDigests, is_batch, prefix_digests
from cairn.proxy.protocol import (
    BadReference,
    Body,
    bool_field,
    decode_body,
    handover_of,
    parse_body,
    prefill_body,
    refuses_params,
    release_body,
    stored_response_of,
    wants_prompt_logprobs,
)
from cairn.proxy.relay import ClientResponse
from cairn.proxy.response_owners import ResponseOwners
from cairn.proxy.server_pool import NoUpstream, ServerPool, UpstreamError, UpstreamResponse
from cairn.proxy.stream_inspector import AnswerSummary, StreamInspector

_FULL = 429
_TOO_LARGE = 413
_REFERENCE_REFUSALS = (400, _TOO_LARGE, 422)
_MAX_READ_BYTES = 16 << 20
"""Of an answer that is read whole: a prefill server's, or a refusal."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request. `body`: None where the `content` goes to the decode servers as it is, and to no others.
    `digests`: of its prompt, None for none; `stored`: the id of the response that it is about, empty for none.
    `decode_only`: why its prompt is not handed over, empty where it may be."""

    path: str
    content: bytes
    body: Body | None = None
    digests: PrefixDigests | None = None
    stored: str = ""
    decode_only: str = ""

    def decode_content(self, handover: msgspec.Raw | None) -> bytes:
        """What a decode server gets."""
        return self.content if self.body is None else decode_body(self.body, handover)


def parse_request(path: str, content: bytes) -> ClientRequest:
    """A request that generates. Raises InvalidRequest."""
    body = parse_body(content)
    bool_field(body, "stream")
    stored = stored_response_of(body) if path == RESPONSES_PATH else ""
    # A conversation that goes on from a stored response is cached where that is stored.
    decode_only = "stored_response" if stored else ""
    if path == "/v1/completions" and is_batch(body):
        decode_only = "batch"
    elif wants_prompt_logprobs(path, body):
        decode_only = "prompt_logprobs"
    return ClientRequest(path, content, body, prefix_digests(body), stored, decode_only)


@dataclass(slots=True)
class RequestForwarder:
    """Answers one request. Used once. `prefill`: None where prompts are not handed over; `hints`, `owners`: what all
    requests remember of answers; `on_first_byte` is called when a server's answer is about to go out.

    `decode_only`: why nothing was handed over, empty where it was. `num_hints_sent`, `num_hints_stored`: second-turn
    hints.
    """

    request: ClientRequest
    decode: ServerPool
    prefill: ServerPool | None
    hints: HintCache
    owners: ResponseOwners
    max_attempts: int
    on_first_byte: Callable[[], None] = lambda: None
    decode_only: str = field(default="", init=False)
    num_hints_sent: int = field(default=0, init=False)
    num_hints_stored: int = field(default=0, init=False)
    _handover: msgspec.Raw | None = field(default=None, init=False)
    _prefill_server: str = field(default="", init=False)
    _decode_server: str | None = field(default=None, init=False)
    _refusal: UpstreamResponse | None = field(default=None, init=False)

    async def run(self, client: ClientResponse) -> int:
        """Answer the client; returns the status of the answer when its last byte is out.

        Raises UpstreamError when the last try has failed, or a server after its first byte, and NoUpstream when no
        server could be tried.
        """
        try:
            return await self._answer(client)
        finally:
            self._release_handover()

    async def _answer(self, client: ClientResponse) -> int:
        """See `run`."""
        tried: list[str] = []
        failure: UpstreamError | NoUpstream = NoUpstream("no server is up")
        self._decode_server = self.owners.find(self.request.stored) if self.request.stored else None
        while len(tried) < self.max_attempts and self.decode.has_untried(tried):
            if not await self._prefill_prompt():
                break
            try:
                # Only now is a server chosen: while the prompt was computed, the loads have changed.
                status = await self._try_decode(tried, client)
            except UpstreamError as error:
                if client.started:
                    raise
                failure = error
                if error.sent:
                    self._release_handover()
                if error.server and error.server in tried:
                    break
                tried.append(error.server)
            except NoUpstream as error:
                failure = failure if tried else error
                break
            else:
                if status is not None:
                    return status
        if self._refusal is None:
            raise failure
        return await client.send_whole(self._refusal.status, self._refusal.headers, self._refusal.content)

    async def _prefill_prompt(self) -> bool:
        """Set `_handover`, or `decode_only` if there will be none; False where the client is to get a prefill server's
        `_refusal`."""
        request, pool = self.request, self.prefill
        if self._handover is not None or self.decode_only or pool is None or request.body is None:
            return True
        self.decode_only = request.decode_only
        digests = [] if request.digests is None else request.digests.digests
        tried, first, hint = list[str](), None, self.hints.find(digests)
        while not self.decode_only and len(tried) < self.max_attempts:
            key = secrets.token_hex(16)
            content = prefill_body(request.path, request.body, hint, key)
            self.num_hints_sent += hint is not None
            try:
                async with pool.send(content, tried, first, release_body(key)) as response:
                    if response.server in tried:
                        break
                    response = await response.read(_MAX_READ_BYTES)
                    is_own = refuses_params(response.status, response.content)
                    if is_own and hint is not None:
                        self.hints.remove(hint, digests)
                        first, hint = response.server, None
                        continue
                    if 400 <= response.status < 500 and response.status != _FULL and not is_own:
                        self._refusal = response
                        return False
                    if response.status != 200:
                        raise UpstreamError(f"it answers with {response.status}", kind="status")
                    self._take_handover(response)
                    return True
            except UpstreamError as error:
                tried.append(error.server)
            except NoUpstream:
                break
        self.decode_only = self.decode_only or ("prefill_failed" if tried else "prefill_down")
        return True

    def _take_handover(self, response: UpstreamResponse) -> None:
        """Raises UpstreamError for an answer that cannot be read at all."""
        self._prefill_server = response.server
        try:
            self._handover = handover_of(response.content)
        except BadReference as error:
            self._drop_handover(str(error))
        except ValueError as error:
            raise UpstreamError(f"cannot be read: {error}", kind="answer") from None
        else:
            self.decode_only = "not_offered" if self._handover is None else ""

    async def _try_decode(self, tried: Sequence[str], client: ClientResponse) -> int | None:
        """The status of the answer that the client has got, or None when the server has refused what was handed over,
        which is dropped then. Raises UpstreamError and NoUpstream."""
        content = self.request.decode_content(self._handover)
        async with self.decode.send(content, tried, self._decode_server) as response:
            if self.decode.should_retry(response.status):
                # Kept in case nobody can do better. A full server has turned the request away and fetched nothing.
                self._refusal = await response.read(_MAX_READ_BYTES)
                sent = response.status != _FULL
                raise UpstreamError(f"it answers with {response.status}", kind="status", sent=sent)
            if self._handover is not None and response.status in _REFERENCE_REFUSALS:
                response = await response.read(_MAX_READ_BYTES)
                if response.status == _TOO_LARGE or refuses_params(response.status, response.content):
                    self._drop_handover(f"refused with {response.status} by {response.server}")
                    self._decode_server = response.server
                    return None
            if response.status < 400:
                self._handover = None  # it is the decode server's
            await self._pass_through(response, client)
            return response.status

    async def _pass_through(self, response: UpstreamResponse, client: ClientResponse) -> None:
        inspector = self._inspector(response)
        self.on_first_byte()
        await client.start(response.status, response.headers)
        async for chunk in response.chunks():
            if inspector is not None:
                inspector.feed(chunk)
            await client.write(chunk)
        if inspector is not None:
            inspector.finish()
        await client.end()

    def _inspector(self, response: UpstreamResponse) -> StreamInspector | None:
        """Remembers where the pages of this conversation are, and its answer if that is stored. None for an answer that
        is nothing to remember."""
        digests = self.request.digests

        def record(answer: AnswerSummary) -> None:
            if answer.response_id is not None:
                self.owners.store(answer.response_id, response.server)
            self.num_hints_stored += self.hints.store_answer(digests, answer)

        if response.status != 200 or (digests is None and self.request.path != RESPONSES_PATH):
            return None
        length = response.header(b"content-length")
        num_bytes = int(length) if length.isdigit() else None if response.rest else len(response.content)
        return StreamInspector(response.header(b"content-type").startswith(b"text/event-stream"), num_bytes, record)

    def _drop_handover(self, reason: str) -> None:
        """Forget what the prefill server has handed over, for good: the decode server computes the prompt."""
        self._release_handover()
        self.decode_only = "bad_reference"
        if self.prefill is not None:
            error = UpstreamError(f"bad reference: {reason}", kind="reference")
            self.prefill.report_failure(self._prefill_server, error)

    def _release_handover(self) -> None:
        """Nobody is going to fetch what the prefill server has handed over, unless somebody has begun to."""
        handover, self._handover = self._handover, None
        if handover is not None and self.prefill is not None:
            content = msgspec.json.encode({"kv_transfer_params": handover})
            self.prefill.release(self._prefill_server, content)
