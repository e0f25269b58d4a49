"""The side channel's sockets: where other servers ask for pages, and where this one asks. Frames in, frames out.

    ROUTER   one, bound: frames of consumers, each with the connection it came by
    DEALER   one a producer, connected when first needed

Frames are dropped, never waited for: whoever misses one says it again. One thread only, but for `wake`.
"""

import ipaddress
import logging
import math
import socket
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import zmq

from cairn.engine.waker import Waker
from cairn.errors import ConfigError
from cairn.transfer.consumer import Address
from cairn.transfer.wire import MAX_FRAME_BYTES

__all__ = ["Channel", "Incoming", "SideChannel"]

_MAX_PRODUCERS = 256
_QUEUED_FRAMES = 1024
_FRAMES_PER_TURN = 256
_RECONNECT_MILLISECONDS = 2000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A frame. `sender`: the connection of the consumer that sent it; None when `address`, a producer, did."""

    frame: bytes
    sender: bytes | None = None
    address: Address | None = None


class Channel(Protocol):
    """Carries frames between servers, or loses them. `dropped` counts what could not be a frame, or found no room."""

    dropped: int

    @property
    def port(self) -> int: ...

    def wake(self) -> None:
        """End a `receive` that waits. For other threads."""
        ...

    def receive(self, seconds: float | None) -> list[Incoming]:
        """What has come; waits for at most `seconds` (None: for ever) until anything does, or `wake` is called."""
        ...

    def reply(self, sender: bytes, frame: bytes) -> None:
        """To the consumer whose frame came with this `sender`."""
        ...

    def send(self, address: Address, frame: bytes) -> None:
        """To a producer. The caller has made sure that its host may be spoken to."""
        ...

    def close(self) -> None: ...


class SideChannel:
    """A `Channel` of ZMQ sockets. `dropped` counts messages that were no single frame, or found no room."""

    def __init__(self, host: str, port: int) -> None:
        """Binds; port 0 takes a free one. Raises ConfigError that names the variables."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._dealers: OrderedDict[Address, zmq.Socket[bytes]] = OrderedDict()
        self.dropped = 0
        self._router = self._socket(zmq.ROUTER, host)
        try:
            self._router.bind(f"tcp://{_numeric(host)}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"VLLM_NIXL_SIDE_CHANNEL_HOST {host}, VLLM_NIXL_SIDE_CHANNEL_PORT {port}: cannot be listened on: "
                f"{error}; choose another port"
            ) from error
        self._port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._waker = Waker(self._poller)

    @property
    def port(self) -> int:
        return self._port

    def wake(self) -> None:
        self._waker.wake()

    def receive(self, seconds: float | None) -> list[Incoming]:
        ready = dict(self._poller.poll(None if seconds is None else math.ceil(seconds * 1000)))
        self._waker.take(ready)
        found: list[Incoming] = []
        if self._router in ready:
            for parts in self._messages(self._router):
                if len(parts) == 2:
                    found.append(Incoming(parts[1], sender=parts[0]))
                else:
                    self.dropped += 1
        for address, dealer in self._dealers.items():
            if dealer in ready:
                found += [Incoming(parts[0], address=address) for parts in self._messages(dealer) if len(parts) == 1]
        return found

    def reply(self, sender: bytes, frame: bytes) -> None:
        self._send(self._router, [sender, frame])

    def send(self, address: Address, frame: bytes) -> None:
        dealer = self._dealers.get(address)
        if dealer is None:
            dealer = self._connect(address)
        if dealer is not None:
            self._dealers.move_to_end(address)
            self._send(dealer, [frame])

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._waker.close()

    def _connect(self, address: Address) -> "zmq.Socket[bytes] | None":
        host, port = address
        while len(self._dealers) >= _MAX_PRODUCERS:
            _, oldest = self._dealers.popitem(last=False)
            self._poller.unregister(oldest)
            oldest.close()
        dealer = self._socket(zmq.DEALER, host)
        try:
            dealer.connect(f"tcp://{_bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            logger.warning("no connection to %s:%d: %s", host, port, error)
            self._poller.unregister(dealer)
            dealer.close()
            return None
        self._dealers[address] = dealer
        return dealer

    def _socket(self, kind: int, host: str) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        made.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
        made.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MILLISECONDS)
        made.setsockopt(zmq.IPV6, int(":" in host))
        self._poller.register(made, zmq.POLLIN)
        return made

    def _send(self, through: "zmq.Socket[bytes]", parts: list[bytes]) -> None:
        try:
            through.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped += 1

    @staticmethod
    def _messages(through: "zmq.Socket[bytes]") -> list[list[bytes]]:
        found: list[list[bytes]] = []
        while len(found) < _FRAMES_PER_TURN:
            try:
                found.append(through.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        return found


def _numeric(host: str) -> str:
    """ZMQ binds to addresses and interfaces, not to names."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        return str(found[0][4][0])
    return _bracketed(host)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
