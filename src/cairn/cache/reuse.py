"""Which checkpoints are used again: records of those that are there, and of those that were, for the eviction policy.

A checkpoint's record stays at its node for a while when the checkpoint has gone (a *ghost*), so that what is learned is
what would have been, not only what the cache let happen: a prompt that is looked up uses the deepest record on its
path, be it there or not.
"""

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.hazard import ALL_PARTS, Class, HazardTable, LearnedParts

if TYPE_CHECKING:
    from cairn.cache.tree import Node

LEAST_INTERVAL = 16
"""Requests between two looks at the statistics, at least."""

RANKED_AT_A_TIME = 4
"""Checkpoints that are ranked anew per request, on average: their chances change with their age."""

_FRESH = (512, 2048, 8192)
"""Where the classes of new tokens begin."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of the request that a checkpoint is made by. `turn`: how many requests in a row went on from where
    the one before had ended, up to 2; `fresh_tokens`: how much of its prompt was new."""

    turn: int = 0
    fresh_tokens: int = 0


NO_LINEAGE = Lineage()


class Reuse:
    """The record of the checkpoint that is or was at the end of `node`. `since`: the request that made or last used it.

    `branches`: ways on from here that were ever taken. `heir`: the record of a deeper checkpoint that is gone, whose
    hits would now be this one's.
    """

    __slots__ = ("branches", "fresh", "heir", "hits", "kind", "node", "origin", "slot", "turn")

    def __init__(self, node: "Node", kind: Kind, origin: Origin, lineage: Lineage) -> None:
        self.node = node
        self.kind = kind
        self.origin = origin
        self.turn = lineage.turn
        self.fresh = bisect_right(_FRESH, lineage.fresh_tokens)
        self.hits = 0
        self.branches = len(node.children)
        self.heir: Reuse | None = None
        self.slot = -1

    @property
    def position(self) -> int:
        return self.node.end

    def kind_of_use(self) -> Class:
        """The class of `HazardTable`, from the general to the particular."""
        kind, branches = self.kind.number, min(2, self.branches)
        if self.hits:
            return (kind, branches, 3 + min(3, self.hits.bit_length()))
        return (kind, branches, self.turn, self.fresh)


