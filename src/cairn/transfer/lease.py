"""What a lease is: pages that a producer has promised to hold, for whom, and until when.

    OFFERED --claim--> CLAIMED --confirm--> CONFIRMED
       |                  |
       +---- release, ----+----> RELEASED
       +---- time is up --+----> EXPIRED

A lease names pages by a random nonce that only the client's reference carries. It is used once: by the transfer that
claimed it first; what is leased in answer to a claim without one is CLAIMED by that from the start. As long as it is
OFFERED or CLAIMED its pages stay as they are; the moment its end is reached it is EXPIRED for good, so CONFIRMED proves
that whatever was read until then was the right bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.contract import Offer
from cairn.transfer.wire import Claim, Granted
from cairn.types import Pages


class LeaseState(Enum):
    """What is true of a lease."""

    OFFERED = "offered"
    """Held; nobody has asked for it yet."""
    CLAIMED = "claimed"
    """Held; one transfer reads, and may end it."""
    CONFIRMED = "confirmed"
    """Over: everything was read while it was held."""
    RELEASED = "released"
    """Over: nobody wants it (any more)."""
    EXPIRED = "expired"
    """Over: its time ran out. Its pages may hold other bytes by now."""


TRANSITIONS: Mapping[LeaseState, frozenset[LeaseState]] = MappingProxyType(
    {
        LeaseState.OFFERED: frozenset({LeaseState.CLAIMED, LeaseState.RELEASED, LeaseState.EXPIRED}),
        LeaseState.CLAIMED: frozenset({LeaseState.CONFIRMED, LeaseState.RELEASED, LeaseState.EXPIRED}),
        LeaseState.CONFIRMED: frozenset(),
        LeaseState.RELEASED: frozenset(),
        LeaseState.EXPIRED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """Times in seconds. `max_pages`: how many distinct pages all leases may hold. `max_age`: heartbeats prolong no
    further. `remember`: how long an ended lease can still say how it ended, and `max_remembered` how many do.
    `linger`: how long a peer's link may go on reading after its lease has ended, or after its last heartbeat."""

    max_pages: int
    duration: float = 30.0
    extension: float = 20.0
    max_age: float = 600.0
    remember: float = 120.0
    max_remembered: int = 4096
    linger: float = 60.0


@dataclass(slots=True, eq=False)
class Lease:
    """`held`: the offer and, once claimed, what was granted; dropped at the end, for tokens and pages are many."""

    request_id: str
    nonce: bytes
    born: float
    until: float
    held: Offer | None
    state: LeaseState = LeaseState.OFFERED
    claim: bytes | None = None
    generation: int = 0
    granted: tuple[Claim, Granted] | None = None
    ended: float = 0.0

    @property
    def is_held(self) -> bool:
        """Whether its pages stay as they are."""
        return self.state in (LeaseState.OFFERED, LeaseState.CLAIMED)

    def to(self, state: LeaseState) -> None:
        """Go to another state. The only place where a state changes."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.request_id}: {self.state.value} -> {state.value} is not a transition")
        self.state = state


class LeasedPages:
    """Counts by page how many leases name it: a page that several leases share counts once."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_pages = 0

    def __len__(self) -> int:
        """Distinct pages that are leased."""
        return self._num_pages

    def num_with(self, pages: Pages) -> int:
        """How many distinct pages would be leased if `pages` (any shape [n], in any order) were leased as well."""
        distinct = np.unique(pages)
        known = distinct[distinct < len(self._counts)]
        return self._num_pages + len(distinct) - int(np.count_nonzero(self._counts[known]))

    def add(self, pages: Pages) -> None:
        """One more lease names `pages`."""
        self._num_pages = self.num_with(pages)
        distinct = np.unique(pages)
        if len(distinct) and distinct[-1] >= len(self._counts):
            more = int(distinct[-1]) + 1 - len(self._counts)
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int32)])
        self._counts[distinct] += 1

    def remove(self, pages: Pages) -> None:
        """A lease that named `pages` has ended."""
        distinct = np.unique(pages)
        self._counts[distinct] -= 1
        self._num_pages -= int(np.count_nonzero(self._counts[distinct] == 0))
