"""What the core in memory shows of its cache: each remembered prompt is a path of its own, a checkpoint at its end."""

from collections import Counter, deque
from collections.abc import Iterable

from cairn.cache.journal import INTERVAL_SECONDS, PrefixNames
from cairn.cache.view import (
    CacheView,
    CheckpointView,
    Folded,
    IntervalView,
    PathView,
    PoolView,
    TreeView,
    VisitView,
)
from cairn.engine.contract import CacheReport, EngineInfo, EngineStats
from cairn.types import Clock

__all__ = ["FakeVisits", "fake_view"]

_MAX_VISITS = 200
_NAMED_BYTES = 512

Path = tuple[str | None, bytes]
"""A prompt that is remembered: its salt, and its key tokens as int64 bytes."""


class FakeVisits:
    """The requests that have ended, as sums and the last of them one by one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.now()
        self._visits: deque[tuple[int, float, int, CacheReport]] = deque(maxlen=_MAX_VISITS)
        self.lost: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._salts: list[str] = []
        self.names = PrefixNames()

    def note(self, salt: str | None, report: CacheReport) -> None:
        """A request has ended with this report."""
        self._sums.update(
            requests=1, prompt=report.prompt_tokens, hit=report.cached_tokens, received=report.received_tokens
        )
        self.lost.update(report.lost_tokens)
        self._visits.append((self._sums["requests"], self._clock.now(), self.number(salt), report))

    def number(self, salt: str | None) -> int:
        """0 for no salt; all others count as one."""
        return int(salt is not None)

    def history(self) -> list[IntervalView]:
        age = self._clock.now() - self._began
        sums = {name: self._sums[name] for name in ("requests", "prompt", "hit", "received")}
        return [IntervalView(age=age, seconds=max(age, INTERVAL_SECONDS), lost=dict(self.lost), **sums)]

    def visits(self) -> list[VisitView]:
        now = self._clock.now()
        return [
            VisitView(
                number=number,
                age=now - at,
                namespace=namespace,
                prompt=report.prompt_tokens,
                hit=report.cached_tokens,
                received=report.received_tokens,
                matched=report.matched_tokens,
                reason=report.reason,
                lost=report.lost_tokens,
            )
            for number, at, namespace, report in reversed(self._visits)
        ]


def fake_view(
    info: EngineInfo, stats: EngineStats, paths: Iterable[Path], visits: FakeVisits, max_paths: int
) -> CacheView:
    """At most `max_paths` of the paths one by one, the others as a sum."""
    known = list(paths)
    shown = [_path(info, visits, salt, prompt) for salt, prompt in known[:max_paths]]
    folded = sum(len(prompt) // 8 for _, prompt in known[max_paths:])
    return CacheView(
        enabled=info.enable_prefix_caching,
        pool=PoolView(
            pages=info.num_pages,
            page_bytes=info.page_bytes,
            free_pages=stats.free_pages,
            cached_pages=stats.cached_pages,
            held_by_requests=stats.held_pages,
            held_by_transfers=0,
            held_by_steps=0,
            open_leases=stats.open_leases,
            open_holds=0,
        ),
        tree=TreeView(
            nodes=len(known),
            paths=len(known),
            namespaces=len({salt for salt, _ in known}),
            tokens=sum(len(prompt) // 8 for _, prompt in known),
            checkpoints=len(known),
            checkpoint_bytes=len(known) * info.page_bytes,
            hits=0,
            dropped_tokens=0,
            dropped_checkpoints=0,
            below=Folded(
                paths=len(known) - len(shown),
                tokens=folded,
                bytes=folded * 8 + (len(known) - len(shown)) * info.page_bytes,
                checkpoints=len(known) - len(shown),
            ),
        ),
        paths=shown,
        history=visits.history(),
        lost=[],
        unlisted_tokens=0,
        visits=visits.visits(),
    )


def _path(info: EngineInfo, visits: FakeVisits, salt: str | None, prompt: bytes) -> PathView:
    length, number = len(prompt) // 8, visits.number(salt)
    return PathView(
        name=visits.names.name(number, length, prompt[-_NAMED_BYTES:]),
        parent=None,
        namespace=number,
        start=0,
        end=length,
        bytes=len(prompt),
        resident=True,
        users=0,
        children=0,
        checkpoints=[
            CheckpointView(
                position=length,
                kind="prompt_end",
                bytes=info.page_bytes,
                hits=0,
                idle=0,
                saved_tokens=length,
                freed_bytes=info.page_bytes + len(prompt),
                value=length * (1 << 20) / (info.page_bytes + len(prompt)),
                held=False,
                probation=False,
            )
        ],
        more=Folded(),
        below=Folded(),
    )
