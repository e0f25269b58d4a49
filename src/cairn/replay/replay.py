"""A trace through the shipped cache: the same lookup, extend, want, commit and release that the scheduler makes.

Requests run one after another, in order of arrival; a prompt is computed in chunks of `max_num_batched_tokens`, cut on
the 64-token grid as the scheduler cuts them. Positions finer than the trace's unit count as the unit: the prompt that
the cache sees is its path, the tokens behind that are computed every time, and the answer ends at a full unit.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cairn.cache.checkpoint import Kind
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Lease, Namespace
from cairn.cache.placement import PromptFacts, Wanted
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.reasons import Reason
from cairn.replay.paths import Paths
from cairn.replay.traces import Trace, TraceRequest, key_tokens
from cairn.step import GRID
from cairn.types import Boundary, Clock, Keys, ManualClock

__all__ = ["Outcome", "Replay"]


@dataclass(slots=True)
class Outcome:
    """What a replay came to, in tokens, requests, checkpoints, bytes and seconds.

    `forward_passes`: prefill chunks. `lost`: every prompt token that was not hit, under one reason; those that no
    earlier request had are `never_seen`. `refused`: requests that the budget cannot hold. `hits`: cached
    tokens, by request. `peak_bytes`: pages in use at most. `seconds`: inside the cache's door.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    forward_passes: int = 0
    refused: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    hits: list[int] = field(default_factory=list)
    lost: Counter[Reason] = field(default_factory=Counter)
    taken: Counter[Kind] = field(default_factory=Counter)
    used: Counter[Kind] = field(default_factory=Counter)
    evicted: Counter[Kind] = field(default_factory=Counter)

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def microseconds_per_request(self) -> float:
        return 1e6 * self.seconds / max(1, len(self.hits))


