"""The endpoints that only tell: models, health, version, metrics."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from cairn.errors import NotFound
from cairn.server.metrics import CONTENT_TYPE_LATEST
from cairn.server.routes import ServiceOfApp
from cairn.server.service import Service

__all__ = ["router"]


def router() -> APIRouter:
    routes = APIRouter()
    routes.add_api_route("/v1/models", list_models, methods=["GET"], response_model=None)
    routes.add_api_route("/v1/models/{name:path}", show_model, methods=["GET"], response_model=None)
    routes.add_api_route("/health", health, methods=["GET"], response_model=None)
    routes.add_api_route("/ping", health, methods=["GET", "POST"], response_model=None)
    routes.add_api_route("/version", version, methods=["GET"], response_model=None)
    routes.add_api_route("/metrics", metrics, methods=["GET"], response_model=None)
    return routes


async def list_models(service: ServiceOfApp) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(service)]}


async def show_model(name: str, service: ServiceOfApp) -> dict[str, Any]:
    card = _model_card(service)
    if name != card["id"]:
        raise NotFound(f"the model {name!r} is not served here; {card['id']!r} is", "model")
    return card


async def health(service: ServiceOfApp) -> Response:
    """200 when a request sent now would be answered, else 503 with the reason."""
    if service.healthy:
        return Response(status_code=200)
    reason = f"the engine has ended: {service.engine.dead}" if service.engine.dead else "the server is shutting down"
    return JSONResponse({"status": reason}, 503)


async def version(service: ServiceOfApp) -> dict[str, str]:
    return {"version": service.options.version}


async def metrics(service: ServiceOfApp) -> Response:
    return Response(service.metrics.exposition(await service.stats()), media_type=CONTENT_TYPE_LATEST)


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.options.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "cairn",
        "root": service.engine.info.model,
        "parent": None,
        "max_model_len": service.engine.info.max_model_len,
    }
