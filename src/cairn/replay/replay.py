"""A trace through the shipped cache: the same lookup, extend, reserve_checkpoint, commit and release that the scheduler
makes.

Each request is a process of a discrete-event simulation. A request of a server's log is scheduled, computed and
finished at the times in the log, concurrently with the others. A request of another trace has no timeline: it is served
alone and at once when it arrives, in prefill chunks of `max_num_batched_tokens`, cut on the 64-token grid as the
scheduler cuts them.

A request that finds no room waits until pages are freed, and everything it does later is delayed by that. A running
request that finds no room for its next token preempts the youngest one, as in the scheduler.

Positions finer than the trace's unit count as the unit: the prompt that the cache sees is its path, the tokens behind
the path are computed every time, and the answer ends at a full unit.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cairn.cache.checkpoint import Kind
from cairn.cache.placement import CheckpointPoint, PromptFacts
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace, SequenceBlocks
from cairn.replay.bounds import Paths
from cairn.replay.timed_cache import ReplayOutcome, TimedCache
from cairn.replay.traces import Timeline, Trace, TraceRequest, key_tokens
from cairn.types import Keys

__all__ = ["Replay", "ReplayOutcome"]


Process = Iterator[float]
"""One request's simulation: each value is the time, in seconds, at which it resumes."""

WAIT_FOR_ROOM = math.inf
"""The time of a process that resumes when pages have been freed."""


class EventQueue:
    """A discrete-event simulation: runs processes in the order of their times, of equal times the lower number first.

    `now`: the trace's time in seconds; `advance` is called with each new one. `room_freed`: to be set when pages were
    freed; the processes that wait for room are then resumed in the order of their numbers until one has to wait again.
    """

    def __init__(self, advance: Callable[[float], None]) -> None:
        self.now = -math.inf
        self.room_freed = False
        self._advance = advance
        self._events: list[tuple[float, int, Process]] = []
        self._waiting: list[tuple[int, Process]] = []

    def has_waiting_before(self, number: int) -> bool:
        """Whether a process with a lower number waits for room."""
        return bool(self._waiting) and self._waiting[0][0] < number

    def start(self, number: int, process: Process) -> None:
        """Start a process now, and run it until it has to wait."""
        self._run(number, process)
        self._retry_waiting()

    def run_until(self, seconds: float) -> None:
        """Run all events up to and including this time."""
        while self._events and self._events[0][0] <= seconds:
            when, number, process = heapq.heappop(self._events)
            self._set_time(when)
            self._run(number, process)
            self._retry_waiting()
        self._set_time(seconds)

    def run_to_end(self) -> None:
        """Run all processes to their ends."""
        self.run_until(math.inf)
        assert not self._waiting, f"{len(self._waiting)} requests wait for room that nobody can free"

    def _set_time(self, seconds: float) -> None:
        if self.now < seconds < math.inf:
            self.now = seconds
            self._advance(seconds)

    def _retry_waiting(self) -> None:
        while self.room_freed and self._waiting:
            self.room_freed = False
            for _ in range(len(self._waiting)):
                number, process = heapq.heappop(self._waiting)
                if not self._run(number, process):
                    break

    def _run(self, number: int, process: Process) -> bool:
        """False if it waits for room."""
        for when in process:
            if when == WAIT_FOR_ROOM:
                heapq.heappush(self._waiting, (number, process))
                return False
            if when > self.now:
                heapq.heappush(self._events, (when, number, process))
                break
        return True


@dataclass(slots=True, eq=False)
class ReplayRequest:
    """A request and its progress in tokens. `keys`: of its path and answer, of which `num_prompt` are the path's and
    `num_tokens` exist so far; `position`: computed tokens. `delay`: seconds behind its timeline. `sequence`: None while
    it waits."""

    index: int
    trace_request: TraceRequest
    keys: Keys
    num_prompt: int
    sequence: SequenceBlocks | None = None
    facts: PromptFacts | None = None
    num_tokens: int = 0
    position: int = 0
    delay: float = 0.0


