"""The HTTP application: routes, middleware and error handling around one engine."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache, partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from cairn.http.application import http_application
from cairn.http.middleware import RootPath
from cairn.server import cache_routes, status_routes
from cairn.server.anthropic.routes import MessagesEndpoints
from cairn.server.cache_routes import CacheViews
from cairn.server.error_handlers import install_error_handlers
from cairn.server.openai.routes import OpenAIEndpoints
from cairn.server.openai_responses.routes import ResponsesEndpoints
from cairn.server.openapi import build_openapi_document
from cairn.server.operator_queries import OperatorQueries
from cairn.server.options import CorsOptions, ServerOptions
from cairn.server.service import Service
from cairn.server.stat_logger import SecondSightingsLogger, ThroughputLogger
from cairn.server.status_routes import DOCS_PATHS
from cairn.setting_types import list_entries
from cairn.types import Clock

_PROBED_PATHS = frozenset({"/health", "/load", "/metrics", "/ping", "/ready", "/version"})
# The page contains no data: it fetches what it shows with the key that is typed into it.
_OPEN_PATHS = frozenset({"/cache/ui", *_PROBED_PATHS})
_GATED_PATHS = frozenset(
    (
        *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses", "/invocations", "/tokenize", "/detokenize"),
    )
)

logger = logging.getLogger(__name__)


def find_open_paths(options: ServerOptions) -> frozenset[str]:
    """Paths that need no API key."""
    return _OPEN_PATHS | DOCS_PATHS if options.enable_docs else _OPEN_PATHS


def create_app(service: Service) -> FastAPI:
    """The application around an engine that has been started. The caller stops the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        reporting: asyncio.Task[None] | None = None
        if not options.disable_log_stats:
            report = _report(service.queries, service.stamps.clock, service.limits.log_seconds)
            reporting = asyncio.create_task(report)
        try:
            yield
        finally:
            if reporting is not None:
                reporting.cancel()
                with suppress(asyncio.CancelledError):
                    await reporting
            await service.aclose()

    options, open_paths = service.options, find_open_paths(service.options)
    app = http_application(
        "cairn",
        lifespan,
        gate=service.gate,
        gated_paths=_GATED_PATHS,
        api_keys=options.api_key,
        open_paths=open_paths,
        max_body_bytes=options.max_body_bytes,
        body_seconds=service.limits.body_seconds,
        new_id=service.stamps.new_id,
        silent_paths=frozenset() if options.enable_request_id_headers else _PROBED_PATHS,
        has_document=not options.disable_fastapi_docs,
    )
    app.state.service = service
    answers, renderer, rules = service.answers, service.renderer, service.translation
    app.include_router(OpenAIEndpoints(answers, service.queries, renderer, options).router())
    app.include_router(MessagesEndpoints(answers, renderer, rules, options).router())
    app.include_router(ResponsesEndpoints(answers, service.responses, service.background, rules, options).router())
    app.include_router(status_routes.router(options))
    views = CacheViews(service.engine, service.queries.views, options.model_name, service.stamps.clock)
    app.include_router(cache_routes.router(views))
    install_error_handlers(app)
    app.openapi = cache(partial(build_openapi_document, app, options, service.engine.info, _GATED_PATHS, open_paths))  # type: ignore[method-assign]
    if options.root_path is not None:
        app.add_middleware(RootPath, root=options.root_path)
    _allow_origins(app, options)
    return app


def _allow_origins(app: FastAPI, options: CorsOptions) -> None:
    if options.allowed_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list_entries(options.allowed_origins) or (),
            allow_methods=list_entries(options.allowed_methods) or (),
            allow_headers=list_entries(options.allowed_headers) or (),
            allow_credentials=options.allow_credentials,
        )


async def _report(queries: OperatorQueries, clock: Clock, seconds: float) -> None:
    """Log throughput and second sightings, every so many `seconds` until cancelled."""
    now = clock.now()
    lines = (ThroughputLogger(now), SecondSightingsLogger(now))
    while True:
        await asyncio.sleep(seconds)
        stats, now = await queries.get_stats(), clock.now()
        for line in lines:
            if (text := line.update(stats, now)) is not None:
                logger.info(text)
