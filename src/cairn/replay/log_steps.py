"""The steps of a log, planned and applied again; which files they fill is for this cache's policy to say."""

from collections.abc import Iterable

from cairn.cache.checkpoint import Kind
from cairn.cache.lease import Lease
from cairn.cache.placement import PromptFacts, Wanted
from cairn.replay.going import DECODE, SAVE, Going, Part
from cairn.replay.timed_cache import TimedCache

__all__ = ["LogSteps"]


class LogSteps:
    """What requests compute, and what is kept and committed of it."""

    def __init__(self, timed: TimedCache) -> None:
        self._timed, self._cache = timed, timed.cache
        self._flying: dict[int, list[Going]] = {}

    def plan(self, step: int, rows: Iterable[tuple[Going, int, int]]) -> None:
        """`rows`: who computes, up to which token, and as what. Those that do not run have no part in it."""
        planned: list[Going] = []
        for going, end, kind in rows:
            if going.facts is not None:
                kept = self._row(going, going.facts, min(end, going.limit), kind)
                going.parts.append(Part(step, min(end, going.limit), kind, kept))
                planned.append(going)
        self._flying[step] = planned
        for going in planned:
            if going.lease is not None:
                self._cache.hold_until(step, going.lease)
        self._timed.note_use()

    def _row(self, going: Going, facts: PromptFacts, end: int, kind: int) -> list[int]:
        """The positions whose files a row fills that ends at `end`."""
        lease, placement, start = going.lease, self._cache.policy.placement, going.position
        assert lease is not None
        going.position = max(start, end)
        if kind == SAVE:
            return [end] if end in lease.files else []
        if start >= end:
            return []
        kept: list[int] = []
        wanted: list[Wanted] = []
        if kind == DECODE:
            point = placement.in_decode(facts, end) if placement is not None and not facts.exact else None
            wanted = [point] if point is not None else []
        else:
            kept = [position for position in going.promised if start < position <= end and position in lease.files]
            while start < end:
                # one chunk where the server's hit and policy were the same
                stop = self._timed.chunk_end(start, end)
                self._timed.outcome.forward_passes += 1
                wanted += placement.in_prefill(facts, start, stop) if placement is not None else []
                start = stop
        return kept + [want.position for want in wanted if self._cache.want(lease, want) is not None]

    def commit(self, going: Going, lease: Lease, num_tokens: int, with_files: bool = False) -> None:
        """`with_files`: the server committed this for the files of the row that ends here, if for nothing else."""
        num_tokens = min(num_tokens, going.limit)
        part = next((part for part in going.parts if part.end == num_tokens), None)
        if part is not None:
            going.parts.remove(part)
            if with_files and part.kind == DECODE and not part.kept:
                return  # a decode row is committed for its files' sake alone
        self._keep(going, lease, num_tokens, [] if part is None else part.kept)

    def _keep(self, going: Going, lease: Lease, num_tokens: int, kept: list[int]) -> None:
        """Commit, with the tokens that have been sampled since. The server had pages for them, but perhaps others: it
        had hit less, or its pages were larger, or the log does not say all."""
        if self._cache.extend(lease, num_tokens) is None:
            going.limit = min(going.limit, going.room)
            return
        for token in going.keys[lease.num_tokens : num_tokens].tolist():
            lease.append(token)
        self._cache.commit(lease, num_tokens, kept)

    def want(self, going: Going, lease: Lease, wanted: Wanted, done: bool) -> None:
        """Keep the state behind the last token that was computed, where the policy keeps such states. `done`: the
        server did, so a step that saves it follows."""
        placement = self._cache.policy.placement
        if placement is None or not lease.hit < wanted.position <= min(going.limit, lease.committed):
            return
        if wanted.kind is Kind.ANSWER_END and (not placement.keeps_answer_end or self._cache.policy.exact):
            return
        if self._cache.want(lease, wanted) is not None and not done:
            self._keep(going, lease, wanted.position, [wanted.position])  # no step follows in which it would be saved

    def applied(self, step: int) -> None:
        for going in self._flying.pop(step, []):
            for part in [part for part in going.parts if part.step == step]:
                going.parts.remove(part)
                # what the server's policy did not keep; the tokens of a row behind the answer's end are nobody's
                if part.kept and going.lease is not None and part.end <= going.request.num_tokens:
                    self._keep(going, going.lease, part.end, part.kept)
        self._cache.step_applied(step)

    def apply_all(self) -> None:
        """The log ends: what is still out is applied."""
        for step in list(self._flying):
            self.applied(step)
