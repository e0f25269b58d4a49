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

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cairn.cache.checkpoint import Kind
from cairn.cache.placement import PromptFacts, Wanted
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace, SequenceBlocks
from cairn.replay.bounds import Paths
from cairn.replay.event_queue import WAIT_FOR_ROOM, EventQueue, Process
from cairn.replay.timed_cache import ReplayOutcome, TimedCache
from cairn.replay.traces import Timeline, Trace, TraceRequest, key_tokens
from cairn.types import Keys

__all__ = ["Replay", "ReplayOutcome"]


@dataclass(slots=True, eq=False)
class ReplayRequest:
    """A request and its progress in tokens. `keys`: of its path and answer, of which `num_prompt` are the path's and
    `num_tokens` exist so far; `position`: computed tokens. `delay`: seconds behind its timeline. `lease`: None while it
    waits."""

    index: int
    request: TraceRequest
    keys: Keys
    num_prompt: int
    lease: SequenceBlocks | None = None
    facts: PromptFacts | None = None
    num_tokens: int = 0
    position: int = 0
    delay: float = 0.0


class Replay:
    """One trace, one cache; good for one run. The cache is shown the trace's own time."""

    def __init__(self, timed: TimedCache) -> None:
        self._timed = timed
        self.cache, self.outcome = timed.cache, timed.outcome
        self._paths = Paths()
        self._unit = 1
        self._step = 0
        self._events = EventQueue(timed.show)
        self._running: dict[int, ReplayRequest] = {}

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> ReplayOutcome:
        """Replay all requests; `progress` is told how many were started. `outcome.hits` is in their order."""
        self._unit, self.outcome.hits = trace.unit, [0] * len(trace.requests)
        for index, request in enumerate(trace.requests):
            self._events.run_until(request.scheduled_time)
            keys = key_tokens(np.concatenate([request.path, request.answer]), trace.unit)
            num_prompt = len(request.path) * trace.unit
            self._events.start(
                index, self._simulate(ReplayRequest(index, request, keys, num_prompt, num_tokens=num_prompt))
            )
            if progress is not None:
                progress(index + 1)
        self._events.run_to_end()
        return self._timed.ended()

    def _simulate(self, sequence: ReplayRequest) -> Process:
        request, length = sequence.request, sequence.request.num_prompt_tokens
        if not sequence.num_prompt or not self._timed.holds(sequence.num_prompt):
            self.outcome.forward_passes += -(-length // self._timed.most_tokens)
            self.outcome.refused += sequence.num_prompt > 0
            self._count(sequence, 0, 0, {Reason.DISABLED if sequence.num_prompt else Reason.NEVER_SEEN: length})
            return
        yield from self._admit(sequence)
        computed, since = sequence.position, request.scheduled_time
        for since, forced, end in self._prefill_steps(request):
            yield since + sequence.delay
            if forced > sequence.position and sequence.lease is not None:
                with self._timed.inside:
                    self.cache.force_checkpoint(sequence.lease, forced)
            while max(computed, sequence.position) < end:
                computed = yield from self._prefill(sequence, max(computed, sequence.position), end)
        self._release_step_pages(sequence)
        yield from self._decode(sequence, since)
        if request.timeline is not None:
            yield request.timeline.finished_time + sequence.delay
        if sequence.lease is None:
            yield from self._admit(sequence)
        saved = self._finish(sequence)
        if request.timeline is not None:
            yield request.timeline.released_time + sequence.delay
        if sequence.lease is None:
            yield from self._admit(sequence)
        self._release(sequence, saved)

    def _prefill_steps(self, request: TraceRequest) -> Iterator[tuple[float, int, int]]:
        """Time, position of a forced checkpoint or 0, and end of a prefill step or 0. Forced checkpoints come before
        those of the policy in the same step; the last step ends at the prompt's end if there is an answer."""
        since, timeline = request.scheduled_time, request.timeline
        if timeline is not None:
            forced = [
                (math.nextafter(when, -math.inf), position, 0)
                for when, position in timeline.forced_checkpoints
                if when >= timeline.scheduled_time
            ]
            yield from sorted(forced + [(when, 0, end) for when, end in timeline.prefill_steps])
            since = timeline.prefill_steps[-1][0] if timeline.prefill_steps else since
        if timeline is None or timeline.completed or len(request.answer):
            yield since, 0, request.num_prompt_tokens

    def _admit(self, sequence: ReplayRequest) -> Process:
        """Wait for pages for all tokens so far, in the order of arrival."""
        since = self._events.now
        while self._events.has_waiting_before(sequence.index) or not self._try_admit(sequence):
            if not self._running:
                with self._timed.inside:
                    self.cache.clear()  # with nothing else running, its own hit is in the way
                fits = self._try_admit(sequence)
                assert fits, f"request {sequence.index} does not fit an empty pool"
                break
            yield WAIT_FOR_ROOM
        self._running[sequence.index] = sequence
        sequence.delay += self._events.now - since

    def _try_admit(self, sequence: ReplayRequest) -> bool:
        request, cache = sequence.request, self.cache
        resumed = sequence.facts is not None
        keys, name = sequence.keys[: sequence.num_tokens], str(sequence.index)
        with self._timed.inside:
            bypass = request.timeline is not None and request.timeline.bypasses_cache and not resumed
            namespace = Namespace(cache_salt=request.namespace)
            lease = cache.lookup(namespace, keys, name, sequence.num_prompt if resumed else None, bypass)
            fits = lease.hit == sequence.num_tokens or cache.could_extend(lease, sequence.num_tokens)
            if not fits or (lease.hit < sequence.num_tokens and cache.extend(lease, sequence.num_tokens) is None):
                cache.release(lease)
                return False
            if request.timeline is not None and not resumed:
                self._receive_pages(lease, request.timeline.received_end)
                for when, position in request.timeline.forced_checkpoints:
                    if when < request.timeline.scheduled_time and position > lease.hit:
                        cache.force_checkpoint(lease, position)
            if request.is_parallel_sample and not resumed and lease.restore is not None and lease.hit == len(keys):
                # it starts from what was held for it, which is no hit that the cache learns from
                looked_up, lease = lease, cache.branch(lease, lease.restore, name)
                cache.release(looked_up)
            else:
                cache.admitted(lease, resumed or request.is_parallel_sample)
            cache.hold_breakpoints(lease, request.boundaries)
            prefill_until = sequence.num_prompt if cache.policy.exact else sequence.num_tokens
            sequence.lease, sequence.facts = lease, cache.facts(lease, prefill_until, request.boundaries)
        if resumed:
            self._recompute(sequence, lease)
        else:
            sequence.position = lease.hit
            self._count(sequence, lease.hit, lease.received, lease.lost)
        return True

    def _receive_pages(self, lease: SequenceBlocks, position: int) -> None:
        """Take in another server's pages and state, if they reach beyond the hit."""
        length = lease.num_prompt_tokens
        if lease.hit < position <= length and self.cache.force_checkpoint(lease, length) is not None:
            self.cache.received(lease, position, length, position)

    def _recompute(self, sequence: ReplayRequest, lease: SequenceBlocks) -> None:
        """Compute what the request had computed before it was preempted, from the hit on."""
        reached, sequence.position = sequence.position, lease.hit
        while sequence.position < reached:
            start, end = sequence.position, reached
            if start < sequence.num_prompt:
                end = self._timed.chunk_end(start, min(reached, sequence.num_prompt))
                self.outcome.forward_passes += 1
            with self._timed.inside:
                self._apply_step(
                    lease, end, self._reserve_checkpoints(sequence, lease, start, min(end, sequence.num_prompt))
                )
            sequence.position = end

    def _prefill(self, sequence: ReplayRequest, computed: int, end: int) -> Generator[float, None, int]:
        """Compute one chunk of the prompt from `computed`, up to `end` at most. Returns how far the prompt is computed
        then, tokens behind the path included: no further if the request was preempted meanwhile."""
        if sequence.lease is None:
            yield from self._admit(sequence)
            return computed
        lease, stop = sequence.lease, self._timed.chunk_end(computed, end)
        high = min(stop, sequence.num_prompt)
        with self._timed.inside:
            kept = self._reserve_checkpoints(sequence, lease, min(computed, sequence.num_prompt), high)
        if sequence.request.timeline is not None:
            yield self._time_of_apply(sequence, sequence.request.timeline, stop)
        if sequence.lease is not lease:
            return computed
        with self._timed.inside:
            self._apply_step(lease, high, kept)
        sequence.position = max(sequence.position, high)
        self.outcome.forward_passes += 1
        return stop

    def _time_of_apply(self, sequence: ReplayRequest, timeline: Timeline, end: int) -> float:
        """The time at which a step that was just planned is applied: after the whole step was planned."""
        first_token_time = timeline.first_token_time + sequence.delay
        last = end >= sequence.num_prompt and first_token_time > self._events.now
        return first_token_time if last else math.nextafter(self._events.now, math.inf)

    def _reserve_checkpoints(self, sequence: ReplayRequest, lease: SequenceBlocks, start: int, end: int) -> list[int]:
        """Positions in the chunk (start, end] of the prompt that have a reserved checkpoint."""
        placement, facts = self.cache.policy.placement, sequence.facts
        assert facts is not None
        kept = [position for position in lease.files if start < position <= end]
        wanted = placement.in_prefill(facts, start, end) if placement is not None and start < end else []
        return kept + [want.position for want in wanted if self.cache.reserve_checkpoint(lease, want) is not None]

    def _decode(self, sequence: ReplayRequest, since: float) -> Process:
        """Generate the answer as far as there is room for it, with the checkpoints of the placement policy.

        Pages for all units up to the next stop are allocated at once, which evicts the same as one after the other.
        """
        policy, timeline = self.cache.policy, sequence.request.timeline
        start, end, block_size = sequence.num_prompt, len(sequence.keys), self.cache.layout.block_size
        times, ends = _answer_timeline(timeline, since, start, end) if timeline is not None else ([], [])
        for stop in range(start + self._unit, end + 1, self._unit):
            facts = sequence.facts
            assert facts is not None
            with self._timed.inside:
                point = policy.placement.in_decode(facts, stop) if policy.placement and not policy.exact else None
            # a page is needed for the first token, whose page may be shared and is copied, and at each page's begin
            needs_page = timeline is not None and (stop == start + 1 or stop % block_size == 1 % block_size)
            if point is None and stop < end and not needs_page:
                continue
            if timeline is not None:
                yield float(np.interp(stop, ends, times)) + sequence.delay
            if sequence.lease is None:
                yield from self._admit(sequence)
            while not self._append_tokens(sequence, stop):
                youngest = max(self._running)
                if youngest > sequence.index:
                    self._preempt(self._running[youngest])
                elif len(self._running) > 1:
                    freed = self._events.room_freed
                    self._preempt(sequence)
                    self._events.room_freed = freed  # the freed pages are for older requests
                    yield WAIT_FOR_ROOM
                    yield from self._admit(sequence)
                else:
                    return
            if point is not None:
                yield from self._keep_checkpoint(sequence, point)

    def _keep_checkpoint(self, sequence: ReplayRequest, want: Wanted) -> Process:
        """Keep a checkpoint of the answer if there is room for it."""
        lease = sequence.lease
        with self._timed.inside:
            wanted = lease is not None and self.cache.reserve_checkpoint(lease, want) is not None
        if wanted and sequence.request.timeline is not None:
            yield math.nextafter(self._events.now, math.inf)
        if wanted and lease is not None and sequence.lease is lease:
            with self._timed.inside:
                self._apply_step(lease, want.position, [want.position])

    def _append_tokens(self, sequence: ReplayRequest, end: int) -> bool:
        """Append the answer's tokens up to `end`. False if there is no room for all of them: then as many units as fit
        are appended."""
        lease = sequence.lease
        assert lease is not None
        for step in (end - sequence.num_tokens, self._unit):
            while sequence.num_tokens < end:
                with self._timed.inside:
                    fits = self.cache.extend(lease, sequence.num_tokens + step) is not None
                if not fits:
                    break
                for token in sequence.keys[sequence.num_tokens : sequence.num_tokens + step].tolist():
                    lease.append(token)
                sequence.num_tokens += step
        sequence.position = sequence.num_tokens
        self._release_step_pages(sequence)
        return sequence.num_tokens >= end

    def _release_step_pages(self, sequence: ReplayRequest) -> None:
        """Free the pages that only the last step needed: the restored checkpoint, and the source of a page copy."""
        if sequence.lease is not None and sequence.lease.transient:
            self._step += 1
            with self._timed.inside:
                self.cache.pin_until(self._step, sequence.lease)
                self.cache.step_applied(self._step)

    def _apply_step(self, lease: SequenceBlocks, num_tokens: int, kept: list[int]) -> None:
        """Plan and apply one step that computes up to `num_tokens` and fills the checkpoints at `kept`."""
        self._step += 1
        self.cache.pin_until(self._step, lease)
        self._timed.note_use()
        self.cache.commit(lease, num_tokens, kept)
        self.cache.step_applied(self._step)
        self._events.room_freed = self._events.room_freed or bool(kept)  # committed checkpoints can be evicted

    def _preempt(self, sequence: ReplayRequest) -> None:
        """Free the pages of a running request; its state is kept under the same conditions as in the scheduler."""
        lease, cache, position = sequence.lease, self.cache, sequence.position
        assert lease is not None
        size = cache.layout.pages_per_checkpoint
        own = sum(len(pages) for pages in lease.pages) - cache.layout.pages_for(lease.matched)
        with self._timed.inside:
            self._apply_step(lease, position, [])
            if position > lease.hit and size < own and cache.policy.placement is not None:
                if cache.reserve_checkpoint(lease, Wanted(position, Kind.PREEMPTION)) is not None:
                    self._apply_step(lease, position, [position])
            cache.release(lease, Reason.PREEMPTED)
        del self._running[sequence.index]
        sequence.lease, self._events.room_freed = None, True

    def _finish(self, sequence: ReplayRequest) -> list[int]:
        """Commit the answer. Returns the position of the checkpoint to save at its end, if any."""
        lease, policy, position = sequence.lease, self.cache.policy, sequence.position
        assert lease is not None
        well = sequence.request.timeline is None or sequence.request.timeline.completed
        with self._timed.inside:
            self._apply_step(lease, position, [])
            at_end = policy.placement is not None and policy.placement.keeps_answer_end and not policy.exact
            wanted = at_end and well and position > sequence.num_prompt
            return (
                [position]
                if wanted and self.cache.reserve_checkpoint(lease, Wanted(position, Kind.ANSWER_END)) is not None
                else []
            )

    def _release(self, sequence: ReplayRequest, saved: list[int]) -> None:
        lease = sequence.lease
        assert lease is not None
        with self._timed.inside:
            if saved and saved[0] in lease.files:
                self._apply_step(lease, saved[0], saved)
            self.cache.release(lease)
        del self._running[sequence.index]
        self._events.room_freed = True

    def _count(self, sequence: ReplayRequest, hit: int, received: int, lost: Mapping[Reason, int]) -> None:
        """Count the prompt: `hit` tokens need not be computed, of which `received` came from another server."""
        request, outcome = sequence.request, self.outcome
        known = self._paths.shared(request.path) * self._unit
        self._paths.add(request.path, request.answer)
        if not request.is_parallel_sample:
            outcome.prompt_tokens += request.num_prompt_tokens
            outcome.hit_tokens += hit - received
            outcome.hits[sequence.index] = hit - received
            outcome.lose(request.num_prompt_tokens, hit, known, lost)


def _answer_timeline(timeline: Timeline, since: float, start: int, end: int) -> tuple[list[float], list[int]]:
    """Times and ascending token counts of an answer's decode steps, for interpolation."""
    times, ends = [since], [start]
    for when, reached in (*timeline.decode_steps, (timeline.finished_time, end + 1)):
        if reached > ends[-1] and when >= times[-1]:
            times.append(when)
            ends.append(reached)
    return times, ends
