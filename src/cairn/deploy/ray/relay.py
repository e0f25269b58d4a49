"""The ingress: takes a client's request, has a replica answer it, and passes the answer on as it comes.

before the first byte   a replica that dies, or that answers 429 or 503: another one, `max_attempts` in all; the last
                        refusal goes to the client when nobody can do better
after the first byte    no second try, ever; a stream ends with an error event
prefill replicas        compute the prompt first, if there are any (`prefill.py`); what they hand over is for one use
no replica              503 with Retry-After after `replica_timeout`
a stored response       its replica comes first; where that is not known, or gone, all are asked until one knows it
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.deploy.ray.exchange import AnswerHead, RelayedRequest
from cairn.deploy.ray.prefill import Prefilled, PrefillPool, PrefillRefusal
from cairn.deploy.ray.replica_calls import Destination, RelayLimits, ReplicaFailed, SendToReplica, wait_replica
from cairn.errors import InvalidBody, Overloaded, RequestError
from cairn.http.error_responses import RESPONSES_PATH, ClientDisconnected, error_response, make_error
from cairn.proxy.protocol import parse_body, refuses_params, stored_response_of
from cairn.proxy.relay import ClientResponse, Relay
from cairn.proxy.response_owners import ResponseOwners
from cairn.proxy.stream_inspector import AnswerRecorder, AnswerSummary, StreamInspector
from cairn.routing.rule import RoutedRequest

_REQUEST_ID = b"x-request-id"
_HAS_BODY = ("POST", "PUT", "PATCH")
_MAX_RESPONSES = 1 << 16
_MOST_ASKED = 64

logger = logging.getLogger(__name__)


ReadPrompt = Callable[[str, bytes], Awaitable[RoutedRequest]]
"""Of a request's path and body; it never fails."""


