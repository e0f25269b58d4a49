"""The request log: a line for each request, with what became of it and all that a replay needs.

    {"name", "unit", "source": "cairn", "version", "layout", "forward_sizes", "budget_bytes", "policy", ...}
    {"n", "id", "t", "in", "out", "finish", "timings", "cached_tokens", ..., "block_hashes", "token_hashes", ...}
    ...

The first line says what was served and by which rules: bytes are those of one rank, `forward_sizes` are the whole
model's. The others are written as requests end. The scheduler's thread only hands a `LogEntry` over; the thread of
`LogFile` hashes and writes. What the scheduler and the cache made of the requests is not in it: a replay decides that
anew, with as many steps between two arrivals as there were here.
"""

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec

from cairn.cache.layout import CacheLayout
from cairn.engine.contract import CacheReport, EngineConfig, EngineInfo
from cairn.engine.core_report import cache_report
from cairn.engine.request_log.file import LogFile
from cairn.engine.request_log.header import VERSION, LoggedPolicy, LogHeader
from cairn.engine.request_log.lines import LogEntry, LogLines
from cairn.models.layer_sizes import ForwardSizes
from cairn.scheduler.plan_builder import PlanBuilder
from cairn.scheduler.request import Request
from cairn.scheduler.state import RequestObserver
from cairn.types import Clock, RequestId

UNIT = 64
"""Tokens of a block hash."""
KEY_BYTES = 32
MAX_WRITTEN_TOKENS = 1 << 24
"""For how many tokens the block hashes in the file are remembered: 30 MiB."""


class RequestLog(RequestObserver):
    """Makes a `LogEntry` of each request when it ends. One thread only."""

    def __init__(self, sink: LogFile, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self._start = clock.now()
        self._num_steps = 0
        # when they were planned: enough for all from a request's end until its pages are freed
        self._last_steps: deque[float] = deque(maxlen=16)
        self._in_flight = 1
        self._arrived_steps: dict[str, int] = {}
        # told since the last line: the request's own may have been written by then
        self._tool_waits: dict[RequestId, int] = {}

    @property
    def dropped(self) -> int:
        """Requests that have no line."""
        return self._sink.dropped

    def close(self) -> None:
        self._sink.close()

    def submitted(self, request: Request) -> None:
        self._arrived_steps[request.id] = self._num_steps

    def planned(self, builder: PlanBuilder) -> None:
        last = self._last_steps[-1] if self._last_steps else 0.0
        requests = [part.request for part in builder.scheduled] + list(builder.plain.requests[:1])
        for request in requests:
            self._in_flight = max(self._in_flight, request.num_in_flight)
            # what it has fetched from another server was not there before
            if request.transfer.fetched is not None and (request.stats.scheduled_time or 0.0) > last:
                self._arrived_steps[request.id] = self._num_steps
        self._num_steps += 1
        self._last_steps.append(self._clock.now())

    def tools_awaited(self, request_id: RequestId) -> None:
        self._tool_waits.setdefault(request_id, self._num_steps)

    def ended(self, request: Request) -> None:
        spec, finished = request.spec, request.stats.finished_time or self._clock.now()
        fields: dict[str, object] = {
            "n": request.stats.arrival,
            "id": request.id,
            "in": len(spec.prompt),
            "out": len(request.output),
            "finish": request.outcome.finish_reason or "error",
            "timings": _timings(request),
            **_cache_fields(cache_report(request)),
            "boundaries": [(each.position, each.kind, each.retain_seconds) for each in spec.boundaries],
            "arrived_step": self._arrived_steps.pop(request.id),
            "finished_step": self._num_steps - sum(when > finished for when in self._last_steps),
        }
        moments = {
            "t": request.stats.arrival_time,
            "scheduled": request.stats.scheduled_time,
            "first_token": request.stats.first_token_time,
            "finished": request.stats.finished_time,
            "released": self._clock.now(),
        }
        fields |= {name: round(when - self._start, 9) for name, when in moments.items() if when is not None}
        optional = {
            "in_flight": self._in_flight if self._in_flight > 1 else 0,
            "priority": spec.priority,
            "parallel_sample": request.stats.is_parallel_sample,
            "kv_export": spec.role.kv_export,
            "bypasses_cache": spec.prompt_logprobs is not None,
            "tool_waits": list(self._tool_waits.items()),
            "dropped": self._sink.dropped,
        }
        fields |= {name: value for name, value in optional.items() if value}
        self._tool_waits.clear()
        names = {"session": spec.session, "client": spec.client}
        self._sink.put(LogEntry(spec.namespace, spec.prompt, tuple(request.output), fields, names))


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
    return RequestLog(file, clock)


def _new_lines(first: Mapping[str, object]) -> LogLines:
    # a key for each file, so that not even two files of one server can be told to be about the same texts
    begun = {**first, "began": round(time.time(), 3)}
    return LogLines(begun, UNIT, os.urandom(KEY_BYTES), MAX_WRITTEN_TOKENS)


def header(config: EngineConfig, info: EngineInfo, layout: CacheLayout, sizes: ForwardSizes) -> dict[str, object]:
    """What a replay has to know of the server: sizes in bytes and tokens, and in elements of matrices. `salted`: hashes
    are keyed."""
    log_header = LogHeader(
        name=os.path.basename(os.path.normpath(info.model)),
        unit=UNIT,
        layout=layout,
        forward_sizes=sizes,
        budget_bytes=info.cache.num_pages * layout.page_bytes,
        policy=LoggedPolicy(
            placement=info.cache.mamba_cache_mode if info.cache.enable_prefix_caching else "none",
            eviction=config.eviction,
            exact=info.exact,
        ),
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        in_flight_sharing=config.in_flight_sharing,
        scheduling_policy=config.scheduling_policy,
    )
    return {"source": "cairn", "version": VERSION, "salted": True, **asdict(log_header)}