class Replay:
    """Replays one trace through one cache, once, on the trace's own time."""

    def __init__(self, timed: TimedCache) -> None:
        self._timed = timed
        self.cache, self.outcome = timed.cache, timed.outcome
        self._paths = Paths()
        self._unit = 1
        self._step = 0
        self._events = EventQueue(timed.advance_to)
        self._running: dict[int, ReplayRequest] = {}

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> ReplayOutcome:
        """Replay all requests. `progress` is called with the number of requests started; `outcome.hits` is in their
        order."""
        for number, trace_request in enumerate(trace.requests, 1):
            self.start(trace_request, trace.unit)
            if progress is not None:
                progress(number)
        return self.finish()

    def start(self, trace_request: TraceRequest, unit: int) -> None:
        """Start one more request at its time, after all that happens before it. One without a timeline is served at
        once: its cached tokens are the last of `outcome.hits`."""
        index, self._unit = len(self.outcome.hits), unit
        self.outcome.hits.append(0)
        self._events.run_until(trace_request.scheduled_time)
        keys = key_tokens(np.concatenate([trace_request.path, trace_request.answer]), unit)
        num_prompt = len(trace_request.path) * unit
        self._events.start(
            index, self._simulate(ReplayRequest(index, trace_request, keys, num_prompt, num_tokens=num_prompt))
        )

    def finish(self) -> ReplayOutcome:
        """Serve all requests to their ends."""
        self._events.run_to_end()
        return self._timed.finish()

    def _simulate(self, request: ReplayRequest) -> Process:
        trace_request, length = request.trace_request, request.trace_request.num_prompt_tokens
        if not request.num_prompt or not self._timed.can_hold(request.num_prompt):
            self.outcome.forward_passes += -(-length // self._timed.max_tokens)
            self.outcome.refused += request.num_prompt > 0
            self._count_prompt(request, 0, 0, {Reason.DISABLED if request.num_prompt else Reason.NEVER_SEEN: length})
            return
        yield from self._admit(request)
        computed, since = request.position, trace_request.scheduled_time
        for since, forced, end in self._prefill_steps(trace_request):
            yield since + request.delay
            if forced > request.position and request.sequence is not None:
                with self._timed.stopwatch:
                    self.cache.force_checkpoint(request.sequence, forced)
            while max(computed, request.position) < end:
                computed = yield from self._prefill(request, max(computed, request.position), end)
        self._release_step_pages(request)
        yield from self._decode(request, since)
        if trace_request.timeline is not None:
            yield trace_request.timeline.finished_time + request.delay
        if request.sequence is None:
            yield from self._admit(request)
        saved = self._finish(request)
        if trace_request.timeline is not None:
            yield trace_request.timeline.released_time + request.delay
        if request.sequence is None:
            yield from self._admit(request)
        self._release(request, saved)

    def _prefill_steps(self, trace_request: TraceRequest) -> Iterator[tuple[float, int, int]]:
        """Time, position of a forced checkpoint or 0, and end of a prefill step or 0. Forced checkpoints come before
        those of the policy in the same step; the last step ends at the prompt's end if there is an answer."""
        since, timeline = trace_request.scheduled_time, trace_request.timeline
        if timeline is not None:
            forced = [
                (math.nextafter(when, -math.inf), position, 0)
                for when, position in timeline.forced_checkpoints
                if when >= timeline.scheduled_time
            ]
            yield from sorted(forced + [(when, 0, end) for when, end in timeline.prefill_steps])
            since = timeline.prefill_steps[-1][0] if timeline.prefill_steps else since
        if timeline is None or timeline.completed or len(trace_request.answer):
            yield since, 0, trace_request.num_prompt_tokens

    def _admit(self, request: ReplayRequest) -> Process:
        """Wait for pages for all tokens so far, in the order of arrival."""
        since = self._events.now
        while self._events.has_waiting_before(request.index) or not self._try_admit(request):
            if not self._running:
                with self._timed.stopwatch:
                    self.cache.clear()  # with nothing else running, its own hit is in the way
                fits = self._try_admit(request)
                assert fits, f"request {request.index} does not fit an empty pool"
                break
            yield WAIT_FOR_ROOM
        self._running[request.index] = request
        request.delay += self._events.now - since

    def _try_admit(self, request: ReplayRequest) -> bool:
        trace_request, cache = request.trace_request, self.cache
        resumed = request.facts is not None
        keys, name = request.keys[: request.num_tokens], str(request.index)
        with self._timed.stopwatch:
            bypass = trace_request.timeline is not None and trace_request.timeline.bypasses_cache and not resumed
            namespace = Namespace(cache_salt=trace_request.namespace)
            sequence = cache.lookup(namespace, keys, name, request.num_prompt if resumed else None, bypass)
            fits = sequence.hit == request.num_tokens or cache.could_extend(sequence, request.num_tokens)
            if not fits or (sequence.hit < request.num_tokens and cache.extend(sequence, request.num_tokens) is None):
                cache.release(sequence)
                return False
            if trace_request.timeline is not None and not resumed:
                self._receive_pages(sequence, trace_request.timeline.received_end)
                for when, position in trace_request.timeline.forced_checkpoints:
                    if when < trace_request.timeline.scheduled_time and position > sequence.hit:
                        cache.force_checkpoint(sequence, position)
            if (
                trace_request.is_parallel_sample
                and not resumed
                and sequence.restore is not None
                and sequence.hit == len(keys)
            ):
                # it starts from the checkpoint that was pinned for it, which is no hit that the cache learns from
                looked_up, sequence = sequence, cache.branch(sequence, sequence.restore, name)
                cache.release(looked_up)
            else:
                cache.begin_request(sequence, resumed or trace_request.is_parallel_sample)
            cache.retain_breakpoints(sequence, trace_request.boundaries)
            prefill_until = request.num_prompt if cache.policy.exact else request.num_tokens
            request.sequence, request.facts = (
                sequence,
                cache.prompt_facts(sequence, prefill_until, trace_request.boundaries),
            )
        if resumed:
            self._recompute(request, sequence)
        else:
            request.position = sequence.hit
            self._count_prompt(request, sequence.hit, sequence.received, sequence.lost)
        return True

    def _receive_pages(self, sequence: SequenceBlocks, position: int) -> None:
        """Take in another server's pages and state, if they reach beyond the hit."""
        length = sequence.num_prompt_tokens
        if sequence.hit < position <= length and self.cache.force_checkpoint(sequence, length) is not None:
            self.cache.receive(sequence, position, length, position)

    def _recompute(self, request: ReplayRequest, sequence: SequenceBlocks) -> None:
        """Compute what the request had computed before it was preempted, from the hit on."""
        reached, request.position = request.position, sequence.hit
        while request.position < reached:
            start, end = request.position, reached
            if start < request.num_prompt:
                end = self._timed.chunk_end(start, min(reached, request.num_prompt))
                self.outcome.forward_passes += 1
            with self._timed.stopwatch:
                self._apply_step(
                    sequence, end, self._reserve_checkpoints(request, sequence, start, min(end, request.num_prompt))
                )
            request.position = end

    def _prefill(self, request: ReplayRequest, computed: int, end: int) -> Generator[float, None, int]:
        """Compute one chunk of the prompt from `computed`, up to `end` at most. Returns how far the prompt is computed
        then, tokens behind the path included: no further if the request was preempted meanwhile."""
        if request.sequence is None:
            yield from self._admit(request)
            return computed
        sequence, stop = request.sequence, self._timed.chunk_end(computed, end)
        high = min(stop, request.num_prompt)
        with self._timed.stopwatch:
            positions = self._reserve_checkpoints(request, sequence, min(computed, request.num_prompt), high)
        if request.trace_request.timeline is not None:
            yield self._time_of_apply(request, request.trace_request.timeline, stop)
        if request.sequence is not sequence:
            return computed
        with self._timed.stopwatch:
            self._apply_step(sequence, high, positions)
        request.position = max(request.position, high)
        self.outcome.forward_passes += 1
        return stop

    def _time_of_apply(self, request: ReplayRequest, timeline: Timeline, end: int) -> float:
        """The time at which a step that was just planned is applied: after the whole step was planned."""
        first_token_time = timeline.first_token_time + request.delay
        last = end >= request.num_prompt and first_token_time > self._events.now
        return first_token_time if last else math.nextafter(self._events.now, math.inf)

    def _reserve_checkpoints(self, request: ReplayRequest, sequence: SequenceBlocks, start: int, end: int) -> list[int]:
        """Positions in the chunk (start, end] of the prompt that have a reserved checkpoint."""
        placement, facts = self.cache.policy.placement, request.facts
        assert facts is not None
        reserved = [position for position in sequence.pending_states if start < position <= end]
        for wanted in placement.in_prefill(facts, start, end) if placement is not None and start < end else []:
            if self.cache.reserve_checkpoint(sequence, wanted) is not None:
                reserved.append(wanted.position)
        return reserved

    def _decode(self, request: ReplayRequest, since: float) -> Process:
        """Generate the answer as far as there is room for it, with the checkpoints of the placement policy.

        Pages for all units up to the next stop are allocated at once, which evicts the same as one after the other.
        """
        policy, timeline = self.cache.policy, request.trace_request.timeline
        start, end, block_size = request.num_prompt, len(request.keys), self.cache.layout.block_size
        times, ends = _answer_timeline(timeline, since, start, end) if timeline is not None else ([], [])
        for stop in range(start + self._unit, end + 1, self._unit):
            facts = request.facts
            assert facts is not None
            with self._timed.stopwatch:
                point = policy.placement.in_decode(facts, stop) if policy.placement and not policy.exact else None
            # a page is needed for the first token, whose page may be shared and is copied, and at each page's begin
            needs_page = timeline is not None and (stop == start + 1 or stop % block_size == 1 % block_size)
            if point is None and stop < end and not needs_page:
                continue
            if timeline is not None:
                yield float(np.interp(stop, ends, times)) + request.delay
            if request.sequence is None:
                yield from self._admit(request)
            while not self._append_tokens(request, stop):
                youngest = max(self._running)
                if youngest > request.index:
                    self._preempt(self._running[youngest])
                elif len(self._running) > 1:
                    freed = self._events.room_freed
                    self._preempt(request)
                    self._events.room_freed = freed  # the freed pages are for older requests
                    yield WAIT_FOR_ROOM
                    yield from self._admit(request)
                else:
                    return
            if point is not None:
                yield from self._save_checkpoint(request, point)

    def _save_checkpoint(self, request: ReplayRequest, wanted: CheckpointPoint) -> Process:
        """Save a checkpoint of the answer if there is room for it."""
        sequence = request.sequence
        with self._timed.stopwatch:
            reserved = sequence is not None and self.cache.reserve_checkpoint(sequence, wanted) is not None
        if reserved and request.trace_request.timeline is not None:
            yield math.nextafter(self._events.now, math.inf)
        if reserved and sequence is not None and request.sequence is sequence:
            with self._timed.stopwatch:
                self._apply_step(sequence, wanted.position, [wanted.position])

    def _append_tokens(self, request: ReplayRequest, end: int) -> bool:
        """Append the answer's tokens up to `end`. False if there is no room for all of them: then as many units as fit
        are appended."""
        sequence = request.sequence
        assert sequence is not None
        for step in (end - request.num_tokens, self._unit):
            while request.num_tokens < end:
                with self._timed.stopwatch:
                    fits = self.cache.extend(sequence, request.num_tokens + step) is not None
                if not fits:
                    break
                for token in request.keys[request.num_tokens : request.num_tokens + step].tolist():
                    sequence.append(token)
                request.num_tokens += step
        request.position = request.num_tokens
        self._release_step_pages(request)
        return request.num_tokens >= end

    def _release_step_pages(self, request: ReplayRequest) -> None:
        """Free the pages that only the last step needed: the restored checkpoint, and the source of a page copy."""
        if request.sequence is not None and request.sequence.transient:
            self._step += 1
            with self._timed.stopwatch:
                self.cache.pin_until(self._step, request.sequence)
                self.cache.release_step(self._step)

    def _apply_step(self, sequence: SequenceBlocks, num_tokens: int, positions: list[int]) -> None:
        """Plan and apply one step that computes up to `num_tokens` and fills the checkpoints at `positions`."""
        self._step += 1
        self.cache.pin_until(self._step, sequence)
        self._timed.record_usage()
        self.cache.commit(sequence, num_tokens, positions)
        self.cache.release_step(self._step)
        self._events.room_freed = self._events.room_freed or bool(positions)  # committed checkpoints can be evicted

    def _preempt(self, request: ReplayRequest) -> None:
        """Free the pages of a running request; its state is kept under the same conditions as in the scheduler."""
        sequence, cache, position = request.sequence, self.cache, request.position
        assert sequence is not None
        size = cache.layout.pages_per_checkpoint
        own = sum(len(pages) for pages in sequence.pages) - cache.layout.pages_for(sequence.matched)
        with self._timed.stopwatch:
            self._apply_step(sequence, position, [])
            if position > sequence.hit and size < own and cache.policy.placement is not None:
                if cache.reserve_checkpoint(sequence, CheckpointPoint(position, Kind.PREEMPTION)) is not None:
                    self._apply_step(sequence, position, [position])
            cache.release(sequence, Reason.PREEMPTED)
        del self._running[request.index]
        request.sequence, self._events.room_freed = None, True

    def _finish(self, request: ReplayRequest) -> list[int]:
        """Commit the answer. Returns the position of the checkpoint to save at its end, if any."""
        sequence, policy, position = request.sequence, self.cache.policy, request.position
        assert sequence is not None
        completed = request.trace_request.timeline is None or request.trace_request.timeline.completed
        with self._timed.stopwatch:
            self._apply_step(sequence, position, [])
            at_end = policy.placement is not None and policy.placement.keeps_answer_end and not policy.exact
            if not at_end or not completed or position <= request.num_prompt:
                return []
            state_pages = self.cache.reserve_checkpoint(sequence, CheckpointPoint(position, Kind.ANSWER_END))
            return [] if state_pages is None else [position]

    def _release(self, request: ReplayRequest, saved: list[int]) -> None:
        sequence = request.sequence
        assert sequence is not None
        with self._timed.stopwatch:
            if saved and saved[0] in sequence.pending_states:
                self._apply_step(sequence, saved[0], saved)
            self.cache.release(sequence)
        del self._running[request.index]
        self._events.room_freed = True

    def _count_prompt(self, request: ReplayRequest, hit: int, received: int, lost: Mapping[Reason, int]) -> None:
        """Count the prompt: `hit` tokens need not be computed, of which `received` came from another server. `lost`:
        the other tokens by the cache's own account; those that it calls new and an earlier request had are evicted."""
        trace_request, outcome = request.trace_request, self.outcome
        num_seen = self._paths.shared(trace_request.path) * self._unit
        self._paths.add(trace_request.path, trace_request.answer)
        if trace_request.is_parallel_sample:
            return
        length, num_seen = trace_request.num_prompt_tokens, max(hit, num_seen)
        outcome.prompt_tokens += length
        outcome.hit_tokens += hit - received
        outcome.hits[request.index] = hit - received
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


def _answer_timeline(timeline: Timeline, since: float, start: int, end: int) -> tuple[list[float], list[int]]:
    """Times and ascending token counts of an answer's decode steps, for interpolation."""
    times, ends = [since], [start]
    for when, reached in (*timeline.decode_steps, (timeline.finished_time, end + 1)):
        if reached > ends[-1] and when >= times[-1]:
            times.append(when)
            ends.append(reached)
    return times, ends
