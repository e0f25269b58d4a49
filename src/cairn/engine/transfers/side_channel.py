"""The side channel's sockets: where other servers claim pages, and where this one does. Frames in, frames out.

    listener                 accepts connections of consumers; each has to prove the secret within a deadline
    a connection a consumer  accepted; named by `sender`
    a connection a producer  made when first needed; named by its address

Nothing waits for a frame to be taken: it is dropped, and its sender repeats it. One thread only, but for `wake`.

What unauthenticated peers can take is bounded: so many connections, the oldest of which gives way to a new one; so many
bytes and seconds each; and all connections together a quarter of the descriptors that the process may have.
"""

import contextlib
import errno
import ipaddress
import logging
import math
import os
import queue
import resource
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cairn.engine.child_process import Waker
from cairn.engine.transfers.tls_connection import ConnectionLost, TlsConnection
from cairn.errors import ConfigError
from cairn.transfer.credentials import TlsCredentials
from cairn.transfer.peers import Address, is_loopback
from cairn.types import Clock

_BACKLOG = 1024
_ACCEPTS_PER_TURN = 32
_PAUSE_SECONDS = 0.5
_TIMERS_SECONDS = 1.0
_MAX_WAITING_FRAMES = 64
_MAX_NAME_LOOKUPS = 16

logger = logging.getLogger(__name__)

