"""What both directions work with: the stores, the names of what is in them, the pool, and the threads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cairn.cache.checkpoint import Origin
from cairn.cache.layout import CacheLayout
from cairn.scheduler.transfers import PrefillSpeed
from cairn.tiers.digests import EntryNames
from cairn.tiers.lanes import TierLanes
from cairn.tiers.memory import TierMemory
from cairn.tiers.store import TierStore
from cairn.tiers.worth import WriteWorth
from cairn.types import Clock

ORIGINS: Mapping[Origin, int] = MappingProxyType({Origin.GRID: 0, Origin.TAIL: 1, Origin.DECODE: 2})
"""The numbers of origins in entries."""


@dataclass(frozen=True, slots=True, eq=False)
class TierContext:
    """What both directions work with. `stores`: the fastest first. `exact`: see `Origin`."""

    layout: CacheLayout
    stores: tuple[TierStore, ...]
    names: EntryNames
    memory: TierMemory
    lanes: TierLanes
    clock: Clock
    speed: PrefillSpeed
    exact: bool = False
    worth: WriteWorth = field(default_factory=WriteWorth)

    @property
    def pages_per_chunk(self) -> int:
        """Pages of each chunk's entry: of the groups of unlimited reach."""
        return self.layout.unlimited_pages_for(self.names.stride)

    def state_spans(self, position: int) -> tuple[tuple[int, int], ...]:
        """Per attention group the first page, and the number of pages, that are filed with the state at `position`:
        those from the mark below it on, of a group of limited reach those within reach."""
        mark = position // self.names.stride * self.names.stride
        starts = [mark if group.reach is None else group.needed_at(position) for group in self.layout.groups]
        return tuple(
            (start // group.tokens_per_page, group.retained_pages(start, position))
            for group, start in zip(self.layout.groups, starts, strict=True)
        )

    def pages_of_state(self, position: int) -> int:
        """Pages of the entry of the state at `position`."""
        return self.layout.pages_per_checkpoint + sum(count for _, count in self.state_spans(position))
