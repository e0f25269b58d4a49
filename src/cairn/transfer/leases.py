"""Leases: pages that a producer has promised to keep, for whom and until when.

    OFFERED --claim--> CLAIMED --confirm--> CONFIRMED
       |                  |
       +---- release, ----+----> RELEASED
       +---- time is up --+----> EXPIRED

A lease is named by a random nonce that only the client's reference carries. It is used once, by the transfer that
claims it first; a lease made for a claim that came without one is CLAIMED from the start. Its pages stay as they are
while it is OFFERED or CLAIMED. When its time is up it is EXPIRED for good, so CONFIRMED proves that whatever was read
until then was the right bytes. Whoever has claimed it loses it with the connection that it was claimed by.

`Leases` is the one owner: the scheduler's thread offers and withdraws, and asks what fits; the transfer thread answers
claims. A page counts until the scheduler has heard that its last lease has ended, and so may unpin it."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.claim import make_grant, match_claim
from cairn.transfer.contract import NO_DEMAND, LeaseDemand, LeaseEnded, Offer
from cairn.transfer.params import remote_request_id
from cairn.transfer.wire import NONCE_BYTES, Claim, Granted, RefusalReason
from cairn.types import Clock, Pages

logger = logging.getLogger(__name__)


class LeaseState(Enum):
    """Where a lease is: see the module. In the last three it has ended."""

    OFFERED = "offered"
    CLAIMED = "claimed"
    CONFIRMED = "confirmed"
    RELEASED = "released"
    """Given back by the consumer, or withdrawn by the producer."""
    EXPIRED = "expired"
    """Its time ran out. The pages may have other contents by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """Times in seconds. `max_pages`: how many distinct pages all leases may pin. `duration`: until an offer expires;
    `extension`: what a claim or a heartbeat adds from now; `max_age`: no lease gets older. `max_remembered`: of how
    many leases that have ended it is remembered how. `linger`: how long a peer's link may go on reading after its lease
    has ended, or after its last heartbeat."""

    max_pages: int
    duration: float = 30.0
    extension: float = 20.0
    max_age: float = 600.0
    max_remembered: int = 4096
    linger: float = 60.0


@dataclass(slots=True, eq=False)
class Lease:
    """`pages`: the distinct ones of `offer`, which is dropped at the end. The nonce is known to whoever has the
    `reference`."""

    request_id: str
    nonce: bytes
    born: float
    until: float
    offer: Offer | None
    pages: Pages
    state: LeaseState = LeaseState.OFFERED

    @property
    def reference(self) -> str:
        """`remote_request_id` of `kv_transfer_params`."""
        return remote_request_id(self.request_id, self.nonce)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A lease that is somebody's now, and what its claim is answered with."""

    lease: Lease
    granted: Granted


