"""One server from start to end: bind, start the engine, serve, drain, and an exit code."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cairn.addresses import make_url
from cairn.engine.contract import EngineClient, TemplateValue
from cairn.errors import ConfigError, Overloaded
from cairn.http.connections import ConnectionDeadlines
from cairn.http.error_responses import error_response
from cairn.http.tls import TlsOptions, check_tls
from cairn.http.web_server import (
    DrainingServer,
    create_server_socket,
    create_web_server,
    parse_trusted_proxies,
    wait_first,
    wait_until_started,
)
from cairn.server.app import create_app
from cairn.server.images import MediaConnector
from cairn.server.options import CertificateOptions, ImageOptions, ServerLimits, ServerOptions
from cairn.server.service import Service
from cairn.server.stat_logger import format_startup_lines

_PROBES = frozenset({"/health", "/ping", "/ready"})

logger = logging.getLogger(__name__)


class HttpServer(DrainingServer):
    """Serves one engine over HTTP."""

    def __init__(
        self,
        engine: EngineClient,
        options: ServerOptions,
        limits: ServerLimits | None = None,
        images: Callable[[ImageOptions], MediaConnector] = MediaConnector,
        default_sampling: Mapping[str, float] = MappingProxyType({}),
        default_template_kwargs: Mapping[str, TemplateValue] = MappingProxyType({}),
        secret: bytes | None = None,
    ) -> None:
        """`images`: makes the connector for images. `default_sampling`, `default_template_kwargs`, `secret`: see
        `Service`.
        Raises ConfigError naming the flag."""
        super().__init__(options.shutdown_timeout)
        self._engine = engine
        self._images = images
        self._options = options
        self._limits = limits or ServerLimits()
        self._default_sampling = default_sampling
        self._default_template_kwargs = default_template_kwargs
        self._secret = secret
        self._tls = tls_options(options)
        check_tls(self._tls)
        self._trusted = parse_trusted_proxies(options.forwarded_allow_ips)

    async def run(self, on_ready: Callable[[int], None] | None = None) -> int:
        """Serve until drained (0) or until the engine dies (1). `on_ready` gets the port.

        Raises ConfigError (ModelError) when it cannot start, EngineDead when the engine falls over while starting.
        """
        listener = create_server_socket(self._options.host, self._options.port)
        served = _ReplaceableApp()
        deadlines = ConnectionDeadlines(head=self._limits.head_seconds, stall=self._limits.stall_seconds)
        server = create_web_server(
            served,
            forwarded_allow_ips=self._trusted,
            lifespan="off",
            deadlines=deadlines,
            tls=self._tls,
            log_level=self._options.uvicorn_log_level,
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await wait_until_started(server, serving, listener)
            if not await self._start_engine():
                return 0
            for line in format_startup_lines(self._engine.info):
                logger.info(line)
            return await self._serve(served, server, serving, on_ready)
        finally:
            server.should_exit = True
            await serving
            listener.close()
            await self._engine.stop(0)

    async def _start_engine(self) -> bool:
        """False if the server was drained before the engine was up."""
        starting = asyncio.create_task(self._engine.start())
        await wait_first(starting, self._draining.wait())
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return False

    async def _serve(
        self,
        served: "_ReplaceableApp",
        server: uvicorn.Server,
        serving: "asyncio.Task[None]",
        on_ready: Callable[[int], None] | None,
    ) -> int:
        port = server.servers[0].sockets[0].getsockname()[1]
        connector = self._images(self._limits.images)
        service = Service(
            self._engine,
            self._options,
            self._limits,
            images=connector,
            default_sampling=self._default_sampling,
            default_template_kwargs=self._default_template_kwargs,
            secret=self._secret,
        )
        app = create_app(service)
        async with app.router.lifespan_context(app):
            served.replace(app)
            url = make_url("http" if self._tls is None else "https", self._options.host, port)
            logger.info("serving %s on %s", ", ".join(self._options.model_names), url)
            if on_ready is not None:
                on_ready(port)
            await wait_first(serving, self._engine.wait_dead(), self._draining.wait())
            service.gate.close()
            if self._draining.is_set() and self._engine.dead is None:
                await self._wait_drained(service.gate, self._engine.wait_dead())
            code = 1 if self._engine.dead is not None else 0
            if code:
                logger.error("the engine has ended: %s", self._engine.dead)
            await self._engine.stop(0)
            server.should_exit = True
            await serving
            return code


def tls_options(options: CertificateOptions) -> TlsOptions | None:
    """None for plain HTTP. Raises ConfigError for files that wait for another one."""
    if options.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile, the server's own certificate")
        return None
    return TlsOptions(
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        ca_certs=options.ssl_ca_certs,
        cert_reqs=options.ssl_cert_reqs,
        ciphers=options.ssl_ciphers,
    )


class _ReplaceableApp:
    """An application that can be replaced: at first one that answers 503 while the model is loaded."""

    def __init__(self) -> None:
        self._app: ASGIApp = _starting

    def replace(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    text = "the server is starting: the model is being loaded"
    response: Response = error_response(Overloaded(f"{text}; try again later"))
    if scope["path"] in _PROBES:
        response = JSONResponse({"status": text}, 503)
    await response(scope, receive, send)
