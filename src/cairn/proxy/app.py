"""The HTTP application: routes, and the health checks beside them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI

from cairn.http.application import http_application
from cairn.proxy import routes
from cairn.proxy.service import ProxyService

__all__ = ["create_app"]

_OPEN_PATHS = frozenset({"/health", "/healthcheck", "/metrics", "/ping", "/version"})
_GATED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models"})


def create_app(service: ProxyService) -> FastAPI:
    """The application around one proxy's state. It asks the servers for their health once before it takes requests."""

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
    app.include_router(routes.router())
    return app
