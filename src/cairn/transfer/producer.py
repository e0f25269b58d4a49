"""The producer as one piece: frames in, frames out, leases kept."""

from collections.abc import Callable

from cairn.transfer.asks import AskLimits, Asks
from cairn.transfer.consumer_sessions import ConsumerSessions, Identity
from cairn.transfer.lease import LeaseLimits
from cairn.transfer.lease_book import LeaseBook
from cairn.transfer.wire import Claim, Confirm, ContentClaim, Heartbeat, Release, Reply, Request
from cairn.types import Clock


class Producer:
    """Answers the side channel of one engine. `leases` and `asks` are also the engine's own doors to what it has
    offered and is asked for. Send what `take_frames` returns whenever something was received, answered or timed."""

    def __init__(
        self,
        identity: Identity,
        limits: LeaseLimits,
        clock: Clock,
        random: Callable[[int], bytes],
        ask_limits: AskLimits | None = None,
    ) -> None:
        self.leases = LeaseBook(identity.layout, identity.me.geometry.block_size, limits, clock, random)
        self.asks = Asks(self.leases, identity.layout, clock, ask_limits or AskLimits())
        self.sessions = ConsumerSessions(identity)

    def receive(self, sender: bytes, frame: bytes) -> bytes | None:
        """The answer to a frame that came by connection `sender`, or None. Never raises on what a peer sent."""
        return self.sessions.receive(sender, frame, self._serve)

    def forget(self, sender: bytes) -> None:
        """The connection has ended: what is leased to whoever was there runs out by itself."""
        self.sessions.forget(sender)

    def take_frames(self) -> list[tuple[bytes, bytes]]:
        """Answers that took their time, as (sender, frame), each once."""
        return [(sender, self.sessions.encode(reply)) for sender, reply in self.asks.take_replies()]

    def _serve(self, sender: bytes, request: Request) -> Reply | None:
        match request:
            case Claim():
                return self.leases.claim(request)
            case Heartbeat():
                return self.leases.heartbeat(request)
            case Confirm():
                return self.leases.confirm(request)
            case Release(claim=claim, nonce=nonce) if claim == nonce:
                return self.asks.release(request)
            case Release():
                return self.leases.release(request)
            case ContentClaim():
                return self.asks.claim(sender, request)
