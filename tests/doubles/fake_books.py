"""What the core in memory counts, and the reports that come of it."""

from collections import Counter
from collections.abc import Collection

import msgspec

from cairn.cache.reasons import Reason
from cairn.engine.contract import CacheReport, EngineInfo, EngineStats
from cairn.engine.step_sizes import StepSizes
from cairn.transfer.params import RemotePrefill
from cairn.types import Clock
from doubles.fake_answer import FakeAnswer
from doubles.fake_view import FakeVisits

__all__ = ["FakeBooks"]


class FakeBooks:
    """`counts`: by the names that EngineStats has for them. `visits`: the requests that have ended."""

    def __init__(self, info: EngineInfo, clock: Clock) -> None:
        self._info = info
        self.counts: Counter[str] = Counter()
        self.visits = FakeVisits(clock)
        self._sources = Counter(local_compute=0, local_cache_hit=0)
        if info.side_channel is not None:
            self._sources["external_kv_transfer"] = 0
        self._reasons: Counter[str] = Counter()
        self._step_sizes = StepSizes()

    def pulled(self, asked: int, received: int) -> None:
        """Prompt tokens that were asked of another server, and how many of them came."""
        self.counts.update(external_prefix_cache_queries=asked, external_prefix_cache_hits=received)
        self.counts["failed_transfers"] += received == 0

    def begun(self, answer: FakeAnswer) -> None:
        """The first answer to a prompt has been started."""
        missing = answer.missing_tokens
        self.counts.update(prompt_tokens=len(answer.keys), computed_prompt_tokens=missing)
        self._sources["local_compute"] += missing
        self._sources["local_cache_hit"] += answer.cached_tokens
        if answer.received_tokens:
            self._sources["external_kv_transfer"] += answer.received_tokens

    def stepped(self, moving: Collection[FakeAnswer]) -> None:
        """These answers are about to get one token more, in one step."""
        first = sum(len(a.keys) - a.cached_tokens for a in moving if not (a.num_tokens or a.index))
        self._step_sizes.add(first + sum(a.num_tokens > 0 for a in moving))
        self.counts["forward_passes"] += any(a.num_tokens or a.cached_tokens < len(a.keys) for a in moving)

    def ended(self, answer: FakeAnswer) -> CacheReport:
        """The first answer to a prompt has ended: what was found of the prompt."""
        cached, missing = answer.cached_tokens, answer.missing_tokens
        remote = answer.role if isinstance(answer.role, RemotePrefill) else None
        told = remote.cached_tokens if remote and not missing else None
        reason = (Reason.REMOTE_FAILED if remote else Reason.NEVER_SEEN) if missing else Reason.NONE
        if not self._info.enable_prefix_caching:
            reason = Reason.DISABLED
        self._reasons[reason.value] += 1
        report = CacheReport(
            prompt_tokens=len(answer.keys),
            matched_tokens=cached,
            cached_tokens=cached,
            computed_tokens=missing,
            reason=reason.value,
            received_tokens=answer.received_tokens,
            prefill_cached_tokens=told if told is not None and told <= len(answer.keys) else None,
            lost_tokens={reason.value: missing} if missing else {},
        )
        self.visits.note(answer.request.cache_salt, report)
        return report

    def stats(self, running: Collection[FakeAnswer], num_waiting: int) -> EngineStats:
        block_size, num_pages = self._info.block_size, self._info.num_pages
        held = sum(-(-(len(a.keys) + a.num_tokens) // block_size) for a in running)
        return msgspec.structs.replace(
            self._step_sizes.told(msgspec.convert(self.counts, EngineStats)),
            num_running=len(running),
            num_waiting=num_waiting,
            num_pages=num_pages,
            held_pages=held,
            free_pages=num_pages - held,
            open_leases=len(running),
            prompt_tokens_by_source=dict(self._sources),
            reasons=dict(self._reasons),
            lost_tokens=dict(self.visits.lost),
        )
