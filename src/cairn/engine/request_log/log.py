"""The request log: a line for each request, with what became of it and all that a replay needs.

    {"name", "unit", "source": "cairn", "version", "layout", "forward_sizes", "budget_bytes", "policy", ...}
    {"n", "id", "t", "in", "out", "finish", "timings", "cached_tokens", ..., "block_hashes", "token_hashes", ...}
    ...

The first line says what was served and by which rules: bytes are those of one rank, `forward_sizes` are the whole
model's. The others are written as requests end. The scheduler's thread only hands a `LogEntry` over; the thread of
`LogFile` hashes and writes. Where checkpoints are placed and what is evicted is not in it: a replay decides that
anew.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from cairn.cache.layout import CacheLayout
from cairn.engine.contract import CacheReport, EngineConfig, EngineInfo
from cairn.engine.core_report import cache_report
from cairn.engine.request_log.file import LogFile
from cairn.engine.request_log.lines import LogEntry, LogLines
from cairn.models.layer_sizes import ForwardSizes
from cairn.scheduler.plan_builder import PlanBuilder, ScheduledSequence
from cairn.scheduler.request import Request
from cairn.step import GRID
from cairn.types import Clock

_NANOSECOND = 1e-9
VERSION = 2
UNIT = 64
"""Tokens of a block hash."""
KEY_BYTES = 32
MAX_WRITTEN_TOKENS = 1 << 24
"""For how many tokens the block hashes in the file are remembered: 30 MiB."""


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


class RequestLog:
    """A `RequestObserver` that makes a `LogEntry` of each request when it ends. One thread only."""

    def __init__(self, sink: LogFile, clock: Clock, block_size: int) -> None:
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
            sequence = part.request.sequence
            times = self._step_times[part.request.id]
            if part.has_row and (not part.is_decode or self._must_record(part)):
                when = before_admission if part.is_decode and self._needs_page(part) else now
                times.steps.append((when, part.end))
            if sequence is not None:
                scheduled = self._scheduled(part.request)
                for position in [at for at, pending in sequence.pending_states.items() if pending.forced]:
                    # for other answers, or another server, the one at the prompt's end is reserved with the pages
                    with_pages = scheduled > last_plan and position == part.request.num_prompt_tokens
                    times.forced_checkpoints.setdefault(position, scheduled - _NANOSECOND if with_pages else now)

    def _must_record(self, part: ScheduledSequence) -> bool:
        """Whether a decode step needs a page or may keep a state."""
        return self._needs_page(part) or bool(part.checkpoint_positions) or part.end % GRID == 0

    def _needs_page(self, part: ScheduledSequence) -> bool:
        return part.start % self._block_size == 0 or part.start == part.request.num_prompt_tokens

    def _scheduled(self, request: Request) -> float:
        when = request.stats.scheduled_time
        return -1.0 if when is None else when - self._start

    def ended(self, request: Request) -> None:
        spec, steps = request.spec, self._step_times.pop(request.id)
        fields: dict[str, object] = {
            "n": request.stats.arrival,
            "id": request.id,
            "in": len(spec.prompt),
            "out": len(request.output),
            "finish": request.outcome.finish_reason or "error",
            "timings": _timings(request),
            **_cache_fields(cache_report(request)),
            "boundaries": [(each.position, each.kind, each.retain_seconds) for each in spec.boundaries],
            "steps": [(_rounded(when), end) for when, end in steps.steps],
        }
        moments = {
            "t": request.stats.arrival_time,
            "scheduled": request.stats.scheduled_time,
            "first_token": request.stats.first_token_time,
            "finished": request.stats.finished_time,
            "released": self._clock.now(),
        }
        fields |= {name: _rounded(when - self._start) for name, when in moments.items() if when is not None}
        optional = {
            "forced_checkpoints": [(_rounded(when), place) for place, when in steps.forced_checkpoints.items()],
            "parallel_sample": request.stats.is_parallel_sample,
            "bypasses_cache": spec.prompt_logprobs is not None,
            "dropped": self._sink.dropped,
        }
        fields |= {name: value for name, value in optional.items() if value}
        self._sink.put(LogEntry(spec.namespace, spec.prompt, tuple(request.output), fields))


def _rounded(seconds: float) -> float:
    """To nanoseconds, which keeps the order of events within a step."""
    return round(seconds, 9)


def _cache_fields(report: CacheReport | None) -> dict[str, object]:
    """The response's `cairn.cache`, field by field; a request that never ran has none."""
    if report is None:
        return {}
    fields = msgspec.to_builtins(report)
    assert isinstance(fields, dict)
    for name in ("prompt_tokens", "prefill_cached_tokens"):
        del fields[name]
    return fields


def _timings(request: Request) -> dict[str, float]:
    """Seconds: `queue`, `prefill`, `decode`, `ttft` and `e2e`, as far as the request has come."""
    stats = request.stats
    spans = {
        "queue": (stats.arrival_time, stats.scheduled_time),
        "ttft": (stats.arrival_time, stats.first_token_time),
        "prefill": (stats.scheduled_time, stats.first_token_time),
        "e2e": (stats.arrival_time, stats.finished_time),
        "decode": (stats.first_token_time, stats.finished_time),
    }
    return {
        name: round(end - start, 6) for name, (start, end) in spans.items() if start is not None and end is not None
    }


# -- the first line ----------------------------------------------------------------------------------------------------


def open_log(
    config: EngineConfig, info: EngineInfo, layout: CacheLayout, sizes: ForwardSizes, clock: Clock
) -> RequestLog | None:
    """None if no log was asked for. `layout`: of one rank; `sizes`: of the whole model. Raises ConfigError when the log
    cannot be written."""
    log = config.request_log
    if log is None:
        return None
    first = header(config, info, layout, sizes)
    file = LogFile(Path(log.path), log.max_bytes, partial(_new_lines, first))
    return RequestLog(file, clock, layout.block_size)


def _new_lines(first: Mapping[str, object]) -> LogLines:
    # a key for each file, so that not even two files of one server can be told to be about the same texts
    begun = {**first, "began": round(time.time(), 3)}
    return LogLines(begun, UNIT, os.urandom(KEY_BYTES), MAX_WRITTEN_TOKENS)


def header(config: EngineConfig, info: EngineInfo, layout: CacheLayout, sizes: ForwardSizes) -> dict[str, object]:
    """What a replay has to know of the server: sizes in bytes and tokens, and in elements of matrices. `salted`: hashes
    are keyed."""
    return {
        "name": os.path.basename(os.path.normpath(info.model)),
        "unit": UNIT,
        "source": "cairn",
        "version": VERSION,
        "salted": True,
        "layout": asdict(layout),
        "forward_sizes": asdict(sizes),
        "budget_bytes": info.cache.num_pages * layout.page_bytes,
        "policy": {
            "placement": info.cache.mamba_cache_mode if info.cache.enable_prefix_caching else "none",
            "eviction": config.eviction,
            "exact": info.exact,
        },
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": info.max_num_seqs,
    }
