"""The side channel's sockets: where other servers claim pages, and where this one does.

    listener                 accepts connections of consumers; each has to prove the secret within a deadline
    a connection a consumer  accepted, and served until it is lost
    a connection a producer  made when a session begins

What unauthenticated peers can take is bounded: so many connections, the oldest of which gives way to a new one; so many
bytes and seconds each; and all connections together a quarter of the descriptors that the process may have.
"""

import asyncio
import concurrent.futures
import contextlib
import ipaddress
import logging
import resource
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cairn.engine.transfers.tls_stream import BoundedSocket, TlsStream
from cairn.errors import ConfigError
from cairn.transfer.credentials import TlsCredentials
from cairn.transfer.peers import Address, is_loopback
from cairn.transfer.stream import ConnectionLost

_BACKLOG = 1024
_ACCEPTS_PER_TURN = 32
_PAUSE_SECONDS = 0.5
_MAX_NAME_LOOKUPS = 16

logger = logging.getLogger(__name__)

_Kind: TypeAlias = Literal["unauthenticated", "consumer", "producer"]

Serve: TypeAlias = Callable[[TlsStream], Coroutine[Any, Any, None]]
"""Serves an authenticated consumer until its connection is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLimits:
    """Connections at a time: of unauthenticated peers (accepted, without a proof yet), of consumers, and to producers.
    `handshake_seconds`: how long one has to prove itself. `idle_seconds`: how long one to a producer is kept on
    which nothing comes; one of a consumer twice as long."""

    max_unauthenticated: int = 64
    max_consumers: int = 256
    max_producers: int = 256
    handshake_seconds: float = 5.0
    idle_seconds: float = 60.0

    @classmethod
    def fitting(cls, max_descriptors: int) -> "ChannelLimits":
        """At most a quarter of the descriptors that this process may have."""
        share = max_descriptors // 4
        return cls(
            max_unauthenticated=max(1, min(64, share // 4)),
            max_consumers=max(1, min(256, share * 3 // 8)),
            max_producers=max(1, min(256, share * 3 // 8)),
        )


class SideChannel:
    """Connections between servers that hold the same secret, by TLS over TCP, in `event_loop`; those of consumers are
    accepted by `listener`. `dropped` counts connections that ended before their peer was authenticated."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: TlsCredentials,
        event_loop: asyncio.AbstractEventLoop,
        limits: ChannelLimits | None = None,
    ) -> None:
        """`limits` None: as many connections as fit the process's descriptors."""
        self._credentials = credentials
        self._event_loop = event_loop
        self._limits = limits or ChannelLimits.fitting(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        # what ends a connection: it has not proved the secret in time, or is idle
        self._timers: dict[TlsStream, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lookups = threading.BoundedSemaphore(_MAX_NAME_LOOKUPS)
        self._serve: Serve | None = None
        self.dropped = 0
        self._listener = listener

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Open connections, those of unauthenticated peers included."""
        return len(self._timers)

    def listen(self, serve: Serve) -> None:
        """Accept consumers from now on."""
        self._serve = serve
        self._event_loop.add_reader(self._listener, self._accept)

    async def connect(self, address: Address) -> TlsStream:
        """A connection to a producer that has proved the secret. The caller has made sure that its host may be
        connected to, and has a deadline. Raises ConnectionLost."""
        numeric = _numeric(address[0]) or await self._resolve(address[0])
        self._make_room("producer", self._limits.max_producers)
        try:
            made = BoundedSocket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionLost(f"it cannot be connected to: {error.strerror}") from error
        # Twice the time that a session waits for its answer: it is the session that notices a silent peer.
        stream = self._add(made, accepted=False, seconds=2 * self._limits.handshake_seconds)
        await stream.open(made, (numeric, address[1]))
        return stream

    def close(self) -> None:
        """Close all sockets; call it while the loop does not run."""
        self._event_loop.remove_reader(self._listener)
        for stream in list(self._timers):
            stream.close("this server ends")
        for task in self._tasks:
            task.cancel()
        self._listener.close()

    def _accept(self) -> None:
        for num_accepted in range(_ACCEPTS_PER_TURN):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Linux looks for a free descriptor first, so only the first try says that somebody waits for one.
                if num_accepted == 0:
                    self._pause(error)
                return
            self._make_room("unauthenticated", self._limits.max_unauthenticated)
            made = BoundedSocket(fileno=accepted.detach())
            stream = self._add(made, accepted=True, seconds=self._limits.handshake_seconds)
            task = self._event_loop.create_task(self._serve_accepted(stream, made))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve_accepted(self, stream: TlsStream, accepted: BoundedSocket) -> None:
        with contextlib.suppress(ConnectionLost):
            await stream.open(accepted)
            self._make_room("consumer", self._limits.max_consumers, kept=stream)
            assert self._serve is not None
            await self._serve(stream)

    def _pause(self, error: OSError) -> None:
        """The process is out of descriptors: without a pause the listener would be ready all the time."""
        logger.warning("no connection can be accepted: %s", error.strerror)
        self._event_loop.remove_reader(self._listener)
        self._event_loop.call_later(_PAUSE_SECONDS, self._resume)
        for oldest in [stream for stream in self._timers if _kind_of(stream) == "unauthenticated"][:1]:
            oldest.close("descriptors are needed")

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._event_loop.add_reader(self._listener, self._accept)

    def _add(self, made: socket.socket, *, accepted: bool, seconds: float) -> TlsStream:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = self._credentials.server if accepted else self._credentials.client
        stream = TlsStream(context, self._event_loop, to_connect=not accepted, heard=self._heard, ended=self._ended)
        self._end_after(stream, seconds, "no proof of the secret in time")
        return stream

    def _end_after(self, stream: TlsStream, seconds: float, reason: str) -> None:
        if stream in self._timers:
            self._timers[stream].cancel()
        self._timers[stream] = self._event_loop.call_later(seconds, stream.close, reason)

    def _heard(self, stream: TlsStream) -> None:
        # a frame whose last bytes came just before the end is taken after it
        if stream.lost is None:
            # The consumer's end closes first, so that it never sends on a connection that is just being closed.
            seconds = self._limits.idle_seconds * (1 if stream.to_connect else 2)
            self._end_after(stream, seconds, "nothing came by it for too long")

    def _ended(self, stream: TlsStream) -> None:
        self._timers.pop(stream).cancel()
        self.dropped += _kind_of(stream) == "unauthenticated"

    def _make_room(self, kind: _Kind, limit: int, kept: TlsStream | None = None) -> None:
        """Close connections of this kind until one more fits: those that are idle for longest, or were accepted
        first."""
        same = [stream for stream in self._timers if _kind_of(stream) == kind and stream is not kept]
        same.sort(key=lambda stream: self._timers[stream].when())
        for stream in same[: max(0, len(same) + 1 - limit)]:
            stream.close("others needed its place")

    async def _resolve(self, host: str) -> str:
        """The address of a host, looked up in a thread: how long that takes is the system resolver's to say. Raises
        ConnectionLost."""
        if not self._lookups.acquire(blocking=False):
            raise ConnectionLost(f"{_MAX_NAME_LOOKUPS} names of hosts are being looked up already")
        resolved: concurrent.futures.Future[str] = concurrent.futures.Future()
        # whoever waits may give up, the thread does not
        resolved.set_running_or_notify_cancel()

        def look_up() -> None:
            try:
                entries = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
                resolved.set_result(str(entries[0][4][0]))
            # UnicodeError: a label that is no host name's
            except (OSError, UnicodeError) as error:
                resolved.set_exception(error)
            finally:
                self._lookups.release()

        threading.Thread(target=look_up, name="cairn-name-lookup", daemon=True).start()
        try:
            return await asyncio.wrap_future(resolved)
        except (OSError, UnicodeError) as error:
            raise ConnectionLost(f"its name cannot be resolved: {error}") from error


def _kind_of(stream: TlsStream) -> _Kind:
    if stream.to_connect:
        return "producer"
    return "consumer" if stream.is_authenticated else "unauthenticated"


def create_listener(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError that names the variables."""
    try:
        numeric = _numeric(host)
        if numeric is None:
            addresses = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
            numeric = str(addresses[0][4][0])
        family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
        listener = socket.create_server((numeric, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST {host}, VLLM_NIXL_SIDE_CHANNEL_PORT {port}: cannot be listened on: "
            f"{error}; choose another port"
        ) from error
    listener.setblocking(False)
    return listener


def _numeric(host: str) -> str | None:
    """The address that a host is, or None when it has to be looked up."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return "127.0.0.1" if is_loopback(host) else None
