"""The side channel's sockets: where other servers ask for pages, and where this one asks. Frames in, frames out.

    listener                 takes connections of consumers; each has to prove the secret within a deadline
    a connection a consumer  accepted; named by `sender`
    a connection a producer  made when first needed; named by its address

Frames are dropped, never waited for: whoever misses one says it again. One thread only, but for `wake`.

What strangers can take is bounded: so many connections without a proof, the oldest of which gives way to a new one; so
many bytes and seconds each; and all connections together a quarter of the descriptors that the process may have.
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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cairn.engine.transfers.tls_connection import ConnectionLost, TlsConnection
from cairn.engine.waker import Waker
from cairn.errors import ConfigError
from cairn.transfer.credentials import TlsCredentials
from cairn.transfer.peers import Address, is_loopback
from cairn.types import Clock

_BACKLOG = 1024
_ACCEPTS_PER_TURN = 32
_PAUSE_SECONDS = 0.5
_TIMERS_SECONDS = 1.0
_MAX_WAITING_FRAMES = 64

logger = logging.getLogger(__name__)

_MAX_OPEN = 16


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
    """Connections at a time: of strangers (accepted, without a proof yet), of consumers, and to producers.
    `handshake_seconds`: how long one has to prove itself. `idle_seconds`: how long one to a producer is kept on
    which nothing comes; one of a consumer twice as long."""

    max_unproved: int = 64
    max_consumers: int = 256
    max_producers: int = 256
    handshake_seconds: float = 5.0
    idle_seconds: float = 60.0

    @classmethod
    def fitting(cls, max_descriptors: int) -> "ChannelLimits":
        """At most a quarter of the descriptors that this process may have."""
        share = max_descriptors // 4
        return cls(
            max_unproved=max(1, min(64, share // 4)),
            max_consumers=max(1, min(256, share * 3 // 8)),
            max_producers=max(1, min(256, share * 3 // 8)),
        )


class NameLookups:
    """`wake` is called, by another thread, when there is something to `take`. At most 16 lookups at a time; how long
    one takes is the system's resolver's to say, and whoever waits for it has a deadline of its own."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._done: queue.SimpleQueue[tuple[str, str | Exception]] = queue.SimpleQueue()
        self._open: set[str] = set()

    def start(self, host: str) -> bool:
        """Look this name up, if it is not being looked up already; False if there are too many."""
        if host not in self._open:
            if len(self._open) >= _MAX_OPEN:
                return False
            self._open.add(host)
            threading.Thread(target=self._look_up, args=(host,), name="cairn-name-lookup", daemon=True).start()
        return True

    def take(self) -> list[tuple[str, str | Exception]]:
        """Names and their addresses, or why there is none, since the last call."""
        found: list[tuple[str, str | Exception]] = []
        while not self._done.empty():
            found.append(self._done.get_nowait())
            self._open.discard(found[-1][0])
        return found

    def _look_up(self, host: str) -> None:
        try:
            entries = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
            self._done.put((host, str(entries[0][4][0])))
        # UnicodeError: a label that is no host name's
        except (OSError, UnicodeError) as error:
            self._done.put((host, error))
        self._wake()


@dataclass(slots=True, eq=False)
class _Link:
    """A connection and its place in the tables. `until`: when it has to have proved itself, or is idle for too long."""

    connection: TlsConnection
    until: float
    sender: bytes | None = None
    address: Address | None = None
    is_open: bool = True


