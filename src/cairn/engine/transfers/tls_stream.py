"""One TCP connection of the side channel: frames over TLS.

    frame: its length in bytes, big endian, 4 bytes; then the frame

No frame is sent or read before the peer has proved that it holds the secret. Until then it may send
`MAX_HANDSHAKE_BYTES`, more than a handshake takes. Whoever sends waits for room, and a peer that sends more than is
taken from here waits, too.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable

from cairn.transfer.stream import ConnectionLost
from cairn.transfer.wire import MAX_FRAME_BYTES

MAX_HANDSHAKE_BYTES = 16 << 10
MAX_WAITING_FRAMES = 64
"""Frames that nobody has taken yet, before no more are read."""

_READ_BYTES = 64 << 10
_MAX_OUTBOX_BYTES = 2 * MAX_FRAME_BYTES
_CLOSE_SECONDS = 5.0
_LENGTH_BYTES = 4


class TlsStream(asyncio.BufferedProtocol):
    """A `Stream` over the transport that it is made the protocol of. `to_connect`: it is being connected, and this end
    is the TLS client; otherwise it was accepted. `heard` is called when something has come, `ended` once, when nothing
    can any more. `is_authenticated`: the peer holds the secret; `lost`: why the connection has ended."""

    def __init__(
        self,
        context: ssl.SSLContext,
        event_loop: asyncio.AbstractEventLoop,
        *,
        to_connect: bool,
        heard: Callable[["TlsStream"], None],
        ended: Callable[["TlsStream"], None],
    ) -> None:
        self.is_authenticated = False
        self.lost: str | None = None
        self.to_connect = to_connect
        self._heard = heard
        self._ended = ended
        self._event_loop = event_loop
        self._transport: asyncio.Transport | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not to_connect)
        self._buffer = bytearray(MAX_HANDSHAKE_BYTES)
        self._handshake_bytes = MAX_HANDSHAKE_BYTES
        self._inbox = bytearray()
        self._frames: deque[bytes] = deque()
        self._has_room = False
        self._changed = asyncio.Event()
        """Set whenever anything has changed that somebody waits for."""

    async def send(self, frame: bytes) -> None:
        while not self._has_room and self.lost is None:
            await self._wait()
        if self.lost is not None or self._transport is None:
            raise ConnectionLost(self.lost or "it is not connected")
        try:
            self._tls.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
        except ssl.SSLError as error:
            self.close(_describe(error))
            raise ConnectionLost(_describe(error)) from error
        self._flush()

    async def receive(self) -> bytes:
        while not self._frames:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            await self._wait()
        frame = self._frames.popleft()
        if self._transport is not None and not self._transport.is_closing() and not self._is_full:
            self._transport.resume_reading()
        return frame

    async def authenticated(self) -> None:
        """Waits for the proof. Raises ConnectionLost."""
        while not self.is_authenticated:
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            await self._wait()

    def close(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._changed.set()
        if self._transport is not None:
            if self.is_authenticated:
                self._transport.close()
                # a peer that takes nothing does not keep it
                self._event_loop.call_later(_CLOSE_SECONDS, self._transport.abort)
            else:
                self._transport.abort()
        self._ended(self)

    # -- what the event loop calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.lost is not None:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_MAX_OUTBOX_BYTES)
        if self.to_connect:
            self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[: None if self.is_authenticated else self._handshake_bytes]

    def buffer_updated(self, num_bytes: int) -> None:
        if self.lost is not None:
            return
        self._incoming.write(memoryview(self._buffer)[:num_bytes])
        try:
            if not self.is_authenticated:
                self._handshake_bytes -= num_bytes
                self._shake_hands()
            if self.is_authenticated:
                self._decrypt()
                self._take_frames()
        except ConnectionLost as lost:
            self.close(str(lost))
            return
        self._flush()
        if self._is_full and self._transport is not None:
            self._transport.pause_reading()
        self._changed.set()
        self._heard(self)

    def eof_received(self) -> None:
        self.close("the peer has closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        text = error.strerror if isinstance(error, OSError) else error
        self.close("the peer has closed the connection" if text is None else f"the connection broke: {text}")

    def pause_writing(self) -> None:
        self._has_room = False

    def resume_writing(self) -> None:
        self._has_room = True
        self._changed.set()

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return len(self._frames) >= MAX_WAITING_FRAMES or sum(map(len, self._frames)) >= _MAX_OUTBOX_BYTES

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _shake_hands(self) -> None:
        """Raises ConnectionLost."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            if self._handshake_bytes <= 0:
                raise ConnectionLost(f"it sent {MAX_HANDSHAKE_BYTES} bytes without a proof of the secret") from None
            return
        except ssl.SSLError as error:
            # Send the TLS alert, if the peer still reads.
            self._flush()
            raise ConnectionLost(_describe(error)) from error
        self._flush()
        self.is_authenticated = self._has_room = True
        self._buffer = bytearray(_READ_BYTES)

    def _decrypt(self) -> None:
        """Raises ConnectionLost."""
        while True:
            try:
                plain = self._tls.read(_READ_BYTES)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLZeroReturnError:
                raise ConnectionLost("the peer has closed the connection") from None
            except ssl.SSLError as error:
                raise ConnectionLost(_describe(error)) from error
            self._inbox += plain

    def _take_frames(self) -> None:
        """Raises ConnectionLost."""
        while len(self._inbox) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._inbox[:_LENGTH_BYTES], "big")
            if end > _LENGTH_BYTES + MAX_FRAME_BYTES:
                raise ConnectionLost(f"it announced a frame of {end - _LENGTH_BYTES} bytes; at most {MAX_FRAME_BYTES}")
            if len(self._inbox) < end:
                break
            self._frames.append(bytes(self._inbox[_LENGTH_BYTES:end]))
            del self._inbox[:end]


def _describe(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    return f"no proof of the secret: both sides need the same --kv-secret-file and the same cairn ({reason})"
