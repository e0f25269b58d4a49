"""The client's side of one request: the answer, passed through byte for byte, or the error."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cairn.errors import RequestError
from cairn.http.clients import cancel_on_disconnect
from cairn.http.error_responses import ClientDisconnected, encode_error_events, error_response
from cairn.proxy.server_pool import Headers

_ERROR_SECONDS = 10.0


class ClientResponse:
    """Writes the response to the client. `started`: a byte of an answer may have gone out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._num_events = 0
        self._event_stream = False
        self._last_bytes = b""
        self.started = False

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        kind = next((value for key, value in headers if key == b"content-type"), b"")
        self._event_stream = kind.startswith(b"text/event-stream")
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def write(self, data: bytes) -> None:
        if self._event_stream:
            self._num_events += (self._last_bytes[-1:] + data).count(b"\n\n")
        self._last_bytes = (self._last_bytes + data)[-4:]
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_whole(self, status: int, headers: Headers, content: bytes) -> int:
        """A complete response; returns its status."""
        await self.start(status, headers)
        await self.write(content)
        await self.end()
        return status

    async def fail(self, error: RequestError) -> None:
        """Send an error response, or the last event of a stream, or, too late for both, leave the answer cut off."""
        if not self.started:
            response = error_response(error, self._scope)
            await self.send_whole(error.status, response.raw_headers, bytes(response.body))
        elif self._event_stream:
            # The server may have ended within an event; what follows has to be one of its own.
            apart = b"" if self._last_bytes.endswith((b"\n\n", b"\r\n\r\n")) or not self._last_bytes else b"\n\n"
            await self.write(apart + encode_error_events(error, self._scope, self._num_events))
            await self.end()


class Relay(Response):
    """Runs `answer` while the client is connected, and cancels it, upstream calls included, when it disconnects.

    `answer` writes the response and returns its status, or raises RequestError. `on_end` is called with the status, the
    error, or ClientDisconnected, and with whether a response had been started. The request's body must have been read.
    """

    def __init__(
        self,
        answer: Callable[[ClientResponse], Coroutine[Any, Any, int]],
        on_end: Callable[[int | RequestError | ClientDisconnected, bool], None],
    ) -> None:
        super().__init__()
        self._answer = answer
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientResponse(scope, send)
        try:
            status = await cancel_on_disconnect(receive, self._answer(client))
        except RequestError as error:
            self._on_end(error, client.started)
            with contextlib.suppress(TimeoutError, OSError, ClientDisconnected):
                async with asyncio.timeout(_ERROR_SECONDS):
                    await cancel_on_disconnect(receive, client.fail(error))
        except (ClientDisconnected, OSError):
            self._on_end(ClientDisconnected(), client.started)
        else:
            self._on_end(status, client.started)
