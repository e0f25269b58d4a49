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
        """Pages of each chunk's entry."""
        return sum(self.names.stride // group.tokens_per_page for group in self.layout.groups)
