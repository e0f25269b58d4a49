"""A trace through the shipped cache: the same lookup, extend, want, commit and release that the scheduler makes.

Requests run one after another, in order of arrival; a prompt is computed in chunks of `max_num_batched_tokens`, cut on
the 64-token grid as the scheduler cuts them. Positions finer than the trace's unit count as the unit: the prompt that
the cache sees is its path, the tokens behind that are computed every time, and the answer ends at a full unit.
"""

from collections.abc import Callable, Mapping

from cairn.cache.checkpoint import Kind
from cairn.cache.lease import Lease, Namespace
from cairn.cache.placement import PromptFacts, Wanted
from cairn.cache.reasons import Reason
from cairn.replay.outcome import Outcome
from cairn.replay.paths import Paths
from cairn.replay.timed_cache import TimedCache
from cairn.replay.traces import Trace, TraceRequest, key_tokens
from cairn.types import Boundary, Keys

__all__ = ["Outcome", "Replay"]


class Replay:
    """One trace, one cache. The cache is shown the trace's own time."""

    def __init__(self, timed: TimedCache) -> None:
        self._timed = timed
        self.cache, self.outcome = timed.cache, timed.outcome
        self._paths = Paths()
        self._step = 0

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> Outcome:
        """Replay all requests; `progress` is told how many are done. An object is good for one run."""
        for index, request in enumerate(trace.requests):
            self._timed.show(request.arrived)
            self._request(request, trace.unit, str(index))
            if progress is not None:
                progress(index + 1)
        return self._timed.ended()

    def _request(self, request: TraceRequest, unit: int, name: str) -> None:
        known = self._paths.shared(request.path) * unit
        self._paths.add(request.path, request.answer)
        hit, lost = 0, {Reason.NEVER_SEEN: request.num_prompt_tokens}
        if not len(request.path):
            self.outcome.forward_passes += -(-request.num_prompt_tokens // self._timed.most_tokens)
        elif (lease := self._admit(name, key_tokens(request.path, unit))) is None:
            self.outcome.refused += 1
            self.outcome.forward_passes += -(-request.num_prompt_tokens // self._timed.most_tokens)
            lost = {Reason.DISABLED: request.num_prompt_tokens}
        else:
            hit, lost = lease.hit, lease.lost
            self._through_the_cache(lease, request, unit)
        self._count(request.num_prompt_tokens, hit, known, lost)

    def _through_the_cache(self, lease: Lease, request: TraceRequest, unit: int) -> None:
        ends = tuple(Boundary(end) for end in request.boundaries)
        answer = key_tokens(request.answer, unit).tolist()
        with self._timed.inside:
            facts = self.cache.facts(lease, lease.num_prompt_tokens, ends)
        self._prefill(lease, facts, request.num_prompt_tokens)
        self._decode(lease, facts, answer, unit)
        with self._timed.inside:
            self.cache.release(lease)

    def _admit(self, name: str, keys: Keys) -> Lease | None:
        """A lease with pages for the whole prompt; None, and nothing has gone, if the pool cannot hold it at all."""
        if not self._timed.holds(len(keys)):
            return None
        with self._timed.inside:
            for _ in range(2):
                lease = self.cache.lookup(Namespace(), keys, name)
                if self.cache.extend(lease, lease.num_tokens) is not None:
                    self.cache.admitted(lease)
                    return lease
                self.cache.release(lease)
                self.cache.clear()  # alone, and its own hit stands in its way
        raise AssertionError(f"request {name} does not fit an empty pool")

    def _prefill(self, lease: Lease, facts: PromptFacts, num_prompt_tokens: int) -> None:
        """Compute the prompt from the hit on, and what is behind the path with its last chunks."""
        placement, path_end = self.cache.policy.placement, lease.num_prompt_tokens
        start = lease.hit
        while start < num_prompt_tokens:
            end = self._timed.chunk_end(start, num_prompt_tokens)
            low, high = min(start, path_end), min(end, path_end)
            with self._timed.inside:
                wanted = placement.in_prefill(facts, low, high) if placement is not None and low < high else []
                self._apply(lease, high, [w.position for w in wanted if self.cache.want(lease, w) is not None])
            self.outcome.forward_passes += 1
            start = end
        with self._timed.inside:
            self._apply(lease, path_end, [])

    def _decode(self, lease: Lease, facts: PromptFacts, answer: list[int], unit: int) -> None:
        """Generate the answer as far as there is room for it, and keep what the policy keeps of it, and its end.

        Pages come for all units up to the next position that is kept: the cache drops the same for many as for one
        after the other.
        """
        placement, exact = self.cache.policy.placement, self.cache.policy.exact
        prompt, position = lease.num_prompt_tokens, lease.num_prompt_tokens
        for end in range(prompt + unit, prompt + len(answer) + 1, unit):
            with self._timed.inside:
                point = placement.in_decode(facts, end) if placement is not None and not exact else None
            if point is None and end < prompt + len(answer):
                continue
            reached = self._grow(lease, answer[position - prompt : end - prompt], unit)
            position += reached
            if position < end:
                break
            if point is not None:
                with self._timed.inside:
                    self._keep(lease, point)
        at_end = placement is not None and placement.keeps_answer_end and not exact and position > prompt
        with self._timed.inside:
            self._apply(lease, position, [])
            if at_end:
                self._keep(lease, Wanted(position, Kind.ANSWER_END))

    def _grow(self, lease: Lease, tokens: list[int], unit: int) -> int:
        """Append what a model would sample, if there is room for it, else as many units as there is room for. Returns
        how many tokens that is."""
        grown = 0
        for step in (len(tokens), unit):
            while grown < len(tokens):
                with self._timed.inside:
                    fits = self.cache.extend(lease, lease.num_tokens + step) is not None
                if not fits:
                    break
                for token in tokens[grown : grown + step]:
                    lease.append(token)
                grown += step
        return grown

    def _keep(self, lease: Lease, want: Wanted) -> None:
        """A state of the answer is kept, if there is room for it; else its tokens stay out of the tree for now."""
        if self.cache.want(lease, want) is not None:
            self._apply(lease, want.position, [want.position])

    def _apply(self, lease: Lease, num_tokens: int, kept: list[int]) -> None:
        """One step that has computed up to `num_tokens` and filled the files at `kept`, planned and applied."""
        self._step += 1
        self.cache.hold_until(self._step, lease)
        self._timed.note_use()
        self.cache.commit(lease, num_tokens, kept)
        self.cache.step_applied(self._step)

    def _count(self, num_prompt_tokens: int, hit: int, known: int, lost: Mapping[Reason, int]) -> None:
        outcome = self.outcome
        outcome.prompt_tokens += num_prompt_tokens
        outcome.hit_tokens += hit
        outcome.hits.append(hit)
        outcome.lose(num_prompt_tokens, hit, known, lost)
