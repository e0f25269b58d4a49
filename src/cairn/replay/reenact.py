"""A server's own request log, gone through again call by call with a cache of the shipped kind.

What was served together shares tokens, and hits depend on who was looked up before whose tokens were committed. So the
log says which sequences share how many tokens, and in which order the cache was called; the sequences are made again
with the same sharing, and the calls are made again. What the cache finds, keeps and drops is its own: what the server
had found stands in the log, too, and is not looked at.

With the server's layout, budget and policy the cached tokens are the same, request by request. With others the order
stays that of the log as far as it can: a request that finds no room is computed when another has ended, all at once;
one that began in an earlier file comes first. Of transfers, what was received is gone through, and that pages are held
for other servers is left out.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cairn.cache.checkpoint import Kind
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Hold, Lease, Namespace
from cairn.cache.placement import PromptFacts, Wanted, placement_for
from cairn.cache.prefix_cache import CachePolicy
from cairn.cache.reasons import Reason
from cairn.replay.outcome import Outcome
from cairn.replay.request_log import LoggedPolicy, LoggedRequest, LoggedTrace, Op
from cairn.replay.timed_cache import TimedCache
from cairn.step import GRID
from cairn.types import Clock, Keys

__all__ = ["Reenactment"]

_PREFILL, _DECODE, _SAVE = 1, 2, 3
_WELL = ("stop", "length")


@dataclass(slots=True, eq=False)
class _Part:
    """A request's share of a step that has been planned: what it computes up to, and which files it fills."""

    step: int
    end: int
    kind: int
    kept: list[int]


@dataclass(slots=True, eq=False)
class _Going:
    """A request on its way. `keys`: the whole sequence. `position`: tokens that plans have covered. `limit`: tokens
    that there is room for. `has_pages`: for all that it began with. `promised`: where a file was wanted whatever the
    policy. `states`: what is held of it for others."""

    number: int
    request: LoggedRequest
    keys: Keys
    lease: Lease | None = None
    facts: PromptFacts | None = None
    position: int = 0
    limit: int = 0
    promised: set[int] = field(default_factory=set)
    parts: deque[_Part] = field(default_factory=deque)
    states: list[Hold] = field(default_factory=list)
    has_pages: bool = False