_Kind: TypeAlias = Literal["unauthenticated", "consumer", "producer"]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A frame, or with `lost` the end of a connection. `sender`: the connection of the consumer that sent it; None when
    `address`, a producer, did. `lost`: why the connection has ended, or could not be made."""

    frame: bytes = b""
    sender: bytes | None = None
    address: Address | None = None
    lost: str | None = None


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


@dataclass(slots=True, eq=False)
class _Connection:
    """`key`: a consumer's sender, or a producer's address. `until`: the end of the handshake's time, or of the idle
    time."""

    tls: TlsConnection
    key: bytes | Address
    until: float
    is_open: bool = True

    @property
    def kind(self) -> _Kind:
        if not isinstance(self.key, bytes):
            return "producer"
        return "consumer" if self.tls.is_authenticated else "unauthenticated"

    def incoming(self, frame: bytes = b"", lost: str | None = None) -> Incoming:
        if isinstance(self.key, bytes):
            return Incoming(frame, sender=self.key, lost=lost)
        return Incoming(frame, address=self.key, lost=lost)


class TlsSideChannel:
    """Carries frames between servers that hold the same secret, by TLS over TCP, or loses them. `dropped` counts frames
    that found no room, and connections that ended before their peer was authenticated."""

    def __init__(
        self, host: str, port: int, credentials: TlsCredentials, clock: Clock, limits: ChannelLimits | None = None
    ) -> None:
        """Binds; port 0 takes a free one. `limits` None: as many connections as fit the process's descriptors. Raises
        ConfigError that names the variables."""
        self._credentials = credentials
        self._clock = clock
        self._limits = limits or ChannelLimits.fitting(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._connections: dict[bytes | Address, _Connection] = {}
        self._names = _NameLookups()
        self._lost: list[Incoming] = []
        self._num_accepted = 0
        self._resume_at: float | None = None
        self.dropped = 0
        self._listener = create_listener(host, port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker = Waker(lambda end: self._selector.register(end, selectors.EVENT_READ))

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Open connections, those of unauthenticated peers included."""
        return len(self._connections)

    def fileno(self) -> int:
        """Is readable when `receive` has something to do."""
        return self._selector.fileno()

    def wake(self) -> None:
        """End a `receive` that waits. For other threads."""
        self._waker.wake()

    def receive(self, seconds: float | None) -> list[Incoming]:
        """What has come; waits for at most `seconds` (None: for ever) until anything does, or `wake` is called."""
        incoming: list[Incoming] = []
        accepts = False
        for key, events in self._selector.select(self._timeout(seconds)):
            if key.fd == self._waker.fileno():
                self._waker.clear()
            elif key.fileobj is self._listener:
                accepts = True
            elif key.data.is_open:
                incoming += self._serve(key.data, events)
        for address, frames, resolved in self._names.take():
            if isinstance(resolved, str):
                self._connect(address, resolved, frames)
            else:
                self._lost.append(Incoming(address=address, lost=f"its name cannot be resolved: {resolved}"))
        self._expire()
        # Only now: who has spoken is not to give way to who has just come.
        if accepts:
            self._accept()
        lost, self._lost = self._lost, []
        return incoming + lost

    def reply(self, sender: bytes, frame: bytes) -> None:
        """To the consumer whose frame came with this `sender`."""
        connection = self._connections.get(sender)
        if connection is None or connection.kind != "consumer":
            self.dropped += 1
        else:
            self._send(connection, frame)

    def send(self, address: Address, frame: bytes) -> None:
        """To a producer. The caller has made sure that its host may be connected to."""
        if (connection := self._connections.get(address)) is not None:
            self._send(connection, frame)
        elif (numeric := _numeric(address[0])) is not None:
            self._connect(address, numeric, [frame])
        elif not self._names.add(address, frame, self.wake):
            self.dropped += 1

    def close(self) -> None:
        for connection in self._connections.values():
            connection.tls.close()
        self._connections.clear()
        self._selector.close()
        self._listener.close()
        self._waker.close()

    def _timeout(self, seconds: float | None) -> float | None:
        """For how long the selector may wait: deadlines of connections have to be looked at now and then."""
        if self._lost:
            return 0.0
        if self._connections or self._resume_at is not None:
            seconds = _TIMERS_SECONDS if seconds is None else min(seconds, _TIMERS_SECONDS)
        return None if seconds is None else math.ceil(seconds * 1000) / 1000

    def _serve(self, connection: _Connection, events: int) -> list[Incoming]:
        """What has come by this connection."""
        tls, kind = connection.tls, connection.kind
        was_authenticated = tls.is_authenticated
        try:
            if events & selectors.EVENT_WRITE:
                tls.flush()
            frames = tls.receive() if events & selectors.EVENT_READ else []
        except ConnectionLost as lost:
            self._close(connection, str(lost))
            return []
        if frames or tls.is_authenticated != was_authenticated:
            # The consumer's end closes first, so that it never sends on a connection that is just being closed.
            idle_seconds = self._limits.idle_seconds * (1 if kind == "producer" else 2)
            connection.until = self._clock.now() + idle_seconds
        if kind != connection.kind:
            self._make_room("consumer", self._limits.max_consumers, kept=connection)
        self._watch(connection)
        return [connection.incoming(frame) for frame in frames]

    def _send(self, connection: _Connection, frame: bytes) -> None:
        try:
            if not connection.tls.send(frame):
                self.dropped += 1
        except ConnectionLost as lost:
            self._close(connection, str(lost))
        else:
            self._watch(connection)

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
            self._num_accepted += 1
            tls = _wrap(accepted, self._credentials.server, to_connect=False)
            self._add(tls, self._num_accepted.to_bytes(8, "big"), self._limits.handshake_seconds, selectors.EVENT_READ)

    def _pause(self, error: OSError) -> None:
        """The process is out of descriptors: without a pause the listener would be ready all the time."""
        logger.warning("no connection can be accepted: %s", error.strerror)
        self._selector.unregister(self._listener)
        self._resume_at = self._clock.now() + _PAUSE_SECONDS
        for oldest in [each for each in self._connections.values() if each.kind == "unauthenticated"][:1]:
            self._close(oldest, "descriptors are needed")

    def _connect(self, address: Address, numeric: str, frames: list[bytes]) -> None:
        """Begin to connect; a failure is reported like a lost connection."""
        self._make_room("producer", self._limits.max_producers)
        try:
            made = socket.socket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            self._lost.append(Incoming(address=address, lost=f"it cannot be connected to: {error.strerror}"))
            return
        tls = _wrap(made, self._credentials.client, to_connect=True)
        failure = made.connect_ex((numeric, address[1]))
        if failure not in (0, errno.EINPROGRESS):
            tls.close()
            self._lost.append(Incoming(address=address, lost=f"it cannot be connected to: {os.strerror(failure)}"))
            return
        # Twice the time that a session waits for its answer: it is the session that notices a silent peer.
        seconds = 2 * self._limits.handshake_seconds
        connection = self._add(tls, address, seconds, selectors.EVENT_READ | selectors.EVENT_WRITE)
        for frame in frames:
            self._send(connection, frame)

    def _add(self, tls: TlsConnection, key: bytes | Address, seconds: float, events: int) -> _Connection:
        connection = self._connections[key] = _Connection(tls, key, self._clock.now() + seconds)
        self._selector.register(tls.socket, events, connection)
        return connection

    def _make_room(self, kind: _Kind, limit: int, kept: _Connection | None = None) -> None:
        """Close connections of this kind until one more fits: those that are idle for longest, or were accepted
        first."""
        same = [each for each in self._connections.values() if each.kind == kind and each is not kept]
        same.sort(key=lambda connection: connection.until)
        for connection in same[: max(0, len(same) + 1 - limit)]:
            self._close(connection, "others needed its place")

    def _expire(self) -> None:
        now = self._clock.now()
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in [each for each in self._connections.values() if each.until <= now]:
            authenticated = connection.tls.is_authenticated
            reason = "nothing came by it for too long" if authenticated else "no proof of the secret in time"
            self._close(connection, reason)

    def _close(self, connection: _Connection, reason: str) -> None:
        """Close a connection, and report it, but for those of unauthenticated peers: nobody knows of them."""
        connection.is_open = False
        del self._connections[connection.key]
        self._selector.unregister(connection.tls.socket)
        connection.tls.close()
        if connection.kind == "unauthenticated":
            self.dropped += 1
        else:
            self._lost.append(connection.incoming(lost=reason))

    def _watch(self, connection: _Connection) -> None:
        """Have the selector look for what the connection waits for."""
        made = connection.tls.socket
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.tls.wants_write else 0)
        if self._selector.get_key(made).events != events:
            self._selector.modify(made, events, connection)


