"""The side channel's sockets: where other servers claim pages, and where this one does.

    listener                 accepts connections of consumers; each has to prove the secret within a deadline
    a connection a consumer  accepted, and served until it is lost
    a connection a producer  made when a session begins

What unauthenticated peers can take is bounded: so many connections, the oldest of which gives way to a new one; so many
bytes and seconds each; and all connections together a quarter of the descriptors that the process may have.
"""

import asyncio
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
from cairn.types import Clock

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
    accepted by `listener`. Call `expire` now and then. `dropped` counts connections that ended before their peer was
    authenticated."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: TlsCredentials,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        limits: ChannelLimits | None = None,
    ) -> None:
        """`limits` None: as many connections as fit the process's descriptors."""
        self._credentials = credentials
        self._clock = clock
        self._event_loop = event_loop
        self._limits = limits or ChannelLimits.fitting(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        # the end of a connection's time: to prove the secret, or to stay idle
        self._until: dict[TlsStream, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_lookups = 0
        self._serve: Serve | None = None
        self._resume_at: float | None = None
        self.dropped = 0
        self._listener = listener

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Open connections, those of unauthenticated peers included."""
        return len(self._until)

    @property
    def is_idle(self) -> bool:
        """Whether `expire` has nothing to look at."""
        return not self._until and self._resume_at is None

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

    def expire(self) -> None:
        """Close the connections whose time is up."""
        now = self._clock.now()
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._event_loop.add_reader(self._listener, self._accept)
        for stream in [stream for stream, until in self._until.items() if until <= now]:
            is_known = stream.is_authenticated
            stream.close("nothing came by it for too long" if is_known else "no proof of the secret in time")

    def close(self) -> None:
        """Close all sockets; call it while the loop does not run."""
        self._event_loop.remove_reader(self._listener)
        for stream in list(self._until):
            stream.close("this server ends")
        for task in self._tasks:
            task.cancel()
        self._listener.close()

    def _accept(self) -> None:
        for num_accepted in range(_ACCEPTS_PER_TURN):
            try:
                accepted, address = self._listener.accept()
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
            task = self._event_loop.create_task(self._serve_accepted(stream, made, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve_accepted(self, stream: TlsStream, accepted: BoundedSocket, address: Address) -> None:
        with contextlib.suppress(ConnectionLost):
            await stream.open(accepted, address)
            self._make_room("consumer", self._limits.max_consumers, kept=stream)
            assert self._serve is not None
            await self._serve(stream)

    def _pause(self, error: OSError) -> None:
        """The process is out of descriptors: without a pause the listener would be ready all the time."""
        logger.warning("no connection can be accepted: %s", error.strerror)
        self._event_loop.remove_reader(self._listener)
        self._resume_at = self._clock.now() + _PAUSE_SECONDS
        for oldest in [stream for stream in self._until if _kind_of(stream) == "unauthenticated"][:1]:
            oldest.close("descriptors are needed")

    def _add(self, made: socket.socket, *, accepted: bool, seconds: float) -> TlsStream:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = self._credentials.server if accepted else self._credentials.client
        stream = TlsStream(context, self._event_loop, to_connect=not accepted, heard=self._heard, ended=self._ended)
        self._until[stream] = self._clock.now() + seconds
        return stream

    def _heard(self, stream: TlsStream) -> None:
        if stream in self._until and stream.is_authenticated:
            # The consumer's end closes first, so that it never sends on a connection that is just being closed.
            self._until[stream] = self._clock.now() + self._limits.idle_seconds * (1 if stream.to_connect else 2)

    def _ended(self, stream: TlsStream) -> None:
        del self._until[stream]
        self.dropped += _kind_of(stream) == "unauthenticated"

    def _make_room(self, kind: _Kind, limit: int, kept: TlsStream | None = None) -> None:
        """Close connections of this kind until one more fits: those that are idle for longest, or were accepted
        first."""
        same = [stream for stream in self._until if _kind_of(stream) == kind and stream is not kept]
        same.sort(key=lambda stream: self._until[stream])
        for stream in same[: max(0, len(same) + 1 - limit)]:
            stream.close("others needed its place")

    async def _resolve(self, host: str) -> str:
        """The address of a host, looked up in a thread: how long that takes is the system resolver's to say. Raises
        ConnectionLost."""
        if self._num_lookups >= _MAX_NAME_LOOKUPS:
            raise ConnectionLost(f"{_MAX_NAME_LOOKUPS} names of hosts are being looked up already")
        self._num_lookups += 1
        resolved: asyncio.Future[str | Exception] = self._event_loop.create_future()

        def settle(result: str | Exception) -> None:
            self._num_lookups -= 1
            if not resolved.done():
                resolved.set_result(result)

        def look_up() -> None:
            result: str | Exception
            try:
                entries = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
                result = str(entries[0][4][0])
            # UnicodeError: a label that is no host name's
            except (OSError, UnicodeError) as error:
                result = error
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                self._event_loop.call_soon_threadsafe(settle, result)

        threading.Thread(target=look_up, name="cairn-name-lookup", daemon=True).start()
        address = await resolved
        if not isinstance(address, str):
            raise ConnectionLost(f"its name cannot be resolved: {address}")
        return address


def _kind_of(stream: TlsStream) -> _Kind:
    if stream.to_connect:
        return "producer"
    return "consumer" if stream.is_authenticated else "unauthenticated"


def create_listener(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError that names the variables."""
    try:
        return _listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST {host}, VLLM_NIXL_SIDE_CHANNEL_PORT {port}: cannot be listened on: "
            f"{error}; choose another port"
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    numeric = _numeric(host)
    if numeric is None:
        addresses = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        numeric = str(addresses[0][4][0])
    listener = socket.socket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((numeric, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _numeric(host: str) -> str | None:
    """The address that a host is, or None when it has to be looked up."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return "127.0.0.1" if is_loopback(host) else None
