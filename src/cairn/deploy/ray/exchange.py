"""One request to the server's application in this process, and its answer as what goes to the ingress.

An answer is an `AnswerHead` with the first bytes of the body, and then bytes. What the application sends while nobody
takes it comes as one chunk.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

_MAX_BUFFERED_BYTES = 1 << 20
_MAX_ITEM_BYTES = 1 << 20
"""Of a message between actors, gRPC takes 4 MiB."""
_LEAVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """A client's request with all of its body. `headers`: lower-case names, and values. `client`: address and port."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    scheme: str = "http"
    http_version: str = "1.1"
    body: bytes = field(default=b"", repr=False)

    def scope(self) -> dict[str, Any]:
        """As ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.http_version,
            "method": self.method,
            "scheme": self.scheme,
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query_string,
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
            "server": None,
        }


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """`body`: what there was of it when the head was taken. `complete`: that was all."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    complete: bool


class AsgiExchange:
    """Runs one request. Used once."""

    def __init__(self, app: ASGIApp, request: RelayedRequest) -> None:
        self._app = app
        self._request = request
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._ended = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._left = asyncio.Event()
        self._unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def run(self) -> AsyncGenerator[AnswerHead | bytes, None]:
        """The answer. When it is closed before its end, or cancelled, the application sees a client that has gone.
        Raises RuntimeError for an application that ends in mid-answer."""
        running = asyncio.create_task(self._run_app())
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                chunk, ended = self._take(), self._ended
                if self._start is not None:
                    head, self._start = self._start, None
                    headers = [(bytes(name), bytes(value)) for name, value in head["headers"]]
                    is_whole = ended and len(chunk) <= _MAX_ITEM_BYTES
                    yield AnswerHead(head["status"], headers, chunk[:_MAX_ITEM_BYTES], is_whole)
                    chunk = chunk[_MAX_ITEM_BYTES:]
                for at in range(0, len(chunk), _MAX_ITEM_BYTES):
                    yield chunk[at : at + _MAX_ITEM_BYTES]
                if ended:
                    return
                if running.done() and not self._news.is_set():
                    raise RuntimeError("the application has ended in mid-answer") from running.exception()
        finally:
            self._left.set()
            self._room.set()
            if not running.done():
                asyncio.get_running_loop().call_later(_LEAVE_SECONDS, running.cancel)

    async def _run_app(self) -> None:
        try:
            await self._app(self._request.scope(), self._receive, self._send)
        finally:
            self._news.set()

    async def _receive(self) -> Message:
        if self._unread:
            return self._unread.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        await self._room.wait()
        if self._left.is_set():
            raise OSError("the client has gone")
        if body := message.get("body", b""):
            self._parts.append(body)
            self._num_bytes += len(body)
            if self._num_bytes >= _MAX_BUFFERED_BYTES:
                self._room.clear()
        self._ended = not message.get("more_body", False)
        self._news.set()

    def _take(self) -> bytes:
        chunk = b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        self._room.set()
        return chunk
