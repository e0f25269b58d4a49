"""What requests found in the cache, lately: sums over time, the last requests, and the prefixes that cost most.

All of it is bounded, holds neither texts nor tokens nor salts, and costs O(1) a request. Prefixes are named by a keyed
digest of their length and their last tokens, with a key that this process makes up and tells nobody.
"""

import hashlib
import secrets
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace, SequenceBlocks
from cairn.types import Clock

INTERVAL_SECONDS = 10.0
NAMED_TOKENS = 64
"""How many of its last tokens name a prefix, besides its length."""

_INTERVALS = 360
_VISITS = 200
_PREFIXES = 128
_NAMESPACES = 1024
_NOT_LOST = (Reason.NONE, Reason.DISABLED, Reason.NEVER_SEEN)


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """One request as it was admitted, in tokens of its prompt. `at`: a clock reading in seconds. `namespace`: 0 for
    prompts without a salt, else a number that stands for one."""

    number: int
    at: float
    namespace: int
    prompt: int
    hit: int
    received: int
    matched: int
    reason: Reason
    lost: dict[Reason, int]


@dataclass(slots=True)
class Interval:
    """Sums over the requests admitted within `INTERVAL_SECONDS` from `start`, a clock reading."""

    start: float
    requests: int = 0
    prompt: int = 0
    hit: int = 0
    received: int = 0
    lost: Counter[Reason] = field(default_factory=Counter)


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
    """Records of lookups, written when a request is admitted and read by the view. Not thread-safe."""

    def __init__(self, clock: Clock, names: PrefixNames | None = None) -> None:
        self.clock = clock
        self.names = names or PrefixNames()
        self.intervals: deque[Interval] = deque(maxlen=_INTERVALS)
        self.visits: deque[LookupRecord] = deque(maxlen=_VISITS)
        self.floor = 0
        """No prefix that is not listed has cost more tokens than this."""
        self._count = 0
        self._prefixes: dict[tuple[str, Reason], LostPrefix] = {}
        self._namespaces: OrderedDict[Namespace, int] = OrderedDict()
        self._numbered = 0

    def admitted(self, sequence: SequenceBlocks) -> None:
        """Record the lookup of `sequence`, whose request begins to run."""
        now, lost, namespace = self.clock.now(), sequence.lost, self.number(sequence.namespace)
        if not self.intervals or now >= self.intervals[-1].start + INTERVAL_SECONDS:
            self.intervals.append(Interval(now // INTERVAL_SECONDS * INTERVAL_SECONDS))
        interval = self.intervals[-1]
        interval.requests += 1
        interval.prompt += sequence.num_prompt_tokens
        interval.hit += sequence.hit - sequence.received
        interval.received += sequence.received
        interval.lost.update(lost)
        self._count += 1
        self.visits.append(
            LookupRecord(
                number=self._count,
                at=now,
                namespace=namespace,
                prompt=sequence.num_prompt_tokens,
                hit=sequence.hit - sequence.received,
                received=sequence.received,
                matched=sequence.matched,
                reason=sequence.reason,
                lost=lost,
            )
        )
        self._charge(sequence, namespace, now)

    def number(self, namespace: Namespace) -> int:
        """The number that stands for a namespace: 0 for the plain one. One not met for long may get another number."""
        if namespace.cache_salt is None and not namespace.adapter:
            return 0
        number = self._namespaces.get(namespace)
        if number is None:
            self._numbered += 1
            number = self._namespaces[namespace] = self._numbered
            if len(self._namespaces) > _NAMESPACES:
                self._namespaces.popitem(last=False)
        else:
            self._namespaces.move_to_end(namespace)
        return number

    def heaviest(self, count: int) -> list[LostPrefix]:
        """The prefixes that have cost most tokens, the costliest first."""
        return sorted(self._prefixes.values(), key=lambda prefix: -prefix.tokens)[:count]

    def _charge(self, sequence: SequenceBlocks, namespace: int, now: float) -> None:
        position = sequence.hit
        for end, reason in (*sequence.missed, (sequence.num_prompt_tokens, sequence.reason)):
            if end <= position:
                continue
            if reason not in _NOT_LOST:
                last = sequence.keys[max(0, end - NAMED_TOKENS) : end]
                self._add(end, np.ascontiguousarray(last).tobytes(), namespace, reason, end - position, now)
            position = end

    def _add(self, depth: int, last: bytes, namespace: int, reason: Reason, tokens: int, now: float) -> None:
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
