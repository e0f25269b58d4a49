"""One proxy from start to end: bind, serve, drain."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from cairn.errors import ConfigError
from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from cairn.types import Clock

__all__ = ["ProxyServer"]

_FLUSH_SECONDS = 5
_STARTED_POLL_SECONDS = 0.01
_MAX_CONNECTIONS = 8192

logger = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process by the signal instead of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ProxyServer:
    """Serves one proxy over HTTP. `drain` is for the event loop's own thread (signal handlers)."""

    def __init__(self, options: ProxyOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock
        self._draining = asyncio.Event()
        self._abandoned = asyncio.Event()

    def drain(self) -> None:
        """Take no new requests, let open ones finish, then end. Called a second time: end now."""
        if self._draining.is_set():
            self._abandoned.set()
        self._draining.set()

    async def run(self, on_ready: Callable[[int], None] | None = None) -> int:
        """Serve until drained; returns 0. `on_ready` gets the port. Raises ConfigError when it cannot listen."""
        listener = _listen(self._options.host, self._options.port)
        try:
            return await self._serve(listener, listener.getsockname()[1], on_ready)
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket, port: int, on_ready: Callable[[int], None] | None) -> int:
        service = ProxyService(self._options, self._clock)
        server = _Uvicorn(_uvicorn_config(create_app(service)))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(_STARTED_POLL_SECONDS)
            logger.info("proxy on http://%s:%d", self._options.host, port)
            for pool in service.pools:
                logger.info("%s servers: %d of %d are up", pool.name, pool.num_up, len(pool.upstreams))
            if on_ready is not None:
                on_ready(port)
            await _first_of(serving, self._draining.wait())
            service.gate.closed = True
            await self._finish_open(service)
        finally:
            server.should_exit = True
            await serving
        return 0

    async def _finish_open(self, service: ProxyService) -> None:
        seconds = self._options.shutdown_seconds
        logger.info("draining: %d requests are open, they have %g s", service.gate.num_open, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _first_of(service.gate.wait_empty(), self._abandoned.wait())
        if service.gate.num_open:
            logger.warning("%d requests are cut short", service.gate.num_open)
            service.gate.cut_short()


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
