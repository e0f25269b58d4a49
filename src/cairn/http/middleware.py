"""What happens to a request before any route sees it: its id, the API key, the gate, the size of its body.

Plain ASGI, so that streams pass through untouched. Decisions are made on `scope["path"]`, the path that is routed on,
never on a URL put together from headers.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.errors import InvalidRequest, Overloaded, QueueFull, RequestError
from cairn.http.clients import record_api_key
from cairn.http.error_responses import ClientDisconnected, error_response, internal_error, make_error

_GZIP = ("gzip", "x-gzip")
_OF_ENCODING = (b"content-encoding", b"content-length")
_SERVER_SEND = "cairn.send"
"""Where a request's scope has the server's own `send`."""
_VISIBLE = re.compile(r"[\x21-\x7e]{1,128}")

logger = logging.getLogger(__name__)


def random_id() -> str:
    return uuid.uuid4().hex


class HttpMiddleware(ABC):
    """One layer around the handling of HTTP requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            return await self._handle(scope, receive, send)
        except RequestError as error:
            return await error_response(error, scope)(scope, receive, send)

    @abstractmethod
    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError, which the client gets, before anything has been answered."""


def get_body_send(scope: Scope, send: Send) -> Send:
    """What sends the pieces of a response's body once `send` has sent its start. The layers between look at the start
    alone, and to go through all of them takes a token's time."""
    body_send: Send = scope.get(_SERVER_SEND, send)
    return body_send


class RequestIds(HttpMiddleware):
    """Gives every request an id, the client's X-Request-Id if it sends one, and returns it in the same header, to
    `silent_paths` only one that was sent. Answers any other exception of the application with 500, so that the
    connection stays usable."""

    def __init__(self, app: ASGIApp, new_id: Callable[[], str], silent_paths: Set[str] = frozenset()) -> None:
        super().__init__(app)
        self._new_id = new_id
        self._silent_paths = silent_paths

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = Headers(scope=scope).get("x-request-id")
        if header is not None and not _VISIBLE.fullmatch(header):
            raise InvalidRequest("the header X-Request-Id must be 1 to 128 visible ASCII characters", "X-Request-Id")
        request_id = header or self._new_id()
        scope["cairn.request_id"] = request_id
        scope["cairn.has_own_request_id"] = header is not None
        scope[_SERVER_SEND] = send
        is_returned = header is not None or scope["path"] not in self._silent_paths
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start" and is_returned:
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            return await self._app(scope, receive, send_with_id)
        except Exception:
            if started:
                raise
            logger.exception("a bug in answering %s", scope["path"])
            return await error_response(internal_error(), scope)(scope, receive, send_with_id)


class RootPath(HttpMiddleware):
    """Takes `root` off the paths that begin with it: a proxy in front may leave it there. All behind this layer see
    the path that is routed on."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        super().__init__(app)
        self._root = root

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}
        return await self._app(scope, receive, send)


class ApiKey(HttpMiddleware):
    """Refuses requests without one of the keys, except for `open_paths`."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], open_paths: Set[str]) -> None:
        super().__init__(app)
        self._open_paths = open_paths
        self._expected = [_digest(key.encode()) for key in api_keys]

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._open_paths:
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        if not key and (named := headers.get("x-api-key")) is not None:
            kind, key = "bearer", named  # Anthropic's clients
        digest = _digest(key.encode("latin-1"))
        # All are compared, so that the time does not depend on which one matches.
        num_matches = sum(hmac.compare_digest(digest, expected) for expected in self._expected)
        if not num_matches or kind.lower() != "bearer":
            raise make_error('send the API key in the header "Authorization: Bearer KEY"', 401)
        record_api_key(scope, key.encode("latin-1"))
        return await self._app(scope, receive, send)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class Gate:
    """Counts open requests and bounds their number. Closed for good once the process drains. `who`: the server or the
    proxy, for the message. `on_full` is called for each request that finds it full."""

    def __init__(self, max_open: int, who: str = "server", on_full: Callable[[], None] = lambda: None) -> None:
        self.max_open = max_open
        self._on_full = on_full
        self.num_open = 0
        self.closed = False
        self._who = who
        self._emptied = asyncio.Event()
        self._emptied.set()

    def enter(self) -> None:
        """Raises Overloaded when closed, QueueFull when full; otherwise `leave` has to follow."""
        if self.closed:
            raise Overloaded(f"the {self._who} is shutting down: send the request to another one")
        if self.num_open >= self.max_open:
            self._on_full()
            raise QueueFull(f"{self.num_open} requests are open already: try again later")
        self.num_open += 1
        self._emptied.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._emptied.set()

    def close(self) -> None:
        self.closed = True

    async def wait_empty(self) -> None:
        await self._emptied.wait()


class GateKeeper(HttpMiddleware):
    """Counts requests to `paths` at the gate until their last byte is sent."""

    def __init__(self, app: ASGIApp, gate: Gate, paths: Set[str]) -> None:
        super().__init__(app)
        self._gate = gate
        self._paths = paths

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._paths:
            return await self._app(scope, receive, send)
        self._gate.enter()
        try:
            return await self._app(scope, receive, send)
        finally:
            self._gate.leave()


async def read_body(receive: Receive, max_bytes: int, seconds: float) -> bytes:
    """The body of a request, or more than `max_bytes` of it. Raises ClientDisconnected, and RequestError if it
    does not come in time."""
    body, more_body = bytearray(), True
    try:
        async with asyncio.timeout(seconds):
            while more_body and len(body) <= max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body += message.get("body", b"")
                more_body = message.get("more_body", False)
    except TimeoutError:
        raise make_error(f"the body did not come within {seconds:g} s", 408) from None
    return bytes(body)


class BodyLimit(HttpMiddleware):
    """Reads the body of a request before the application does, up to `max_bytes` (413) and for `seconds` (408), and
    unpacks one in gzip up to as many; another encoding is a 415. The application sees the bytes that are meant."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        announced, encoding = headers.get("content-length", "0"), headers.get("content-encoding", "").strip().lower()
        try:
            if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
                raise self._too_large()
            if encoding not in ("", "identity", *_GZIP):
                raise make_error(f"Content-Encoding is {encoding[:64]!r}: send gzip, or the body as it is", 415)
            body = await read_body(receive, self._max_bytes, self._seconds)
        except ClientDisconnected:
            return None
        if len(body) > self._max_bytes:
            raise self._too_large()
        if encoding in _GZIP:
            body = await asyncio.to_thread(self._unpack, body)
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] not in _OF_ENCODING]}
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        return await self._app(scope, replay, send)

    def _unpack(self, body: bytes) -> bytes:
        unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            unpacked = unpacker.decompress(body, self._max_bytes + 1)
        except zlib.error as error:
            raise InvalidRequest(f"the body is no gzip: {error}") from None
        if len(unpacked) > self._max_bytes:
            raise self._too_large()
        if not unpacker.eof or unpacker.unused_data:
            what = "ends too early" if not unpacker.eof else f"has {len(unpacker.unused_data)} bytes after its end"
            raise InvalidRequest(f"the body's gzip {what}")
        return unpacked

    def _too_large(self) -> RequestError:
        return make_error(f"the body has more than {self._max_bytes} bytes", 413)
