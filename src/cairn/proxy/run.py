"""One proxy from start to end: bind, serve, drain."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from cairn.http.forwarded import trusted_proxies
from cairn.http.listening import first_of, listen, until_started, web_server
from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from cairn.types import Clock

__all__ = ["ProxyServer"]

logger = logging.getLogger(__name__)


class ProxyServer:
    """Serves one proxy over HTTP. `drain` is for the event loop's own thread (signal handlers)."""

    def __init__(self, options: ProxyOptions, clock: Clock | None = None, body_seconds: float = 60.0) -> None:
        """`body_seconds`: how long a client may take to send its request. Raises ConfigError naming the flag."""
        self._options = options
        self._clock = clock
        self._body_seconds = body_seconds
        self._trusted = trusted_proxies(options.forwarded_allow_ips)
        self._draining = asyncio.Event()
        self._abandoned = asyncio.Event()

    def drain(self) -> None:
        """Take no new requests, let open ones finish, then end. Called a second time: end now."""
        if self._draining.is_set():
            self._abandoned.set()
        self._draining.set()

    async def run(self, on_ready: Callable[[int], None] | None = None) -> int:
        """Serve until drained; returns 0. `on_ready` gets the port. Raises ConfigError when it cannot listen."""
        listener = listen(self._options.host, self._options.port)
        try:
            return await self._serve(listener, listener.getsockname()[1], on_ready)
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket, port: int, on_ready: Callable[[int], None] | None) -> int:
        service = ProxyService(self._options, self._clock, body_seconds=self._body_seconds)
        server = web_server(
            create_app(service),
            forwarded_allow_ips=self._trusted,
            # the client's, the prefill server's, which is kept for a moment, and the decode server's
            descriptors_per_request=3,
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until_started(server, serving, listener)
            logger.info("proxy on http://%s:%d", self._options.host, port)
            for pool in service.pools:
                logger.info("%s servers: %d of %d are up", pool.name, pool.num_up, len(pool.upstreams))
            if on_ready is not None:
                on_ready(port)
            await first_of(serving, self._draining.wait())
            service.gate.closed = True
            await self._finish_open(service)
        finally:
            server.should_exit = True
            await serving
        return 0

    async def _finish_open(self, service: ProxyService) -> None:
        seconds = self._options.shutdown_timeout
        logger.info("draining: %d requests are open, they have %g s", service.gate.num_open, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await first_of(service.gate.wait_empty(), self._abandoned.wait())
        if service.gate.num_open:
            logger.warning("%d requests are cut short", service.gate.num_open)
            service.gate.cut_short()