class Replay:
    """One trace, one cache. `clock` measures the time spent in the cache's door; the trace's own time is what the cache
    itself is shown."""

    def __init__(
        self,
        layout: CacheLayout,
        budget_bytes: int,
        policy: CachePolicy,
        clock: Clock,
        max_num_batched_tokens: int = 8192,
    ) -> None:
        """Raises ValueError for a budget of less than a page and chunks of less than 64 tokens."""
        if max_num_batched_tokens < GRID:
            raise ValueError(f"max_num_batched_tokens must be at least {GRID}, not {max_num_batched_tokens}")
        self._trace_time = ManualClock()
        self.cache = PrefixCache(layout, budget_bytes // layout.page_bytes, policy, clock=self._trace_time)
        self.outcome = Outcome()
        self._clock = clock
        self._budget_tokens = max_num_batched_tokens
        self._paths = Paths()
        self._step = 0

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> Outcome:
        """Replay all requests; `progress` is told how many are done. An object is good for one run."""
        for index, request in enumerate(trace.requests):
            self._trace_time.advance(max(0.0, request.arrived - self._trace_time.now()))
            self._request(request, trace.unit, str(index))
            if progress is not None:
                progress(index + 1)
        residents = self.cache.residents
        self.outcome.taken, self.outcome.evicted = residents.taken, residents.evicted
        self.outcome.used = self.cache.counters.used
        return self.outcome

    def _request(self, request: TraceRequest, unit: int, name: str) -> None:
        known = self._paths.shared(request.path) * unit
        self._paths.add(request.path, request.answer)
        hit, reason = 0, Reason.NEVER_SEEN
        if len(request.path):
            keys, answer = key_tokens(request.path, unit), key_tokens(request.answer, unit)
            start = self._clock.now()
            hit, reason = self._through_the_cache(request, name, keys, answer, unit)
            self.outcome.seconds += self._clock.now() - start
        else:
            self.outcome.forward_passes += -(-request.num_prompt_tokens // self._budget_tokens)
        self._count(request.num_prompt_tokens, hit, known, reason)

    def _through_the_cache(
        self, request: TraceRequest, name: str, keys: Keys, answer: Keys, unit: int
    ) -> tuple[int, Reason]:
        """Cached tokens, and the reason for no more."""
        lease = self._admit(name, keys)
        if lease is None:
            self.outcome.refused += 1
            self.outcome.forward_passes += -(-request.num_prompt_tokens // self._budget_tokens)
            return 0, Reason.DISABLED
        facts = self._facts(lease, tuple(Boundary(end) for end in request.boundaries))
        self._prefill(lease, facts, request.num_prompt_tokens)
        self._decode(lease, facts, answer, unit)
        self.cache.release(lease)
        return lease.hit, lease.reason

    def _admit(self, name: str, keys: Keys) -> Lease | None:
        """A lease with pages for the whole prompt; None, and nothing has gone, if the pool cannot hold it at all: the
        scheduler refuses such a request, and leaves one page a group for copy on write, too."""
        layout = self.cache.layout
        if layout.pages_for(len(keys)) + len(layout.groups) > self.cache.pool.num_pages:
            return None
        for _ in range(2):
            lease = self.cache.lookup(Namespace(), keys, name)
            if self.cache.extend(lease, lease.num_tokens) is not None:
                self.cache.admitted(lease)
                return lease
            self.cache.release(lease)
            self.cache.clear()  # alone, and its own hit stands in its way
        raise AssertionError(f"request {name} does not fit an empty pool")

    def _facts(self, lease: Lease, ends: tuple[Boundary, ...]) -> PromptFacts:
        return PromptFacts(
            num_tokens=lease.num_prompt_tokens,
            hit=lease.hit,
            matched=lease.matched,
            seen=lease.seen,
            boundaries=ends,
            exact=self.cache.policy.exact,
            idle_files=self.cache.idle_files(),
        )

    def _prefill(self, lease: Lease, facts: PromptFacts, num_prompt_tokens: int) -> None:
        """Compute the prompt from the hit on, and what is behind the path with its last chunks."""
        placement, path_end = self.cache.policy.placement, lease.num_prompt_tokens
        most = self._budget_tokens
        if placement is not None and placement.step_tokens is not None:
            most = min(most, placement.step_tokens)
        start = lease.hit
        while start < num_prompt_tokens:
            end = _chunk_end(start, num_prompt_tokens, most)
            low, high = min(start, path_end), min(end, path_end)
            wanted = placement.in_prefill(facts, low, high) if placement is not None and low < high else []
            self._commit(lease, high, wanted)
            self.outcome.forward_passes += 1
            start = end
        self._commit(lease, path_end, [])

    def _decode(self, lease: Lease, facts: PromptFacts, answer: Keys, unit: int) -> None:
        """Generate the answer, unit by unit, as far as there is room for it, and keep its end if the policy does."""
        placement, exact = self.cache.policy.placement, self.cache.policy.exact
        position, tokens = lease.num_prompt_tokens, answer.tolist()
        for first in range(0, len(tokens), unit):
            if self.cache.extend(lease, position + unit) is None:
                break
            self._append(lease, tokens[first : first + unit])
            position += unit
            point = placement.in_decode(facts, position) if placement is not None and not exact else None
            if point is not None:
                self._commit(lease, position, [point])
        at_end = placement is not None and placement.keeps_answer_end and not exact
        if at_end and position > lease.num_prompt_tokens:
            self._commit(lease, position, [Wanted(position, Kind.ANSWER_END)])
        else:
            self._commit(lease, position, [])

    def _append(self, lease: Lease, tokens: list[int]) -> None:
        """What a model would sample: no work of the cache's, so its time does not count."""
        start = self._clock.now()
        for token in tokens:
            lease.append(token)
        self.outcome.seconds -= self._clock.now() - start

    def _commit(self, lease: Lease, num_tokens: int, wanted: list[Wanted]) -> None:
        """One step that has computed up to `num_tokens` and keeps what is wanted, planned and applied."""
        kept = [want.position for want in wanted if self.cache.want(lease, want) is not None]
        self._step += 1
        self.cache.hold_until(self._step, lease)
        in_use = self.cache.pool.num_pages - self.cache.pool.num_free
        self.outcome.peak_bytes = max(self.outcome.peak_bytes, in_use * self.cache.layout.page_bytes)
        self.cache.commit(lease, num_tokens, kept)
        self.cache.step_applied(self._step)

    def _count(self, num_prompt_tokens: int, hit: int, known: int, reason: Reason) -> None:
        outcome = self.outcome
        outcome.prompt_tokens += num_prompt_tokens
        outcome.hit_tokens += hit
        outcome.prefill_tokens += num_prompt_tokens - hit
        outcome.hits.append(hit)
        if reason in (Reason.NEVER_SEEN, Reason.NONE):
            reason = Reason.EVICTED  # what was seen before, and the cache does not even remember that
        outcome.lost[reason] += known - hit
        outcome.lost[Reason.NEVER_SEEN] += num_prompt_tokens - known
        outcome.lost += Counter()  # without the reasons that have cost nothing


def _chunk_end(start: int, limit: int, budget: int) -> int:
    """Where a chunk from `start` ends: at `limit` if the budget reaches it, else on the 64-token grid."""
    end = start + budget
    return limit if end >= limit else end // GRID * GRID
