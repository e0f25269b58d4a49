"""A cache that is shown a trace's own time, while a clock measures the calls to it; and what a replay comes to."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cairn.cache.checkpoint import Kind
from cairn.cache.layout import CacheLayout
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.reasons import Reason
from cairn.replay.memory import TreeMemory, tree_memory
from cairn.step import GRID
from cairn.types import Clock, ManualClock


@dataclass(slots=True)
class ReplayOutcome:
    """What a replay came to, in tokens, requests, checkpoints, bytes and seconds.

    `forward_passes`: prefill chunks. `lost`: every prompt token that was not hit, under one reason; those that no
    earlier request had are `never_seen`. `refused`: requests that the budget cannot hold. `hits`: cached
    tokens, by request. `peak_bytes`: pages in use at most. `seconds`: inside the cache's door and its placement policy.
    `tree`: what the cache's books take in memory at the end.
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
    tree: TreeMemory | None = None

    def lose(self, num_prompt_tokens: int, hit: int, known: int, lost: Mapping[Reason, int]) -> None:
        """A prompt of which the first `hit` tokens were not computed, and earlier requests had had the first `known`,
        whether or not the cache remembers them. `lost`: the cache's own account; what it takes for new and is not was
        forgotten."""
        self.prefill_tokens += num_prompt_tokens - hit
        known = max(hit, known)
        left = known - hit
        for reason, tokens in lost.items():
            if reason is not Reason.NEVER_SEEN:
                self.lost[reason] += min(tokens, left)
                left -= min(tokens, left)
        self.lost[Reason.EVICTED] += left
        self.lost[Reason.NEVER_SEEN] += num_prompt_tokens - known
        self.lost += Counter()  # without the reasons that have cost nothing

    @property
    def microseconds_per_request(self) -> float:
        return 1e6 * self.seconds / max(1, len(self.hits))


class Stopwatch:
    """Adds up, in `seconds`, the time that `clock` shows between going in and coming out. It costs little itself: of a
    request of many calls it would be seen."""

    __slots__ = ("_clock", "_since", "seconds")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._since = self._clock.now()

    def __exit__(self, *raised: object) -> None:
        self.seconds += self._clock.now() - self._since


class TimedCache:
    """`cache`, and the `outcome` of what is gone through with it, good for one run. Its calls are made `inside` a
    stopwatch that goes by `clock`. `most_tokens`: the longest prefill chunk."""

    def __init__(
        self, layout: CacheLayout, budget_bytes: int, policy: CachePolicy, clock: Clock, most_tokens: int
    ) -> None:
        """Raises ValueError for a budget of less than a page and chunks of less than 64 tokens."""
        if most_tokens < GRID:
            raise ValueError(f"max_num_batched_tokens must be at least {GRID}, not {most_tokens}")
        self._trace_time = ManualClock()
        self.cache = PrefixCache(layout, budget_bytes // layout.page_bytes, policy, clock=self._trace_time)
        self.outcome = ReplayOutcome()
        self.most_tokens = most_tokens
        self.inside = Stopwatch(clock)

    def show(self, seconds: float) -> None:
        """The trace has come to this time, unless it was later already."""
        self._trace_time.advance(max(0.0, seconds - self._trace_time.now()))

    def holds(self, num_prompt_tokens: int) -> bool:
        """Whether an empty pool has room for such a prompt: with one page a group for copy on write, as the scheduler
        has it, which refuses others."""
        layout = self.cache.layout
        return layout.pages_for(num_prompt_tokens) + len(layout.groups) <= self.cache.pool.num_pages

    def chunk_end(self, start: int, limit: int) -> int:
        """Where a prefill chunk from `start` ends: at `limit` if it may be so long, else on the 64-token grid."""
        placement, most = self.cache.policy.placement, self.most_tokens
        if placement is not None and placement.step_tokens is not None:
            most = min(most, placement.step_tokens)
        end = start + most
        return limit if end >= limit else end // GRID * GRID

    def note_use(self) -> None:
        """A step has been planned, so no more pages will be in use before it is applied."""
        pool = self.cache.pool
        in_use = (pool.num_pages - pool.num_free) * self.cache.layout.page_bytes
        self.outcome.peak_bytes = max(self.outcome.peak_bytes, in_use)

    def ended(self) -> ReplayOutcome:
        """The outcome, with what the cache itself has counted."""
        outcome, checkpoints = self.outcome, self.cache.checkpoints
        outcome.taken, outcome.evicted = checkpoints.taken, checkpoints.evicted
        outcome.used = self.cache.counters.used
        outcome.seconds = self.inside.seconds
        outcome.tree = tree_memory(self.cache)
        return outcome