class RequestRelay:
    """The ASGI application of the ingress: every path goes to a replica, which answers it as a server does."""

    def __init__(
        self,
        send_to_replica: SendToReplica,
        limits: RelayLimits,
        read_prompt: ReadPrompt | None = None,
        prefill: PrefillPool | None = None,
        guard: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        """`read_prompt`: None where requests are routed by load alone. `prefill`: computes prompts for the others.
        `guard`: what stands before all this, and refuses strangers."""
        self._guarded: ASGIApp = self._relay if guard is None else guard(self._relay)
        self._prefill = prefill
        self._send_to_replica = send_to_replica
        self._limits = limits
        self._read_prompt = read_prompt or _read_nothing
        self._owners = ResponseOwners(_MAX_RESPONSES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            ids = [value.decode("latin-1") for name, value in scope["headers"] if name == _REQUEST_ID]
            scope["cairn.request_id"] = ids[0] if ids else None
            await self._guarded(scope, receive, send)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = await self._read_request(scope, receive)
        except ClientDisconnected:
            return
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send)
            return

        async def answer(client: ClientResponse) -> int:
            return await self._answer(request, client, scope["cairn.request_id"] is not None)

        await Relay(answer, lambda end, started: None)(scope, receive, send)

    async def _read_request(self, scope: Scope, receive: Receive) -> RelayedRequest:
        """One byte more than may be is read of a body, at most: the replica says what is wrong with it. Raises
        ClientDisconnected, and RequestError for a body that does not come in time."""
        body = bytearray()
        more = scope["method"] in _HAS_BODY
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while more and len(body) <= self._limits.max_body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            raise make_error(f"the body did not come within {self._limits.body_seconds:g} s", 408) from None
        client = scope.get("client")
        return RelayedRequest(
            method=scope["method"],
            path=scope["path"],
            raw_path=scope.get("raw_path") or scope["path"].encode(),
            query_string=scope.get("query_string", b""),
            headers=[(bytes(name), bytes(value)) for name, value in scope["headers"]],
            client=(str(client[0]), int(client[1])) if client else None,
            scheme=scope.get("scheme", "http"),
            http_version=scope.get("http_version", "1.1"),
            body=bytes(body[: self._limits.max_body_bytes + 1]),
        )

    async def _answer(self, request: RelayedRequest, client: ClientResponse, has_id: bool) -> int:
        stored = _stored_response(request)
        prompt = RoutedRequest() if stored else await self._read_prompt(request.path, request.body)
        prefilled = Prefilled(request)
        if self._prefill is not None and not stored:
            try:
                prefilled = await self._prefill.hand_over(request, prompt)
            except PrefillRefusal as error:
                return await client.send_whole(error.head.status, _own_headers(error.head, has_id), error.head.body)
        handed = prefilled.handed
        tried: list[str] = []
        refusal: AnswerHead | None = None
        failure, owner = "", self._owners.find(stored) if stored else None
        max_attempts = _MOST_ASKED if stored else self._limits.max_attempts
        while len(tried) < max_attempts:
            call = self._send_to_replica(handed or prefilled.plain, Destination(prompt, tuple(tried), owner))
            try:
                name = await wait_replica(call, self._limits.replica_seconds)
            except ReplicaFailed as error:
                tried.append("")
                failure = str(error)
                continue
            was_handed, handed = handed, None
            has_others = name not in tried and len(tried) + 1 < max_attempts
            tried.append(name)
            try:
                async with aclosing(call.answer()) as chunks:
                    head = await anext(chunks)
                    assert isinstance(head, AnswerHead)
                    if was_handed is not None and _refuses_handover(head):
                        logger.warning("replica %s has refused what was handed over: %d", name, head.status)
                        owner = tried.pop()
                        continue
                    if head.status == 429:
                        handed = was_handed  # a full replica has fetched nothing
                    is_refusal = head.status in (429, 503) or (bool(stored) and head.status == 404)
                    if is_refusal and head.complete and has_others:
                        refusal = head
                        continue
                    recorder = self._recorder(prefilled, head, name)
                    await _pass_through(head, chunks, client, has_id, recorder)
                    return head.status
            except (ReplicaFailed, StopAsyncIteration) as error:
                failure = str(error)
                logger.warning("replica %s has failed: %s", name, failure)
                if client.started:
                    raise make_error("the replica failed in mid-answer", 502) from error
        if refusal is not None:
            return await client.send_whole(refusal.status, _own_headers(refusal, has_id), refusal.body)
        raise Overloaded(f"no replica could answer: try again later; the last one: {failure}")

    def _recorder(self, prefilled: Prefilled, head: AnswerHead, name: str) -> AnswerRecorder | None:
        """Remembers which replica has a response that may be stored, and where the pages of an answer are whose prompt
        was handed over."""
        digests, is_response = prefilled.digests, prefilled.plain.path == RESPONSES_PATH
        if head.status != 200 or not (is_response or digests is not None):
            return None

        def record(answer: AnswerSummary) -> None:
            if answer.response_id is not None:
                self._owners.store(answer.response_id, name)
            if self._prefill is not None:
                self._prefill.record_answer(digests, answer)

        kind = next((value for key, value in head.headers if key == b"content-type"), b"")
        return AnswerRecorder(StreamInspector(kind.startswith(b"text/event-stream")), record)


async def _pass_through(
    head: AnswerHead,
    chunks: AsyncGenerator[AnswerHead | bytes, None],
    client: ClientResponse,
    has_id: bool,
    recorder: AnswerRecorder | None,
) -> None:
    if recorder is not None:
        recorder.feed(head.body)
        if head.complete:
            recorder.finish()
    await client.start(head.status, _own_headers(head, has_id))
    if head.body:
        await client.write(head.body)
    if not head.complete:
        async for chunk in chunks:
            assert isinstance(chunk, bytes)
            if recorder is not None:
                recorder.feed(chunk)
            await client.write(chunk)
        if recorder is not None:
            recorder.finish()
    await client.end()


async def _read_nothing(path: str, content: bytes) -> RoutedRequest:
    return RoutedRequest()


def _refuses_handover(head: AnswerHead) -> bool:
    return head.complete and (head.status == 413 or refuses_params(head.status, head.body))


def _stored_response(request: RelayedRequest) -> str:
    """The id of the stored response that a request is about, or goes on from; empty for none."""
    if request.path.startswith(f"{RESPONSES_PATH}/"):
        return request.path.removeprefix(f"{RESPONSES_PATH}/").partition("/")[0]
    if request.path != RESPONSES_PATH:
        return ""
    try:
        return stored_response_of(parse_body(request.body))
    except InvalidBody:
        return ""


def _own_headers(head: AnswerHead, has_id: bool) -> list[tuple[bytes, bytes]]:
    """Without the request's id where Ray's proxy has named the request: it adds the header once more."""
    return [(name, value) for name, value in head.headers if not (has_id and name.lower() == _REQUEST_ID)]


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
