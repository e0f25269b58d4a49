"""One proxy: its endpoints, the health checks beside them, and how it is served and drained."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cairn import __version__
from cairn.addresses import make_url
from cairn.errors import RequestError
from cairn.http.application import http_application
from cairn.http.clients import get_client_address
from cairn.http.error_responses import ClientDisconnected, make_error
from cairn.http.sessions import SESSION_HEADERS
from cairn.http.web_server import (
    DrainingServer,
    create_server_socket,
    create_web_server,
    parse_trusted_proxies,
    wait_first,
    wait_until_started,
)
from cairn.proxy.forward import ClientRequest, RequestForwarder, parse_request
from cairn.proxy.options import ProxyOptions
from cairn.proxy.prefixes import routed_request
from cairn.proxy.protocol import HANDOVER_PATHS
from cairn.proxy.relay import ClientResponse, Relay
from cairn.proxy.server_pool import Headers, NoUpstream, UpstreamError
from cairn.proxy.service import ProxyService
from cairn.proxy.upstream_calls import UpstreamCalls
from cairn.routing.rule import RoutedRequest
from cairn.types import Clock

__all__ = ["ProxyServer", "create_app"]

_OPEN_PATHS = frozenset({"/health", "/healthcheck", "/metrics", "/ping", "/version"})
_GENERATE_PATHS = (*HANDOVER_PATHS, "/v1/messages/count_tokens")
_GATED_PATHS = frozenset((*_GENERATE_PATHS, "/v1/models"))
_STORED_PATH = "/v1/responses/{response_id}"
_FORWARDED = (b"authorization", b"x-api-key", b"traceparent", b"tracestate", *SESSION_HEADERS)

logger = logging.getLogger(__name__)


# -- endpoints ---------------------------------------------------------------------------------------------------------


def _service(request: Request) -> ProxyService:
    service = request.app.state.service
    assert isinstance(service, ProxyService)
    return service


Service = Annotated[ProxyService, Depends(_service)]


def generate(path: str) -> Callable[[Request, Service], Coroutine[Any, Any, Response]]:
    """The endpoint that forwards requests to this path."""

    async def endpoint(request: Request, service: Service) -> Response:
        content, headers, arrival = await request.body(), _upstream_headers(request), service.clock.now()
        client_headers = request.scope["headers"]

        async def answer(client: ClientResponse) -> int:
            forwarder = _create_forwarder(service, path, content, headers, client_headers, arrival)
            try:
                async with service.gate.time_limit():
                    return await forwarder.run(client)
            except NoUpstream:
                raise make_error("no decode server is up: try again later", 503) from None
            except UpstreamError as error:
                if client.started:
                    raise make_error(f"the decode server failed in mid-answer: {error}", 502) from error
                raise make_error(f"no decode server could answer; the last one: {error}", 502) from error
            finally:
                service.metrics.record_forwarded(forwarder)

        def on_end(end: int | RequestError | ClientDisconnected, started: bool) -> None:
            service.metrics.requests.labels(_outcome(end, started)).inc()
            if isinstance(end, int) and end < 400:
                service.metrics.request_seconds.observe(service.clock.now() - arrival)

        return Relay(answer, on_end)

    return endpoint


def _create_forwarder(
    service: ProxyService, path: str, content: bytes, headers: Headers, client_headers: Headers, arrival: float
) -> RequestForwarder:
    """`headers`: what the servers get. Raises InvalidRequest."""
    request, options = parse_request(path, content), service.options
    # Counting computes nothing that could be cached or handed over.
    counts = path not in HANDOVER_PATHS
    prompt = RoutedRequest() if counts else routed_request(request.body or {}, request.digests, client_headers)
    prefill = UpstreamCalls(service, service.prefill, "POST", path, headers, prompt, options.prefill_timeout)
    return RequestForwarder(
        request,
        UpstreamCalls(service, service.decode, "POST", path, headers, prompt),
        prefill if service.prefill.upstreams and not counts else None,
        service.hints,
        service.response_owners,
        options.max_attempts,
        lambda: service.metrics.first_byte_seconds.observe(service.clock.now() - arrival),
    )


def _ask_decode(request: Request, service: ProxyService, path: str, stored: str = "") -> Response:
    """The answer of a decode server, the least loaded first; or of the one that has `stored` this response, else of the
    first that knows it."""
    pool, seconds, headers = service.decode, service.options.health_timeout, _upstream_headers(request)
    calls = UpstreamCalls(service, pool, request.method, path, headers, RoutedRequest(), seconds, bool(stored))
    asked, num_servers = ClientRequest(path, b"", stored=stored), len(pool.upstreams)

    async def answer(client: ClientResponse) -> int:
        forwarder = RequestForwarder(asked, calls, None, service.hints, service.response_owners, num_servers)
        try:
            return await forwarder.run(client)
        except (NoUpstream, UpstreamError) as error:
            raise make_error("no decode server can say: try again later", 503) from error

    return Relay(answer, lambda end, started: None)


def _outcome(end: int | RequestError | ClientDisconnected, started: bool) -> str:
    if isinstance(end, ClientDisconnected):
        return "gone"
    if isinstance(end, RequestError) and started:
        return "cut_off"
    status = end.status if isinstance(end, RequestError) else end
    if status == 504:
        return "late"
    return "answered" if status < 400 else "refused" if status < 500 else "failed"


def _upstream_headers(request: Request) -> Headers:
    """The headers that the servers get with a client's request."""
    headers = [(key, value) for key, value in request.scope["headers"] if key in _FORWARDED]
    headers += [(b"content-type", b"application/json"), (b"x-request-id", request.scope["cairn.request_id"].encode())]
    # The address alone: what the client says of itself, and of those before it, goes to nobody.
    address = get_client_address(request.scope)
    return [*headers, (b"x-forwarded-for", address.encode())] if address else headers


