"""The producer as one piece: frames in, frames out, leases kept. Whoever asks has to serve the same layout."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from cairn.transfer.content_lookups import ContentLookups, LookupLimits
from cairn.transfer.contract import Identity
from cairn.transfer.lease import LeaseLimits
from cairn.transfer.lease_book import LeaseBook
from cairn.transfer.wire import (
    VERSION,
    Claim,
    Confirm,
    Denied,
    FromProducer,
    Heartbeat,
    Hello,
    Release,
    Reply,
    Request,
    Welcome,
    replies,
    requests,
)
from cairn.types import Clock

Serve: TypeAlias = Callable[[bytes, Request], Reply | None]
"""Answers a record that came by this connection; None when the answer comes later, by `ConsumerSessions.encode`."""

_MAX_OPEN = 1024


class ConsumerSessions:
    """`sender` names a connection whose other end has proved that it holds the secret. `dropped` counts frames that
    were no record."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._requests = requests()
        self._replies = replies()
        self._greeted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def dropped(self) -> int:
        return self._requests.dropped

    @property
    def num_open(self) -> int:
        """Connections that have been welcomed."""
        return len(self._greeted)

    def receive(self, sender: bytes, frame: bytes, serve: Serve) -> bytes | None:
        """The answer to a frame, or None when there is none (yet). `serve` is asked on welcomed connections alone."""
        match self._requests.decode(frame):
            case None:
                return None
            case Hello() as hello:
                answer: FromProducer | None = self._greet(sender, hello)
            case request if sender in self._greeted:
                self._greeted.move_to_end(sender)
                answer = serve(sender, request)
            case request:
                answer = Denied(request.claim, "no such session: it is too old, or from before a restart")
        return None if answer is None else self.encode(answer)

    def encode(self, reply: FromProducer) -> bytes:
        """A record as a frame."""
        return self._replies.encode(reply)

    def forget(self, sender: bytes) -> None:
        """The connection has ended."""
        self._greeted.pop(sender, None)

    def _greet(self, sender: bytes, hello: Hello) -> Welcome | Denied:
        own = self._identity
        if hello.version != VERSION:
            return Denied(
                hello.nonce, f"protocol version {hello.version} here, {VERSION} there: run the same cairn on both"
            )
        if hello.layout != own.layout:
            return Denied(
                hello.nonce,
                "the layouts differ: both sides must serve the same model with the same dtype and quantization",
            )
        self._greeted[sender] = None
        if len(self._greeted) > _MAX_OPEN:
            self._greeted.popitem(last=False)
        return Welcome(hello.nonce, own.me.engine_id, own.layout, own.me.geometry, list(own.me.ranks))


class Producer:
    """Answers the side channel of one engine. `leases` and `lookups` are also the engine's own doors to what it has
    offered and is asked for. Send what `take_frames` returns whenever something was received, answered or timed."""

    def __init__(
        self,
        identity: Identity,
        limits: LeaseLimits,
        clock: Clock,
        random: Callable[[int], bytes],
        lookup_limits: LookupLimits | None = None,
    ) -> None:
        self.leases = LeaseBook(identity.layout, identity.me.geometry.block_size, limits, clock, random)
        self.lookups = ContentLookups(self.leases, identity.layout, clock, lookup_limits or LookupLimits())
        self.sessions = ConsumerSessions(identity)

    def receive(self, sender: bytes, frame: bytes) -> bytes | None:
        """The answer to a frame that came by connection `sender`, or None. Never raises on what a peer sent."""
        return self.sessions.receive(sender, frame, self._serve)

    def forget(self, sender: bytes) -> None:
        """The connection has ended: what is leased to whoever was there runs out by itself."""
        self.sessions.forget(sender)

    def take_frames(self) -> list[tuple[bytes, bytes]]:
        """Answers that took their time, as (sender, frame), each once."""
        return [(sender, self.sessions.encode(reply)) for sender, reply in self.lookups.take_replies()]

    def _serve(self, sender: bytes, request: Request) -> Reply | None:
        match request:
            case Claim(nonce=None):
                return self.lookups.claim(sender, request)
            case Claim():
                return self.leases.claim(request)
            case Heartbeat():
                return self.leases.heartbeat(request)
            case Confirm():
                return self.leases.confirm(request)
            case Release(claim=claim, nonce=nonce) if claim == nonce:
                return self.lookups.release(request)
            case Release():
                return self.leases.release(request)
