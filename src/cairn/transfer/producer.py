"""The producer's side of transfers: frames in, frames out; leases, and lookups for claims without one.

    claim with a lease      --> Leases: Granted or Refused
    claim without a lease   --> LookupRequest --> an offer: leased to the sender, Granted
                                             +--> nothing, or no answer in time: Refused(NOT_CACHED)

The cache belongs to the scheduler, which answers when it can. Meanwhile the consumer repeats its claim: that is one
lookup, and an answer that was lost is sent again.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cairn.transfer.claim import match_claim
from cairn.transfer.contract import Identity, LookupId, LookupRequest, Offer
from cairn.transfer.digest import DIGEST_BYTES
from cairn.transfer.leases import LeaseLimits, Leases
from cairn.transfer.session import ConsumerSessions
from cairn.transfer.wire import (
    Claim,
    Confirm,
    Granted,
    Heartbeat,
    RefusalReason,
    Refused,
    Release,
    Released,
    Reply,
    Request,
    refusal,
)
from cairn.types import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """`max_open`: lookups that wait for an answer at a time; more are refused. `seconds`: how long one waits, well
    below the time after which a consumer gives up. `max_remembered`: answers that can be repeated."""

    max_open: int = 64
    seconds: float = 2.0
    max_remembered: int = 1024


@dataclass(frozen=True, slots=True)
class _Lookup:
    sender: bytes
    claim: Claim
    until: float


class ContentLookups:
    """Claims without a lease: those that wait for the cache to be looked up, and the latest answers. `layout` is
    `digest.layout_hash`."""

    def __init__(self, leases: Leases, layout: bytes, clock: Clock, limits: LookupLimits) -> None:
        self._leases = leases
        self._layout = layout
        self._clock = clock
        self._limits = limits
        self._open: dict[LookupId, _Lookup] = {}
        self._by_claim: dict[bytes, LookupId] = {}
        self._answered: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._requests: list[LookupRequest] = []
        self._replies: list[tuple[bytes, Reply]] = []
        self._last_id = 0

    @property
    def num_open(self) -> int:
        """Lookups without an answer."""
        return len(self._open)

    def claim(self, sender: bytes, claim: Claim) -> Granted | Refused | None:
        """The answer, or None while there is none: then `take_replies` returns it later."""
        self.expire()
        if claim.claim in self._answered:
            nonce = self._answered[claim.claim]
            return self._leases.repeat_grant(claim, nonce) if nonce else refusal(claim, RefusalReason.NOT_CACHED)
        if (open_id := self._by_claim.get(claim.claim)) is not None:
            first = self._open[open_id]
            return None if (first.sender, first.claim) == (sender, claim) else refusal(claim, RefusalReason.USED)
        if not claim.marks or len(claim.marks) % DIGEST_BYTES:
            return refusal(claim, RefusalReason.OUT_OF_RANGE)
        if len(self._open) >= self._limits.max_open:
            return refusal(claim, RefusalReason.NOT_CACHED)
        self._last_id += 1
        lookup = LookupId(self._last_id)
        self._open[lookup] = _Lookup(sender, claim, self._clock.now() + self._limits.seconds)
        self._by_claim[claim.claim] = lookup
        self._requests.append(LookupRequest(lookup, claim.adapter, claim.marks, claim.start, claim.end))
        return None

    def release(self, release: Release) -> Released:
        """The sender does not need the answer any more; it may or may not have been given it."""
        if (lookup := self._by_claim.get(release.claim)) is not None:
            self._close(lookup, None)
        elif nonce := self._answered.get(release.claim):
            self._leases.withdraw(nonce)
        else:
            # The claim may arrive after its release.
            self._remember(release.claim, None)
        return Released(release.claim)

    def refuse(self, lookup: LookupId) -> None:
        """Nothing is cached of what was claimed. Does nothing for unknown and ended lookups."""
        if (open_lookup := self._open.get(lookup)) is not None:
            self._close(lookup, None)
            self._replies.append((open_lookup.sender, refusal(open_lookup.claim, RefusalReason.NOT_CACHED)))

    def grant(self, lookup: LookupId, offer: Offer, nonce: bytes) -> None:
        """Give the lease `nonce` of the offer to the sender of the claim. It ends, and nothing is given, when the
        lookup has ended, when the claim contradicts itself, or when the offer has nothing beyond `start`. Raises
        AssertionError for an offer of other content than was claimed."""
        self.expire()
        open_lookup, granted = self._open.get(lookup), None
        if open_lookup is not None and len(offer.keys) > open_lookup.claim.start:
            if match_claim(open_lookup.claim, offer, self._layout) == len(offer.keys):
                granted = self._leases.grant(open_lookup.claim, nonce)
            elif open_lookup.claim.end is None:
                raise AssertionError(f"{offer.request_id}: {len(offer.keys)} tokens are at no mark of the claim")
            # Found by an end that the marks do not lead to: the claim contradicts itself, which is the peer's fault.
        if granted is None or open_lookup is None:
            self._leases.withdraw(nonce)
            self.refuse(lookup)
            return
        self._close(lookup, nonce)
        self._replies.append((open_lookup.sender, granted))

    def expire(self) -> None:
        """Refuse the lookups that have waited for too long."""
        now = self._clock.now()
        for lookup in [lookup for lookup, open_lookup in self._open.items() if open_lookup.until <= now]:
            self.refuse(lookup)

    def take_requests(self) -> list[LookupRequest]:
        """Lookups since the last call that still wait for an answer."""
        self.expire()
        requests, self._requests = [each for each in self._requests if each.lookup in self._open], []
        return requests

    def take_replies(self) -> list[tuple[bytes, Reply]]:
        """Answers since the last call, each with the connection it goes to."""
        self.expire()
        replies, self._replies = self._replies, []
        return replies

    def _close(self, lookup: LookupId, nonce: bytes | None) -> None:
        claim = self._open.pop(lookup).claim.claim
        del self._by_claim[claim]
        self._remember(claim, nonce)

    def _remember(self, claim: bytes, nonce: bytes | None) -> None:
        self._answered[claim] = nonce
        if len(self._answered) > self._limits.max_remembered:
            self._answered.popitem(last=False)


class Producer:
    """Answers the side channel of one engine. Through `leases` and `lookups` the engine leases its own pages and
    answers lookups. Send the frames of `take_frames` whenever something was received, answered or timed out."""

    def __init__(
        self,
        identity: Identity,
        limits: LeaseLimits,
        clock: Clock,
        random: Callable[[int], bytes],
        lookup_limits: LookupLimits | None = None,
    ) -> None:
        self.leases = Leases(identity.layout, identity.me.geometry.block_size, limits, clock, random)
        self.lookups = ContentLookups(self.leases, identity.layout, clock, lookup_limits or LookupLimits())
        self.sessions = ConsumerSessions(identity)

    @property
    def is_idle(self) -> bool:
        """Whether there is no lease and no lookup that may end by itself, and none of which nobody has heard."""
        return self.leases.is_idle and not self.lookups.num_open

    def receive(self, sender: bytes, frame: bytes) -> bytes | None:
        """The answer to a frame that came by connection `sender`, or None. Never raises on what a peer sent."""
        return self.sessions.receive(sender, frame, self._serve)

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
            case Release(nonce=None):
                return self.lookups.release(request)
            case Release():
                return self.leases.release(request)
