"""A trace through the shipped scheduler and cache, on a virtual clock and with a runner that knows every answer.

A request of a server's log comes after as many steps as it did there, so under the server's own rules every step of the
replay is one of the server's. Under other rules a request may end later than it did; then those that came after its end
come so many steps later, as clients wait for answers. A request of another trace is served alone, at once, when it
arrives.

Positions finer than the trace's unit count as the unit: the prompt that the cache sees is its path, the tokens after
the path are computed every time, and the answer ends at a full unit.
"""

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from cairn.cache.layout import CacheLayout
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace
from cairn.errors import InvalidRequest
from cairn.replay.bounds import Paths
from cairn.replay.other_servers import OtherServers
from cairn.replay.outcome import ReplayOutcome, tree_memory
from cairn.replay.tiers import ReplayedTiers
from cairn.replay.trace import ReplayedServer, Trace, TraceRequest, key_tokens
from cairn.scheduler.advance import chunk_end
from cairn.scheduler.plan_builder import PlanBuilder
from cairn.scheduler.request import Request, Spec
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import RequestObserver, SchedulerConfig, SchedulingPolicy
from cairn.scheduler.transfers import Transfers
from cairn.step import GRID, StepResult
from cairn.transfer.contract import KvSource, TransferRole
from cairn.types import Clock, Keys, ManualClock, RequestId, SamplingParams

__all__ = ["Replay", "ReplayOutcome"]

UNBOUNDED = 1 << 60
"""Tokens of a sequence, and requests that wait."""


@dataclass(slots=True, eq=False)
class ReplayRequest:
    """A request that has not ended. `index`: where its hits are counted, if anywhere. `answer`: its tokens; the last
    one may be any. `leaves`: its client is gone, as soon as it has been admitted."""

    index: int
    trace_request: TraceRequest
    answer: list[int]
    admitted: bool = False
    leaves: bool = False


class _Event(NamedTuple):
    """After so many steps, `indices` arrive: several are answers to one prompt. Or their client is gone, or the cache
    is told that their answers were calls."""

    step: int
    seconds: float
    indices: list[int]
    kind: Literal["arrival", "leave", "call"] = "arrival"


