"""Calls of replicas through a Ray Serve handle, as what the relay expects."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpc import RpcError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from cairn.deploy.ray.exchange import AnswerHead, RelayedRequest
from cairn.deploy.ray.replica_calls import Destination, ReplicaFailed
from cairn.deploy.ray.start_failures import StartFailures
from cairn.proxy.server_pool import NoUpstream

_MAX_GRPC_BYTES = 2 << 20
"""gRPC, which costs half as much, takes messages of 4 MiB."""

_FAILURES = (RayError, RayServeException, RpcError)


def _ignore(name: str, prefilled: Callable[[], None]) -> None:
    """Nobody asked who has taken a request."""


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """What the router gets to know of a request. It stays in the ingress' process: the replica gets an empty one.

    `on_routed` is called, from any thread, with the name of the replica that has taken the request, and with what is to
    be called when its first token has come.
    """

    destination: Destination = field(default_factory=Destination)
    on_routed: Callable[[str, Callable[[], None]], None] = _ignore

    def __reduce__(self) -> tuple[Any, ...]:
        return RoutingHint, ()


class HandleReplicas:
    """Sends requests through `handle`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._actor_handle = handle.options(stream=True, method_name="answer")
        self._grpc_handle = self._actor_handle.options(_by_reference=False)
        self._failures = StartFailures(partial(_read_status, handle))

    def __call__(self, request: RelayedRequest, destination: Destination) -> "HandleCall":
        is_small = len(request.body) <= _MAX_GRPC_BYTES
        handle = self._grpc_handle if is_small else self._actor_handle
        return HandleCall(handle, request, destination, self._failures)


class HandleCall:
    """One request through a handle."""

    def __init__(
        self, handle: DeploymentHandle, request: RelayedRequest, destination: Destination, failures: StartFailures
    ) -> None:
        self.find_failure = failures.find
        loop = asyncio.get_running_loop()
        self._routed: asyncio.Future[tuple[str, Callable[[], None]]] = loop.create_future()

        def on_routed(name: str, prefilled: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(self._set_routed, name, prefilled)

        self._items = handle.remote(request, RoutingHint(destination, on_routed))
        self._first = asyncio.ensure_future(self._items.__anext__())

    def _set_routed(self, name: str, prefilled: Callable[[], None]) -> None:
        if not self._routed.done():
            self._routed.set_result((name, prefilled))

    async def wait_replica(self) -> str:
        """Raises ReplicaFailed, and NoUpstream when there is none that may be waited for."""
        try:
            await asyncio.wait((self._routed, self._first), return_when=asyncio.FIRST_COMPLETED)
            if not self._routed.done() and (error := self._first.exception()) is not None:
                raise error
        except DeploymentUnavailableError as error:
            reason = await self.find_failure() or "`serve status` and Ray's log say why"
            raise NoUpstream(f"no replica could be started: {reason}") from error
        except BackPressureError as error:
            raise NoUpstream("too many requests wait for a replica: try again later") from error
        except _FAILURES as error:
            raise ReplicaFailed(_in_one_line(error)) from error
        return (await self._routed)[0]

    async def answer(self) -> AsyncGenerator[AnswerHead | bytes, None]:
        try:
            item = await self._first
            (await self._routed)[1]()
            while True:
                yield item
                item = await self._items.__anext__()
        except StopAsyncIteration:
            return
        except _FAILURES as error:
            raise ReplicaFailed(_in_one_line(error)) from error
        finally:
            self.cancel()

    def cancel(self) -> None:
        with suppress(*_FAILURES):
            self._items.cancel()
        self._first.cancel()


def _read_status(handle: DeploymentHandle) -> str:
    """What Ray says of the deployment behind `handle`. It waits for Ray's controller."""
    application = serve.status().applications.get(handle.app_name)
    status = None if application is None else application.deployments.get(handle.deployment_name)
    return "" if status is None else status.message


def _in_one_line(error: Exception) -> str:
    """The first line: what Ray says of an actor that has died has many."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
