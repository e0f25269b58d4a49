"""Which checkpoint is dropped first: a policy that gives priorities, and the queue that keeps them in order."""

import heapq
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from cairn.cache.checkpoint import Kind
from cairn.cache.tree import Checkpoint

__all__ = ["CheckpointFacts", "Eviction", "EvictionQueue", "LeastRecentlyUsed", "ValuePerByte", "eviction_for"]


class CheckpointFacts(NamedTuple):
    """What a policy may know. `saved_tokens`: tokens that need not be computed thanks to this checkpoint, over the
    next shallower one. `freed_bytes`: what dropping it gives, with the pages that only it makes useful. `chance`: of a
    use per request to come, as `cairn.cache.reuse` has learned it."""

    kind: Kind
    saved_tokens: int
    freed_bytes: int
    hits: int
    last_used: int
    held: bool = False
    chance: float = 0.0


class Eviction(Protocol):
    """Gives each checkpoint a priority, which is asked for again as facts change; the lowest goes first."""

    def priority(self, facts: CheckpointFacts) -> float: ...


class LeastRecentlyUsed:
    """Drops what has not been used for the longest time."""

    def priority(self, facts: CheckpointFacts) -> float:
        return float(facts.last_used)


class ValuePerByte:
    """Drops what saves the least per byte that it keeps: chance of a use x tokens saved by it / bytes freed.

    With the chance as a rate, at its best over all times to wait, this is what one byte earns per request. It is the
    rule of DESIGN section 4, and what "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (Beckmann, Chen and
    Cidon, NSDI 2018) ranks by, for objects that save different amounts.
    """

    def priority(self, facts: CheckpointFacts) -> float:
        return facts.chance * facts.saved_tokens / max(1, facts.freed_bytes)


Entry = tuple[int, float, int, Checkpoint]


class EvictionQueue:
    """Checkpoints by priority: those on probation first, those that a client holds last. O(log n) a push or pop.

    A heap whose outdated entries are passed over when they come up, and swept when they outnumber the live ones.
    """

    def __init__(self, policy: Eviction) -> None:
        self._policy = policy
        self._heap: list[Entry] = []
        self._live: dict[int, Checkpoint] = {}
        self._unproven: set[int] = set()
        self._version = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_on_probation(self) -> int:
        """How many are on probation and were never hit: they go first."""
        return len(self._unproven)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.version in self._live

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._live.values())

    def push(self, checkpoint: Checkpoint, facts: CheckpointFacts) -> None:
        """Put a checkpoint in, or in a new place."""
        self.remove(checkpoint)
        self._version += 1
        checkpoint.version = self._version
        self._live[self._version] = checkpoint
        first, priority = self.place(facts)
        if first == 0:
            self._unproven.add(self._version)
        heapq.heappush(self._heap, (first, priority, self._version, checkpoint))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapq.heapify(self._heap)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out; no matter if it is not in."""
        self._live.pop(checkpoint.version, None)
        self._unproven.discard(checkpoint.version)

    def pop(self) -> Checkpoint | None:
        """The next to go, taken out; None when there is none."""
        while self._heap:
            _, _, version, checkpoint = heapq.heappop(self._heap)
            if version in self._live:
                self.remove(checkpoint)
                return checkpoint
        return None

    def goes_before_all(self, facts: CheckpointFacts) -> bool:
        """Whether a checkpoint that is not in, or no more, of which this is known would be the next to go."""
        while self._heap and self._heap[0][2] not in self._live:
            heapq.heappop(self._heap)
        return not self._heap or self.place(facts) <= self._heap[0][:2]

    def place(self, facts: CheckpointFacts) -> tuple[int, float]:
        """Where a checkpoint of which this is known stands: the least goes first."""
        earned = not facts.kind.on_probation or facts.hits > 0
        return 2 if facts.held else int(earned), self._policy.priority(facts)


def eviction_for(name: str) -> Eviction:
    """The policy that `--eviction` names."""
    match name:
        case "lru":
            return LeastRecentlyUsed()
        case "value":
            return ValuePerByte()
    raise ValueError(f"unknown eviction policy {name!r}: lru or value")
