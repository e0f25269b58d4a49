"""A trace through the shipped cache: the same lookup, extend, want, commit and release that the scheduler makes.

Each request is a way of its own from its lookup to its release, which says when it goes on. Those of a server's log
began, computed their chunks and ended when the log says, beside each other; those of other traces are served one after
the other, each at once when it arrives, in chunks of `max_num_batched_tokens`, cut on the 64-token grid as the
scheduler cuts them.

Who finds no room waits until another one has ended, and is later by that from then on; who runs and finds none sends
the youngest back to wait, as the scheduler does.

Positions finer than the trace's unit count as the unit: the prompt that the cache sees is its path, the tokens behind
that are computed every time, and the answer ends at a full unit.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cairn.cache.checkpoint import Kind
from cairn.cache.lease import Lease, Namespace
from cairn.cache.placement import PromptFacts, Wanted
from cairn.cache.reasons import Reason
from cairn.replay.outcome import Outcome
from cairn.replay.paths import Paths
from cairn.replay.timed_cache import TimedCache
from cairn.replay.traces import Served, Trace, TraceRequest, key_tokens
from cairn.replay.turns import WAITS, Turns, Way
from cairn.types import Keys

__all__ = ["Outcome", "Replay"]


@dataclass(slots=True, eq=False)
class _Going:
    """A request on its way. `keys`: of its path and answer, `num_prompt` of the path's, `num_known` of those so far.
    `position`: tokens computed. `late`: seconds behind the log. `lease`: None while it waits."""

    index: int
    request: TraceRequest
    keys: Keys
    num_prompt: int
    lease: Lease | None = None
    facts: PromptFacts | None = None
    num_known: int = 0
    position: int = 0
    late: float = 0.0


class Replay:
    """One trace, one cache; good for one run. The cache is shown the trace's own time."""

    def __init__(self, timed: TimedCache) -> None:
        self._timed = timed
        self.cache, self.outcome = timed.cache, timed.outcome
        self._paths = Paths()
        self._unit = 1
        self._step = 0
        self._turns = Turns(timed.show)
        self._running: dict[int, _Going] = {}

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> Outcome:
        """Replay all requests; `progress` is told how many have begun. `outcome.hits` is in their order."""
        self._unit, self.outcome.hits = trace.unit, [0] * len(trace.requests)
        for index, request in enumerate(trace.requests):
            self._turns.go_on_until(request.started)
            keys = key_tokens(np.concatenate([request.path, request.answer]), trace.unit)
            num_prompt = len(request.path) * trace.unit
            self._turns.begin(index, self._serve(_Going(index, request, keys, num_prompt, num_known=num_prompt)))
            if progress is not None:
                progress(index + 1)
        self._turns.end()
        return self._timed.ended()

    def _serve(self, going: _Going) -> Way:
        request, length = going.request, going.request.num_prompt_tokens
        if not going.num_prompt or not self._timed.holds(going.num_prompt):
            self.outcome.forward_passes += -(-length // self._timed.most_tokens)
            self.outcome.refused += going.num_prompt > 0
            self._count(going, 0, 0, {Reason.DISABLED if going.num_prompt else Reason.NEVER_SEEN: length})
            return
        yield from self._admitted(going)
        computed, since = going.position, request.started
        for since, asked, end in self._steps(request):
            yield since + going.late
            if asked and going.lease is not None:
                with self._timed.inside:
                    self.cache.want_always(going.lease, asked)
            while max(computed, going.position) < end:
                computed = yield from self._prefill(going, max(computed, going.position), end)
        self._let_go_of_copies(going)
        yield from self._decode(going, since)
        if request.served is not None:
            yield request.served.finished + going.late
        if going.lease is None:
            yield from self._admitted(going)
        saved = self._finish(going)
        if request.served is not None:
            yield request.served.released + going.late
        if going.lease is None:
            yield from self._admitted(going)
        self._release(going, saved)

    def _steps(self, request: TraceRequest) -> Iterator[tuple[float, int, int]]:
        """When a file was asked for at a position, or the prompt was computed up to an end; one that was answered was
        computed to its own. What is asked for comes before the policy's wishes in the same step."""
        since, served = request.started, request.served
        if served is not None:
            asked = [(math.nextafter(when, -math.inf), position, 0) for when, position in served.asked]
            yield from sorted(asked + [(when, 0, end) for when, end in served.chunks])
            since = served.chunks[-1][0] if served.chunks else since
        if served is None or served.finished_well or len(request.answer):
            yield since, 0, request.num_prompt_tokens

    def _admitted(self, going: _Going) -> Way:
        """A lease with pages for all that is known of it, as soon as there is room and nobody waits before it."""
        since = self._turns.now
        while self._turns.has_waiting_before(going.index) or not self._try(going):
            if not self._running:
                with self._timed.inside:
                    self.cache.clear()  # alone, and its own hit stands in its way
                fits = self._try(going)
                assert fits, f"request {going.index} does not fit an empty pool"
                break
            yield WAITS
        self._running[going.index] = going
        going.late += self._turns.now - since

    def _try(self, going: _Going) -> bool:
        request, cache = going.request, self.cache
        resumed = going.facts is not None
        keys, name = going.keys[: going.num_known], str(going.index)
        with self._timed.inside:
            passed_by = request.served is not None and request.served.computed_whole and not resumed
            namespace = Namespace(cache_salt=request.namespace)
            lease = cache.lookup(namespace, keys, name, going.num_prompt if resumed else None, passed_by)
            fits = lease.hit == going.num_known or cache.could_extend(lease, going.num_known)
            if not fits or (lease.hit < going.num_known and cache.extend(lease, going.num_known) is None):
                cache.release(lease)
                return False
            if request.served is not None and not resumed:
                self._receive(lease, request.served.received_end)
            if request.branches and not resumed and lease.restore is not None and lease.hit == going.num_prompt:
                looked_up, lease = lease, cache.branch(lease, lease.restore, name)
                cache.release(looked_up)
            else:
                cache.admitted(lease, resumed or request.branches)
            cache.hold_breakpoints(lease, request.boundaries)
            prefilled = going.num_prompt if cache.policy.exact else going.num_known
            going.lease, going.facts = lease, cache.facts(lease, prefilled, request.boundaries)
        if resumed:
            self._compute_again(going, lease)
        else:
            going.position = lease.hit
            self._count(going, lease.hit, lease.received, lease.lost)
        return True

    def _receive(self, lease: Lease, position: int) -> None:
        """Another server's pages and state come, as far as there is more of them than was found."""
        length = lease.num_prompt_tokens
        if lease.hit < position <= length and self.cache.want_always(lease, length) is not None:
            self.cache.received(lease, position, length, position)

    def _compute_again(self, going: _Going, lease: Lease) -> None:
        """What it had computed before it was sent back, but for its hit."""
        reached, going.position = going.position, lease.hit
        while going.position < reached:
            start, end = going.position, reached
            if start < going.num_prompt:
                end = self._timed.chunk_end(start, min(reached, going.num_prompt))
                self.outcome.forward_passes += 1
            with self._timed.inside:
                self._apply(lease, end, self._want(going, lease, start, min(end, going.num_prompt)))
            going.position = end

    def _prefill(self, going: _Going, computed: int, end: int) -> Generator[float, None, int]:
        """Compute a chunk of the prompt from `computed`, up to `end` at most; what is behind the path comes with the
        last ones. Returns how far it is computed then, which is no further if it was sent back."""
        if going.lease is None:
            yield from self._admitted(going)
            return computed
        lease, stop = going.lease, self._timed.chunk_end(computed, end)
        high = min(stop, going.num_prompt)
        with self._timed.inside:
            kept = self._want(going, lease, min(computed, going.num_prompt), high)
        if going.request.served is not None:
            yield math.nextafter(self._turns.now, math.inf)  # a step is applied when all of it has been planned
        if going.lease is not lease:
            return computed
        with self._timed.inside:
            self._apply(lease, high, kept)
        going.position = max(going.position, high)
        self.outcome.forward_passes += 1
        return stop

    def _want(self, going: _Going, lease: Lease, start: int, end: int) -> list[int]:
        """The positions whose files a chunk [start, end) of the prompt fills."""
        placement, facts = self.cache.policy.placement, going.facts
        assert facts is not None
        kept = [position for position in lease.files if start < position <= end]
        wanted = placement.in_prefill(facts, start, end) if placement is not None and start < end else []
        return kept + [want.position for want in wanted if self.cache.want(lease, want) is not None]

    def _decode(self, going: _Going, since: float) -> Way:
        """Generate the answer as far as there is room for it, and keep what the policy keeps of it.

        Pages come for all units up to the next stop: the cache drops the same for many as for one after the other.
        """
        policy, served = self.cache.policy, going.request.served
        start, end, block_size = going.num_prompt, len(going.keys), self.cache.layout.block_size
        times, ends = _growth(served, since, start, end) if served is not None else ([], [])
        for stop in range(start + self._unit, end + 1, self._unit):
            facts = going.facts
            assert facts is not None
            with self._timed.inside:
                point = policy.placement.in_decode(facts, stop) if policy.placement and not policy.exact else None
            # pages are needed for the first token, which may come into one that others have, and for each page's first
            needs_page = served is not None and (stop == start + 1 or stop % block_size == 1 % block_size)
            if point is None and stop < end and not needs_page:
                continue
            if served is not None:
                yield float(np.interp(stop, ends, times)) + going.late
            if going.lease is None:
                yield from self._admitted(going)
            while not self._grow(going, stop):
                youngest = max(self._running)
                if youngest > going.index:
                    self._send_back(self._running[youngest])
                elif len(self._running) > 1:
                    freed = self._turns.freed
                    self._send_back(going)
                    self._turns.freed = freed  # what it has given back is for those before it
                    yield WAITS
                    yield from self._admitted(going)
                else:
                    return
            if point is not None:
                yield from self._keep_in_step(going, point)

    def _keep_in_step(self, going: _Going, want: Wanted) -> Way:
        """A state of the answer is kept, if there is room for it; else its tokens stay out of the tree for now."""
        lease = going.lease
        with self._timed.inside:
            wanted = lease is not None and self.cache.want(lease, want) is not None
        if wanted and going.request.served is not None:
            yield math.nextafter(self._turns.now, math.inf)
        if wanted and lease is not None and going.lease is lease:
            with self._timed.inside:
                self._apply(lease, want.position, [want.position])

    def _grow(self, going: _Going, end: int) -> bool:
        """Append what a model would sample up to `end`; False if there is no room for all of it: then as many units as
        there is room for."""
        lease = going.lease
        assert lease is not None
        for step in (end - going.num_known, self._unit):
            while going.num_known < end:
                with self._timed.inside:
                    fits = self.cache.extend(lease, going.num_known + step) is not None
                if not fits:
                    break
                for token in going.keys[going.num_known : going.num_known + step].tolist():
                    lease.append(token)
                going.num_known += step
        going.position = going.num_known
        self._let_go_of_copies(going)
        return going.num_known >= end

    def _let_go_of_copies(self, going: _Going) -> None:
        """The step has been applied that has read what the request begins from, and the page it has a copy of."""
        if going.lease is not None and going.lease.transient:
            self._step += 1
            with self._timed.inside:
                self.cache.hold_until(self._step, going.lease)
                self.cache.step_applied(self._step)

    def _apply(self, lease: Lease, num_tokens: int, kept: list[int]) -> None:
        """One step that has computed up to `num_tokens` and filled the files at `kept`, planned and applied."""
        self._step += 1
        self.cache.hold_until(self._step, lease)
        self._timed.note_use()
        self.cache.commit(lease, num_tokens, kept)
        self.cache.step_applied(self._step)
        self._turns.freed = self._turns.freed or bool(kept)  # files that are in the tree can be dropped

    def _send_back(self, going: _Going) -> None:
        """It gives its pages to another one and waits; its state is kept as the scheduler keeps it."""
        lease, cache, position = going.lease, self.cache, going.position
        assert lease is not None
        size = cache.layout.pages_per_checkpoint
        own = sum(len(pages) for pages in lease.pages) - cache.layout.pages_for(lease.matched)
        with self._timed.inside:
            self._apply(lease, position, [])
            if position > lease.hit and size < own and cache.policy.placement is not None:
                if cache.want(lease, Wanted(position, Kind.PREEMPTION)) is not None:
                    self._apply(lease, position, [position])
            cache.release(lease, Reason.PREEMPTED)
        del self._running[going.index]
        going.lease, self._turns.freed = None, True

    def _finish(self, going: _Going) -> list[int]:
        """Its answer is complete. Returns where its last state is to be saved."""
        lease, policy, position = going.lease, self.cache.policy, going.position
        assert lease is not None
        well = going.request.served is None or going.request.served.finished_well
        with self._timed.inside:
            self._apply(lease, position, [])
            at_end = policy.placement is not None and policy.placement.keeps_answer_end and not policy.exact
            wanted = at_end and well and position > going.num_prompt
            return (
                [position] if wanted and self.cache.want(lease, Wanted(position, Kind.ANSWER_END)) is not None else []
            )

    def _release(self, going: _Going, saved: list[int]) -> None:
        lease = going.lease
        assert lease is not None
        with self._timed.inside:
            if saved and saved[0] in lease.files:
                self._apply(lease, saved[0], saved)
            self.cache.release(lease)
        del self._running[going.index]
        self._turns.freed = True

    def _count(self, going: _Going, hit: int, received: int, lost: Mapping[Reason, int]) -> None:
        """`hit` tokens of its prompt need not be computed, `received` of them thanks to another server. That of a
        branch was counted before."""
        request, outcome = going.request, self.outcome
        known = self._paths.shared(request.path) * self._unit
        self._paths.add(request.path, request.answer)
        if not request.branches:
            outcome.prompt_tokens += request.num_prompt_tokens
            outcome.hit_tokens += hit - received
            outcome.hits[going.index] = hit - received
            outcome.lose(request.num_prompt_tokens, hit, known, lost)


def _growth(served: Served, since: float, start: int, end: int) -> tuple[list[float], list[int]]:
    """When an answer had how many tokens: times, and ascending ends."""
    times, ends = [since], [start]
    for when, reached in (*served.pages, (served.finished, end + 1)):
        if reached > ends[-1] and when >= times[-1]:
            times.append(when)
            ends.append(reached)
    return times, ends
