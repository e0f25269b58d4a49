"""The proxy's endpoints."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cairn import __version__
from cairn.errors import RequestError
from cairn.http.clients import get_client_address
from cairn.http.error_responses import ClientDisconnected, make_error
from cairn.proxy.forward import Forwarding, GeneratePath, forwarded_request
from cairn.proxy.pool import Upstream
from cairn.proxy.relay import ClientSide, Relay
from cairn.proxy.service import ProxyService
from cairn.proxy.upstream import CallFailed, Headers

_FORWARDED = (b"authorization", b"traceparent", b"tracestate")
_MAX_MODELS_BYTES = 1 << 20


def service_of(request: Request) -> ProxyService:
    service = request.app.state.service
    assert isinstance(service, ProxyService)
    return service


ServiceOfApp = Annotated[ProxyService, Depends(service_of)]


def router() -> APIRouter:
    routes = APIRouter()
    routes.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)
    routes.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"], response_model=None)
    routes.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    routes.add_api_route("/health", health, methods=["GET"], response_model=None)
    routes.add_api_route("/healthcheck", health, methods=["GET"], response_model=None)
    routes.add_api_route("/ping", health, methods=["GET", "POST"], response_model=None)
    routes.add_api_route("/version", version, methods=["GET"], response_model=None)
    routes.add_api_route("/metrics", metrics, methods=["GET"], response_model=None)
    return routes


async def completions(request: Request, service: ServiceOfApp) -> Response:
    return _relay(request, service, await request.body(), "/v1/completions")


async def chat_completions(request: Request, service: ServiceOfApp) -> Response:
    return _relay(request, service, await request.body(), "/v1/chat/completions")


def _relay(request: Request, service: ProxyService, content: bytes, path: GeneratePath) -> Response:
    arrived = service.clock.now()

    async def work(client: ClientSide) -> int:
        async with service.gate.limited():
            return await Forwarding(service, forwarded_request(service, path, content, _headers(request)), client).run()

    def ended(how: int | RequestError | ClientDisconnected, started: bool) -> None:
        service.metrics.requests.labels(_outcome(how, started)).inc()
        if isinstance(how, int) and how < 400:
            service.metrics.request_seconds.observe(service.clock.now() - arrived)

    return Relay(work, ended)


def _outcome(how: int | RequestError | ClientDisconnected, started: bool) -> str:
    if isinstance(how, ClientDisconnected):
        return "gone"
    if isinstance(how, RequestError) and started:
        return "cut_off"
    status = how.status if isinstance(how, RequestError) else how
    if status == 504:
        return "late"
    return "answered" if status < 400 else "refused" if status < 500 else "failed"


def _headers(request: Request) -> Headers:
    """What the servers get to see of the client's headers."""
    kept = [(key, value) for key, value in request.scope["headers"] if key in _FORWARDED]
    own = [(b"content-type", b"application/json"), (b"x-request-id", request.scope["cairn.request_id"].encode())]
    # The address alone: what the client says of itself, and of those before it, goes to nobody.
    address = get_client_address(request.scope)
    return [*kept, *own, (b"x-forwarded-for", address.encode())] if address else [*kept, *own]


async def models(request: Request, service: ServiceOfApp) -> Response:
    """What one of the decode servers says, the least busy first."""
    tried: list[Upstream] = []
    while (upstream := service.decode.least_busy(tried)) is not None:
        tried.append(upstream)
        url, seconds = f"{upstream.url}/v1/models", service.options.health_timeout
        try:
            reply = await service.client.whole("GET", url, b"", _headers(request), seconds, _MAX_MODELS_BYTES)
        except CallFailed as error:
            service.failed(service.decode, upstream, error)
            continue
        if reply.status < 500:
            headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in reply.headers}
            return Response(reply.content, reply.status, headers)
    raise make_error("no decode server can say: try again later", 503, "service_unavailable")


async def health(service: ServiceOfApp) -> Response:
    """200 when a request sent now would have a decode server to go to, else 503 with the reason."""
    reason = "ok"
    if not service.healthy:
        reason = "the proxy is shutting down" if service.gate.closed else "no decode server is up"
    body = {"status": reason, "prefill_instances": service.prefill.num_up, "decode_instances": service.decode.num_up}
    return JSONResponse(body, 200 if service.healthy else 503)


async def version(service: ServiceOfApp) -> dict[str, str]:
    return {"version": __version__}


async def metrics(service: ServiceOfApp) -> Response:
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
