"""The producer as one piece: frames in, frames out, leases kept."""

from collections.abc import Callable

from cairn.transfer.lease import LeaseBook, LeaseLimits
from cairn.transfer.sessions import Identity, Sessions
from cairn.transfer.wire import (
    Claim,
    Confirm,
    ContentClaim,
    FromProducer,
    Heartbeat,
    Reason,
    Release,
    ToProducer,
    refusal,
)
from cairn.types import Clock

__all__ = ["Producer"]


class Producer:
    """Answers the side channel of one engine. `leases` is also the engine's own door to what it has offered."""

    def __init__(self, identity: Identity, limits: LeaseLimits, clock: Clock, random: Callable[[int], bytes]) -> None:
        self.leases = LeaseBook(identity.layout, identity.me.geometry.block_size, limits, clock, random)
        self.sessions = Sessions(identity, clock, random)

    def receive(self, sender: bytes, frame: bytes) -> bytes | None:
        """The answer to a frame that came by connection `sender`, or None. Never raises on what a peer sent."""
        return self.sessions.receive(sender, frame, self._serve)

    def _serve(self, request: ToProducer) -> FromProducer:
        match request:
            case Claim():
                return self.leases.claim(request)
            case Heartbeat():
                return self.leases.heartbeat(request)
            case Confirm():
                return self.leases.confirm(request)
            case Release():
                return self.leases.release(request)
            case ContentClaim():
                # Allowed by the protocol: a hint binds nobody to still hold what it names.
                return refusal(request, Reason.NOT_HELD)
