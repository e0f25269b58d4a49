"""A request on its way to a replica: through Ray (`handles.py`), or a test's double; and the replicas of a pool as the
tries of one request see them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from cairn.deploy.ray.exchange import AnswerHead, RelayedRequest
from cairn.http.handover import RELEASE_PATH
from cairn.proxy.server_pool import RELEASE_SECONDS, Headers, NoUpstream, ReleaseTasks, UpstreamError, UpstreamResponse
from cairn.routing.rule import RoutedRequest

REQUEST_ID = b"x-request-id"
_OF_BODY = (b"content-length", b"content-encoding", b"transfer-encoding")

logger = logging.getLogger(__name__)


class ReplicaFailed(UpstreamError):
    """A replica has died, or cannot be reached."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="failed")


class ReplicaCall(Protocol):
    """A request on its way to a replica."""

    async def wait_replica(self) -> str:
        """The name of the replica that has it. Raises ReplicaFailed, and NoUpstream when there is none to wait for."""

    def answer(self) -> AsyncGenerator[AnswerHead | bytes, None]:
        """An AnswerHead, then bytes. Closing it aborts the request. Raises ReplicaFailed."""

    async def find_failure(self) -> str:
        """What keeps replicas from starting; empty for nothing that is known."""

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request should go. `request`: what is known of its prompt; `tried`: names of replicas that are passed
    over if there are others; `owner`: of the one that comes first if it is there."""

    request: RoutedRequest = field(default_factory=RoutedRequest)
    tried: Sequence[str] = ()
    owner: str | None = None


SendToReplica = Callable[[RelayedRequest, Destination], ReplicaCall]


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """`replica_seconds`: for a replica to take a request. `body_seconds`: for a client to send a body.
    `answer_seconds`: for all of an answer."""

    max_attempts: int
    max_body_bytes: int
    replica_seconds: float
    body_seconds: float = 60.0
    answer_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """A `ServerPool` for one request. `prompt`: what is known of it; `seconds`: for a replica to take the request;
    `retried`: statuses with which another one is tried; `releases`: of all requests."""

    send_to_replica: SendToReplica
    request: RelayedRequest
    prompt: RoutedRequest
    seconds: float
    releases: ReleaseTasks
    retried: Sequence[int] = ()

    @asynccontextmanager
    async def send(
        self, content: bytes, tried: Sequence[str], first: str | None, abandoned: bytes | None = None
    ) -> AsyncIterator[UpstreamResponse]:
        request, server = _with_body(self.request, content), ""
        call = self.send_to_replica(request, Destination(self.prompt, tuple(tried), first))
        try:
            server = await wait_replica(call, self.seconds)
            async with aclosing(call.answer()) as items:
                head = await anext(items, None)
                if not isinstance(head, AnswerHead):
                    raise ReplicaFailed("it has ended without an answer")
                rest = None if head.complete else _chunks(items)
                yield UpstreamResponse(head.status, self._answer_headers(head), head.body, rest, server)
        except BaseException as error:
            if abandoned is not None and server:
                self.release(server, abandoned)
            if isinstance(error, UpstreamError):
                error.server, error.sent = server, error.sent and bool(server)
                self.report_failure(server, error)
            raise

    def has_untried(self, tried: Sequence[str]) -> bool:
        return True  # who is there, the router knows: it takes one that was tried when there is no other

    def should_retry(self, status: int) -> bool:
        return status in self.retried

    def report_failure(self, server: str, error: UpstreamError) -> None:
        level = logging.DEBUG if error.kind == "status" else logging.WARNING
        logger.log(level, "replica %s has failed: %s", server or "of no name", error)

    def release(self, server: str, content: bytes) -> None:
        self.releases.start(self._release(server, content))

    async def _release(self, server: str, content: bytes) -> None:
        asked = replace(self.request, path=RELEASE_PATH, raw_path=RELEASE_PATH.encode(), query_string=b"")
        call = self.send_to_replica(_with_body(asked, content), Destination(owner=server))
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await wait_replica(call, RELEASE_SECONDS)
                async with aclosing(call.answer()) as items:
                    await anext(items, None)
        except (UpstreamError, NoUpstream, TimeoutError) as error:
            logger.debug("replica %s has not been told to release: %s", server, error)

    def _answer_headers(self, head: AnswerHead) -> Headers:
        """Without the request's id where Ray's proxy has named the request: it adds the header once more."""
        has_id = any(name == REQUEST_ID for name, _ in self.request.headers)
        return [(name, value) for name, value in head.headers if not (has_id and name.lower() == REQUEST_ID)]


async def _chunks(items: AsyncGenerator[AnswerHead | bytes, None]) -> AsyncGenerator[bytes, None]:
    async for item in items:
        assert isinstance(item, bytes)
        yield item


def _with_body(request: RelayedRequest, content: bytes) -> RelayedRequest:
    if content == request.body:
        return request
    headers = [(name, value) for name, value in request.headers if name not in _OF_BODY]
    return replace(request, headers=headers, body=content)


async def wait_replica(call: ReplicaCall, seconds: float) -> str:
    """The name of the replica that has the request; cancels the call where there is none. Raises ReplicaFailed, and
    NoUpstream after so many `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await call.wait_replica()
    except BaseException as error:
        call.cancel()
        if isinstance(error, TimeoutError):
            reason = await call.find_failure()
            text = f"no replica has taken the request within {seconds:g} s: "
            raise NoUpstream(text + (f"one could not be started: {reason}" if reason else "try again later")) from None
        raise
