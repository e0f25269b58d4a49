"""Claims without a lease that wait for the producer's cache to be asked, and what became of them.

    claim --> ContentAsked --> answer: an offer -> leased, claimed by whoever asked, Granted
                          +--> answer: nothing, or none in time -> Refused(NOT_HELD)

The cache belongs to somebody else, who answers when there is time. The consumer repeats its claim meanwhile: that is
one ask, and an answer that was lost is given again.
"""

from collections import OrderedDict
from dataclasses import dataclass

from cairn.step import GRID
from cairn.transfer.contract import AskId, ContentAsked, Offer
from cairn.transfer.digest import DIGEST_BYTES, content_digest
from cairn.transfer.lease_book import LeaseBook
from cairn.transfer.wire import Claim, Granted, RefusalReason, Refused, Release, Released, Reply, refusal
from cairn.types import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """`max_open`: asks that wait at a time; more are refused. `seconds`: how long one waits, well below the time in
    which a consumer gives up. `max_remembered`: how many answers can be given again."""

    max_open: int = 64
    seconds: float = 2.0
    max_remembered: int = 1024


@dataclass(frozen=True, slots=True)
class _Ask:
    sender: bytes
    claim: Claim
    until: float


class ContentLookups:
    """All claims without a lease of one engine. `layout` is `digest.layout_hash`."""

    def __init__(self, leases: LeaseBook, layout: bytes, clock: Clock, limits: LookupLimits) -> None:
        self._leases = leases
        self._layout = layout
        self._clock = clock
        self._limits = limits
        self._open: dict[AskId, _Ask] = {}
        self._by_claim: dict[bytes, AskId] = {}
        self._answered: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._asked: list[ContentAsked] = []
        self._replies: list[tuple[bytes, Reply]] = []
        self._next = 0

    @property
    def num_open(self) -> int:
        """ContentLookups without an answer."""
        return len(self._open)

    @property
    def next_end(self) -> float | None:
        """When the next ask is refused for want of an answer, or None while there is none."""
        return min((ask.until for ask in self._open.values()), default=None)

    def claim(self, sender: bytes, claim: Claim) -> Granted | Refused | None:
        """The answer, or None while there is none: then it comes by `take_replies`."""
        self.expire()
        if claim.claim in self._answered:
            nonce = self._answered[claim.claim]
            return refusal(claim, RefusalReason.NOT_HELD) if nonce is None else self._leases.granted(claim, nonce)
        known = self._by_claim.get(claim.claim)
        if known is not None:
            ask = self._open[known]
            return None if ask.claim == claim and ask.sender == sender else refusal(claim, RefusalReason.USED)
        if claim.marks is None or len(claim.marks) % DIGEST_BYTES:
            return refusal(claim, RefusalReason.OUT_OF_RANGE)
        if len(self._open) >= self._limits.max_open:
            return refusal(claim, RefusalReason.NOT_HELD)
        self._next += 1
        ask_id = AskId(self._next)
        self._open[ask_id] = _Ask(sender, claim, self._clock.now() + self._limits.seconds)
        self._by_claim[claim.claim] = ask_id
        self._asked.append(ContentAsked(ask_id, claim.adapter, claim.marks, claim.start, claim.checkpoint, claim.end))
        return None

    def release(self, release: Release) -> Released:
        """Whoever asked does not want the answer any more, and may or may not have been given it."""
        if (ask := self._by_claim.get(release.claim)) is not None:
            self._close(ask, None)
        elif (nonce := self._answered.get(release.claim)) is not None:
            self._leases.withdraw(nonce)
        else:
            # Its claim may be under way still, and come after this.
            self._remember(release.claim, None)
        return Released(release.claim)

    def refuse(self, ask: AskId) -> None:
        """Nothing is held of what was asked. Unknown and ended asks are left as they are."""
        if (found := self._open.get(ask)) is not None:
            self._close(ask, None)
            self._replies.append((found.sender, refusal(found.claim, RefusalReason.NOT_HELD)))

    def grant(self, ask: AskId, offer: Offer, nonce: bytes) -> bool:
        """Lease what is held to whoever asked. False, and nothing is leased, when the ask has ended or contradicts
        itself, or when the offer brings nothing beyond what the other side has, or does not fit under the leases' cap.
        Raises AssertionError for an offer that was not asked for."""
        self.expire()
        found = self._open.get(ask)
        if found is None:
            return False
        position = len(offer.keys)
        if position <= found.claim.start or not self._leases.has_room(offer.all_pages):
            self.refuse(ask)
            return False
        digest = content_digest(self._layout, offer.name, offer.keys)
        if digest not in (_mark(found.claim.marks, position), found.claim.end):
            if found.claim.end is not None:
                # Found by an end that its marks do not lead to: the claim contradicts itself, and is the peer's doing.
                self.refuse(ask)
                return False
            raise AssertionError(f"{offer.request_id}: {position} tokens are at no mark of what was asked for")
        granted = self._leases.grant(found.claim, offer, nonce)
        self._close(ask, nonce)
        self._replies.append((found.sender, granted))
        return True

    def expire(self) -> None:
        """Refuse what has waited long enough."""
        now = self._clock.now()
        for ask in [ask for ask, found in self._open.items() if found.until <= now]:
            self.refuse(ask)

    def take_asked(self) -> list[ContentAsked]:
        """What was asked since the last call, and still waits for an answer."""
        self.expire()
        asked, self._asked = [event for event in self._asked if event.ask in self._open], []
        return asked

    def take_replies(self) -> list[tuple[bytes, Reply]]:
        """Answers since the last call, each with the connection it goes to."""
        self.expire()
        replies, self._replies = self._replies, []
        return replies

    def _close(self, ask: AskId, nonce: bytes | None) -> None:
        claim = self._open.pop(ask).claim.claim
        del self._by_claim[claim]
        self._remember(claim, nonce)

    def _remember(self, claim: bytes, nonce: bytes | None) -> None:
        self._answered[claim] = nonce
        if len(self._answered) > self._limits.max_remembered:
            self._answered.popitem(last=False)


def _mark(marks: bytes | None, position: int) -> bytes | None:
    """The digest of the first `position` tokens, if there is one."""
    if marks is None or position % GRID:
        return None
    at = position // GRID * DIGEST_BYTES
    return marks[at - DIGEST_BYTES : at]
