"""Records of recent lookups: sums over time, the last requests, and the prefixes that cost the most tokens.

All of it is bounded, holds neither texts nor tokens nor salts, and costs O(1) a request. Prefixes are named by a keyed
digest of their length and their last tokens, with a key that this process makes up and tells nobody.
"""

import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace, SequenceBlocks
from cairn.cache.view import IntervalView, VisitView
from cairn.types import Clock

INTERVAL_SECONDS = 10.0
NAMED_TOKENS = 64
"""How many of its last tokens name a prefix, besides its length."""

_INTERVALS = 360
_VISITS = 200
_PREFIXES = 128
_NAMESPACES = 1024
_NOT_LOST = (Reason.NONE, Reason.DISABLED, Reason.NEVER_SEEN)


@dataclass(slots=True)
class LostPrefix:
    """Tokens that were not hit before token `depth` of one prefix, for one reason, since it was last listed."""

    name: str
    depth: int
    namespace: int
    reason: Reason
    tokens: int = 0
    requests: int = 0
    at: float = 0.0


class PrefixNames:
    """Names prefixes by keyed digests: equal for equal prefixes, and otherwise opaque. `key`: at most 64 bytes, random
    unless given."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(16) if key is None else key

    def name(self, namespace: int, depth: int, last: bytes) -> str:
        """`last`: the bytes of the prefix's last `NAMED_TOKENS` key tokens, or of all where it has fewer."""
        digest = hashlib.blake2b(last, digest_size=8, key=self._key)
        digest.update(f"{namespace}/{depth}".encode())
        return digest.hexdigest()


class Journal:
    """Records of lookups, written when a request is admitted. Not thread-safe.

    `intervals` and `visits` are records of the view with the clock reading of their beginnings, in seconds; their age
    is set when they are shown. `floor`: no prefix that is not listed has cost more tokens than this.
    """

    def __init__(self, clock: Clock, names: PrefixNames | None = None) -> None:
        self.clock = clock
        self.names = names or PrefixNames()
        self.intervals: deque[tuple[float, IntervalView]] = deque(maxlen=_INTERVALS)
        self.visits: deque[tuple[float, VisitView]] = deque(maxlen=_VISITS)
        self.floor = 0
        self._num_lookups = 0
        self._prefixes: dict[tuple[str, Reason], LostPrefix] = {}
        self._namespaces: OrderedDict[Namespace, int] = OrderedDict()
        self._num_namespaces = 0

    def record(self, sequence: SequenceBlocks, lost: Mapping[Reason, int]) -> None:
        """Record the lookup of `sequence`, whose request begins to run; `lost`: its tokens that were not hit."""
        now, namespace = self.clock.now(), self.number(sequence.namespace)
        self._num_lookups += 1
        visit = VisitView(
            number=self._num_lookups,
            age=0.0,
            namespace=namespace,
            prompt=sequence.num_prompt_tokens,
            hit=sequence.hit - sequence.received,
            received=sequence.received,
            matched=sequence.matched,
            reason=sequence.reason.value,
            lost={reason.value: tokens for reason, tokens in lost.items()},
        )
        self.visits.append((now, visit))
        if not self.intervals or now >= self.intervals[-1][0] + INTERVAL_SECONDS:
            interval = IntervalView(age=0.0, seconds=INTERVAL_SECONDS)
            self.intervals.append((now // INTERVAL_SECONDS * INTERVAL_SECONDS, interval))
        interval = self.intervals[-1][1]
        interval.requests += 1
        interval.prompt += visit.prompt
        interval.hit += visit.hit
        interval.received += visit.received
        for reason, tokens in visit.lost.items():
            interval.lost[reason] = interval.lost.get(reason, 0) + tokens
        for start, end, why in sequence.iter_misses():
            if why not in _NOT_LOST:
                last = sequence.keys[max(0, end - NAMED_TOKENS) : end].tobytes()
                self._add_lost(end, last, namespace, why, end - start, now)

    def number(self, namespace: Namespace) -> int:
        """The number that stands for a namespace: 0 for the plain one. One that was not used for long may get
        another."""
        if namespace.cache_salt is None and not namespace.adapter:
            return 0
        number = self._namespaces.get(namespace)
        if number is None:
            self._num_namespaces += 1
            number = self._namespaces[namespace] = self._num_namespaces
            if len(self._namespaces) > _NAMESPACES:
                self._namespaces.popitem(last=False)
        else:
            self._namespaces.move_to_end(namespace)
        return number

    def heaviest(self, count: int) -> list[LostPrefix]:
        """The prefixes that have cost most tokens, the costliest first."""
        return sorted(self._prefixes.values(), key=lambda prefix: -prefix.tokens)[:count]

    def _add_lost(self, depth: int, last: bytes, namespace: int, reason: Reason, tokens: int, now: float) -> None:
        name = self.names.name(namespace, depth, last)
        prefix = self._prefixes.get((name, reason))
        if prefix is None:
            prefix = self._prefixes[name, reason] = LostPrefix(name, depth, namespace, reason)
        prefix.tokens += tokens
        prefix.requests += 1
        prefix.at = now
        if len(self._prefixes) > 2 * _PREFIXES:
            # in bulk, so that a request pays O(1): counts of those that stay are exact from their listing on
            kept = self.heaviest(_PREFIXES)
            self.floor += max(0, *(p.tokens for p in self.heaviest(2 * _PREFIXES)[_PREFIXES:]))
            self._prefixes = {(p.name, p.reason): p for p in kept}
