"""One HTTP connection: deadlines for heads and for reading responses, and the number of connections."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from cairn.http.error_responses import encode_error, make_error

_MAX_HEAD_BYTES = 1 << 15
_SCOPE_KEY = "cairn.connection"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionDeadlines:
    """In seconds. `head`: from a request's first byte, or the connection's start, to the end of its headers. `stall`:
    how long a client may leave written bytes unread."""

    head: float = 30.0
    stall: float = 60.0


def get_connection(scope: Scope) -> "Connection | None":
    """The connection that a request came over, to write pieces of the response that has begun; None if it is not in
    chunks, or where another server than this one has it."""
    connection: Connection | None = scope.get(_SCOPE_KEY)
    return connection if connection is not None and connection.conn.is_chunked else None


class PendingWrites(list[tuple[asyncio.Transport, bytes]]):
    """What connections are given to write in one turn of the event loop, sent behind all that makes it: one send after
    another finds more in near caches, and wakes fewer clients."""

    def send(self) -> None:
        pieces = self[:]
        self.clear()
        for transport, data in pieces:
            transport.write(data)


class ConnectionLimit:
    """At most so many connections at once. One more closes the one that has been idle for the longest, so that idle
    connections keep nobody out, or itself if none is idle. `pending`: what all of them have to write."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._num_open = 0
        self._idle: dict[Connection, None] = {}
        self.pending = PendingWrites()

    def add(self, connection: "Connection") -> None:
        self._num_open += 1
        self._idle[connection] = None
        if self._num_open > self._max_open:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.close()

    def remove(self, connection: "Connection") -> None:
        self._num_open -= 1
        self._idle.pop(connection, None)

    def mark_busy(self, connection: "Connection") -> None:
        self._idle.pop(connection, None)

    def mark_idle(self, connection: "Connection") -> None:
        self._idle[connection] = None


class _Http11(h11.Connection):
    """h11's side of a connection. What it checks and frames of a chunked body is the same for each piece, so its state
    machine is asked for the first and the last event of a response alone: it takes longer than to send a token.

    A response's head is kept for what follows it, and `on_head` is called: a write of its own would wake the client for
    nothing, mostly on a core that has better to do."""

    is_chunked = False

    def __init__(self, on_head: Callable[[], object]) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self._on_head = on_head
        self._head = b""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self.is_chunked and type(event) is h11.Data:
            return self.take_head() + _chunk(event.data) if event.data else b""
        output = super().send(event)
        if type(event) is h11.Response:
            self._head = output or b""
            self.is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in self._head.lower()
            self._on_head()
            return b""
        if type(event) is h11.EndOfMessage:
            self.is_chunked = False
            return self.take_head() + (output or b"")
        return self.take_head() + output if output else output

    def take_head(self) -> bytes:
        """The head of a response that has begun, unless it has gone."""
        head, self._head = self._head, b""
        return head


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(H11Protocol):
    """uvicorn's connection, closed if the client takes too long to send its headers or to read its responses.

    `can_write`: whether a response's head has gone, and the client is there and keeps up: what it has not read is not
    more than asyncio keeps unasked.
    """

    __slots__ = ("_pending", "can_write", "transport")  # what `write` needs, out of a crowded dictionary

    def __init__(self, *args: Any, deadlines: ConnectionDeadlines, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(*args, **options)
        # What the application sends at once comes before this: then nothing is left.
        self.conn: _Http11 = _Http11(self._hold_head)
        self._deadlines = deadlines
        self._limit = limit
        self._pending = limit.pending
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._has_received = False
        self.can_write = False

    def _start_timer(self, name: Literal["head", "stall"]) -> None:
        """Unless it is running."""
        if name not in self._timers:
            end = self._miss_head if name == "head" else self.transport.abort
            self._timers[name] = self.loop.call_later(getattr(self._deadlines, name), end)

    def _cancel_timer(self, name: Literal["head", "stall"]) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # -- the head of a request -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer("head")
        self._limit.add(self)

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:  # a request has begun: its application does after this
            self.scope[_SCOPE_KEY] = self  # type: ignore[literal-required]

    def data_received(self, data: bytes) -> None:
        self._has_received, before = True, self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._cancel_timer("head")
        elif self._is_between_requests():
            self._start_timer("head")
        if not self._is_between_requests():
            self._limit.mark_busy(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.remove(self)
        self.can_write = False
        self._cancel_timer("head")
        self._cancel_timer("stall")
        super().connection_lost(exc)
        if self.scope is not None:
            self.scope.pop(_SCOPE_KEY, None)  # type: ignore[misc]

    def _miss_head(self) -> None:
        if self._has_received:
            self._refuse(408, f"the headers did not come within {self._deadlines.head:g} s")
        self.close()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is no HTTP, and for headers that are too long."""
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self._refuse(431, "the request's headers are too long")
        else:
            self._refuse(400, "this is no valid HTTP request")
        self.close()

    def _refuse(self, status: int, message: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = encode_error(make_error(message, status))
        fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        reason = HTTPStatus(status).phrase.encode()
        response = h11.Response(status_code=status, headers=[*fields.items()], reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    # -- a response ---------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """A piece of the body, if `can_write`: what ASGI's `send` does in the next task, without one that waits."""
        pending = self._pending
        if not pending:
            self.loop.call_soon(pending.send)
        pending.append((self.transport, _chunk(data)))

    def _hold_head(self) -> None:
        self.can_write = False
        self.loop.call_soon(self._send_head)

    def _send_head(self) -> None:
        if self.transport.is_closing():
            return
        if head := self.conn.take_head():
            self.transport.write(head)
        self.can_write = not self.flow.write_paused

    # -- the end of a response -------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_between_requests() and not self.transport.is_closing():
            self._limit.mark_idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.can_write = False
        self._start_timer("stall")

    def resume_writing(self) -> None:
        self._cancel_timer("stall")
        super().resume_writing()
        self.can_write = True

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_timer("stall")

    def close(self) -> None:
        """What has been written still goes out, if the client reads it."""
        self._pending.send()
        self._cancel_timer("head")
        self._send_head()
        self.can_write = False
        self.transport.close()
        self._start_timer("stall")
