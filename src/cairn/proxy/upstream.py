"""HTTP to the configured servers, and to nobody else: no redirects, no cookies, no proxies from the environment."""

import asyncio
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import httpx

from cairn.http.cookies import no_cookies
from cairn.proxy.options import ProxyOptions

Headers = Sequence[tuple[bytes, bytes]]

_POOL_SECONDS = 5.0
_WRITE_SECONDS = 60.0
# uvicorn closes idle connections after 5 s; a request sent on one just then would be lost.
_KEEP_ALIVE_SECONDS = 2.0
_MAX_IDLE_CONNECTIONS = 256

_LOCAL_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_ANSWER_HEADERS = frozenset(
    (b"content-type", b"content-encoding", b"content-length", b"cache-control", b"retry-after", b"www-authenticate")
)


class CallFailed(Exception):
    """A server gave no usable answer. `sent`: it may have begun with the request. `kind`: the word for metrics."""

    def __init__(self, message: str, *, kind: str, sent: bool = True) -> None:
        super().__init__(message)
        self.kind = kind
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer, without the headers that are no business of the client's."""

    status: int
    headers: Headers
    content: bytes = b""

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")


class UpstreamClient:
    """All connections to the servers. Use as an async context manager."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._http = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            cookies=no_cookies(),
            timeout=options.connect_timeout,
            limits=httpx.Limits(
                # Each open request has at most one connection, and each server at most one for its health.
                max_connections=options.max_open + len(options.prefill) + len(options.decode) + 16,
                max_keepalive_connections=_MAX_IDLE_CONNECTIONS,
                keepalive_expiry=_KEEP_ALIVE_SECONDS,
            ),
        )

    async def __aenter__(self) -> "UpstreamClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def open(
        self, url: str, content: bytes, headers: Headers, silence_seconds: float, method: str = "POST"
    ) -> AsyncIterator[tuple[Reply, AsyncGenerator[bytes, None]]]:
        """An answer without its content, which comes in chunks as the server sends them, undecoded.

        Raises CallFailed; so does iterating over the chunks.
        """
        timeout = httpx.Timeout(
            connect=self._options.connect_timeout, read=silence_seconds, write=_WRITE_SECONDS, pool=_POOL_SECONDS
        )
        # Undecoded bytes are passed on, so nothing may be compressed that the client did not ask to be.
        sent = [*headers, (b"accept-encoding", b"identity"), (b"user-agent", b"cairn-proxy")]
        request = self._http.build_request(method, url, content=content, headers=sent, timeout=timeout)
        response = await self._send(request)
        try:
            lower = ((key.lower(), value) for key, value in response.headers.raw)
            kept = [(key, value) for key, value in lower if key in _ANSWER_HEADERS]
            async with aclosing(_chunks(response)) as chunks:
                yield Reply(response.status_code, kept), chunks
        finally:
            await response.aclose()

    async def whole(
        self, method: str, url: str, content: bytes, headers: Headers, seconds: float, max_bytes: int
    ) -> Reply:
        """An answer with all of its content, within `seconds`. Raises CallFailed."""
        try:
            async with asyncio.timeout(seconds), self.open(url, content, headers, seconds, method) as (reply, chunks):
                return replace(reply, content=await read_whole(chunks, max_bytes))
        except TimeoutError:
            raise CallFailed(f"no answer within {seconds:g} s", kind="timeout") from None

    async def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return await self._http.send(request, stream=True)
        except httpx.PoolTimeout as error:
            raise CallFailed("no connection was free", kind="timeout", sent=False) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            kind = "local" if _is_local(error) else "unreached"
            raise CallFailed(f"cannot be reached: {_words(error)}", kind=kind, sent=False) from error
        except httpx.TransportError as error:
            raise _broken(error) from error


async def read_whole(chunks: AsyncGenerator[bytes, None], max_bytes: int) -> bytes:
    """All that is still to come. Raises CallFailed when it is too much."""
    parts, size = [], 0
    async with aclosing(chunks):
        async for part in chunks:
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise CallFailed(f"its answer has more than {max_bytes} bytes", kind="answer")
    return b"".join(parts)


async def _chunks(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError as error:
        raise _broken(error) from error


def _broken(error: httpx.TransportError) -> CallFailed:
    if isinstance(error, httpx.TimeoutException):
        return CallFailed("it has been silent for too long", kind="timeout")
    return CallFailed(f"the connection broke: {_words(error)}", kind="broken")


def _is_local(error: BaseException | None) -> bool:
    """Whether it is this process that could not connect: that says nothing about the server."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _LOCAL_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
