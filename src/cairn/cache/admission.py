"""Which checkpoints are given a file: whether there is room for one, and whether it is worth what would have to go."""

from dataclasses import dataclass
from types import MappingProxyType

from cairn.cache.checkpoint import Kind
from cairn.cache.eviction import CheckpointFacts
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Lease, PendingFile
from cairn.cache.pages import PagePool
from cairn.cache.placement import Wanted
from cairn.cache.residents import Residents
from cairn.types import Pages

FIRST_WAYS = MappingProxyType({Kind.ANSWER_END: (0,), Kind.PROMPT_END: (0, 1)})
"""How many ways on there may be from a new checkpoint; from others one."""

MAX_FORETOLD = 4
"""Places of a prompt that statistics alone have named, while memory is idle or holds what is on probation; else one."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Gives leases files of the pool. `enabled` False: only what another server is going to read."""

    layout: CacheLayout
    pool: PagePool
    residents: Residents
    enabled: bool

    def want(self, lease: Lease, wanted: Wanted) -> Pages | None:
        """A file for the checkpoint of `lease` at `wanted.position`; None if there is no room for it, or it has one.

        Those on probation take free pages only, and only while a quarter of the pool is free; a bet that is worth far
        less than what would go for it is refused, and only remembered.
        """
        if wanted.position in lease.files:
            pending = lease.files[wanted.position]
            pending.hold_seconds = max(pending.hold_seconds, wanted.hold_seconds)
            return None
        if not self.enabled:
            return None
        if self.layout.state_bytes == 0 and wanted.position != lease.num_prompt_tokens and not wanted.hold_seconds:
            return None
        size = self.layout.pages_per_checkpoint
        if wanted.kind.is_bet and not wanted.hold_seconds:
            if not self._costs_nothing(lease, wanted) and not self.residents.ranking.worth(self._facts(lease, wanted)):
                lease.refused[wanted.position] = wanted.kind
                return None
        if wanted.kind.on_probation:
            if 4 * self.pool.num_free < self.pool.num_pages or self.pool.num_free < size:
                return None
        elif not self.residents.make_room(size):
            return None
        pages = self.pool.allocate(size)
        lease.give(wanted.position, PendingFile(pages, wanted.kind, wanted.hold_seconds))
        lease.kept.append(wanted.position)
        return pages

    def want_always(self, lease: Lease, position: int) -> Pages | None:
        """A file for the state at `position`, whatever the policy says. None if there is no room."""
        if position in lease.files:
            return lease.files[position].pages
        size = self.layout.pages_per_checkpoint
        if not self.residents.make_room(size):
            return None
        pages = self.pool.allocate(size)
        lease.give(position, PendingFile(pages, Kind.PROMPT_END))
        return pages

    def settle(self, lease: Lease, position: int) -> None:
        """The state at `position` is filled and somebody else holds its file. With the cache off nothing will take it
        from the lease, so it lets go of it."""
        if not self.enabled and position in lease.files:
            self.pool.release(lease.files.pop(position).pages)

    def idle_files(self) -> int:
        """How many checkpoint files fit into the free pages beyond a quarter of the pool."""
        return max(0, self.pool.num_free - self.pool.num_pages // 4) // self.layout.pages_per_checkpoint

    def most_foretold(self, idle_files: int) -> int:
        """How many places of a prompt may be kept because prompts like it were left there."""
        unproven = idle_files + self.residents.queue.num_on_probation
        return MAX_FORETOLD if unproven >= 2 * MAX_FORETOLD else 1

    def _costs_nothing(self, lease: Lease, wanted: Wanted) -> bool:
        """Whether there is room for a checkpoint without dropping another one: also for the one at the prompt's end, if
        that is to come and would be worth more. What has been given to this one cannot be had back by then. A place
        that statistics alone have named finds room where pages are free, not where they can be made free."""
        runs, size = self.residents.runs, self.layout.pages_per_checkpoint
        if wanted.kind is Kind.OFFSET and self.pool.num_free < size:
            return False
        if not runs.drop_barren(size):
            return False
        end = lease.num_prompt_tokens
        if wanted.position >= end or end in lease.files or runs.drop_barren(2 * size):
            return True
        place, at_end = self.residents.queue.place, Wanted(end, Kind.PROMPT_END)
        return place(self._facts(lease, wanted)) >= place(self._facts(lease, at_end))

    def _facts(self, lease: Lease, wanted: Wanted) -> CheckpointFacts:
        """What eviction may know of a checkpoint that is to be made."""
        position = wanted.position
        above = max((kept for kept in lease.kept if kept < position), default=min(lease.hit, position))
        pages = self.layout.pages_per_checkpoint
        if wanted.kind in (Kind.PROMPT_END, Kind.ANSWER_END):
            # without it nobody could use what is computed from the match on
            pages += self.layout.pages_for(position) - self.layout.pages_for(max(above, min(lease.matched, position)))
        known = lease.known if lease.known is not None and lease.known.position == position else None
        ways = (lease.ways + 1,) if wanted.kind is Kind.JUNCTION else FIRST_WAYS.get(wanted.kind, (1,))
        chance = self.residents.reuse.first_chance(wanted.kind, ways, lease.lineage, known)
        return self.residents.ranking.foreseen(wanted.kind, position - above, pages, chance)
