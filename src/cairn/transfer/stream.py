"""A connection between two servers that hold the same secret: frames over TLS over TCP, until it is lost.

    frame: its length in bytes, big endian, 4 bytes; then the frame

No frame is sent or read before the peer has proved that it holds the secret. Until then it may send
`MAX_HANDSHAKE_BYTES`, more than a handshake takes. Whoever sends waits for room, and a peer that sends more than is
taken from here waits, too.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

from cairn.transfer.peers import Address
from cairn.transfer.wire import MAX_FRAME_BYTES

MAX_HANDSHAKE_BYTES = 16 << 10
READ_BYTES = 64 << 10
"""With twice as many bytes that nobody has taken, no more are read."""

_MAX_OUTBOX_BYTES = 2 * MAX_FRAME_BYTES
_LENGTH_BYTES = 4


class ConnectionLost(Exception):
    """The connection has ended, or could not be made; the text says why."""


class BoundedSocket(socket.socket):
    """Receives `num_left` bytes and no more; None: as many as come."""

    num_left: int | None = MAX_HANDSHAKE_BYTES

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Raises ConnectionError when there are more. Transports of asyncio read by this method."""
        if self.num_left == 0:
            raise ConnectionError(f"it sent {MAX_HANDSHAKE_BYTES} bytes without a proof of the secret")
        count = super().recv_into(memoryview(buffer)[: self.num_left], nbytes, flags)
        if self.num_left is not None:
            self.num_left -= count
        return count


class TlsStream:
    """Frames, whole, once and in order, once it is `open`, over a socket that is closed with it.

    `to_connect`: this end is the one that connects, and the TLS client; otherwise it has accepted. One by which nothing
    comes for `idle_seconds` while somebody waits for it is closed. `ended` is called once. `is_authenticated`: the peer
    holds the secret; `heard_at`: when something has come last, by the loop's clock; `lost`: why the connection has
    ended.
    """

    def __init__(
        self,
        made: BoundedSocket,
        context: ssl.SSLContext,
        event_loop: asyncio.AbstractEventLoop,
        *,
        to_connect: bool,
        idle_seconds: float,
        ended: Callable[["TlsStream"], None],
    ) -> None:
        self.is_authenticated = False
        self.lost: str | None = None
        self.to_connect = to_connect
        self.heard_at = event_loop.time()
        self._made = made
        self._context = context
        self._event_loop = event_loop
        self._idle_seconds = idle_seconds
        self._ended = ended
        self._opening: asyncio.Task[Any] | None = None
        self._reader = asyncio.StreamReader(READ_BYTES, event_loop)
        self._writer: asyncio.StreamWriter | None = None
        self._sending = asyncio.Lock()

    async def open(self, seconds: float, address: Address | None = None) -> None:
        """Connect to `address`, or take whoever was accepted; then there are so many seconds to shake hands. Raises
        ConnectionLost."""
        loop, made = self._event_loop, self._made
        protocol = asyncio.StreamReaderProtocol(self._reader, loop=loop)
        tls: dict[str, Any] = {"ssl": self._context, "ssl_handshake_timeout": seconds}
        self._opening = asyncio.current_task()
        try:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            if address is None:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, made, **tls)
            else:
                await loop.sock_connect(made, address)
                transport, _ = await loop.create_connection(lambda: protocol, sock=made, server_hostname="", **tls)
        except BaseException as error:
            made.close()
            self._opening = None
            if self.lost is None and not isinstance(error, OSError):
                self.close("nobody waits for it any more")
                raise
            raise self._lost_by(error) from error
        self._opening, made.num_left, self.is_authenticated = None, None, True
        self.heard_at = loop.time()
        transport.set_write_buffer_limits(high=_MAX_OUTBOX_BYTES)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)

    async def send(self, frame: bytes) -> None:
        """Returns when there was room for the frame; whoever waits has a deadline. Raises ConnectionLost."""
        assert self._writer is not None
        try:
            # one after the other: so all that waits here is one frame more than there is room for
            async with self._sending:
                await self._writer.drain()
                self._writer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
        except OSError as error:
            raise self._lost_by(error) from error

    async def receive(self) -> bytes:
        """The next frame. Raises ConnectionLost."""
        try:
            async with asyncio.timeout(self._idle_seconds):
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
                if length > MAX_FRAME_BYTES:
                    raise OSError(f"it announced a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
                frame = await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise self._lost_by(error) from error
        self.heard_at = self._event_loop.time()
        return frame

    def close(self, reason: str) -> None:
        """End the connection, without waiting for what the sockets have not taken yet. Does nothing for one that has
        ended."""
        if self.lost is not None:
            return
        self.lost = reason
        if self._opening is not None:
            self._opening.cancel()
        elif self._writer is not None:
            self._reader.set_exception(ConnectionLost(reason))
            self._writer.close()
            # a peer that takes nothing, and never says that it is over, does not keep it
            self._writer.transport.abort()
        self._ended(self)

    def _lost_by(self, error: BaseException) -> ConnectionLost:
        """Close the connection; why it has ended, if it has not before."""
        self.close(_describe(error, self.to_connect and not self.is_authenticated))
        return ConnectionLost(self.lost or "")


def _describe(error: BaseException, is_connecting: bool) -> str:
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        return f"no proof of the secret: both sides need the same --kv-secret-file and the same cairn ({reason})"
    if isinstance(error, OSError) and error.errno is not None:
        # asyncio's own text is about its call
        text = os.strerror(error.errno)
        return f"it cannot be connected to: {text}" if is_connecting else f"the connection broke: {text}"
    if isinstance(error, TimeoutError):
        return "nothing came by it for too long"
    is_told = isinstance(error, OSError) and error.args
    return str(error) if is_told else "the peer has closed the connection"
