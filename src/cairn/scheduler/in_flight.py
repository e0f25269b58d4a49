"""In-flight prefix sharing: a request waits until another one, which is in prefill, has computed their common prefix.

    leader   0 ======== computed ========> . . . . . . . . p . . . . end       runs
    waiting  0 ....... hit ............................... p . own part        keeps its place in the queue until p

The next request of the queue is compared with the prompts in prefill. Where a prompt (the leader's) shares at least 64
tokens more with it than the cache has, the leader saves its state at the point p where the two diverge. The request
waits until that state is there, and is then looked up like any other. Requests after it go on: they may have the slots
and pages that are left after what it needs itself has been reserved.

No wait is endless. It ends at once when the leader has passed p, has ended or was preempted, and after `MAX_IDLE` plans
without progress of the leader. Leaders run, so there is no circle. No request waits for the same leader twice, nor for
more than `MAX_WAITS` in all; and a leader has computed at least as many tokens as the cache has of the request.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.keys import common_tokens
from cairn.scheduler.plan_builder import PlanBuilder
from cairn.scheduler.request import Phase, Request
from cairn.step import GRID

MIN_SHARED = GRID
"""Tokens that waiting has to save."""

MAX_IDLE = 2
"""Plans that a leader may let pass without a token before nobody waits for it any more."""

MAX_WAITS = 4
"""Leaders that one request waits for, one after the other."""

MAX_UNALIGNED = 2
"""States off the 64-token grid that one leader is asked for: each costs a state product per layer."""

MAX_COMPARED = 1 << 19
"""Most tokens that one plan compares."""


@dataclass(slots=True)
class SharedCounters:
    """Since the start: requests that have started from a state they had waited for, and the tokens that saved them."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class _Leader:
    """A request in prefill. `number`: in the order in which leaders start. `positions`: where others wait for its
    state."""

    number: int
    positions: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Wait:
    """A wait until `leader` has computed `position` tokens. `pages`: reserved for the tokens after them. `scheduled`:
    how far the leader was planned when it last made progress, `idle` plans ago."""

    leader: Request
    position: int
    pages: int
    scheduled: int
    idle: int = 0

    def is_over(self) -> bool:
        """Whether the wait ends now. To be called once a plan, after the running requests have got their rows."""
        leader = self.leader
        if leader.phase is not Phase.RUNNING:
            return True
        if leader.num_scheduled >= self.position:
            return leader.num_computed >= self.position
        self.idle = 0 if leader.num_scheduled > self.scheduled else self.idle + 1
        self.scheduled = leader.num_scheduled
        return self.idle > MAX_IDLE


@dataclass(slots=True, eq=False)
class _WaitHistory:
    """The waits of a request so far. `num_compared`: leaders up to this number have been compared with it. `leaders`:
    arrivals of those that it has waited for. `hit`: tokens that it would have hit without waiting; None if it has not
    waited since it last ran."""

    num_compared: int = 0
    leaders: set[int] = field(default_factory=set)
    hit: int | None = None


