"""The ingress: takes a client's request, has a replica answer it, and passes the answer on as it comes.

What is tried when a replica fails is the proxy's, in `cairn.proxy.forward`. A replica that answers 429 or 503 is
followed by another one, `max_attempts` in all; prefill replicas, if there are any, compute the prompt first.

no replica          503 with Retry-After after `replica_timeout`
a stored response   its replica comes first; where that is not known, or gone, all are asked until one knows it
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.deploy.ray.exchange import RelayedRequest
from cairn.deploy.ray.replica_calls import REQUEST_ID, RelayLimits, ReplicaPool, SendToReplica
from cairn.errors import InvalidRequest, Overloaded, RequestError
from cairn.http.error_responses import RESPONSES_PATH, ClientDisconnected, error_response, make_error
from cairn.http.middleware import read_body
from cairn.proxy.forward import ClientRequest, RequestForwarder, parse_request
from cairn.proxy.prefixes import HintCache
from cairn.proxy.protocol import HANDOVER_PATHS
from cairn.proxy.relay import ClientResponse, Relay
from cairn.proxy.response_owners import ResponseOwners
from cairn.proxy.server_pool import Headers, NoUpstream, ReleaseTasks, UpstreamError
from cairn.routing.rule import RoutedRequest

_HAS_BODY = ("POST", "PUT", "PATCH")
_RETRIED = (429, 503)
_MAX_OWNERS_ASKED = 64
"""Of the replicas that may have a stored response."""
_MAX_PREFILL_SECONDS = 5.0
"""For a prefill replica to take a prompt: one that is there does so at once, and others can compute it."""


ReadPrompt = Callable[[str, bytes, Headers], Awaitable[RoutedRequest]]
"""Of a request's path, body and headers; it never fails."""


class RequestRelay:
    """The ASGI application of the ingress: every path goes to a replica, which answers it as a server does."""

    def __init__(
        self,
        send_to_replica: SendToReplica,
        limits: RelayLimits,
        read_prompt: ReadPrompt | None = None,
        prefill: SendToReplica | None = None,
        guard: Callable[[ASGIApp], ASGIApp] | None = None,
        hints: HintCache | None = None,
    ) -> None:
        """`read_prompt`: None where requests are routed by load alone. `prefill`: to those that compute prompts for the
        others. `guard`: what stands before all this, and refuses strangers. `hints`: where the prefill replicas find
        the pages of conversations' last answers."""
        self._guarded: ASGIApp = self._relay if guard is None else guard(self._relay)
        self._prefill = prefill
        self._send_to_replica = send_to_replica
        self._limits = limits
        self._read_prompt = read_prompt or _read_nothing
        self._hints = HintCache() if hints is None else hints
        self._owners = ResponseOwners()
        self._releases = ReleaseTasks()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            ids = [value.decode("latin-1") for name, value in scope["headers"] if name == REQUEST_ID]
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
            return await self._answer(request, client)

        await Relay(answer, lambda end, started: None)(scope, receive, send)

    async def _read_request(self, scope: Scope, receive: Receive) -> RelayedRequest:
        """One byte more than may be is read of a body, at most: the replica says what is wrong with it. Raises
        ClientDisconnected, and RequestError for a body that does not come in time."""
        body, limits = b"", self._limits
        if scope["method"] in _HAS_BODY:
            body = await read_body(receive, limits.max_body_bytes, limits.body_seconds)
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
            body=body[: limits.max_body_bytes + 1],
        )

    async def _answer(self, request: RelayedRequest, client: ClientResponse) -> int:
        forwarded = self._client_request(request)
        stored, seconds = bool(forwarded.stored), self._limits.replica_seconds
        prompt = RoutedRequest() if stored else await self._read_prompt(request.path, request.body, request.headers)
        retried = (*_RETRIED, 404) if stored else _RETRIED
        prefill = None
        if self._prefill is not None:
            prefill = ReplicaPool(self._prefill, request, prompt, min(seconds, _MAX_PREFILL_SECONDS), self._releases)
        forwarder = RequestForwarder(
            forwarded,
            ReplicaPool(self._send_to_replica, request, prompt, seconds, self._releases, retried),
            prefill,
            self._hints,
            self._owners,
            _MAX_OWNERS_ASKED if stored else self._limits.max_attempts,
        )
        answer_seconds = self._limits.answer_seconds
        try:
            # A replica's own time is over first, unless it is silent.
            async with asyncio.timeout(answer_seconds + seconds):
                return await forwarder.run(client)
        except TimeoutError:
            raise make_error(f"the answer was not there within {answer_seconds:g} s", 504) from None
        except NoUpstream as error:
            raise Overloaded(str(error)) from error
        except UpstreamError as error:
            if client.started:
                raise make_error("the replica failed in mid-answer", 502) from error
            raise Overloaded(f"no replica could answer: try again later; the last one: {error}") from error

    def _client_request(self, request: RelayedRequest) -> ClientRequest:
        """Its body is read where a part of it is to go elsewhere; a replica says what is wrong with it."""
        path, hands_over = request.path, self._prefill is not None
        if path.startswith(f"{RESPONSES_PATH}/"):
            return ClientRequest(path, request.body, stored=path.split("/")[3])
        reads = hands_over or path == RESPONSES_PATH
        if request.method == "POST" and path in HANDOVER_PATHS and reads:
            with suppress(InvalidRequest):
                read = parse_request(path, request.body)
                return read if hands_over else replace(read, body=None, digests=None)
        return ClientRequest(path, request.body)


async def _read_nothing(path: str, content: bytes, headers: Headers) -> RoutedRequest:
    return RoutedRequest()


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
