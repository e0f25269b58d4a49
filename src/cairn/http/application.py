"""What the applications of server and proxy share: the framework, error handlers and middleware."""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from cairn import __version__
from cairn.errors import RequestError
from cairn.http.error_responses import error_response, make_error
from cairn.http.middleware import ApiKey, BodyLimit, Gate, GateKeeper, RequestIds

ROOT_PATH = "/"
"""Where `HEAD` asks whether anybody is there, for which no key is needed."""


def http_application(
    title: str,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    *,
    gate: Gate,
    gated_paths: Set[str],
    api_keys: Sequence[str] | None,
    open_paths: Set[str],
    max_body_bytes: int,
    body_seconds: float,
    new_id: Callable[[], str],
    silent_paths: Set[str] = frozenset(),
    has_document: bool = True,
) -> FastAPI:
    """An application without routes, whose errors are vLLM's, behind four layers of middleware. `gated_paths`: those
    that count as open requests; `open_paths`: those that need no API key; `silent_paths`: those whose answers have an
    X-Request-Id only where the client sent one. `body_seconds`: for a client to send a
    request's body. `has_document`: whether /openapi.json is there."""
    # A redirect would be built from the Host header.
    plain: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    if not has_document:
        plain["openapi_url"] = None
    app = FastAPI(title=title, version=__version__, lifespan=lifespan, **plain)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, http_error)
    app.router.add_api_route(
        ROOT_PATH, _answer_head, methods=["HEAD"], include_in_schema=False, route_class_override=_HeadRoute
    )
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, seconds=body_seconds)
    app.add_middleware(GateKeeper, gate=gate, paths=gated_paths)
    if api_keys:
        app.add_middleware(ApiKey, api_keys=api_keys, open_paths={*open_paths, ROOT_PATH})
    app.add_middleware(RequestIds, new_id=new_id, silent_paths=silent_paths)
    return app


class _HeadRoute(APIRoute):
    """Nothing else is there: other methods find no path, instead of a path without them."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (match, child) if match == Match.FULL else (Match.NONE, {})


async def _answer_head() -> Response:
    """By this agents find out whether anybody is there."""
    return Response()


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope)


async def http_error(request: Request, error: Exception) -> Response:
    """For errors of the framework: a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    request_error = make_error(error.detail, error.status_code)
    request_error.type = HTTPStatus(error.status_code).phrase
    response = error_response(request_error, request.scope)
    response.headers.update(error.headers or {})
    return response
