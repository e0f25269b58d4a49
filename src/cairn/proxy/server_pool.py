"""A pool of servers as the tries of one request see it: over HTTP (`upstream_calls.py`), or through Ray Serve."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

RELEASE_SECONDS = 2.0
"""For a server to let go of what it has handed over."""

Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """A server gave no usable response. `kind`: the metrics' label; `sent`: the server may have begun the request;
    `server`: its name, empty where it is not known."""

    def __init__(self, message: str, *, kind: str, sent: bool = True) -> None:
        super().__init__(message)
        self.kind = kind
        self.sent = sent
        self.server = ""


class NoUpstream(Exception):
    """There is no server that could get the request; the message says why."""


@dataclass(frozen=True, slots=True)
class UpstreamResponse:
    """A server's response, with only those headers that are passed on to the client. `content`: its body, or as much of
    it as has come before the `rest`."""

    status: int
    headers: Headers
    content: bytes = b""
    rest: AsyncGenerator[bytes, None] | None = None
    server: str = ""

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises UpstreamError."""
        if self.content:
            yield self.content
        if self.rest is not None:
            async for chunk in self.rest:
                yield chunk

    async def read(self, max_bytes: int) -> "UpstreamResponse":
        """With the whole body as its content. Raises UpstreamError, also if that has more than `max_bytes`."""
        content = bytearray()
        async for chunk in self.chunks():
            content += chunk
            if len(content) > max_bytes:
                raise UpstreamError(f"its answer has more than {max_bytes} bytes", kind="answer")
        return replace(self, content=bytes(content), rest=None)


class ServerPool(Protocol):
    """The servers that can do one part of a request, prefill or decode."""

    def send(
        self, content: bytes, tried: Sequence[str], first: str | None, abandoned: bytes | None = None
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """A server's response to this body: of `first` if it is there, of one of `tried` only where there is no other.
        `abandoned`: what is sent to its `RELEASE_PATH` where its answer is not waited for, or cannot be read.

        Raises NoUpstream, and UpstreamError; counts every UpstreamError that leaves the context as the server's.
        """

    def has_untried(self, tried: Sequence[str]) -> bool: ...

    def should_retry(self, status: int) -> bool:
        """Whether another server may do better than one with this status."""

    def report_failure(self, server: str, error: UpstreamError) -> None:
        """Count a failure that shows only after the call."""

    def release(self, server: str, content: bytes) -> None:
        """Have a server let go of what it has handed over, in the background: `content` goes to its `RELEASE_PATH`."""


class ReleaseTasks:
    """Releases that are under way, which outlive the requests that they are of, and are bounded in number and time:
    what is not released runs out by itself."""

    def __init__(self, max_open: int = 256) -> None:
        self._max_open = max_open
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, release: Coroutine[Any, Any, None]) -> None:
        """`release` must not raise."""
        if len(self._tasks) >= self._max_open:
            release.close()
            return
        task = asyncio.create_task(release)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