class TlsSideChannel:
    """Carries frames between servers that hold the same secret, by TLS over TCP, or loses them. `dropped` counts frames
    that found no room, and connections that ended for want of a proof."""

    def __init__(
        self, host: str, port: int, credentials: TlsCredentials, clock: Clock, limits: ChannelLimits | None = None
    ) -> None:
        """Binds; port 0 takes a free one. `limits` None: as many connections as fit the process's descriptors. Raises
        ConfigError that names the variables."""
        self._credentials = credentials
        self._clock = clock
        self._limits = limits or ChannelLimits.fitting(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._selector = selectors.DefaultSelector()
        self._unproved: OrderedDict[bytes, _Link] = OrderedDict()
        self._consumers: OrderedDict[bytes, _Link] = OrderedDict()
        self._producers: OrderedDict[Address, _Link] = OrderedDict()
        self._lookups = NameLookups(self.wake)
        self._unresolved: dict[Address, deque[bytes]] = {}
        self._lost: list[Incoming] = []
        self._num_accepted = 0
        self._timers_at = clock.now()
        self._resume_at: float | None = None
        self.dropped = 0
        try:
            self._listener = _listen(host, port)
        except OSError as error:
            self._selector.close()
            raise ConfigError(
                f"VLLM_NIXL_SIDE_CHANNEL_HOST {host}, VLLM_NIXL_SIDE_CHANNEL_PORT {port}: cannot be listened on: "
                f"{error}; choose another port"
            ) from error
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker = Waker(lambda end: self._selector.register(end, selectors.EVENT_READ))

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Connections that are open, of strangers, too."""
        return len(self._unproved) + len(self._consumers) + len(self._producers)

    def fileno(self) -> int:
        """Is readable when `receive` has something to do."""
        return self._selector.fileno()

    def wake(self) -> None:
        """End a `receive` that waits. For other threads."""
        self._waker.wake()

    def receive(self, seconds: float | None) -> list[Incoming]:
        """What has come; waits for at most `seconds` (None: for ever) until anything does, or `wake` is called."""
        found: list[Incoming] = []
        accepts = False
        for key, events in self._selector.select(self._patience(seconds)):
            if key.fd == self._waker.fileno():
                self._waker.clear()
            elif key.fileobj is self._listener:
                accepts = True
            elif key.data.is_open:
                found += self._serve(key.data, events)
        self._take_names()
        self._expire()
        # Only now: who has spoken is not to give way to who has just come.
        if accepts:
            self._accept()
        lost, self._lost = self._lost, []
        return found + lost

    def reply(self, sender: bytes, frame: bytes) -> None:
        """To the consumer whose frame came with this `sender`."""
        link = self._consumers.get(sender)
        if link is None:
            self.dropped += 1
        else:
            self._send(link, frame)

    def send(self, address: Address, frame: bytes) -> None:
        """To a producer. The caller has made sure that its host may be spoken to."""
        link = self._producers.get(address)
        if link is not None:
            self._send(link, frame)
        elif address in self._unresolved:
            if len(self._unresolved[address]) < _MAX_WAITING_FRAMES:
                self._unresolved[address].append(frame)
            else:
                self.dropped += 1
        elif (numeric := _numeric(address[0])) is not None:
            self._connect(address, numeric, [frame])
        elif self._lookups.start(address[0]):
            self._unresolved[address] = deque([frame])
        else:
            self.dropped += 1

    def close(self) -> None:
        for table in (self._unproved, self._consumers, self._producers):
            for link in table.values():
                link.connection.close()
            table.clear()
        self._selector.close()
        self._listener.close()
        self._waker.close()

    def _patience(self, seconds: float | None) -> float | None:
        """For how long the selector may wait: deadlines of connections have to be looked at now and then."""
        if self._lost:
            return 0.0
        if self.num_connections or self._resume_at is not None:
            seconds = _TIMERS_SECONDS if seconds is None else min(seconds, _TIMERS_SECONDS)
        return None if seconds is None else math.ceil(seconds * 1000) / 1000

    def _serve(self, link: _Link, events: int) -> list[Incoming]:
        """What has come by this connection."""
        connection, was_proved = link.connection, link.connection.is_proved
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            frames = connection.receive() if events & selectors.EVENT_READ else []
        except ConnectionLost as lost:
            self._lose(link, str(lost))
            return []
        if frames or connection.is_proved != was_proved:
            link.until = self._clock.now() + self._idle_seconds(link)
        if connection.is_proved and not was_proved and link.sender is not None:
            del self._unproved[link.sender]
            while len(self._consumers) >= self._limits.max_consumers:
                self._lose(min(self._consumers.values(), key=_idle_until), "others needed its place")
            self._consumers[link.sender] = link
        self._watch(link)
        return [Incoming(frame, sender=link.sender, address=link.address) for frame in frames]

    def _send(self, link: _Link, frame: bytes) -> None:
        try:
            if not link.connection.send(frame):
                self.dropped += 1
        except ConnectionLost as lost:
            self._lose(link, str(lost))
        else:
            self._watch(link)

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
            while len(self._unproved) >= self._limits.max_unproved:
                self._lose(next(iter(self._unproved.values())), "others needed its place")
            self._num_accepted += 1
            sender = self._num_accepted.to_bytes(8, "big")
            connection = _connection(accepted, self._credentials.server, to_connect=False)
            until = self._clock.now() + self._limits.handshake_seconds
            self._unproved[sender] = link = _Link(connection, until, sender=sender)
            self._selector.register(accepted, selectors.EVENT_READ, link)

    def _pause(self, error: OSError) -> None:
        """The process is out of descriptors: without a pause the listener would be ready all the time."""
        logger.warning("no connection can be taken: %s", error.strerror)
        self._selector.unregister(self._listener)
        self._resume_at = self._clock.now() + _PAUSE_SECONDS
        if self._unproved:
            self._lose(next(iter(self._unproved.values())), "descriptors are needed")

    def _take_names(self) -> None:
        """Connect to hosts whose addresses are known now."""
        for host, found in self._lookups.take():
            for address in [address for address in self._unresolved if address[0] == host]:
                frames = self._unresolved.pop(address)
                if isinstance(found, str):
                    self._connect(address, found, frames)
                else:
                    self._lost.append(Incoming(address=address, lost=f"its name cannot be resolved: {found}"))

    def _connect(self, address: Address, numeric: str, frames: Iterable[bytes]) -> None:
        """Begin to connect; a failure is told as for any lost connection."""
        while len(self._producers) >= self._limits.max_producers:
            self._lose(min(self._producers.values(), key=_idle_until), "others needed its place")
        try:
            made = socket.socket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            self._lost.append(Incoming(address=address, lost=f"it cannot be connected to: {error.strerror}"))
            return
        connection = _connection(made, self._credentials.client, to_connect=True)
        failure = made.connect_ex((numeric, address[1]))
        if failure not in (0, errno.EINPROGRESS):
            connection.close()
            self._lost.append(Incoming(address=address, lost=f"it cannot be connected to: {os.strerror(failure)}"))
            return
        # Twice the time that a session waits for its answer: it is the session that notices a silent peer.
        until = self._clock.now() + 2 * self._limits.handshake_seconds
        self._producers[address] = link = _Link(connection, until, address=address)
        self._selector.register(made, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        for frame in frames:
            self._send(link, frame)

    def _expire(self) -> None:
        now = self._clock.now()
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if now < self._timers_at:
            return
        self._timers_at = now + _TIMERS_SECONDS / 4
        for table in (self._unproved, self._consumers, self._producers):
            for link in [link for link in table.values() if link.until <= now]:
                proved = link.connection.is_proved
                self._lose(link, "nothing came by it for too long" if proved else "no proof of the secret in time")

    def _lose(self, link: _Link, reason: str) -> None:
        """Close a connection, and tell whoever knows of it."""
        link.is_open = False
        self._selector.unregister(link.connection.socket)
        link.connection.close()
        if link.address is not None:
            del self._producers[link.address]
        elif link.sender is not None and self._consumers.pop(link.sender, None) is None:
            # a stranger: nobody has heard of it
            del self._unproved[link.sender]
            self.dropped += 1
            return
        self._lost.append(Incoming(sender=link.sender, address=link.address, lost=reason))

    def _watch(self, link: _Link) -> None:
        """Have the selector look for what the connection waits for."""
        connection = link.connection
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, link)

    def _idle_seconds(self, link: _Link) -> float:
        # The consumer's end closes first, so that it never asks by a connection that is just being closed.
        return self._limits.idle_seconds * (2 if link.sender is not None else 1)


def _idle_until(link: _Link) -> float:
    return link.until


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    numeric = _numeric(host)
    if numeric is None:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        numeric = str(found[0][4][0])
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


def _connection(made: socket.socket, context: ssl.SSLContext, *, to_connect: bool) -> TlsConnection:
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return TlsConnection(made, context, to_connect=to_connect)


def _numeric(host: str) -> str | None:
    """The address that a host is, or None when it has to be looked up."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return "127.0.0.1" if is_loopback(host) else None
