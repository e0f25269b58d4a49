"""The endpoints for operators: models, health, load, version, limits, metrics, and emptying the cache."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from cairn import __version__
from cairn.engine.contract import EngineClient
from cairn.errors import EngineDead, InvalidRequest, Overloaded
from cairn.http.error_responses import make_error
from cairn.http.handover import RELEASE_PATH
from cairn.http.middleware import Gate
from cairn.server.dependencies import EngineDep, GateDep, LimitsDep, MetricsDep, ModelDep, OptionsDep, QueriesDep
from cairn.server.openai.engine_request import encode_release_params
from cairn.server.options import ServerOptions

DOCS_PATHS = frozenset({"/docs", "/redoc", "/openapi.json"})
"""What reading the documentation in a browser takes: it sends no key."""

_NO_ICON = "data:,"


def router(options: ServerOptions) -> APIRouter:
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
    routes.add_api_route(RELEASE_PATH, release_kv_transfer, methods=["POST"], response_model=None)
    if options.enable_tokenizer_info_endpoint:
        routes.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"], response_model=None)
    if options.enable_docs:
        routes.add_api_route("/docs", docs, methods=["GET"], response_model=None, include_in_schema=False)
        routes.add_api_route("/redoc", redoc, methods=["GET"], response_model=None, include_in_schema=False)
    return routes


async def tokenizer_info(engine: EngineDep) -> Response:
    return Response(msgspec.json.encode(engine.tokenizer.describe()), media_type="application/json")


async def docs(options: OptionsDep) -> Response:
    return get_swagger_ui_html(openapi_url=_document_path(options), title="cairn", swagger_favicon_url=_NO_ICON)


async def redoc(options: OptionsDep) -> Response:
    return get_redoc_html(
        openapi_url=_document_path(options), title="cairn", with_google_fonts=False, redoc_favicon_url=_NO_ICON
    )


def _document_path(options: ServerOptions) -> str:
    """As a browser asks for it."""
    return f"{options.root_path or ''}/openapi.json"


async def list_models(model: ModelDep) -> dict[str, Any]:
    return {"object": "list", "data": [model.card(name) for name in model.names]}


async def show_model(name: str, model: ModelDep) -> dict[str, Any]:
    model.check_name(name)
    return model.card(name)


async def health(engine: EngineDep, gate: GateDep) -> Response:
    """200 if a request sent now would be served, else 503 with the reason."""
    if _is_healthy(engine, gate):
        return Response(status_code=200)
    reason = f"the engine has ended: {engine.dead}" if engine.dead else "the server is shutting down"
    return JSONResponse({"status": reason}, 503)


async def ready(engine: EngineDep, gate: GateDep, queries: QueriesDep) -> Response:
    """As /health, and 503 as well while the engine does not answer."""
    if _is_healthy(engine, gate):
        try:
            await queries.fetch_stats()
        except (EngineDead, Overloaded) as error:
            return JSONResponse({"status": str(error)}, 503)
    return await health(engine, gate)


def _is_healthy(engine: EngineClient, gate: Gate) -> bool:
    return engine.dead is None and not gate.closed


async def load(gate: GateDep) -> dict[str, int]:
    """Open requests, waiting ones included."""
    return {"server_load": gate.num_open}


async def version() -> dict[str, str]:
    return {"version": __version__}


async def server_info(options: OptionsDep, limits: LimitsDep, engine: EngineDep, gate: GateDep) -> dict[str, Any]:
    """The engine's configuration and the limits of requests. No keys."""
    info = msgspec.to_builtins(engine.info)
    cache = info.pop("cache")
    return {
        "version": __version__,
        "model_name": options.model_name,
        "engine": {**info, **cache},
        "limits": {
            "max_open": gate.max_open,
            "max_body_bytes": options.max_body_bytes,
            **{name: getattr(limits, name) for name in ("head_seconds", "body_seconds", "stall_seconds")},
            "request_seconds": options.request_timeout,
            "images": limits.images.limit,
        },
    }


async def metrics(metrics: MetricsDep, queries: QueriesDep) -> Response:
    return Response(metrics.exposition(await queries.get_stats()), media_type=CONTENT_TYPE_LATEST)


async def reset_prefix_cache(
    queries: QueriesDep,
    reset_running_requests: Annotated[bool, Query()] = False,
    reset_external: Annotated[bool, Query()] = False,
) -> Response:
    """Empty the cache; 409, and nothing is dropped, while requests or other servers use pages.

    An engine that does not answer in time (503) may still do it later.
    """
    for name, value in (("reset_running_requests", reset_running_requests), ("reset_external", reset_external)):
        if value:
            raise InvalidRequest(f"{name} is not supported: leave it out", name)
    num_pages = await queries.reset_cache()
    if num_pages:
        raise make_error(f"{num_pages} pages are held by open requests: try again when they have ended", 409)
    return Response(status_code=200)


class ReleaseRequest(BaseModel):
    """POST /release_kv_transfer. `kv_transfer_params`: as a prefill server has answered them."""

    kv_transfer_params: dict[str, Any]


async def release_kv_transfer(body: ReleaseRequest, engine: EngineDep) -> Response:
    """Nobody is going to fetch this prompt: let go of it, unless somebody has begun to. Tried in the background, and
    not an error where there is nothing to let go of. Whoever has the parameters could fetch the prompt as well."""
    encoded = encode_release_params(body.kv_transfer_params, engine.info)
    if encoded is not None:
        engine.release_kv_transfer(encoded)
    return Response(status_code=200)
