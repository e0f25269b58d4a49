"""The connections of consumers, as their producer sees them: which of them serve the same layout."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cairn.transfer.contract import Peer
from cairn.transfer.frames import replies, requests
from cairn.transfer.wire import VERSION, Denied, FromProducer, Hello, Reply, Request, Welcome

Serve: TypeAlias = Callable[[bytes, Request], Reply | None]
"""Answers a record that came by this connection; None when the answer comes later, by `ConsumerSessions.encode`."""

_MAX_OPEN = 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this server is. `me.engine_id` is new at every start; `layout` is `digest.layout_hash`."""

    me: Peer
    layout: bytes


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
