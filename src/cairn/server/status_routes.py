"""The endpoints for operators: models, health, load, version, limits, metrics, and emptying the cache."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cairn import __version__
from cairn.errors import EngineDead, InvalidRequest, Overloaded
from cairn.http.error_responses import make_error
from cairn.server.prompts import check_model
from cairn.server.routes import ServiceDep
from cairn.server.service import Service


def router() -> APIRouter:
    routes = APIRouter()
    routes.add_api_route("/v1/models", list_models, methods=["GET"], response_model=None)
    routes.add_api_route("/v1/models/{name:path}", show_model, methods=["GET"], response_model=None)
    routes.add_api_route("/health", health, methods=["GET"], response_model=None)
    routes.add_api_route("/ping", health, methods=["GET"], response_model=None, name="ping")
    routes.add_api_route("/ping", health, methods=["POST"], response_model=None, name="post_ping")
    routes.add_api_route("/ready", ready, methods=["GET"], response_model=None)
    routes.add_api_route("/load", load, methods=["GET"], response_model=None)
    routes.add_api_route("/version", version, methods=["GET"], response_model=None)
    routes.add_api_route("/server_info", server_info, methods=["GET"], response_model=None)
    routes.add_api_route("/metrics", metrics, methods=["GET"], response_model=None)
    routes.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"], response_model=None)
    return routes


async def list_models(service: ServiceDep) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(service)]}


async def show_model(name: str, service: ServiceDep) -> dict[str, Any]:
    check_model(service, name)
    return _model_card(service)


async def health(service: ServiceDep) -> Response:
    """200 if a request sent now would be served, else 503 with the reason."""
    if service.healthy:
        return Response(status_code=200)
    reason = f"the engine has ended: {service.engine.dead}" if service.engine.dead else "the server is shutting down"
    return JSONResponse({"status": reason}, 503)


async def ready(service: ServiceDep) -> Response:
    """As /health, and 503 as well while the engine does not answer."""
    if service.healthy:
        try:
            await service.stats_queries.run(service.engine.stats)
        except (EngineDead, Overloaded) as error:
            return JSONResponse({"status": str(error)}, 503)
    return await health(service)


async def load(service: ServiceDep) -> dict[str, int]:
    """Open requests, waiting ones included."""
    return {"server_load": service.gate.num_open}


async def version(service: ServiceDep) -> dict[str, str]:
    return {"version": __version__}


async def server_info(service: ServiceDep) -> dict[str, Any]:
    """The engine's configuration and the limits of requests. No keys."""
    options, limits = service.options, service.limits
    engine = msgspec.to_builtins(service.engine.info)
    cache = engine.pop("cache")
    return {
        "version": __version__,
        "model_name": options.model_name,
        "engine": {**engine, **cache},
        "limits": {
            "max_open": service.gate.max_open,
            "max_body_bytes": options.max_body_bytes,
            **{name: getattr(limits, name) for name in ("head_seconds", "body_seconds", "stall_seconds")},
            "request_seconds": options.request_timeout,
            "images": limits.images.limit,
        },
    }


async def metrics(service: ServiceDep) -> Response:
    return Response(service.metrics.exposition(await service.get_stats()), media_type=CONTENT_TYPE_LATEST)


async def reset_prefix_cache(
    service: ServiceDep,
    reset_running_requests: Annotated[bool, Query()] = False,
    reset_external: Annotated[bool, Query()] = False,
) -> Response:
    """Empty the cache; 409, and nothing is dropped, while requests or other servers use pages.

    An engine that does not answer in time (503) may still do it later.
    """
    for name, value in (("reset_running_requests", reset_running_requests), ("reset_external", reset_external)):
        if value:
            raise InvalidRequest(f"{name} is not supported: leave it out", name)
    num_pages = await service.reset_queries.run(service.engine.reset_cache)
    if num_pages:
        raise make_error(f"{num_pages} pages are held by open requests: try again when they have ended", 409)
    return Response(status_code=200)


def _model_card(service: Service) -> dict[str, Any]:
    info, name = service.engine.info, service.options.model_name
    named = {"id": name, "object": "model", "created": service.started, "owned_by": "cairn"}
    return {**named, "root": info.model, "parent": None, "max_model_len": info.max_model_len}
