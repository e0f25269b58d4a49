"""The producer's side: every lease of one engine, and what is answered to whoever asks for one.

A lease is held until it ends, and what is held stays within a cap; an ended one is remembered for a while, to say how
it ended. Every call looks at the clock first: no answer depends on when somebody last tidied up.
"""

import hmac
from collections.abc import Callable

from cairn.transfer.contract import HeldCheckpoint, LeaseEnded, Offer, num_range_pages
from cairn.transfer.digest import content_digest
from cairn.transfer.lease import Lease, LeasedPages, LeaseLimits, LeaseState
from cairn.transfer.params import remote_request_id
from cairn.transfer.wire import (
    NONCE_BYTES,
    Alive,
    Claim,
    Confirm,
    Confirmed,
    Granted,
    Heartbeat,
    RefusalReason,
    Refused,
    Release,
    Released,
    pack_pages,
    refusal,
)
from cairn.types import Clock, Pages


class LeaseBook:
    """All leases of one engine. `random` gives that many unpredictable bytes."""

    def __init__(
        self, layout: bytes, tokens_per_page: int, limits: LeaseLimits, clock: Clock, random: Callable[[int], bytes]
    ) -> None:
        self._layout = layout
        self._tokens_per_page = tokens_per_page
        self._limits = limits
        self._clock = clock
        self._random = random
        self._held: dict[bytes, Lease] = {}
        self._over: dict[bytes, Lease] = {}
        self._ended: list[LeaseEnded] = []
        self._generation = 0
        self._pages = LeasedPages()
        self._read_until = clock.now()

    @property
    def num_pages(self) -> int:
        """Distinct pages under leases that have not ended."""
        self.expire()
        return len(self._pages)

    @property
    def num_held(self) -> int:
        """Leases that have not ended."""
        self.expire()
        return len(self._held)

    @property
    def is_idle(self) -> bool:
        """Whether no lease is held, and nobody has to be told of one that has ended."""
        return not (self._held or self._ended)

    @property
    def next_end(self) -> float | None:
        """When the next lease runs out, or None while there is none."""
        return min((lease.until for lease in self._held.values()), default=None)

    @property
    def may_be_read(self) -> bool:
        """Whether a peer's link may be reading from here: one that has given up cannot use these pages again before
        its reads have ended, and some links need this side for that."""
        return bool(self._held) or self._clock.now() < self._read_until

    def has_room(self, pages: Pages, num_more: int = 0) -> bool:
        """Whether leases of these pages, and of `num_more` that no lease has, stay within the cap, or there is nothing
        yet that they could be too many with. Pages that are leased already count once."""
        self.expire()
        return self._pages.num_with(pages) + num_more <= self._limits.max_pages or not self._held

    def new_nonce(self) -> bytes:
        """A nonce for `offer`, for whoever must know it before."""
        return self._random(NONCE_BYTES)

    def offer(self, offer: Offer, nonce: bytes | None = None) -> bytes:
        """Hold these pages from now on. Returns the nonce: the given one, 16 unpredictable bytes never used before, or
        a new one. Ask `has_room` first."""
        return self._hold(offer, nonce).nonce

    def grant(self, claim: Claim, offer: Offer, nonce: bytes | None = None) -> Granted:
        """Hold these pages for a claim without a lease, whose marks `offer.keys` were checked against. Ask `has_room`
        first."""
        return self._grant(self._hold(offer, nonce), claim, offer, len(offer.keys))

    def granted(self, claim: Claim, nonce: bytes) -> Granted | Refused:
        """What was granted to this claim, to say it again; refused once the lease has ended."""
        self.expire()
        lease = self._held.get(nonce)
        if lease is None or lease.granted is None:
            return refusal(claim, RefusalReason.EXPIRED)
        first, granted = lease.granted
        return granted if claim == first else refusal(claim, RefusalReason.USED)

    def _hold(self, offer: Offer, nonce: bytes | None) -> Lease:
        if not self.has_room(offer.all_pages):
            raise AssertionError(f"{offer.request_id}: {len(offer.all_pages)} pages do not fit under the leases' cap")
        nonce = self.new_nonce() if nonce is None else nonce
        if len(nonce) != NONCE_BYTES or nonce in self._held or nonce in self._over:
            raise AssertionError(f"{offer.request_id}: a nonce is {NONCE_BYTES} bytes that no other lease has")
        now = self._clock.now()
        lease = Lease(offer.request_id, nonce, now, now + self._limits.duration, offer)
        self._held[nonce] = lease
        self._pages.add(offer.all_pages)
        return lease

    def withdraw(self, nonce: bytes) -> None:
        """The producer's own end of a lease, if it has not ended."""
        self.expire()
        if (lease := self._held.get(nonce)) is not None:
            self._end(lease, LeaseState.RELEASED)

    def expire(self) -> None:
        """End what has run out, and forget what ended long ago."""
        now = self._clock.now()
        for lease in [lease for lease in self._held.values() if lease.until <= now]:
            self._end(lease, LeaseState.EXPIRED)
        while self._over:
            oldest = next(iter(self._over.values()))
            if len(self._over) <= self._limits.max_remembered and now - oldest.ended < self._limits.remember:
                break
            del self._over[oldest.nonce]

    def take_ended(self) -> list[LeaseEnded]:
        """Leases that have ended since the last call, each once."""
        self.expire()
        ended, self._ended = self._ended, []
        return ended

    def claim(self, claim: Claim) -> Granted | Refused:
        """What was offered under the lease that the claim names."""
        lease = self._find(claim)
        if isinstance(lease, Refused):
            return lease
        if lease.granted is not None:
            # Only the very same claim is a repetition; the digest was right the first time.
            return self.granted(claim, lease.nonce)
        offer = lease.held
        if offer is None or not 0 < claim.position <= len(offer.keys) or claim.start > claim.position:
            return refusal(claim, RefusalReason.OUT_OF_RANGE)
        if claim.checkpoint and _deepest(offer, claim.position) is None:
            return refusal(claim, RefusalReason.OUT_OF_RANGE)
        digest = content_digest(self._layout, offer.name, offer.keys[: claim.position])
        if claim.end is None or not hmac.compare_digest(digest, claim.end):
            return refusal(claim, RefusalReason.OTHER_CONTENT)
        return self._grant(lease, claim, offer, claim.position)

    def _grant(self, lease: Lease, claim: Claim, offer: Offer, position: int) -> Granted:
        """The lease belongs to this claim from now on."""
        self._generation += 1
        lease.to(LeaseState.CLAIMED)
        self._extend(lease)
        first = claim.start // self._tokens_per_page
        count = num_range_pages(claim.start, position, self._tokens_per_page)
        checkpoint = _deepest(offer, position) if claim.checkpoint else None
        granted = Granted(
            claim.claim,
            lease.request_id,
            lease.nonce,
            self._generation,
            position,
            pack_pages(offer.pages[first : first + count]),
            checkpoint.position if checkpoint else None,
            pack_pages(checkpoint.pages) if checkpoint else b"",
        )
        lease.claim, lease.generation, lease.granted = claim.claim, self._generation, (claim, granted)
        return granted

    def heartbeat(self, beat: Heartbeat) -> Alive | Refused:
        lease = self._find(beat)
        if isinstance(lease, Refused):
            self._read_until = self._clock.now() + self._limits.linger
            return lease
        self._extend(lease)
        return Alive(beat.claim)

    def confirm(self, confirm: Confirm) -> Confirmed | Refused:
        lease = self._find(confirm, repeatable=LeaseState.CONFIRMED)
        if isinstance(lease, Refused):
            return lease
        if lease.generation != confirm.generation:
            return refusal(confirm, RefusalReason.FORGED)
        if lease.state is LeaseState.CLAIMED:
            self._end(lease, LeaseState.CONFIRMED)
        return Confirmed(confirm.claim, confirm.generation)

    def release(self, release: Release) -> Released | Refused:
        lease = self._find(release, repeatable=LeaseState.RELEASED)
        if isinstance(lease, Refused):
            return lease
        if lease.state is not LeaseState.RELEASED:
            self._end(lease, LeaseState.RELEASED)
        return Released(release.claim)

    def _find(
        self, asked: Claim | Heartbeat | Confirm | Release, repeatable: LeaseState | None = None
    ) -> Lease | Refused:
        """The lease, if the one who asks may use it. `repeatable`: how it may have ended all the same."""
        self.expire()
        nonce = asked.nonce or b""
        lease = self._held.get(nonce) or self._over.get(nonce)
        if lease is None:
            return refusal(asked, RefusalReason.UNKNOWN)
        if lease.request_id != asked.request_id:
            return refusal(asked, RefusalReason.FORGED)
        if lease.state is LeaseState.EXPIRED:
            return refusal(asked, RefusalReason.EXPIRED)
        owned = lease.claim is None or lease.claim == asked.claim
        if not owned or (not lease.is_held and lease.state is not repeatable):
            return refusal(asked, RefusalReason.USED)
        return lease

    def _extend(self, lease: Lease) -> None:
        """A claim or a heartbeat: somebody is there."""
        until = self._clock.now() + self._limits.extension
        lease.until = max(lease.until, min(until, lease.born + self._limits.max_age))

    def _end(self, lease: Lease, state: LeaseState) -> None:
        lease.to(state)
        del self._held[lease.nonce]
        assert lease.held is not None
        self._pages.remove(lease.held.all_pages)
        lease.held, lease.granted, lease.ended = None, None, self._clock.now()
        if lease.claim is not None:
            self._read_until = lease.ended + self._limits.linger
        self._over[lease.nonce] = lease
        self._ended.append(LeaseEnded(remote_request_id(lease.request_id, lease.nonce), state.value))


def _deepest(offer: Offer, position: int) -> HeldCheckpoint | None:
    usable = [checkpoint for checkpoint in offer.checkpoints if checkpoint.position <= position]
    return max(usable, key=lambda checkpoint: checkpoint.position, default=None)