class ReuseBook:
    """All records, the ghosts among them bounded, and what they teach. Time is counted in requests (`now`);
    `version` is another one when any node's record is."""

    def __init__(self, max_ghosts: int, parts: LearnedParts = ALL_PARTS) -> None:
        self.now = self.version = 0
        self.parts = parts
        self.table = HazardTable(parts=parts)
        self._max_ghosts = max_ghosts if parts.ghosts else 0
        self._ghosts: OrderedDict[Reuse, None] = OrderedDict()
        self._due = self._rank_due = 0
        # of record i: its row, the request it counts its age from, and up to which its time at risk has been noted
        self._rows: list[int] = []
        self._since: list[int] = []
        self._noted: list[int] = []
        self._records: list[Reuse | None] = []
        self._free: list[int] = []

    @property
    def num_ghosts(self) -> int:
        return len(self._ghosts)

    def is_ghost(self, reuse: Reuse) -> bool:
        """Whether its checkpoint has gone, and it is remembered."""
        return reuse in self._ghosts

    def records(self) -> list[Reuse]:
        """All of them, for the audit."""
        return [reuse for reuse in self._records if reuse is not None]

    def made(self, node: "Node", kind: Kind, origin: Origin, lineage: Lineage) -> Reuse:
        """A checkpoint is made at the end of `node`; what its ghost knew is kept."""
        reuse, before = Reuse(node, kind, origin, lineage if self.parts.lineage else NO_LINEAGE), node.reuse
        if before is not None:
            reuse.hits, reuse.branches, reuse.heir = before.hits, before.branches, before.heir
            self.forget(before)
        self._enter(reuse)
        self.version += 1
        node.reuse = reuse
        return reuse

    def used(self, reuse: Reuse) -> None:
        """The request at hand uses this record, or would if its checkpoint were still there."""
        slot = reuse.slot
        self._note(slot)
        self.table.hit(self._rows[slot], self.now - self._since[slot])
        reuse.hits += 1
        self._since[slot] = self.now
        self._rows[slot] = self.table.row(reuse.kind_of_use())

    def changed(self, reuse: Reuse) -> None:
        """Its kind or the number of its branches is another."""
        reuse.branches = max(reuse.branches, len(reuse.node.children))
        self._note(reuse.slot)
        self._rows[reuse.slot] = self.table.row(reuse.kind_of_use())

    def dropped(self, reuse: Reuse, above: "Reuse | None") -> None:
        """Its checkpoint has gone; `above`, the next shallower one, is what its hits fall to."""
        self._ghosts[reuse] = None
        heir = self._heir(reuse)
        reuse.heir = None
        if above is not None and self.parts.heirs:
            best = max((one for one in (reuse, heir, self._heir(above)) if one is not None), key=self._own_chance)
            above.heir = best
        while len(self._ghosts) > self._max_ghosts:
            self.forget(next(iter(self._ghosts)))

    def forget(self, reuse: Reuse) -> None:
        """The end of a record."""
        self._note(reuse.slot)
        self._ghosts.pop(reuse, None)
        self._records[reuse.slot] = None
        self._free.append(reuse.slot)
        reuse.slot, reuse.node.reuse = -1, None

    def chance(self, reuse: Reuse) -> float:
        """Uses per request to come, at best (see `HazardTable.refresh`), with those of its heir."""
        heir = self._heir(reuse)
        return self._own_chance(reuse) + (self._own_chance(heir) if heir is not None else 0.0)

    def first_chance(self, kind: Kind, ways: tuple[int, ...], lineage: Lineage, before: Reuse | None) -> float:
        """`chance` of a checkpoint before it is made, at best. `ways`: how many ways on there may be from it; `before`:
        the record of one that was there, from which there is one more now."""
        lineage = lineage if self.parts.lineage else NO_LINEAGE
        fresh = bisect_right(_FRESH, lineage.fresh_tokens)
        rows = [self.table.row((kind.number, min(2, number), lineage.turn, fresh)) for number in ways]
        if before is not None and before.hits:
            rows = [self.table.row((before.kind.number, min(2, before.branches + 1), *before.kind_of_use()[2:]))]
        return max(self.table.index(row, 0) for row in rows)

    def look(self, num_ranked: int) -> bool:
        """Whether it is time for `num_ranked` checkpoints to be ranked anew, since all have grown older; now and then
        it learns from what has been noted."""
        if self.now < self._rank_due:
            return False
        self._rank_due = self.now + max(1, num_ranked // RANKED_AT_A_TIME)
        if self.now >= self._due:
            self._due = self.now + max(LEAST_INTERVAL, num_ranked // 4)
            self._learn()
        return True

    def _learn(self) -> None:
        slots = [reuse.slot for reuse in self._records if reuse is not None]
        since = np.array(self._since, np.float64)[slots]
        noted = np.array(self._noted, np.float64)[slots]
        self.table.all_at_risk(np.array(self._rows, np.int64)[slots], noted - since, self.now - since)
        self._noted = [self.now] * len(self._noted)
        self.table.refresh()

    def _heir(self, reuse: Reuse) -> Reuse | None:
        """Its heir, as long as that is a ghost."""
        if reuse.heir is not None and not self.is_ghost(reuse.heir):
            reuse.heir = None
        return reuse.heir

    def _own_chance(self, reuse: Reuse) -> float:
        slot = reuse.slot
        return self.table.index(self._rows[slot], self.now - self._since[slot])

    def _note(self, slot: int) -> None:
        """Its time at risk up to now."""
        since = self._since[slot]
        self.table.at_risk(self._rows[slot], self._noted[slot] - since, self.now - since)
        self._noted[slot] = self.now

    def _enter(self, reuse: Reuse) -> None:
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._records)
            self._records.append(None)
            for values in (self._rows, self._since, self._noted):
                values.append(0)
        reuse.slot, self._records[slot] = slot, reuse
        self._rows[slot] = self.table.row(reuse.kind_of_use())
        self._since[slot] = self._noted[slot] = self.now