class Replay(RequestObserver):
    """Replays one trace, once. `cache`: what it goes through; `outcome`: what has come of it.

    `max_tokens`: of a step, at least 64. `clock` measures what scheduler, cache and policies take. `log`: the server
    whose log the trace is. `tiers`: the bytes of those below the cache, by name, the fastest first. `scheduling`: whose
    turn it is; None: as in the log. Raises ValueError if the budget is less than a page, or `max_tokens` too small.
    """

    def __init__(
        self,
        layout: CacheLayout,
        budget_bytes: int,
        policy: CachePolicy,
        max_tokens: int,
        clock: Clock,
        log: ReplayedServer | None = None,
        tiers: Mapping[str, int] | None = None,
        scheduling: SchedulingPolicy | None = None,
    ) -> None:
        if max_tokens < GRID:
            raise ValueError(f"max_num_batched_tokens must be at least {GRID}, not {max_tokens}")
        self._log = log
        num_seqs = 1 if log is None else log.max_num_seqs
        self._config = SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(max_tokens, num_seqs + GRID),
            max_waiting=UNBOUNDED,
            max_model_len=UNBOUNDED,
            max_in_flight=1 if log is None else log.max_in_flight,
            exact=policy.exact,
            in_flight_sharing=log is None or log.in_flight_sharing,
            policy=scheduling or ("fcfs" if log is None else log.scheduling_policy),
        )
        self._time = ManualClock()
        self.cache = PrefixCache(layout, budget_bytes // layout.page_bytes, policy, self._time)
        self.outcome = ReplayOutcome()
        self._others = OtherServers()
        transfers = Transfers(None if log is None else self._others)
        self._scheduler = Scheduler(self._config, self.cache, self._time, transfers, self)
        self._tiers = ReplayedTiers(tiers or {}, self.cache, transfers, self._time)
        self._paths = Paths()
        self._unit = 1
        self._clock = clock
        self._requests: dict[RequestId, ReplayRequest] = {}
        self._admitted: list[tuple[ReplayRequest, Request]] = []
        self._ended: list[RequestId] = []
        self._out: deque[PlanBuilder] = deque()
        self._num_steps = 0
        self._late = 0
        """Steps by which requests of a log come later than they did."""

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> ReplayOutcome:
        """Replay all requests. `progress` is called with the number of requests started; `outcome.hits` is in their
        order."""
        progress = progress or (lambda number: None)
        if self._log is None:
            for number, trace_request in enumerate(trace.requests, 1):
                self.serve(trace_request, trace.unit)
                progress(number)
        else:
            self._serve_log(trace, progress)
        outcome, checkpoints = self.outcome, self.cache.checkpoints
        outcome.taken, outcome.used = checkpoints.taken, self.cache.counters.used
        outcome.evicted, outcome.tree = checkpoints.evicted, tree_memory(self.cache)
        return outcome

    def serve(self, trace_request: TraceRequest, unit: int) -> int:
        """Serve one more request alone, from its arrival to its end. Returns its cached tokens, which are the last of
        `outcome.hits`."""
        index, self._unit = len(self.outcome.hits), unit
        self.outcome.hits.append(0)
        self._advance_to(trace_request.arrived)
        self._submit({index: trace_request}, index)
        self._run_until(sys.maxsize)
        if trace_request.tools_step is not None:
            self._scheduler.await_tools(RequestId(str(index)))
        return self.outcome.hits[index]

    def _serve_log(self, trace: Trace, progress: Callable[[int], None]) -> None:
        requests, started = (*trace.requests, *trace.unserved), 0
        self.outcome.hits = [0] * len(trace.requests)
        for event in _events(requests):
            self._run_until(event.step)
            self._advance_to(event.seconds)
            if event.kind == "leave":
                self._leave(event.indices[0])
            elif event.kind == "call":
                self._scheduler.await_tools(RequestId(str(event.indices[0])))
            if event.kind != "arrival":
                continue
            counted = [index for index in event.indices if not requests[index].is_parallel_sample]
            self._submit({index: requests[index] for index in event.indices}, (counted or event.indices)[0])
            started += len(event.indices)
            progress(started)
        self._run_until(sys.maxsize)

    def _advance_to(self, seconds: float) -> None:
        """Set the virtual time, which never goes back."""
        self._time.advance(max(0.0, seconds - self._time.now()))

    # -- requests ------------------------------------------------------------------------------------------------

    def _submit(self, answers: Mapping[int, TraceRequest], counted: int) -> None:
        """Hand over requests with the same prompt, whose cached tokens are counted at index `counted`."""
        first, name = next(iter(answers.values())), str(next(iter(answers)))
        prompt, specs = key_tokens(first.path, self._unit), list[Spec]()
        limit = max(1, self._scheduler.max_tokens_for(len(prompt)))
        if first.timeline.received_end:
            self._others.promised[name] = first.timeline.received_end
        for index, trace_request in answers.items():
            # the last token of an answer is sampled and not computed
            answer = [*key_tokens(trace_request.answer, self._unit).tolist(), 0]
            specs.append(_spec(index, trace_request, prompt, min(limit, len(answer))))
            self._requests[specs[-1].request_id] = ReplayRequest(counted, trace_request, answer)
        try:
            # a prompt without a full unit never meets the cache
            self._scheduler.submit(specs[0], specs[1:])
        except InvalidRequest:
            for spec in specs:
                del self._requests[spec.request_id]
            if counted < len(self.outcome.hits):
                self._count_refused(counted, first)
        self._poll()

    def _poll(self) -> None:
        """Other servers and tiers give and take all at once."""
        self._scheduler.poll()
        while self._others.pending or self._tiers.is_busy:
            self._scheduler.poll()

    def _leave(self, index: int) -> None:
        request_id = RequestId(str(index))
        request = self._requests.get(request_id)
        if request is not None and not request.admitted and math.isfinite(request.trace_request.timeline.scheduled):
            request.leaves = True
        else:
            self._scheduler.abort(request_id)

    def _run_until(self, step: int) -> None:
        """Plan and apply steps before this one of the log, and count the prompts that came in."""
        since = self._clock.now()
        while self._scheduler.has_work and self._num_steps < step + self._late:
            skipped = self._scheduler.skip_plain_steps(step + self._late - self._num_steps, self._next_tokens)
            self._num_steps += skipped
            if not skipped:
                self._run_step()
            self._poll()
        self.outcome.seconds += self._clock.now() - since
        if step < sys.maxsize:
            self._num_steps = max(self._num_steps, step + self._late)
        for replayed, request in self._admitted:
            self._count_admitted(replayed, request)
        for request_id in self._ended:
            del self._requests[request_id]
        self._admitted.clear()
        self._ended.clear()

    def _run_step(self) -> None:
        """Plan as many steps as may be out, and run the oldest one to its end."""
        pool = self.cache.pool
        while self._scheduler.can_plan:
            self._scheduler.plan()
            in_use = (pool.num_pages - pool.num_free) * self.cache.layout.page_bytes
            self.outcome.peak_bytes = max(self.outcome.peak_bytes, in_use)
        builder = self._out.popleft()
        for progress in self._scheduler.apply(result_of(builder, lambda request: self._requests[request.id].answer)):
            if progress.finish is not None:
                # who came after it waits for it, as long as it may take
                timeline = self._requests[progress.request.id].trace_request.timeline
                self._late = max(self._late, self._num_steps - timeline.finished_step)
        for replayed, request in self._admitted:
            if replayed.leaves:
                self._scheduler.abort(request.id)

    def _next_tokens(self, request: Request, num_tokens: int) -> list[int]:
        start = len(request.output)
        return self._requests[request.id].answer[start : start + num_tokens]

    # -- what the scheduler tells ---------------------------------------------------------------------------------

    def planned(self, builder: PlanBuilder) -> None:
        self._out.append(builder)
        self._num_steps += 1
        for part in builder.scheduled:
            self.outcome.forward_passes += part.has_row and not part.is_decode
            replayed = self._requests[part.request.id]
            if not replayed.admitted:
                replayed.admitted = True
                self._admitted.append((replayed, part.request))

    def ended(self, request: Request) -> None:
        self._ended.append(request.id)

    # -- counts --------------------------------------------------------------------------------------------------

    def _count_admitted(self, replayed: ReplayRequest, request: Request) -> None:
        sequence = request.stats.first_sequence
        assert sequence is not None
        if not request.stats.is_parallel_sample and replayed.index < len(self.outcome.hits):
            received = 0 if request.transfer.from_tier else sequence.received
            self.outcome.tier_tokens += sequence.received - received
            self._count_prompt(replayed.index, replayed.trace_request, sequence.hit, received, sequence.lost)
            path, length = request.num_prompt_tokens, replayed.trace_request.num_prompt_tokens
            self.outcome.forward_passes += self._num_chunks(sequence.hit, length) - self._num_chunks(sequence.hit, path)

    def _num_chunks(self, start: int, end: int) -> int:
        placement, most = self.cache.policy.placement, self._config.max_num_batched_tokens
        if placement is not None and placement.step_tokens is not None:
            most = min(most, placement.step_tokens)
        count = 0
        while start < end:
            start, count = chunk_end(start, end, most), count + 1
        return count

    def _count_refused(self, index: int, trace_request: TraceRequest) -> None:
        length, reason = trace_request.num_prompt_tokens, Reason.NEVER_SEEN
        if len(trace_request.path):
            self.outcome.refused, reason = self.outcome.refused + 1, Reason.DISABLED
        self.outcome.forward_passes += -(-length // self._config.max_num_batched_tokens)
        self._count_prompt(index, trace_request, 0, 0, {reason: length})

    def _count_prompt(
        self, index: int, trace_request: TraceRequest, hit: int, received: int, lost: Mapping[Reason, int]
    ) -> None:
        """Count the prompt: `hit` tokens need not be computed, of which `received` came from another server. `lost`:
        the other tokens by the cache's own account; those that it calls new and an earlier request had are evicted."""
        outcome = self.outcome
        length = trace_request.num_prompt_tokens
        num_seen = max(hit, self._paths.shared(trace_request.path) * self._unit)
        self._paths.add(trace_request.path, trace_request.answer)
        outcome.prompt_tokens += length
        outcome.hit_tokens += hit - received
        outcome.hits[index] = hit - received
        outcome.prefill_tokens += length - hit
        remaining = num_seen - hit
        for reason, tokens in lost.items():
            if reason not in (Reason.REWRITTEN, Reason.NEVER_SEEN):
                outcome.lost[reason] += min(tokens, remaining)
                remaining -= min(tokens, remaining)
        outcome.lost[Reason.EVICTED] += remaining
        rewritten = min(lost.get(Reason.REWRITTEN, 0), length - num_seen)
        outcome.lost[Reason.REWRITTEN] += rewritten
        outcome.lost[Reason.NEVER_SEEN] += length - num_seen - rewritten
        outcome.lost += Counter()  # drops reasons without tokens


def result_of(builder: PlanBuilder, answer_of: Callable[[Request], Sequence[int]]) -> StepResult:
    """What a runner gives that knows every answer."""
    samples, requests = builder.samples, [part.request for part in builder.scheduled] + list(builder.plain.requests)
    by_slot = {request.slot: request for request in requests}
    tokens = []
    for slot, position in zip(samples.slots.tolist(), samples.positions.tolist(), strict=True):
        request = by_slot[slot]
        tokens.append(answer_of(request)[position - request.num_prompt_tokens])
    advanced = np.ones(builder.num_decodes, np.bool_)
    return StepResult(builder.step, samples.slots, np.array(tokens, np.int64), advanced=advanced)


def _spec(index: int, trace_request: TraceRequest, prompt: Keys, max_tokens: int) -> Spec:
    timeline = trace_request.timeline
    source = KvSource("", "", 0, end=timeline.received_end) if timeline.received_end else None
    return Spec(
        request_id=RequestId(str(index)),
        prompt=prompt,
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        namespace=Namespace(cache_salt=trace_request.namespace),
        boundaries=trace_request.boundaries,
        role=TransferRole(source, timeline.kv_export),
        prompt_logprobs=0 if timeline.bypasses_cache else None,
        priority=timeline.priority,
        session=_session_of(trace_request),
        client=f"{timeline.client:x}" if timeline.client else "",
    )


def _session_of(trace_request: TraceRequest) -> str:
    """The name of its session, in a log or a trace; empty where that is not known."""
    if trace_request.timeline.session:
        return f"{trace_request.timeline.session:x}"
    return "" if trace_request.session is None else f"session {trace_request.session}"


def _events(requests: Sequence[TraceRequest]) -> Iterable[_Event]:
    """Arrivals, departures and calls of a log, in order. Answers to one prompt, which are named NAME, NAME/1, ...,
    arrive together."""
    arrivals, others = dict[object, _Event](), list[_Event]()
    for index in sorted(range(len(requests)), key=lambda index: requests[index].arrived):
        request, timeline = requests[index], requests[index].timeline
        base, _, number = request.name.rpartition("/")
        prompt = base if base and number.isdecimal() else request.name
        event = _Event(timeline.arrived_step, request.arrived, [])
        arrivals.setdefault((event.step, prompt, request.path.tobytes()), event).indices.append(index)
        if not timeline.completed:
            others.append(_Event(timeline.finished_step, timeline.finished, [index], "leave"))
        if request.tools_step is not None:
            others.append(_Event(request.tools_step, timeline.finished, [index], "call"))
    return sorted([*others, *arrivals.values()], key=lambda event: (event.step, event.seconds))
