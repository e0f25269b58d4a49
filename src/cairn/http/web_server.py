"""The listening socket, uvicorn on it, draining at shutdown, and the proxies whose X-Forwarded-For is believed."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import uvicorn

from cairn.errors import ConfigError
from cairn.http.connections import Connection, ConnectionDeadlines, ConnectionLimit
from cairn.http.middleware import Gate
from cairn.http.tls import TlsOptions
from cairn.setting_types import list_entries

_FLUSH_SECONDS = 5
_STARTED_POLL_SECONDS = 0.01
_MAX_CONNECTIONS = 8192
_MAX_DESCRIPTORS = 65536
_SPARE_DESCRIPTORS = 128
_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 32
"""Connections accepted before the ones above the limit are closed: fewer than the spare descriptors."""
_CIPHERS = "TLSv1"
"""uvicorn's default: what OpenSSL takes for TLS 1.2."""

_TRUSTED_VARIABLE = "FORWARDED_ALLOW_IPS"
_LOOPBACK = "127.0.0.1,::1"
_MAX_TRUSTED = 4096
_SHOWN = 80

logger = logging.getLogger(__name__)


class DrainingServer:
    """A server that can be drained. `shutdown_seconds`: what open requests have left then."""

    def __init__(self, shutdown_seconds: float) -> None:
        self._shutdown_seconds = shutdown_seconds
        self._draining = asyncio.Event()
        self._abandoned = asyncio.Event()

    def drain(self) -> None:
        """Take no new requests, let open ones finish, then end. Called again: end now. For the event loop's thread."""
        if self._draining.is_set():
            self._abandoned.set()
        self._draining.set()

    async def _wait_drained(self, gate: Gate, *ends: Awaitable[Any]) -> None:
        """Wait for the open requests, for `shutdown_seconds` at most, or until one of `ends` is done."""
        logger.info("draining: %d requests are open, they have %g s", gate.num_open, self._shutdown_seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shutdown_seconds):
                await wait_first(gate.wait_empty(), self._abandoned.wait(), *ends)
        if gate.num_open:
            logger.warning("%d requests are cut short", gate.num_open)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process by the signal instead of an exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def create_server_socket(host: str, port: int) -> socket.socket:
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


def create_web_server(
    app: Any,
    *,
    forwarded_allow_ips: Sequence[str],
    lifespan: Literal["on", "off"] = "on",
    deadlines: ConnectionDeadlines | None = None,
    descriptors_per_request: int = 1,
    tls: TlsOptions | None = None,
    log_level: str | None = None,
) -> uvicorn.Server:
    """A server for one ASGI application; it leaves the process's signals alone. `forwarded_allow_ips`: addresses and
    networks of the proxies whose X-Forwarded-For is believed. `lifespan`: whether the application gets ASGI's lifespan
    events. `descriptors_per_request`: open files that a request may take, its connection included; it bounds the
    number of connections. `tls`: for HTTPS. `log_level`: least severity that uvicorn logs; None: as everything."""
    limit = ConnectionLimit(_max_connections(descriptors_per_request))
    files: dict[str, Any] = {}
    if tls is not None:
        files = {f"ssl_{name}": value for name, value in asdict(tls).items()}
        files["ssl_ciphers"] = tls.ciphers or _CIPHERS
    config = uvicorn.Config(
        app,
        http=partial(Connection, deadlines=deadlines or ConnectionDeadlines(), limit=limit),  # type: ignore[arg-type]
        ws="none",
        proxy_headers=True,
        forwarded_allow_ips=trusted_hosts(forwarded_allow_ips),
        lifespan=lifespan,
        log_config=None,
        log_level=log_level,
        access_log=False,
        server_header=False,
        backlog=_ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        **files,
    )
    return _Uvicorn(config)


def trusted_hosts(names: Sequence[str]) -> list[str]:
    """Addresses and networks of trusted proxies as uvicorn has to be told them."""
    return [form for name in names for form in _address_forms(name)]


def _address_forms(name: str) -> list[str]:
    """An IPv4 network also as IPv6 sockets write it: uvicorn does not take the two for the same."""
    network = None if name == "*" else ipaddress.ip_network(name)
    if isinstance(network, ipaddress.IPv4Network):
        return [name, f"::ffff:{network.network_address}/{96 + network.prefixlen}"]
    return [name]


def raise_descriptor_limit() -> None:
    """To as many open files as the process may have: the usual 1024 are fewer than the requests that may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def _max_connections(descriptors_per_request: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, (soft - _SPARE_DESCRIPTORS) // descriptors_per_request))


async def wait_until_started(server: uvicorn.Server, serving: asyncio.Task[None], listener: socket.socket) -> None:
    """Wait until the server accepts connections on its `listener`, or has failed to."""
    while not server.started and not serving.done():
        await asyncio.sleep(_STARTED_POLL_SECONDS)
    if server.started:
        # uvicorn's `backlog` is both what the kernel queues and what is accepted in one go: here the first is larger.
        listener.listen(_BACKLOG)


async def wait_first(*waits: Awaitable[Any]) -> None:
    """Wait for any of these. Tasks are left as they are, coroutines are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        created = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
        for task in created:
            task.cancel()
        await asyncio.gather(*created, return_exceptions=True)


def parse_trusted_proxies(text: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The addresses and networks of --forwarded-allow-ips: `a,b`, `["a", "b"]`, or `*` alone for everybody. None: those
    of uvicorn's variable, where an empty text is nobody, else loopback. Raises ConfigError."""
    where = "--forwarded-allow-ips"
    if text is None:
        where, text = _TRUSTED_VARIABLE, environ.get(_TRUSTED_VARIABLE, _LOOPBACK)
        if not text.strip():
            return ()
    names = list_entries(text)
    if names is None:
        raise ConfigError(f"{where}: must be addresses and networks as a,b or a JSON list, not {text[:_SHOWN]!r}")
    if len(names) > _MAX_TRUSTED:
        raise ConfigError(f"{where}: {len(names)} entries are too many: at most {_MAX_TRUSTED} are taken")
    for name in names if names != ["*"] else ():
        try:
            ipaddress.ip_network(name)
        except ValueError:
            raise ConfigError(
                f"{where}: must hold addresses and networks like 10.0.0.5, 10.0.0.0/8 or fd00::/8, or be * alone, "
                f"not {name[:_SHOWN]!r}"
            ) from None
    return tuple(names)
