"""Server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cairn.http.failures import ClientGone
from cairn.http.leaving import unless_gone

DONE_EVENT = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event with a JSON object."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """Sends the events of a generator, and closes it when the client goes away or takes too long to read.

    `seconds` bounds the whole stream; the generator should have a deadline of its own that comes first.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await unless_gone(receive, self._write(send))
        except (ClientGone, TimeoutError, OSError):
            return

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
