"""Answers to requests whose body nobody wants to read: refused for its size, its sender or its target."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LINGER_SECONDS = 2.0
_LINGER_BYTES = 16 << 20


class UnreadBodies:
    """Ends the connection behind an answer that comes before its request's body is over.

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
