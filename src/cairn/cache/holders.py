"""Who refers to pages besides the tree: requests, others outside, and steps that have not been applied."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cairn.cache.lease import Hold, Lease
from cairn.cache.pages import PagePool
from cairn.cache.tree import Node
from cairn.types import Pages


@dataclass(frozen=True, slots=True)
class Holders:
    """The open leases and holds, by identity, and the pages that each unapplied step still names."""

    pool: PagePool
    leases: dict[int, Lease] = field(default_factory=dict)
    holds: dict[int, Hold] = field(default_factory=dict)
    steps: dict[int, list[Pages]] = field(default_factory=dict)

    def open(self, lease: Lease) -> None:
        """Refer to what a new lease needs: the pages of its own, and the file of its hit."""
        self.leases[id(lease)] = lease
        for table in lease.tables:
            self.pool.acquire(table.own)
        if lease.checkpoint is not None:
            self.pool.acquire(lease.checkpoint.pages)
            lease.transient.append(lease.checkpoint.pages)

    def close(self, lease: Lease) -> None:
        """The end of all references of a lease."""
        assert not lease.closed, f"released twice: {lease.purpose}"
        lease.closed = True
        del self.leases[id(lease)]
        for table in lease.tables:
            self.pool.release(table.own)
        for pages in [file.pages for file in lease.files.values()] + lease.transient:
            self.pool.release(pages)
        lease.files.clear()
        lease.transient.clear()

    def hold(self, purpose: str, pages: Pages, for_requests: bool = False) -> Hold:
        """Keep `pages`, which are distinct and in use, until `let_go`."""
        hold = Hold(purpose, pages.copy(), for_requests)
        self.pool.acquire(hold.pages)
        self.holds[id(hold)] = hold
        return hold

    def let_go(self, hold: Hold) -> None:
        """End a hold."""
        del self.holds[id(hold)]
        self.pool.release(hold.pages)

    def hold_until(self, step: int, lease: Lease) -> None:
        """What `lease` needs for step `step` alone is the step's from now on."""
        if lease.transient:
            self.steps.setdefault(step, []).extend(lease.transient)
            lease.transient = []

    def step_applied(self, step: int) -> None:
        """Let go of what step `step` named."""
        for pages in self.steps.pop(step, ()):
            self.pool.release(pages)

    def of_requests(self) -> list[Pages]:
        """The page lists of leases, of the runs that they have locked and of holds for requests, some pages perhaps in
        several.

        A locked run may keep pages that its lease does not read: the copy that a deeper run has taken the place of, or
        what somebody else has computed as well.
        """
        held = [table.pages for lease in self.leases.values() for table in lease.tables]
        locked: set[Node] = set()
        for lease in self.leases.values():
            held += [file.pages for file in lease.files.values()] + lease.transient
            node = lease.node
            while node is not None and node not in locked:
                locked.add(node)
                held += node.pages or ()
                node = node.parent
        return held + [hold.pages for hold in self.holds.values() if hold.for_requests]

    def of_others(self) -> list[Pages]:
        """Those of all other holds."""
        return [hold.pages for hold in self.holds.values() if not hold.for_requests]

    def of_steps(self) -> list[Pages]:
        """Those of steps that have not been applied."""
        return [pages for held in self.steps.values() for pages in held]

    def num_distinct(self, lists: Iterable[Pages]) -> int:
        """How many pages are in `lists`."""
        named = np.zeros(self.pool.num_pages, bool)
        for numbers in lists:
            named[numbers] = True
        return int(named.sum())
