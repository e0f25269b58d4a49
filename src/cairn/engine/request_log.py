"""The request log: a line for each request, with what became of it and all that a replay needs.

    {"name", "unit", "source": "cairn", "version", "layout", "forward_sizes", "budget_bytes", "policy", ...}
    {"n", "id", "t", "in", "out", "finish", "timings", "cached_tokens", ..., "block_hashes", "token_hashes", ...}
    ...

The first line says what was served and by which rules: bytes are those of one rank, `forward_sizes` are the whole
model's. The others are written as requests end. The scheduler's thread only hands a `LogEntry` over; the thread of
`LogFile` hashes and writes. Where checkpoints are placed and what is evicted is not in it: a replay decides that
anew.
"""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cairn.cache.lease import Namespace
from cairn.engine.contract import CacheReport
from cairn.engine.core_report import cache_report
from cairn.scheduler.plan_builder import PlanBuilder, ScheduledSequence
from cairn.scheduler.request import Request
from cairn.step import GRID
from cairn.types import Boundary, Clock, Keys

_NANOSECOND = 1e-9


@dataclass(slots=True)
class StepTimes:
    """When a request was computed, in seconds since the start of the log.

    `steps`: the time at which each of its steps was planned and the number of tokens computed after it: all prefill
    steps, and those decode steps that need a page or may keep a state. `forced_checkpoints`: the positions of
    checkpoints that were reserved because another request needs them, whatever the placement policy says, with the
    times at which they were first seen.
    """

    steps: list[tuple[float, int]] = field(default_factory=list)
    forced_checkpoints: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class LogEntry:
    """One request that has ended. `times`, in seconds since the start of the log: arrival (`t`), `scheduled` if it ever
    got pages, `first_token` if it has one, `finished` (the answer is complete) and `released` (its pages were freed).

    `is_parallel_sample`: the prompt is counted with another answer to it. `bypasses_cache`: nothing was looked up,
    because all of the prompt had to be computed. `dropped`: entries dropped before this one.
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
    step_times: StepTimes
    is_parallel_sample: bool
    bypasses_cache: bool
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

    def put(self, entry: LogEntry) -> bool:
        """False, at once, when there is no room for it."""
        ...

    def close(self) -> None: ...


class RequestLog:
    """A `RequestObserver` that makes a `LogEntry` of each request when it ends. One thread only."""

    def __init__(self, sink: EntrySink, clock: Clock, block_size: int) -> None:
        self._sink = sink
        self._block_size = block_size
        self._clock = clock
        self._start = clock.now()
        self._last_plan = 0.0
        self._step_times: dict[str, StepTimes] = {}

    @property
    def dropped(self) -> int:
        """Requests that have no line."""
        return self._sink.dropped

    def close(self) -> None:
        self._sink.close()

    def submitted(self, request: Request) -> None:
        self._step_times[request.id] = StepTimes()

    def planned(self, builder: PlanBuilder) -> None:
        now = self._clock.now() - self._start
        last_plan, self._last_plan = self._last_plan, now
        admitted = [when for part in builder.scheduled if (when := self._scheduled(part.request)) > last_plan]
        # running requests get their pages before others are admitted; checkpoints are reserved last
        before_admission = min([now, *(when - _NANOSECOND for when in admitted)])
        for part in builder.scheduled:
            lease = part.request.lease
            times = self._step_times[part.request.id]
            if part.has_row and (not part.is_decode or self._is_recorded(part)):
                when = before_admission if part.is_decode and self._needs_page(part) else now
                times.steps.append((when, part.end))
            if lease is not None:
                scheduled = self._scheduled(part.request)
                for position in lease.files.keys() - lease.kept:
                    # for other answers, or another server, the one at the prompt's end is reserved with the pages
                    with_pages = scheduled > last_plan and position == part.request.num_prompt_tokens
                    times.forced_checkpoints.setdefault(position, scheduled - _NANOSECOND if with_pages else now)

    def _is_recorded(self, part: ScheduledSequence) -> bool:
        """Whether a decode step needs a page or may keep a state."""
        return self._needs_page(part) or bool(part.kept) or part.end % GRID == 0

    def _needs_page(self, part: ScheduledSequence) -> bool:
        return part.start % self._block_size == 0 or part.start == part.request.num_prompt_tokens

    def _scheduled(self, request: Request) -> float:
        when = request.times.scheduled
        return -1.0 if when is None else when - self._start

    def ended(self, request: Request) -> None:
        spec, trunk = request.spec, request.trunk
        times = {
            "t": request.times.arrived,
            "scheduled": request.times.scheduled,
            "first_token": request.times.first_token,
            "finished": request.times.finished,
            "released": self._clock.now(),
        }
        self._sink.put(
            LogEntry(
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
                step_times=self._step_times.pop(request.id),
                is_parallel_sample=trunk is not None and trunk.counted != request.id,
                bypasses_cache=spec.prompt_logprobs is not None,
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
