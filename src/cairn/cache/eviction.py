"""Which checkpoint is dropped first: a policy that gives priorities, and the queue that keeps them in order."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from cairn.cache.checkpoint import Checkpoint, Kind

__all__ = ["CheckpointFacts", "Eviction", "EvictionQueue", "LeastRecentlyUsed", "ValuePerByte", "eviction_for"]


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a policy may know. `saved_tokens`: tokens that need not be computed thanks to this checkpoint, over the
    next shallower one. `freed_bytes`: what dropping it gives, with the pages that only it makes useful."""

    kind: Kind
    saved_tokens: int
    freed_bytes: int
    hits: int
    last_used: int
    held: bool = False


class Eviction(Protocol):
    """Gives each checkpoint a priority that holds until it is used again; the lowest goes first."""

    def priority(self, facts: CheckpointFacts) -> float: ...

    def evicted(self, priority: float) -> None:
        """Told of each drop, so that a policy can age what stays."""
        ...


class LeastRecentlyUsed:
    """Drops what has not been used for the longest time."""

    def priority(self, facts: CheckpointFacts) -> float:
        return float(facts.last_used)

    def evicted(self, priority: float) -> None:
        return None


class ValuePerByte:
    """Drops the least (tokens saved x uses) per byte freed, aged by what has been dropped before.

    GreedyDual-Size with frequency: H = L + uses x cost / size, where L rises to the H of each victim (Cherkasova,
    "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69R1, 1998, section 3).
    The ageing stands for the chance of reuse falling with time, and keeps every H valid until its next use.
    """

    def __init__(self) -> None:
        self._age = 0.0

    def priority(self, facts: CheckpointFacts) -> float:
        return self._age + (1 + facts.hits) * facts.saved_tokens / max(1, facts.freed_bytes)

    def evicted(self, priority: float) -> None:
        self._age = max(self._age, priority)


Entry = tuple[int, float, int, Checkpoint]


class EvictionQueue:
    """Checkpoints by priority: those on probation first, those that a client holds last. O(log n) a push or pop.

    A heap whose outdated entries are passed over when they come up, and swept when they outnumber the live ones.
    """

    def __init__(self, policy: Eviction) -> None:
        self._policy = policy
        self._heap: list[Entry] = []
        self._live: dict[int, Checkpoint] = {}
        self._version = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return self._live.get(checkpoint.version) is checkpoint

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._live.values())

    def push(self, checkpoint: Checkpoint, facts: CheckpointFacts) -> None:
        """Put a checkpoint in, or in a new place."""
        self.remove(checkpoint)
        self._version += 1
        checkpoint.version = self._version
        self._live[self._version] = checkpoint
        earned = not facts.kind.on_probation or facts.hits > 0
        rank = 2 if facts.held else int(earned)
        heapq.heappush(self._heap, (rank, self._policy.priority(facts), self._version, checkpoint))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapq.heapify(self._heap)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out; no matter if it is not in."""
        if checkpoint in self:
            del self._live[checkpoint.version]

    def pop(self) -> tuple[Checkpoint, float] | None:
        """The next to go and its priority, taken out; None when there is none."""
        while self._heap:
            _, priority, version, checkpoint = heapq.heappop(self._heap)
            if self._live.pop(version, None) is not None:
                return checkpoint, priority
        return None

    def evicted(self, priority: float) -> None:
        """Tell the policy that what `pop` gave was really dropped."""
        self._policy.evicted(priority)


def eviction_for(name: str) -> Eviction:
    """The policy that `--eviction` names."""
    match name:
        case "lru":
            return LeastRecentlyUsed()
        case "value":
            return ValuePerByte()
    raise ValueError(f"unknown eviction policy {name!r}: lru or value")
