"""The HTTP application: routes, middleware, error handling, and the health checks beside them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cairn import __version__
from cairn.errors import RequestError
from cairn.http.failures import error_response, failed
from cairn.http.middleware import ApiKey, BodyLimit, BugShield, GateKeeper, HeadLimit, RequestIds
from cairn.http.unread import UnreadBodies
from cairn.proxy import routes
from cairn.proxy.service import ProxyService

__all__ = ["create_app"]

_OPEN_PATHS = frozenset({"/health", "/healthcheck", "/metrics", "/ping", "/version"})
_GATED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models"})
_MAX_HEAD_BYTES = 1 << 15


def create_app(service: ProxyService) -> FastAPI:
    """The application around one proxy's state. It asks the servers for their health once before it takes requests."""
    options = service.options

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.client:
            await service.health.check_if_due()
            checking = asyncio.create_task(service.health.run())
            try:
                yield
            finally:
                checking.cancel()
                with suppress(asyncio.CancelledError):
                    await checking

    # A redirect would be built from the Host header.
    app = FastAPI(
        title="cairn proxy",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.include_router(routes.router())
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes, seconds=service.body_seconds)
    app.add_middleware(GateKeeper, gate=service, paths=_GATED_PATHS)
    if options.api_key:
        app.add_middleware(ApiKey, api_keys=options.api_key, open_paths=_OPEN_PATHS)
    app.add_middleware(BugShield)
    app.add_middleware(RequestIds, new_id=service.new_id)
    app.add_middleware(HeadLimit, max_bytes=_MAX_HEAD_BYTES)
    app.add_middleware(UnreadBodies)
    return app


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found_error", 405: "method_not_allowed"}.get(error.status_code, "invalid_request_error")
    response = error_response(failed(error.detail, error.status_code, code))
    response.headers.update(error.headers or {})
    return response