async def models(request: Request, service: Service) -> Response:
    return _ask_decode(request, service, "/v1/models")


async def stored_response(request: Request, service: Service, response_id: str) -> Response:
    ending = request.scope["path"].rpartition("/")[2]
    path = f"/v1/responses/{quote(response_id, safe='')}"
    path += f"/{ending}" if ending in ("cancel", "input_items") and ending != response_id else ""
    query = request.scope["query_string"].decode("latin-1")
    return _ask_decode(request, service, path + (f"?{query}" if query else ""), response_id)


async def health(service: Service) -> Response:
    """200 when a request sent now would have a decode server to go to, else 503 with the reason."""
    reason = "ok"
    if not service.healthy:
        reason = "the proxy is shutting down" if service.gate.closed else "no decode server is up"
    body = {"status": reason, "prefill_instances": service.prefill.num_up, "decode_instances": service.decode.num_up}
    return JSONResponse(body, 200 if service.healthy else 503)


async def version() -> dict[str, str]:
    return {"version": __version__}


async def metrics(service: Service) -> Response:
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


# -- the application ---------------------------------------------------------------------------------------------------


def create_app(service: ProxyService) -> FastAPI:
    """The application around one proxy's state. It asks the servers for their health once before it takes requests."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aclosing(service.client):
            await service.health.check_if_due()
            checking = asyncio.create_task(service.health.run())
            try:
                yield
            finally:
                checking.cancel()
                with suppress(asyncio.CancelledError):
                    await checking

    app = http_application(
        "cairn proxy",
        lifespan,
        gate=service.gate,
        gated_paths=_GATED_PATHS,
        api_keys=service.options.api_key,
        open_paths=_OPEN_PATHS,
        max_body_bytes=service.options.max_body_bytes,
        body_seconds=service.body_seconds,
        new_id=service.new_id,
    )
    app.state.service = service
    endpoints: tuple[tuple[str, Callable[..., Any], list[str]], ...] = (
        *((path, generate(path), ["POST"]) for path in _GENERATE_PATHS),
        (_STORED_PATH, stored_response, ["GET", "DELETE"]),
        (f"{_STORED_PATH}/cancel", stored_response, ["POST"]),
        (f"{_STORED_PATH}/input_items", stored_response, ["GET"]),
        ("/v1/models", models, ["GET"]),
        ("/health", health, ["GET"]),
        ("/healthcheck", health, ["GET"]),
        ("/ping", health, ["GET", "POST"]),
        ("/version", version, ["GET"]),
        ("/metrics", metrics, ["GET"]),
    )
    for path, endpoint, methods in endpoints:
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    return app


class ProxyServer(DrainingServer):
    """Serves one proxy over HTTP."""

    def __init__(self, options: ProxyOptions, clock: Clock | None = None, body_seconds: float = 60.0) -> None:
        """`body_seconds`: how long a client may take to send its request. Raises ConfigError naming the flag."""
        super().__init__(options.shutdown_timeout)
        self._options = options
        self._clock = clock
        self._body_seconds = body_seconds
        self._trusted = parse_trusted_proxies(options.forwarded_allow_ips)

    async def run(self, on_ready: Callable[[int], None] | None = None) -> int:
        """Serve until drained; returns 0. `on_ready` gets the port. Raises ConfigError when it cannot listen."""
        with create_server_socket(self._options.host, self._options.port) as listener:
            return await self._serve(listener, listener.getsockname()[1], on_ready)

    async def _serve(self, listener: socket.socket, port: int, on_ready: Callable[[int], None] | None) -> int:
        service = ProxyService(self._options, self._clock, body_seconds=self._body_seconds)
        server = create_web_server(
            create_app(service),
            forwarded_allow_ips=self._trusted,
            # the client's, the prefill server's, which is kept for a moment, and the decode server's
            descriptors_per_request=3,
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await wait_until_started(server, serving, listener)
            logger.info("proxy on %s", make_url("http", self._options.host, port))
            for pool in service.pools:
                logger.info("%s servers: %d of %d are up", pool.name, pool.num_up, len(pool.upstreams))
            if on_ready is not None:
                on_ready(port)
            await wait_first(serving, self._draining.wait())
            service.gate.close()
            await self._wait_drained(service.gate)
            service.gate.cut_short()
        finally:
            server.should_exit = True
            await serving
        return 0
