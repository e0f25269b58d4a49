"""One proxy from start to end: bind, serve, drain."""

import asyncio
import logging
import socket
from collections.abc import Callable

from cairn.http.web_server import (
    DrainingServer,
    create_server_socket,
    create_web_server,
    parse_trusted_proxies,
    wait_first,
    wait_until_started,
)
from cairn.proxy.app import create_app
from cairn.proxy.options import ProxyOptions
from cairn.proxy.service import ProxyService
from cairn.types import Clock

__all__ = ["ProxyServer"]

logger = logging.getLogger(__name__)


class ProxyServer(DrainingServer):
    """Serves one proxy over HTTP."""

    def __init__(self, options: ProxyOptions, clock: Clock | None = None, body_seconds: float = 60.0) -> None:
        """`body_seconds`: how long a client may take to send its request. Raises ConfigError naming the flag."""
        super().__init__(options.shutdown_timeout)
        self._options = options
        self._clock = clock
        self._body_seconds = body_seconds
        self._trusted = parse_trusted_proxies(options.forwarded_allow_ips)

    async def run(self, on_ready: Callable[[int], None] | None = None) -> int:
        """Serve until drained; returns 0. `on_ready` gets the port. Raises ConfigError when it cannot listen."""
        listener = create_server_socket(self._options.host, self._options.port)
        try:
            return await self._serve(listener, listener.getsockname()[1], on_ready)
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket, port: int, on_ready: Callable[[int], None] | None) -> int:
        service = ProxyService(self._options, self._clock, body_seconds=self._body_seconds)
        server = create_web_server(
            create_app(service),
            forwarded_allow_ips=self._trusted,
            # the client's, the prefill server's, which is kept for a moment, and the decode server's
            descriptors_per_request=3,
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await wait_until_started(server, serving, listener)
            logger.info("proxy on http://%s:%d", self._options.host, port)
            for pool in service.pools:
                logger.info("%s servers: %d of %d are up", pool.name, pool.num_up, len(pool.upstreams))
            if on_ready is not None:
                on_ready(port)
            await wait_first(serving, self._draining.wait())
            service.gate.close()
            await self._finish_open(service.gate)
            service.gate.cut_short()
        finally:
            server.should_exit = True
            await serving
        return 0
