"""The request log: a line for each request, with what became of it and all that a replay needs.

    {"name", "unit", "source": "cairn", "version", "layout", "forward_sizes", "budget_bytes", "policy", ...}
    {"n", "id", "t", "in", "out", "finish", "timings", "cached_tokens", ..., "h", "codes", "chunks", ...}
    ...

The first line says what was served and by which rules: bytes are those of one rank, `forward_sizes` are the whole
model's. The others are written as requests end. The scheduler's thread only hands an `Entry` over; hashing, writing and
all else is done by the thread of `LogFile`. Where checkpoints are placed and what is evicted is not in it: that is for
the replay to decide anew.
"""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cairn.cache.lease import Namespace
from cairn.engine.contract import CacheReport
from cairn.engine.core_report import cache_report
from cairn.scheduler.draft import Draft, Part
from cairn.scheduler.request import Request
from cairn.step import GRID, Row
from cairn.types import Boundary, Clock, Keys

__all__ = ["Computed", "Entry", "EntrySink", "RequestLog", "reported"]

_NANOSECOND = 1e-9


@dataclass(slots=True)
class Computed:
    """How a request was computed. `chunks`: when the step of each was planned, in seconds since the log's start, and
    how many tokens were computed then. `asked`: positions whose state is kept because another request needs it,
    whatever the policy says, and when a file was seen to be set aside."""

    chunks: list[tuple[float, int]] = field(default_factory=list)
    asked: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One request that has ended. `times`: when it arrived (`t`), had pages (`started`) if it ever had, was answered
    (`finished`) and gave its pages back (`released`), in seconds since the log's start.

    `counted`: its prompt is in the counters, which count that of several answers once. `computed_whole`: nothing was
    looked up for it, because all of its prompt had to be computed. `dropped`: entries so far that nobody took.
    """

    number: int
    request_id: str
    namespace: Namespace
    prompt: Keys
    output: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    times: dict[str, float]
    finish: str
    timings: dict[str, float]
    report: CacheReport | None
    computed: Computed
    counted: bool
    computed_whole: bool
    dropped: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class EntrySink(Protocol):
    """Takes entries away: `cairn.engine.request_log_file.LogFile`."""

    @property
    def dropped(self) -> int:
        """Entries that were not written."""
        ...

    def put(self, entry: Entry) -> bool:
        """False, at once, when there is no room for it."""
        ...

    def close(self) -> None: ...


class RequestLog:
    """Takes down what the scheduler does (`RequestObserver`). One thread only."""

    def __init__(self, sink: EntrySink, clock: Clock, block_size: int) -> None:
        self._sink = sink
        self._block_size = block_size
        self._clock = clock
        self._start = clock.now()
        self._planned = 0.0
        self._computed: dict[str, Computed] = {}

    @property
    def dropped(self) -> int:
        """Requests that have no line."""
        return self._sink.dropped

    def close(self) -> None:
        self._sink.close()

    def submitted(self, request: Request) -> None:
        self._computed[request.id] = Computed()

    def planned(self, draft: Draft) -> None:
        now = self._clock.now() - self._start
        grown = self._before_admissions(draft, now)
        for part in draft.parts:
            row, lease = None if part.row is None else draft.rows[part.row], part.request.lease
            computed = self._computed[part.request.id]
            if row is not None and (not row.decode or self._matters(row, part)):
                # pages are given to those that run before others come in, and files when all rows have their pages
                when = grown if row.decode and self._needs_page(row, part) else now
                computed.chunks.append((when, part.end))
            if lease is not None:
                for position in lease.files.keys() - lease.kept:
                    computed.asked.setdefault(position, now)

    def _matters(self, row: Row, part: Part) -> bool:
        """Of an answer the first token and that of each page, which pages are needed for, and where states are kept."""
        return self._needs_page(row, part) or bool(part.kept) or row.end % GRID == 0

    def _needs_page(self, row: Row, part: Part) -> bool:
        return row.start % self._block_size == 0 or row.start == part.request.num_prompt_tokens

    def _before_admissions(self, draft: Draft, now: float) -> float:
        """When those that ran already were given their pages: before new ones were."""
        started = [part.request.times.scheduled for part in draft.parts]
        new = [when - self._start for when in started if when is not None and when - self._start > self._planned]
        self._planned = now
        return min([now, *(when - _NANOSECOND for when in new)])

    def ended(self, request: Request) -> None:
        spec, trunk, went = request.spec, request.trunk, request.times
        times = {
            "t": went.arrived,
            "started": went.scheduled,
            "finished": went.finished,
            "released": self._clock.now(),
        }
        self._sink.put(
            Entry(
                number=request.arrival,
                request_id=request.id,
                namespace=spec.namespace,
                prompt=spec.prompt,
                output=tuple(request.output),
                boundaries=spec.boundaries,
                times={name: seconds - self._start for name, seconds in times.items() if seconds is not None},
                finish=request.finish or "error",
                timings=_timings(request),
                report=cache_report(request, None),
                computed=self._computed.pop(request.id),
                counted=trunk is None or trunk.counted == request.id,
                computed_whole=spec.prompt_logprobs is not None,
                dropped=self._sink.dropped,
            )
        )


def _timings(request: Request) -> dict[str, float]:
    """Seconds: what there is of `queue`, `prefill`, `decode`, `ttft` and `e2e`."""
    times, told = request.times, {}
    if times.scheduled is not None:
        told["queue"] = times.scheduled - times.arrived
    if times.first_token is not None:
        told["ttft"] = times.first_token - times.arrived
        if times.scheduled is not None:
            told["prefill"] = times.first_token - times.scheduled
    if times.finished is not None:
        told["e2e"] = times.finished - times.arrived
        if times.first_token is not None:
            told["decode"] = times.finished - times.first_token
    return {name: round(seconds, 6) for name, seconds in told.items()}


def reported(report: CacheReport | None) -> dict[str, object]:
    """The response's `cairn.cache`, field by field; a request that never ran has none."""
    if report is None:
        return {}
    fields = msgspec.to_builtins(report)
    assert isinstance(fields, dict)
    return {name: value for name, value in fields.items() if name != "prompt_tokens" and value is not None}
