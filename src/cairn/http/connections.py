"""One HTTP connection with limits of its own: before any application sees a request, and behind its answer."""

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import h11
import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cairn.http.error_responses import error_body

_MAX_HEAD_BYTES = 1 << 15
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionDeadlines:
    """In seconds. `head`: from a request's first byte, or the connection's start, to the end of its headers. `stall`:
    how long a client may leave written bytes unread."""

    head: float = 30.0
    stall: float = 60.0


class ConnectionLimit:
    """At most so many connections at once. When one more comes, the one that has been without a request for the longest
    is closed, so that idle connections keep nobody out; when none is idle, it is the new one."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._num_open = 0
        self._idle: dict[Connection, None] = {}

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


class _BoundedHeads(h11.Connection):
    """h11's own bound is for heads that are not complete yet; what comes at once may have more."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            size = len(event.target) + sum(len(name) + len(value) for name, value in event.headers)
            if size > _MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
        return event


class Connection(H11Protocol):
    """uvicorn's connection. Clients that take for ever to send their headers, or to read their answers, lose it."""

    def __init__(self, *args: Any, deadlines: ConnectionDeadlines, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _BoundedHeads(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._deadlines = deadlines
        self._limit = limit
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._heard = False

    def _start(self, name: Literal["head", "stall"]) -> None:
        """Give the client so long for this, if it has not been given it already."""
        if name not in self._timers:
            missed = self._head_missed if name == "head" else self.transport.abort
            self._timers[name] = self.loop.call_later(getattr(self._deadlines, name), missed)

    def _cancel(self, name: Literal["head", "stall"]) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    # -- the head of a request -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start("head")
        self._limit.add(self)

    def data_received(self, data: bytes) -> None:
        self._heard, before = True, self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._cancel("head")
        elif self._between_requests():
            self._start("head")
        if not self._between_requests():
            self._limit.mark_busy(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.remove(self)
        self._cancel("head")
        self._cancel("stall")
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _head_missed(self) -> None:
        if self._heard:
            self._refuse(408, f"the headers did not come within {self._deadlines.head:g} s", "request_timeout")
        self.close()

    def send_400_response(self, msg: str) -> None:
        """Called where what came is no HTTP, or headers have no end."""
        hint = getattr(sys.exception(), "error_status_hint", 400)
        if hint == 431:
            self._refuse(431, "the request's headers are too long", "request_header_fields_too_large")
        else:
            self._refuse(400, "this is no valid HTTP request", "invalid_request_error")
        self.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = msgspec.json.encode(error_body(message, status, code))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = (
            h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")

    # -- the end of an answer --------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._between_requests() and not self.transport.is_closing():
            self._limit.mark_idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("stall")

    def resume_writing(self) -> None:
        self._cancel("stall")
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start("stall")

    def close(self) -> None:
        """What has been written still goes out, if the client reads it."""
        self._cancel("head")
        self.transport.close()
        self._start("stall")


class LingeringClose:
    """Ends the connection behind an answer that comes before its request's body is over: refused for its size, its
    sender or its target.

    A connection closed at once would be reset, and the client, which is still writing, might never see the answer.
    So the answer goes out whole, what still comes is thrown away for a moment, a bounded number of bytes, and then the
    connection is closed (RFC 9112, section 9.6).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        unread, closing = True, False

        async def watched_receive() -> Message:
            nonlocal unread
            message = await receive()
            if message["type"] != "http.request" or not message.get("more_body", False):
                unread = False
            return message

        async def closing_send(message: Message) -> None:
            nonlocal closing
            if unread and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            elif unread and message["type"] == "http.response.body" and not message.get("more_body", False):
                closing, message = True, {**message, "more_body": True}
            await send(message)

        await self._app(scope, watched_receive, closing_send)
        if closing:
            await _discard(receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


async def _discard(receive: Receive) -> None:
    """Read on until the body is over, the client has left, or it has been enough."""
    left = _LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
            # The client reads the answer once it can write no more.
            await asyncio.sleep(_LINGER_SECONDS)