class _NameLookups:
    """Host names that are being looked up, at most 16 at a time, each in a thread: how long that takes is the system
    resolver's to say, and whoever waits for it has a deadline of its own. Frames wait here for their host's address."""

    def __init__(self) -> None:
        self._waiting: dict[Address, list[bytes]] = {}
        self._resolved: queue.SimpleQueue[tuple[str, str | Exception]] = queue.SimpleQueue()

    def add(self, address: Address, frame: bytes, notify: Callable[[], None]) -> bool:
        """Have a frame wait, and its host looked up; `notify` is called by another thread when there is something to
        `take`. False if there is no room for it."""
        hosts = {host for host, _ in self._waiting}
        if address[0] not in hosts:
            if len(hosts) >= _MAX_NAME_LOOKUPS:
                return False
            arguments = (address[0], notify)
            threading.Thread(target=self._look_up, args=arguments, name="cairn-name-lookup", daemon=True).start()
        frames = self._waiting.setdefault(address, [])
        if len(frames) >= _MAX_WAITING_FRAMES:
            return False
        frames.append(frame)
        return True

    def take(self) -> list[tuple[Address, list[bytes], str | Exception]]:
        """Addresses whose hosts were looked up, their frames, and the numeric host or the error."""
        taken: list[tuple[Address, list[bytes], str | Exception]] = []
        while not self._resolved.empty():
            host, resolved = self._resolved.get_nowait()
            for address in [address for address in self._waiting if address[0] == host]:
                taken.append((address, self._waiting.pop(address), resolved))
        return taken

    def _look_up(self, host: str, notify: Callable[[], None]) -> None:
        try:
            entries = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
            self._resolved.put((host, str(entries[0][4][0])))
        # UnicodeError: a label that is no host name's
        except (OSError, UnicodeError) as error:
            self._resolved.put((host, error))
        notify()


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


def _wrap(made: socket.socket, context: ssl.SSLContext, *, to_connect: bool) -> TlsConnection:
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return TlsConnection(made, context, to_connect=to_connect)


def _numeric(host: str) -> str | None:
    """The address that a host is, or None when it has to be looked up."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return "127.0.0.1" if is_loopback(host) else None