class Leases:
    """All leases of one engine. What is pinned stays within a cap. Every method looks at the clock first, and any
    thread may call it. `layout` is `digest.layout_hash`; `random(n)`: n unpredictable bytes."""

    def __init__(self, layout: bytes, limits: LeaseLimits, clock: Clock, random: Callable[[int], bytes]) -> None:
        self._layout = layout
        self._limits = limits
        self._clock = clock
        self._random = random
        self._lock = threading.RLock()
        self._active: dict[bytes, Lease] = {}
        self._past: OrderedDict[bytes, Lease] = OrderedDict()
        self._ended: list[Lease] = []
        # leases by page number, those whose end nobody has taken yet included
        self._counts: NDArray[np.int32] = np.zeros(0, np.int32)
        self._read_until = clock.now()

    @property
    def num_pages(self) -> int:
        """Distinct pages of leases whose end nobody has taken yet. A page that several leases share counts once."""
        return int(np.count_nonzero(self._counts))

    @property
    def is_idle(self) -> bool:
        """Whether no lease is active and `take_ended` has nothing to return."""
        return not (self._active or self._ended)

    @property
    def may_be_read(self) -> bool:
        """Whether a peer's link may be reading from here. Also for a while after a lease has ended: a consumer that has
        given up cannot reuse its own pages before its reads have ended, and some links need this side for that."""
        return bool(self._active) or self._clock.now() < self._read_until

    def fits(self, demand: LeaseDemand, promised: LeaseDemand = NO_DEMAND) -> bool:
        """See `contract.SchedulerSide.fits`."""
        with self._lock:
            num_leased, total = self.num_pages, promised + demand
            if not (num_leased or promised):
                return True
            pages = np.unique(total.pages)
            num_shared = np.count_nonzero(self._counts[pages[pages < len(self._counts)]])
            return bool(num_leased + len(pages) - num_shared + total.num_new <= self._limits.max_pages)

    def offer(self, offer: Offer) -> Lease:
        """Lease these pages from now on. An offer that does not fit under the cap ends at once: whoever made it has
        miscounted, and all other leases go on."""
        with self._lock:
            nonce, now, pages = self._random(NONCE_BYTES), self._clock.now(), np.unique(offer.all_pages)
            fits = self.fits(LeaseDemand(pages))
            lease = Lease(offer.request_id, nonce, now, now + self._limits.duration, offer, pages)
            self._active[nonce] = lease
            self._counts = np.pad(self._counts, (0, max(0, pages.max(initial=-1) + 1 - len(self._counts))))
            self._counts[pages] += 1
            if not fits:
                logger.error("%s: %d pages do not fit under the leases' cap", offer.request_id, len(pages))
                self.release(lease)
            return lease

    def decline(self, request_id: str, nonce: bytes) -> RefusalReason | None:
        """End the lease of this request that nobody has claimed: a claimed one is its claimant's to end. Returns why
        not."""
        with self._at_now():
            lease = self._find(request_id, nonce)
            if isinstance(lease, RefusalReason):
                return lease
            self._end(lease, LeaseState.RELEASED)
            return None

    def expire(self) -> bool:
        """End the leases whose time is up. Whether `take_ended` has something to return."""
        with self._at_now():
            return bool(self._ended)

    def take_ended(self) -> list[LeaseEnded]:
        """Leases that have ended since the last call, each once: their pages need not be kept any longer."""
        with self._at_now():
            ended, self._ended = self._ended, []
            for lease in ended:
                self._counts[lease.pages] -= 1
        return [LeaseEnded(lease.reference, lease.state.value) for lease in ended]

    def claim(self, claim: Claim) -> Claimed | RefusalReason:
        """Answer a claim under a lease: all or nothing of the prefix that it names."""
        with self._at_now():
            lease = self._find(claim.request_id or "", claim.nonce or b"")
        if isinstance(lease, RefusalReason):
            return lease
        offer = lease.offer
        granted = None if offer is None else make_grant(claim, offer, claim.position)
        if offer is None or granted is None or (claim.checkpoint and granted.checkpoint_position is None):
            return RefusalReason.OUT_OF_RANGE
        # long prompts take a while: without the lock, which the scheduler waits for
        if match_claim(claim, offer, self._layout) is None:
            return RefusalReason.OTHER_CONTENT
        return self._give(lease, granted) or _why_ended(lease)

    def grant(self, claim: Claim, lease: Lease) -> Claimed | None:
        """Give all of an offer to a claim that came without a lease. None if the lease has ended, if the offer has
        nothing beyond `start`, and if the claim contradicts itself. Raises AssertionError for an offer of other content
        than was claimed."""
        offer = lease.offer
        if offer is None or len(offer.keys) <= claim.start:
            return None
        if match_claim(claim, offer, self._layout) != len(offer.keys):
            if claim.end is None:
                raise AssertionError(f"{offer.request_id}: {len(offer.keys)} tokens are at no mark of the claim")
            # Found by an end that the marks do not lead to, which is the peer's fault.
            return None
        granted = make_grant(claim, offer, len(offer.keys))
        return None if granted is None else self._give(lease, granted)

    def heartbeat(self, lease: Lease | None) -> RefusalReason | None:
        """Extend a claimed lease. None, and one that has ended: whoever reads has given up, and needs this side until
        its reads have ended."""
        with self._at_now() as now:
            if lease is None or lease.state is not LeaseState.CLAIMED:
                self._read_until = now + self._limits.linger
                return _why_ended(lease)
            self._extend(lease, now)
            return None

    def confirm(self, lease: Lease | None) -> RefusalReason | None:
        """End a claimed lease well, unless it has ended before: then the pages may have had other contents."""
        with self._at_now():
            if lease is None or lease.state is not LeaseState.CLAIMED:
                return _why_ended(lease)
            self._end(lease, LeaseState.CONFIRMED)
            return None

    def release(self, lease: Lease) -> None:
        """End a lease, if it has not ended."""
        with self._at_now():
            if lease.state in (LeaseState.OFFERED, LeaseState.CLAIMED):
                self._end(lease, LeaseState.RELEASED)

    def _find(self, request_id: str, nonce: bytes) -> Lease | RefusalReason:
        """The lease of this name, if it can be claimed."""
        lease = self._active.get(nonce) or self._past.get(nonce)
        if lease is None:
            return RefusalReason.UNKNOWN
        if lease.request_id != request_id:
            return RefusalReason.FORGED
        return lease if lease.state is LeaseState.OFFERED else _why_ended(lease)

    def _give(self, lease: Lease, granted: Granted) -> Claimed | None:
        """None where it has ended, or been claimed, since it was looked at."""
        with self._at_now() as now:
            if lease.state is not LeaseState.OFFERED:
                return None
            lease.state = LeaseState.CLAIMED
            self._extend(lease, now)
            return Claimed(lease, granted)

    @contextmanager
    def _at_now(self) -> Iterator[float]:
        """Nobody else looks at the leases meanwhile, and those whose time is up have ended; the time."""
        with self._lock:
            now = self._clock.now()
            for lease in [lease for lease in self._active.values() if lease.until <= now]:
                self._end(lease, LeaseState.EXPIRED)
            yield now

    def _extend(self, lease: Lease, now: float) -> None:
        lease.until = max(lease.until, min(now + self._limits.extension, lease.born + self._limits.max_age))

    def _end(self, lease: Lease, state: LeaseState) -> None:
        if lease.state is LeaseState.CLAIMED:
            self._read_until = self._clock.now() + self._limits.linger
        # no lease ends twice: it would not be there any more
        del self._active[lease.nonce]
        lease.state, lease.offer = state, None
        self._ended.append(lease)
        self._past[lease.nonce] = lease
        if len(self._past) > self._limits.max_remembered:
            self._past.popitem(last=False)


def _why_ended(lease: Lease | None) -> RefusalReason:
    """Why a lease cannot be used: None for one that nobody knows."""
    if lease is None:
        return RefusalReason.UNKNOWN
    return RefusalReason.EXPIRED if lease.state is LeaseState.EXPIRED else RefusalReason.USED
