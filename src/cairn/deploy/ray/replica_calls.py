"""A request on its way to a replica, as the relay sees it: through Ray (`handles.py`), or a test's double."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cairn.deploy.ray.exchange import AnswerHead, RelayedRequest
from cairn.errors import Overloaded
from cairn.routing.rule import RoutedRequest


class ReplicaFailed(Exception):
    """A replica has died, or cannot be reached."""


class ReplicaCall(Protocol):
    """A request on its way to a replica."""

    async def wait_replica(self) -> str:
        """The name of the replica that has it."""
        ...

    def answer(self) -> AsyncGenerator[AnswerHead | bytes, None]:
        """An AnswerHead, then bytes. Closing it aborts the request. Raises ReplicaFailed."""
        ...

    async def find_failure(self) -> str:
        """What keeps replicas from starting; empty for nothing that is known."""
        ...

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request should go. `request`: what is known of its prompt; `tried`: names of replicas that come last;
    `owner`: of the one that comes first."""

    request: RoutedRequest
    tried: Sequence[str] = ()
    owner: str | None = None


SendToReplica = Callable[[RelayedRequest, Destination], ReplicaCall]


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """`replica_seconds`: for a replica to take a request. `body_seconds`: for a client to send a body."""

    max_attempts: int
    max_body_bytes: int
    replica_seconds: float
    body_seconds: float = 60.0


async def wait_replica(call: ReplicaCall, seconds: float) -> str:
    """The name of the replica that has the request; cancels the call where there is none. Raises ReplicaFailed, and
    Overloaded after so many `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await call.wait_replica()
    except BaseException as error:
        call.cancel()
        if isinstance(error, TimeoutError):
            reason = await call.find_failure()
            text = f"no replica has taken the request within {seconds:g} s: "
            raise Overloaded(text + (f"one could not be started: {reason}" if reason else "try again later")) from None
        raise
