"""One server from start to end: bind, bring the engine up, serve, drain, and say how it ended."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from cairn.engine.contract import EngineClient
from cairn.errors import ConfigError
from cairn.server.app import create_app
from cairn.server.log_lines import start_lines
from cairn.server.options import ServerOptions
from cairn.server.service import Service

__all__ = ["HttpServer"]

_FLUSH_SECONDS = 5
_STARTED_POLL_SECONDS = 0.01
_MAX_CONNECTIONS = 8192

logger = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process by the signal instead of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one engine over HTTP. `drain` and `abandon` are for the event loop's own thread (signal handlers)."""

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._draining = asyncio.Event()
        self._abandoned = asyncio.Event()

    def drain(self) -> None:
        """Take no new requests, let open ones finish, then end. Called a second time: end now."""
        if self._draining.is_set():
            self._abandoned.set()
        self._draining.set()

    async def run(self, on_ready: Callable[[int], None] | None = None) -> int:
        """Serve until drained (0) or until the engine dies (1). `on_ready` gets the port.

        Raises ConfigError (ModelError) when it cannot start, EngineDead when the engine falls over while starting.
        """
        listener = _listen(self._options.host, self._options.port)
        port = listener.getsockname()[1]
        try:
            if not await self._start_engine():
                return 0
            for line in start_lines(self._engine.info):
                logger.info(line)
            return await self._serve(listener, port, on_ready)
        finally:
            listener.close()
            await self._engine.stop(0)

    async def _start_engine(self) -> bool:
        """False when it was told to end before the engine was up."""
        starting = asyncio.create_task(self._engine.start())
        await self._first_of(starting, self._draining.wait())
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return False

    async def _serve(self, listener: socket.socket, port: int, on_ready: Callable[[int], None] | None) -> int:
        service = Service(self._engine, self._options)
        server = _Uvicorn(_uvicorn_config(create_app(self._engine, self._options, service)))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(_STARTED_POLL_SECONDS)
            logger.info("serving %s on http://%s:%d", self._options.model_name, self._options.host, port)
            if on_ready is not None:
                on_ready(port)
            await self._first_of(serving, self._engine.wait_dead(), self._draining.wait())
            service.gate.close()
            if self._draining.is_set() and self._engine.dead is None:
                await self._finish_open(service)
            code = 1 if self._engine.dead is not None else 0
            if code:
                logger.error("the engine has ended: %s", self._engine.dead)
            await self._engine.stop(0)
        finally:
            server.should_exit = True
            await serving
        return code

    async def _finish_open(self, service: Service) -> None:
        seconds = self._options.shutdown_seconds
        logger.info("draining: %d requests are open, they have %g s", service.gate.num_open, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._first_of(service.gate.wait_empty(), self._engine.wait_dead(), self._abandoned.wait())
        if service.gate.num_open:
            logger.warning("%d requests were cut short", service.gate.num_open)

    @staticmethod
    async def _first_of(*waits: Awaitable[Any]) -> None:
        """Wait for any of these. Tasks are left as they are, coroutines are cancelled."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            own = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
            for task in own:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError naming the flags."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be used: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port} cannot be listened on: {error}; choose another port") from error
    return listener


def _uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