class InFlight:
    """Requests that wait for the prefill of others. With `enabled` False none does."""

    def __init__(self, cache: PrefixCache, counters: SharedCounters, exact: bool, enabled: bool) -> None:
        self._cache = cache
        self._counters = counters
        self._exact = exact
        self._enabled = enabled and cache.enabled
        self._leaders: dict[Request, _Leader] = {}  # in the order in which they began
        self._waits: dict[Request, _Wait] = {}
        self._histories: dict[Request, _WaitHistory] = {}
        self._num_leaders = 0
        self._compared = 0

    def num_before(self, request: Request) -> int:
        """How many waiting requests come before `request`: a slot is reserved for each."""
        return sum(other.sort_key < request.sort_key for other in self._waits)

    @property
    def waiting(self) -> Iterable[Request]:
        """Those that wait for a leader."""
        return self._waits.keys()

    def is_waiting(self, request: Request) -> bool:
        """Whether it waits for a leader."""
        return request in self._waits

    def refresh(self) -> None:
        """End the waits that are over; to be called when the running requests of a plan have got their rows."""
        self._compared = 0
        if not self._leaders and not self._waits:
            return
        for request in [request for request, wait in self._waits.items() if wait.is_over()]:
            del self._waits[request]
        for leader in [leader for leader in self._leaders if not _in_prefill(leader)]:
            del self._leaders[leader]

    def should_wait_for_prefix(
        self, builder: PlanBuilder, request: Request, lookup: Callable[[Request], SequenceBlocks]
    ) -> bool:
        """Whether `request`, whose turn it is, waits for one that runs. `lookup`: as for its admission."""
        if request in self._waits:
            return True
        if not self._enabled or (request.spec.prompt_logprobs is not None and not request.output):
            return False
        history = self._histories.setdefault(request, _WaitHistory())
        matches = self._leaders_sharing(request, history)
        history.num_compared = self._num_leaders
        if not matches or len(history.leaders) >= MAX_WAITS:
            return False
        sequence = lookup(request)
        for leader, shared in reversed(matches):
            if leader.num_computed < sequence.hit:
                continue
            position = self._shared_position(builder, leader, request, sequence.hit, shared)
            if position is not None:
                self._wait(request, history, leader, position, sequence.hit)
                break
        self._cache.discard(sequence)
        return request in self._waits

    def leaves_room(self, request: Request, sequence: SequenceBlocks, num_states: int) -> bool:
        """Whether the pages reserved for waiting requests before `request` are available besides its own, which hold
        all of its tokens and `num_states` states."""
        reserved = sum(wait.pages for other, wait in self._waits.items() if other.sort_key < request.sort_key)
        if not reserved:
            return True
        need = reserved + sequence.blocks.missing_pages(request.num_tokens)
        return self._cache.could_free(sequence, need + num_states * self._cache.layout.pages_per_checkpoint)

    def add_leader(self, request: Request) -> None:
        """`request` starts running: from now on others may wait for what it computes."""
        history, sequence = self._histories.get(request), request.sequence
        assert sequence is not None
        if history is not None and history.hit is not None:
            self._counters.requests += sequence.hit > history.hit
            self._counters.tokens += max(0, sequence.hit - history.hit)
            history.hit = None
        if self._enabled and _in_prefill(request):
            self._num_leaders += 1
            self._leaders.pop(request, None)
            self._leaders[request] = _Leader(self._num_leaders)

    def remove(self, request: Request) -> None:
        """`request` has ended; those that wait for it stop waiting at the next plan."""
        for known in (self._leaders, self._waits, self._histories):
            known.pop(request, None)

    def positions_to_save(self, request: Request, start: int, end: int) -> list[int]:
        """Positions p, start < p <= end, at which others wait for its state; pages are reserved for each."""
        leader = self._leaders.get(request)
        return sorted(p for p in leader.positions if start < p <= end) if leader is not None else []

    # -- who waits where -----------------------------------------------------------------------------------------

    def _leaders_sharing(self, request: Request, history: _WaitHistory) -> list[tuple[Request, int]]:
        """Requests in prefill that have not been looked at for this one, with the tokens that both begin with: each
        shares more than the one before it. Most are told apart by one token."""
        matches: list[tuple[Request, int]] = []
        least = MIN_SHARED
        new = [leader for leader, entry in self._leaders.items() if entry.number > history.num_compared]
        keys = request.spec.prompt if self._exact or request.spec.role.kv_export or not new else request.keys()
        for leader in new:
            assert leader.sequence is not None
            theirs = leader.sequence.keys[: leader.prefill_until]
            if min(len(keys), len(theirs)) < least or keys[least - 1] != theirs[least - 1]:
                continue
            if leader.spec.namespace != request.spec.namespace or leader.stats.arrival in history.leaders:
                continue
            if self._compared >= MAX_COMPARED:
                break
            shared = common_tokens(keys, theirs)
            self._compared += shared + 1
            if shared >= least:
                matches.append((leader, shared))
                least = shared + 1
        return matches

    def _shared_position(
        self, builder: PlanBuilder, leader: Request, request: Request, hit: int, shared: int
    ) -> int | None:
        """The position of a state of the leader that `request` can start from; None if there is none worth waiting
        for."""
        assert leader.sequence is not None
        pending = leader.sequence.pending_states
        if self._cache.layout.resumes_anywhere:
            points = [shared]
        else:
            points = [p for p in dict.fromkeys((shared, shared // GRID * GRID)) if self._can_resume_at(request, p)]
            points = [p for p in points if p in pending or self._can_save_at(builder, leader, p)]
            points += sorted((p for p in pending if p <= shared and self._can_resume_at(request, p)), reverse=True)
        for point in points:
            if point - hit < MIN_SHARED or point <= leader.num_computed:
                continue
            if self._cache.layout.resumes_anywhere or point in pending or self._save_at(leader, point):
                return point
        return None

    def _can_resume_at(self, request: Request, position: int) -> bool:
        """Whether it may go on from a state there that was built by prefill (DESIGN section 6)."""
        return not self._exact or position % GRID == 0 or position == request.num_prompt_tokens

    def _can_save_at(self, builder: PlanBuilder, leader: Request, position: int) -> bool:
        """Whether no step that is out has passed `position`; the one at hand may."""
        if position % GRID and sum(p % GRID != 0 for p in self._leaders[leader].positions) >= MAX_UNALIGNED:
            return False
        if position > leader.num_scheduled:
            return True
        return any(entry.request is leader and entry.start < position for entry in builder.scheduled if entry.has_row)

    def _save_at(self, leader: Request, position: int) -> bool:
        """Reserve pages for the leader's state there; False if there is no room for it."""
        assert leader.sequence is not None
        if self._cache.force_checkpoint(leader.sequence, position) is None:
            return False
        self._leaders[leader].positions.add(position)
        return True

    def _wait(self, request: Request, history: _WaitHistory, leader: Request, position: int, hit: int) -> None:
        layout = self._cache.layout
        pages = layout.pages_for(request.num_tokens) - layout.pages_for(position) + len(layout.groups)
        if request.spec.role.kv_export and position < request.num_prompt_tokens:
            pages += layout.pages_per_checkpoint
        self._waits[request] = _Wait(leader, position, pages, leader.num_scheduled)
        history.leaders.add(leader.stats.arrival)
        history.hit = hit if history.hit is None else history.hit


def _in_prefill(request: Request) -> bool:
    return request.phase is Phase.RUNNING and request.num_computed < request.prefill_until