class Reenactment:
    """One log, one cache; good for one run. `clock` measures the time that the calls take; the cache is shown the log's
    own time."""

    def __init__(
        self,
        layout: CacheLayout,
        budget_bytes: int,
        policy: CachePolicy,
        clock: Clock,
        max_num_batched_tokens: int = 8192,
    ) -> None:
        """Raises ValueError for a budget of less than a page and chunks of less than 64 tokens."""
        self._timed = TimedCache(layout, budget_bytes, policy, clock, max_num_batched_tokens)
        self.cache, self.outcome = self._timed.cache, self._timed.outcome
        self._going: dict[int, _Going] = {}
        self._hits: dict[int, int] = {}
        self._late: deque[LoggedRequest] = deque()
        self._flying: dict[int, list[_Going]] = {}
        self._alone: set[int] = set()
        self._alone_steps = 0
        self._ends_kept = True

    def run(self, trace: LoggedTrace, progress: Callable[[int], None] | None = None) -> Outcome:
        """Make all calls; `progress` is told how many requests are done. `outcome.hits` is in the order of
        `trace.logged`."""
        self._ends_kept = _keeps_answer_end(trace.policy, trace.unit)
        known = {request.number: request for request in trace.logged}
        begun = {op[1] for op in trace.ops if op[0] in ("l", "b")}
        self._late += [request for request in trace.logged if request.number not in begun]
        self._catch_up()
        for op in trace.ops:
            self._call(op, known)
            if progress is not None and op[0] == "r":
                progress(len(self._hits))
        for going in list(self._going.values()):
            self._release(going, None, catch_up=False)
            for state in going.states:
                self.cache.let_go(state)
        for step in list(self._flying):
            self._applied(step)
        self._late += [request for request in trace.logged if request.number not in {*self._hits, *self._alone}]
        self._catch_up()
        return self._counted(trace)

    def _call(self, op: Op, known: Mapping[int, LoggedRequest]) -> None:
        code = op[0]
        if code == "t":
            self._timed.show(op[1])
            return
        if code in ("l", "b"):
            self._join(op, known)
        with self._timed.inside():
            match code:
                case "p":
                    self._plan(op[1], op[2])
                case "s":
                    self._applied(op[1])
                case "m":
                    self.cache.make_room(op[1])
                case _ if op[1] in self._going:
                    self._call_for(self._going[op[1]], op)

    def _join(self, op: Op, known: Mapping[int, LoggedRequest]) -> None:
        """The sequence of a request is made before its time is measured."""
        number = op[1]
        source = known.get(number) if number not in self._alone else None
        if source is None and op[0] == "b" and op[2] in self._going:
            source = self._going[op[2]].request
        if number not in self._going and source is not None:
            self._going[number] = _Going(number, source, source.keys())

    def _call_for(self, going: _Going, op: Op) -> None:
        match op[0]:
            case "l":
                self._lookup(going, op[2], bool(op[3]), bool(op[4]))
            case "b":
                self._branch(going, self._going.get(op[2]), self._going.get(op[3]))
            case "g":
                if going.states:
                    self.cache.let_go(going.states.pop())
                self._forget(going)
            case _ if going.lease is not None:
                self._call_with_lease(going, going.lease, op)

    def _call_with_lease(self, going: _Going, lease: Lease, op: Op) -> None:
        match op[0]:
            case "a":
                self.cache.admitted(lease, bool(op[2]))
            case "h":
                self._start(going, lease)
            case "x":
                self._extend(going, lease, op[2], bool(op[3]))
            case "c":
                self._commit(going, lease, op[2], bool(op[3]))
            case "w":
                self._want(going, lease, Wanted(op[2], op[3]), bool(op[4]))
            case "f":
                if self.cache.want_always(lease, op[2]) is not None:
                    going.promised.add(op[2])
            case "v":
                self._receive(lease, op[2], op[3], op[4])
            case "k":
                self._hold(going, lease)
            case "r":
                self._release(going, op[2])

    # -- admission -----------------------------------------------------------------------------------------------

    def _lookup(self, going: _Going, length: int, resumed: bool, passed_by: bool = False) -> Lease:
        if going.lease is not None:
            self._release(going, None)  # calls are missing here
        request = going.request
        resumed_from = request.num_prompt_tokens if resumed else None
        namespace = Namespace(cache_salt=str(request.namespace) if request.namespace else None)
        lease = self.cache.lookup(namespace, going.keys[:length], str(request.number), resumed_from, passed_by)
        self._going[going.number] = going
        going.lease, going.facts, going.limit, going.has_pages = lease, None, going.request.num_tokens, False
        return lease

    def _branch(self, going: _Going, source: _Going | None, holder: _Going | None) -> None:
        if source is None or source.lease is None or holder is None or not holder.states:
            self._lookup(going, going.request.num_prompt_tokens, resumed=False)
            return
        going.lease = self.cache.branch(source.lease, holder.states[-1].pages, str(going.request.number))
        going.facts, going.limit, going.has_pages = None, going.request.num_tokens, False

    def _extend(self, going: _Going, lease: Lease, num_tokens: int, done: bool) -> None:
        if self.cache.extend(lease, num_tokens) is not None:
            going.has_pages = True
        elif done and going.facts is None:
            self._put_off(going)
        elif done:
            going.limit = min(going.limit, num_tokens - 1)

    def _put_off(self, going: _Going) -> None:
        """There is less room than the server had: the request waits until another has ended."""
        self._release(going, None, catch_up=False)
        self._late.append(going.request)
        self._alone.add(going.request.number)
        self._catch_up()

    def _start(self, going: _Going, lease: Lease) -> None:
        """The request runs: from here on it is as the scheduler's `_take` leaves it."""
        if lease.hit < lease.num_tokens and not going.has_pages and self.cache.extend(lease, lease.num_tokens) is None:
            self._put_off(going)  # the server had all of it, and needed no pages
            return
        request, cache = going.request, self.cache
        cache.hold_breakpoints(lease, request.boundaries)
        going.position = lease.hit
        num_tokens = request.num_prompt_tokens if cache.policy.exact else lease.num_tokens
        going.facts = cache.facts(lease, num_tokens, request.boundaries)
        if request.number not in self._hits:
            self._hits[request.number] = lease.hit - lease.received
            self.outcome.prefill_tokens += request.num_prompt_tokens - lease.hit
            self.outcome.lost.update(lease.lost)

    def _receive(self, lease: Lease, num_tokens: int, wanted: int, position: int) -> None:
        if wanted in lease.files and lease.hit < position <= num_tokens <= lease.num_tokens:
            self.cache.received(lease, num_tokens, wanted, position)

    def _hold(self, going: _Going, lease: Lease) -> None:
        position = going.request.num_prompt_tokens
        pages = lease.restore if lease.hit == position else None
        if pages is None and position in lease.files:
            pages = lease.files[position].pages
        if pages is not None:
            going.states.append(self.cache.hold(f"state of {going.request.number}", pages))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _plan(self, step: int, rows: list[tuple[int, int, int]]) -> None:
        planned: list[_Going] = []
        for number, end, kind in rows:
            going = self._going.get(number)
            if going is not None and going.facts is not None:
                kept = self._row(going, going.facts, min(end, going.limit), kind)
                going.parts.append(_Part(step, min(end, going.limit), kind, kept))
                planned.append(going)
        self._flying[step] = planned
        for going in planned:
            if going.lease is not None:
                self.cache.hold_until(step, going.lease)
        self._timed.note_use()

    def _row(self, going: _Going, facts: PromptFacts, end: int, kind: int) -> list[int]:
        """The positions whose files a row fills that ends at `end`."""
        lease, placement, start = going.lease, self.cache.policy.placement, going.position
        assert lease is not None
        going.position = max(start, end)
        if kind == _SAVE:
            return [end] if end in lease.files else []
        if start >= end:
            return []
        kept: list[int] = []
        wanted: list[Wanted] = []
        if kind == _DECODE:
            point = placement.in_decode(facts, end) if placement is not None and not facts.exact else None
            wanted = [point] if point is not None else []
        else:
            kept = [position for position in going.promised if start < position <= end and position in lease.files]
            while start < end:
                # one chunk where the server's hit and policy were the same
                stop = self._timed.chunk_end(start, end)
                self.outcome.forward_passes += 1
                wanted += placement.in_prefill(facts, start, stop) if placement is not None else []
                start = stop
        return kept + [want.position for want in wanted if self.cache.want(lease, want) is not None]

    def _commit(self, going: _Going, lease: Lease, num_tokens: int, with_files: bool = False) -> None:
        num_tokens = min(num_tokens, going.limit)
        part = next((part for part in going.parts if part.end == num_tokens), None)
        if part is not None:
            going.parts.remove(part)
            if with_files and part.kind == _DECODE and not part.kept:
                return  # a decode row is committed for its files' sake alone
        self._keep(going, lease, num_tokens, [] if part is None else part.kept)

    def _keep(self, going: _Going, lease: Lease, num_tokens: int, kept: list[int]) -> None:
        """Commit, with the tokens that have been sampled since."""
        if num_tokens > lease.matched and not lease.copied and self.cache.extend(lease, num_tokens) is None:
            going.limit = lease.matched  # the server had hit less, and its page was its own
            return
        for token in going.keys[lease.num_tokens : num_tokens].tolist():
            lease.append(token)
        self.cache.commit(lease, num_tokens, kept)

    def _applied(self, step: int) -> None:
        for going in self._flying.pop(step, []):
            for part in [part for part in going.parts if part.step == step]:
                going.parts.remove(part)
                # what the server's policy did not keep; the tokens of a row behind the answer's end are nobody's
                if part.kept and going.lease is not None and part.end <= going.request.num_tokens:
                    self._keep(going, going.lease, part.end, part.kept)
        self.cache.step_applied(step)

    # -- the end -------------------------------------------------------------------------------------------------

    def _want(self, going: _Going, lease: Lease, wanted: Wanted, done: bool) -> None:
        placement = self.cache.policy.placement
        if placement is None or not lease.hit < wanted.position <= min(going.limit, lease.committed):
            return
        if wanted.kind is Kind.ANSWER_END and (not placement.keeps_answer_end or self.cache.policy.exact):
            return
        if self.cache.want(lease, wanted) is not None and not done:
            self._keep(going, lease, wanted.position, [wanted.position])  # no step follows in which it would be saved

    def _release(self, going: _Going, loss: Reason | None, catch_up: bool = True) -> None:
        lease, request = going.lease, going.request
        if lease is None:
            return
        whole = lease.committed > request.num_prompt_tokens and lease.committed >= request.num_tokens - 1
        if not self._ends_kept and whole and going.facts is not None and request.finish in _WELL:
            self._want(going, lease, Wanted(lease.committed, Kind.ANSWER_END), done=False)
        self.cache.release(lease, loss)
        going.lease = going.facts = None
        going.parts.clear()
        going.promised.clear()
        self._forget(going)
        if catch_up:
            self._catch_up()

    def _forget(self, going: _Going) -> None:
        if going.lease is None and not going.states:
            self._going.pop(going.number, None)

    # -- out of order --------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Compute requests that have been put off, as long as there is room."""
        while self._late and self._whole(self._late[0], alone=not self.cache.leases):
            self._late.popleft()

    def _whole(self, request: LoggedRequest, alone: bool) -> bool:
        """Compute a request from start to end. False if it has to go on waiting, which it does not when nobody else
        has a lease."""
        cache = self.cache
        if not self._timed.holds(request.num_prompt_tokens):
            self.outcome.refused += 1
            self._hits[request.number] = 0
            self.outcome.prefill_tokens += request.num_prompt_tokens
            self.outcome.lost[Reason.DISABLED] += request.num_prompt_tokens
            return True
        going = _Going(request.number, request, request.keys())
        lease = self._lookup(going, request.num_prompt_tokens, resumed=False)
        if cache.extend(lease, lease.num_tokens) is None:
            self._release(going, None, catch_up=False)
            if not alone:
                return False
            cache.clear()  # its own hit stands in its way
            lease = self._lookup(going, request.num_prompt_tokens, resumed=False)
            cache.extend(lease, lease.num_tokens)
        going.has_pages = True
        cache.admitted(lease)
        self._start(going, lease)
        self._compute(going, lease)
        self._release(going, None, catch_up=False)
        return True

    def _compute(self, going: _Going, lease: Lease) -> None:
        request = going.request
        while going.position < request.num_prompt_tokens:
            self._one_step(going, self._timed.chunk_end(going.position, request.num_prompt_tokens), _PREFILL)
        last = max(request.num_prompt_tokens, request.num_tokens - 1)  # the last token of an answer is not computed
        for end in range((going.position // GRID + 1) * GRID, last + GRID, GRID):
            self._extend(going, lease, min(end, last), done=True)
            self._one_step(going, min(end, last), _DECODE)
        self._commit(going, lease, last)
        if request.finish in _WELL:
            self._want(going, lease, Wanted(min(last, going.limit), Kind.ANSWER_END), done=False)

    def _one_step(self, going: _Going, end: int, kind: int) -> None:
        self._alone_steps -= 1
        self._plan(self._alone_steps, [(going.request.number, end, kind)])
        if going.lease is not None and kind == _PREFILL:
            self._commit(going, going.lease, end)
        self._applied(self._alone_steps)

    def _counted(self, trace: LoggedTrace) -> Outcome:
        outcome = self._timed.ended()
        outcome.hits = [self._hits[request.number] for request in trace.logged]
        outcome.hit_tokens = sum(outcome.hits)
        outcome.prompt_tokens = sum(request.num_prompt_tokens for request in trace.logged)
        return outcome


def _keeps_answer_end(policy: LoggedPolicy, block_size: int) -> bool:
    """Whether the server kept the state at answers' ends; nothing is known of a policy that has no name here."""
    try:
        return placement_for(policy.placement, block_size, policy.exact).keeps_answer_end and not policy.exact
    except ValueError:
        return False
