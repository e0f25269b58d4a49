"""Rules that know no prefixes, or one digest of each prompt: what the shipped rule is compared with.

Each counts the open requests of every replica itself, as a router does that relays all answers: no report is late.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import MappingProxyType

import numpy as np

from cairn.cache.events import Event
from cairn.routing.index import PrefixIndex
from cairn.routing.rule import ReplicaLoad, RoutedRequest, RoutingOptions, RoutingRule

__all__ = ["BASELINES", "SHARED_CACHE", "SHIPPED", "make_router"]

SHIPPED = "cairn"
SHARED_CACHE = "shared cache"
"""No rule, but the bound of all: each request goes where least work waits, and every replica has what any has."""
POINTS = 160
"""Of each replica on the ring of a consistent hash."""

Loads = Mapping[str, ReplicaLoad]


class Baseline:
    """A rule without an index."""

    uses_index = False
    index_bytes = 0

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._open: dict[str, int] = {}

    def choose(self, request: RoutedRequest, replicas: Loads, now: float) -> str:
        raise NotImplementedError

    def record_routed(self, request: RoutedRequest, replica: str, now: float) -> None:
        self._open[replica] = self._open.get(replica, 0) + 1

    def record_prefilled(self, request: RoutedRequest, replica: str) -> None: ...

    def record_finished(self, request: RoutedRequest, replica: str) -> None:
        self._open[replica] -= 1

    def apply(self, replica: str, event: Event) -> None: ...

    def _least_loaded(self, names: list[str]) -> str:
        """The one with the fewest open requests, any of several."""
        counts = [self._open.get(name, 0) for name in names]
        least = min(counts)
        best = [name for name, count in zip(names, counts, strict=True) if count == least]
        return best[int(self._rng.integers(len(best)))] if len(best) > 1 else best[0]


class RoundRobin(Baseline):
    _next = 0

    def choose(self, request: RoutedRequest, replicas: Loads, now: float) -> str:
        names = list(replicas)
        self._next += 1
        return names[(self._next - 1) % len(names)]


class LeastLoaded(Baseline):
    def choose(self, request: RoutedRequest, replicas: Loads, now: float) -> str:
        return self._least_loaded(list(replicas))


class PowerOfTwo(Baseline):
    """The less loaded of two replicas at random."""

    def choose(self, request: RoutedRequest, replicas: Loads, now: float) -> str:
        names = list(replicas)
        picked = self._rng.choice(len(names), size=min(2, len(names)), replace=False)
        return self._least_loaded([names[number] for number in picked.tolist()])


class LeastWork(Baseline):
    """The replica with the least to prefill, as it reports it, of several the one that has got the fewest requests."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._routed: Counter[str] = Counter()

    def choose(self, request: RoutedRequest, replicas: Loads, now: float) -> str:
        best = min(replicas, key=lambda name: (replicas[name].pending_tokens, self._routed[name]))
        self._routed[best] += 1
        return best


class ConsistentHash(Baseline):
    """A ring with `POINTS` points a replica."""

    def __init__(self, seed: int, key: Callable[[RoutedRequest], str]) -> None:
        super().__init__(seed)
        self._key = key
        self._ring: list[tuple[int, str]] = []

    def choose(self, request: RoutedRequest, replicas: Loads, now: float) -> str:
        if len(self._ring) != POINTS * len(replicas):
            self._ring = sorted((_point(f"{name}/{number}"), name) for name in replicas for number in range(POINTS))
        place = bisect(self._ring, (_point(self._key(request)), "")) % len(self._ring)
        return self._ring[place][1]


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


class ShippedRule:
    """`RoutingRule`, fed with everything that it can know."""

    uses_index = True

    def __init__(self, options: RoutingOptions, index: PrefixIndex) -> None:
        self._index = index
        self._rule = RoutingRule(options, index)
        self.record_routed = self._rule.record_routed
        self.record_prefilled = self._rule.record_prefilled
        self.record_finished = self._rule.record_finished
        self.apply = self._index.apply

    def choose(self, request: RoutedRequest, replicas: Loads, now: float) -> str:
        return self._rule.rank(request, replicas, now, limit=1)[0]

    @property
    def index_bytes(self) -> int:
        return self._index.num_bytes


BASELINES: Mapping[str, Callable[[int], Baseline]] = MappingProxyType(
    {
        "round robin": RoundRobin,
        "least loaded": LeastLoaded,
        "two choices": PowerOfTwo,
        "hash of session": lambda seed: ConsistentHash(seed, lambda request: request.session or ""),
        "hash of first block": lambda seed: ConsistentHash(seed, lambda request: str(request.block_hashes[:1])),
    }
)


def make_router(
    name: str, seed: int, options: RoutingOptions, index: PrefixIndex | None = None
) -> Baseline | ShippedRule:
    """`index`: the shipped rule's, one of its own unless given. Raises SystemExit for an unknown name."""
    if name == SHIPPED:
        return ShippedRule(options, index or PrefixIndex())
    if name == SHARED_CACHE:
        return LeastWork(seed)
    known = (SHIPPED, *BASELINES, SHARED_CACHE)
    if name not in known:
        raise SystemExit(f"--rules: there is no rule {name!r}; there are {', '.join(known)}")
    return BASELINES[name](seed)
