"""One TCP connection of the side channel: frames over TLS. No method waits.

    frame: its length in bytes, big endian, 4 bytes; then the frame

No frame is sent or read before the peer has proved that it holds the secret. Until then it may send
`MAX_HANDSHAKE_BYTES`, more than a handshake takes.
"""

import contextlib
import os
import socket
import ssl
from collections import deque

from cairn.transfer.wire import MAX_FRAME_BYTES

MAX_HANDSHAKE_BYTES = 16 << 10

_READ_BYTES = 64 << 10
_READS_PER_TURN = 16
_MAX_OUTBOX_BYTES = 2 * MAX_FRAME_BYTES
_MAX_WAITING_FRAMES = 64
_LENGTH_BYTES = 4


class ConnectionLost(Exception):
    """The connection has ended; the text says why."""


class TlsConnection:
    """Owns the socket, which must be non-blocking. `to_connect`: it is being connected, and this end is the TLS client;
    otherwise it was accepted. `is_authenticated`: the peer holds the secret."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, *, to_connect: bool) -> None:
        self.socket = connected
        self.is_authenticated = False
        self._is_connected = not to_connect
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not to_connect)
        self._handshake_bytes = MAX_HANDSHAKE_BYTES
        self._waiting: deque[bytes] = deque()
        self._inbox = bytearray()
        self._outbox = bytearray()

    @property
    def wants_write(self) -> bool:
        """Whether `flush` is to be called when the socket takes bytes."""
        return not self._is_connected or bool(self._outbox)

    def send(self, frame: bytes) -> bool:
        """Send a frame, or queue it; False if there is no room for it. Raises ConnectionLost."""
        if not self.is_authenticated:
            if len(self._waiting) >= _MAX_WAITING_FRAMES:
                return False
            self._waiting.append(frame)
            return True
        if len(self._outbox) > _MAX_OUTBOX_BYTES:
            return False
        self._encrypt(frame)
        self.flush()
        return True

    def receive(self) -> list[bytes]:
        """The frames that have come whole. Raises ConnectionLost."""
        frames: list[bytes] = []
        if not self._is_connected:
            return frames
        for _ in range(_READS_PER_TURN):
            try:
                data = self.socket.recv(
                    _READ_BYTES if self.is_authenticated else min(_READ_BYTES, self._handshake_bytes)
                )
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror}") from error
            if not data:
                if frames:
                    break  # the next call says so
                raise ConnectionLost("the peer has closed the connection")
            self._incoming.write(data)
            if not self.is_authenticated:
                self._handshake_bytes -= len(data)
                self._shake_hands()
            if self.is_authenticated:
                self._decrypt()
                frames += self._take_frames()
        self.flush()
        return frames

    def flush(self) -> None:
        """Send what the socket takes. Raises ConnectionLost."""
        if not self._is_connected:
            failure = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure:
                raise ConnectionLost(f"it cannot be connected to: {os.strerror(failure)}")
            try:
                self.socket.getpeername()
            except OSError:
                return  # not yet
            self._is_connected = True
            self._shake_hands()
        self._outbox += self._outgoing.read()
        while self._outbox:
            try:
                sent = self.socket.send(self._outbox)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror}") from error
            del self._outbox[:sent]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if self._handshake_bytes <= 0:
                raise ConnectionLost(f"it sent {MAX_HANDSHAKE_BYTES} bytes without a proof of the secret") from None
            return
        except ssl.SSLError as error:
            # Send the TLS alert, if the peer still reads.
            with contextlib.suppress(ConnectionLost):
                self.flush()
            raise ConnectionLost(_describe(error)) from error
        self.is_authenticated = True
        while self._waiting:
            self._encrypt(self._waiting.popleft())

    def _encrypt(self, frame: bytes) -> None:
        try:
            self._tls.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
        except ssl.SSLError as error:
            raise ConnectionLost(_describe(error)) from error
        self._outbox += self._outgoing.read()

    def _decrypt(self) -> None:
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

    def _take_frames(self) -> list[bytes]:
        frames: list[bytes] = []
        while len(self._inbox) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._inbox[:_LENGTH_BYTES], "big")
            if end > _LENGTH_BYTES + MAX_FRAME_BYTES:
                raise ConnectionLost(f"it announced a frame of {end - _LENGTH_BYTES} bytes; at most {MAX_FRAME_BYTES}")
            if len(self._inbox) < end:
                break
            frames.append(bytes(self._inbox[_LENGTH_BYTES:end]))
            del self._inbox[:end]
        return frames


def _describe(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    return f"no proof of the secret: both sides need the same --kv-secret-file and the same cairn ({reason})"
