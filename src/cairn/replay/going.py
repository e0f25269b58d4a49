"""A request on its way through a log's cache, and its share of the steps that are out."""

from collections import deque
from dataclasses import dataclass, field

from cairn.cache.lease import Hold, Lease
from cairn.cache.placement import PromptFacts
from cairn.replay.request_log import LoggedRequest
from cairn.types import Keys

__all__ = ["DECODE", "PREFILL", "SAVE", "Going", "Part"]

PREFILL, DECODE, SAVE = 1, 2, 3


@dataclass(slots=True, eq=False)
class Part:
    """A request's share of a step that has been planned: what it computes up to, and which files it fills. `kind`: as
    rows have it in the log."""

    step: int
    end: int
    kind: int
    kept: list[int]


@dataclass(slots=True, eq=False)
class Going:
    """A request on its way. `keys`: the whole sequence. `facts`: None until it runs. `position`: tokens that plans have
    covered. `limit`: tokens that there is room for. `has_pages`: for all that it began with. `promised`: where a file
    was wanted whatever the policy. `states`: what is held of it for others."""

    number: int
    request: LoggedRequest
    keys: Keys
    lease: Lease | None = None
    facts: PromptFacts | None = None
    position: int = 0
    limit: int = 0
    promised: set[int] = field(default_factory=set)
    parts: deque[Part] = field(default_factory=deque)
    states: list[Hold] = field(default_factory=list)
    has_pages: bool = False

    @property
    def room(self) -> int:
        """How many tokens its lease has pages for, to read or to write to."""
        lease = self.lease
        if lease is None or not lease.copied:
            return lease.matched if lease is not None else 0
        pairs = zip(lease.groups, lease.tables, strict=True)
        return min((group.tokens_per_page * table.length for group, table in pairs), default=self.request.num_tokens)

    @property
    def ended_well(self) -> bool:
        """Whether its answer was given to the end, which may be gone on from."""
        return self.request.finish in ("stop", "length")
