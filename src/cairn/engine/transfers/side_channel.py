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

from cairn.errors import ConfigError
from cairn.transfer.credentials import TlsCredentials
from cairn.transfer.peers import Address, is_loopback
from cairn.transfer.stream import BoundedSocket, ConnectionLost, TlsStream

_BACKLOG = 1024
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
        self._listener = listener
        self._credentials = credentials
        self._event_loop = event_loop
        self._limits = limits or ChannelLimits.fitting(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._streams: dict[TlsStream, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lookups = threading.BoundedSemaphore(_MAX_NAME_LOOKUPS)
        self._serve: Serve | None = None
        self.dropped = 0

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def listen(self, serve: Serve) -> None:
        """Accept consumers from now on."""
        self._serve = serve
        self._event_loop.add_reader(self._listener, self._accept)

    async def connect(self, address: Address) -> TlsStream:
        """A connection to a producer that has proved the secret. The caller has made sure that its host may be
        connected to, and has a deadline. Raises ConnectionLost."""
        numeric = _numeric(address[0]) or await self._resolve(address[0])
        self._keep("producer", self._limits.max_producers - 1)
        try:
            made = BoundedSocket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionLost(f"it cannot be connected to: {error.strerror}") from error
        stream = self._add(made, to_connect=True)
        await stream.open(self._limits.handshake_seconds, (numeric, address[1]))
        return stream

    def close(self) -> None:
        """Close all sockets."""
        self._event_loop.remove_reader(self._listener)
        for stream in list(self._streams):
            stream.close("this server ends")
        for task in self._tasks:
            task.cancel()
        self._listener.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # The process is out of descriptors: without a pause the listener would be ready all the time.
            logger.warning("no connection can be accepted: %s", error.strerror)
            self._event_loop.remove_reader(self._listener)
            self._event_loop.call_later(_PAUSE_SECONDS, self._event_loop.add_reader, self._listener, self._accept)
            for oldest in self._of_kind("unauthenticated")[:1]:
                oldest.close("descriptors are needed")
            return
        self._keep("unauthenticated", self._limits.max_unauthenticated - 1)
        stream = self._add(BoundedSocket(fileno=accepted.detach()), to_connect=False)
        task = self._event_loop.create_task(self._serve_accepted(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_accepted(self, stream: TlsStream) -> None:
        with contextlib.suppress(ConnectionLost):
            await stream.open(self._limits.handshake_seconds)
            self._keep("consumer", self._limits.max_consumers)
            assert self._serve is not None
            await self._serve(stream)

    def _add(self, made: BoundedSocket, *, to_connect: bool) -> TlsStream:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = self._credentials.client if to_connect else self._credentials.server
        # The consumer's end closes first, so that it never sends on a connection that is just being closed.
        idle_seconds = self._limits.idle_seconds * (1 if to_connect else 2)
        stream = TlsStream(
            made, context, self._event_loop, to_connect=to_connect, idle_seconds=idle_seconds, ended=self._ended
        )
        self._streams[stream] = None
        return stream

    def _ended(self, stream: TlsStream) -> None:
        del self._streams[stream]
        self.dropped += _kind_of(stream) == "unauthenticated"

    def _of_kind(self, kind: _Kind) -> list[TlsStream]:
        """First those that are idle for longest, or were accepted first."""
        return sorted((each for each in self._streams if _kind_of(each) == kind), key=lambda each: each.heard_at)

    def _keep(self, kind: _Kind, most: int) -> None:
        """Close connections of this kind until no more than so many are left."""
        same = self._of_kind(kind)
        for stream in same[: max(0, len(same) - most)]:
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
                resolved.set_result(_look_up(host))
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
        numeric = _numeric(host) or _look_up(host)
        family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
        listener = socket.create_server((numeric, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST {host}, VLLM_NIXL_SIDE_CHANNEL_PORT {port}: cannot be listened on: "
            f"{error}; choose another port"
        ) from error
    listener.setblocking(False)
    return listener


def _look_up(host: str) -> str:
    """The address of a host's name. Raises OSError, UnicodeError."""
    return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])


def _numeric(host: str) -> str | None:
    """The address that a host is, or None when it has to be looked up."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return "127.0.0.1" if is_loopback(host) else None
