"""Replicas and clients of the Ray ingress, without Ray: a test gives the calls what they answer."""

import asyncio
import json
from dataclasses import replace

from cairn.deploy.ray.exchange import AnswerHead
from cairn.deploy.ray.relay import RequestRelay
from cairn.deploy.ray.replica_calls import RelayLimits, ReplicaFailed
from cairn.http.handover import RELEASE_PATH

JSON = [(b"content-type", b"application/json")]
STREAM = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"r1")]
DEATH = ReplicaFailed("the actor has died")


class Call:
    """Answers with `items`; an exception among them is raised, and an Event waited for. `failure`: what keeps replicas
    from starting."""

    def __init__(self, name, items, failure=""):
        self.name, self.items, self.failure = name, items, failure
        self.cancelled = False
        self.closed = False

    async def wait_replica(self):
        if self.name is None:
            await asyncio.Event().wait()
        return self.name

    async def answer(self):
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                else:
                    yield item
        finally:
            self.closed = True

    async def find_failure(self):
        return self.failure

    def cancel(self):
        self.cancelled = True


class Client:
    """One request to the relay, and what came back. `released`: what replicas were told to let go of, whatever their
    calls."""

    def __init__(
        self,
        *calls,
        limits=None,
        body=b"{}",
        headers=((b"x-request-id", b"r1"),),
        method="POST",
        path="/v1/x",
        **options,
    ):
        """`options`: of the relay."""
        self.calls, self.sent, self.requests, self.released = list(calls), [], [], []
        self.gone = asyncio.Event()
        self._unread = [{"type": "http.request", "body": body, "more_body": False}]
        self._relay = RequestRelay(self.send_to_replica, limits or RelayLimits(3, 1 << 20, 5.0), **options)
        self._scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers),
            "client": ("10.0.0.9", 5),
        }

    def send_to_replica(self, request, destination):
        if request.path == RELEASE_PATH:
            self.released.append((destination.owner, json.loads(request.body)))
            return Call(destination.owner, [AnswerHead(200, JSON, b"", True)])
        self.requests.append((request, replace(destination, tried=tuple(destination.tried))))
        return self.calls[len(self.requests) - 1]

    async def _receive(self):
        if self._unread:
            return self._unread.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)

    async def ask(self):
        await self._relay(self._scope, self._receive, self._send)
        return self

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def body(self):
        return b"".join(message["body"] for message in self.sent[1:])
