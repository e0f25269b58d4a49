"""Requests as a trace records them. Its two forms: `cairn.trace_rows`; in the own one, each line also has `s` (which
session it belongs to), `v` (whether its answer is seen again in a later prompt) and perhaps `b` (where messages end). A
server's own log is a third one: `cairn.replay.server_log`.

A prompt's *path* is the ids of its full units; the tokens behind the last one are its own and never hit.
"""

import heapq
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.models.layer_sizes import ForwardSizes
from cairn.trace_rows import TraceBounds, TraceRow, has_header, trace_lines, trace_rows, whole
from cairn.types import Boundary, Keys

__all__ = ["Ids", "LogHeader", "LoggedPolicy", "Timeline", "Trace", "TraceRequest", "key_tokens", "read_trace"]

MAX_UNIT = 1 << 16
MAX_TOKENS = 1 << 24
MAX_ID = 1 << 46
"""Ids times the largest unit stay within int64."""
MAX_REQUESTS = 1 << 22
_BOUNDS = TraceBounds(lines=MAX_REQUESTS, unit=MAX_UNIT, tokens=MAX_TOKENS, ids=MAX_ID)

Ids = NDArray[np.integer[Any]]

_ANY = -1
"""In the place of an id: none is below 0."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a server did what for a request, in seconds since the start of its log.

    `scheduled_time`: the request got its pages; `first_token_time`: the step that ended its prompt was applied, or
    `scheduled_time` if none was; `finished_time`: its answer was complete; `released_time`: its pages were freed.
    `prefill_steps`: the time of each prefill step and the number of prompt tokens computed after it; `decode_steps`:
    the same for decode steps that need a page or may keep a state, the number of tokens with the answer included.
    `forced_checkpoints`: the time and the position of each checkpoint that was reserved because another request needs
    it, whatever the placement policy says. `received_end`: the number of prompt tokens available after another server's
    pages came, 0 if none came. `completed`: the answer ended with `stop` or `length`. `bypasses_cache`: nothing was
    looked up. `cached_tokens`: the hit of the server, which a replay does not look at.
    """

    scheduled_time: float
    prefill_steps: tuple[tuple[float, int], ...]
    decode_steps: tuple[tuple[float, int], ...]
    first_token_time: float
    finished_time: float
    released_time: float
    completed: bool = True
    forced_checkpoints: tuple[tuple[float, int], ...] = ()
    received_end: int = 0
    bypasses_cache: bool = False
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request, arrived `arrived` seconds after the trace's start.

    `num_prompt_tokens` counts what is behind the path, too; `path` holds the ids of its full units, shape [u]; `answer`
    the ids of the units that are computed of the answer, shape [a], negative where nobody else has them.
    `boundaries`: ends of messages, ascending, rounded down to the unit, within the path. `name`: what the trace calls
    it, if anything. `namespace`: requests of different namespaces share nothing. `is_parallel_sample`: one of several
    answers to a prompt that is counted with another answer, so its own prompt is not counted. `timeline`: None if the
    trace is no server's log; then the request is served alone, at once, when it arrives.
    """

    arrived: float
    num_prompt_tokens: int
    path: Ids
    answer: Ids
    boundaries: tuple[Boundary, ...] = ()
    name: str = ""
    namespace: str | None = None
    is_parallel_sample: bool = False
    timeline: Timeline | None = None

    @property
    def scheduled_time(self) -> float:
        """Seconds since the trace's start."""
        return self.arrived if self.timeline is None else self.timeline.scheduled_time


class LoggedPolicy(msgspec.Struct, frozen=True):
    """The cache policy of a server, by the names that its flags have."""

    placement: str
    eviction: str
    exact: bool


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The server that wrote a log. `layout`, `budget_bytes`: of one rank; `forward_sizes`: of the whole model."""

    layout: CacheLayout
    forward_sizes: ForwardSizes
    budget_bytes: int
    policy: LoggedPolicy
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their `scheduled_time`; `unit`: tokens of one id. `header`: None if it is no server's
    log."""

    name: str
    unit: int
    requests: tuple[TraceRequest, ...]
    header: LogHeader | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    arrived: float
    session: int
    num_in: int
    num_out: int
    reappears: bool
    path: Ids
    boundaries: tuple[Boundary, ...]


def key_tokens(ids: Ids, unit: int) -> Keys:
    """`unit` key tokens for each id, shape [len(ids) * unit]: equal for equal ids and for no others."""
    return (ids.astype(np.int64)[:, None] * unit + np.arange(unit, dtype=np.int64)).reshape(-1)


def read_trace(path: Path) -> Trace:
    """Read a trace of any form. Raises ConfigError naming the file, the line and the field."""
    try:
        return _trace(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _trace(path: Path) -> Trace:
    lines = trace_lines(path, MAX_REQUESTS)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{path} is empty: a trace has one JSON object a line")
    where, header = first
    if header.get("source") == "cairn":
        from cairn.replay.server_log import read_server_log  # which is built on this module

        return read_server_log(where, header, lines)
    unit, found = trace_rows(first, lines, _BOUNDS)
    if has_header(header):
        name, rows = str(header.get("name", path.name)), [_own_row(row, unit) for row in found]
    else:
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        rows = [_lone_row(row, index) for index, row in enumerate(found)]
    if not rows:
        raise ConfigError(f"{path} has a header and no requests")
    return Trace(name, unit, _with_answers(rows, unit))


def _own_row(row: TraceRow, unit: int) -> _Row:
    line, where, ends = row.line, row.where, row.line.get("b", [])
    if not isinstance(ends, list) or any(type(end) is not int or not 0 <= end <= row.num_in for end in ends):
        raise ConfigError(f"{where}: `b` must list token positions of the prompt")
    floored = {min(end // unit, len(row.ids)) * unit for end in ends} - {0}
    return _Row(
        arrived=row.arrived,
        session=whole(line, "s", where, 0, MAX_ID),
        num_in=row.num_in,
        num_out=row.num_out,
        reappears=whole(line, "v", where, 0, 1) == 1,
        path=row.ids,
        boundaries=tuple(map(Boundary, sorted(floored))),
    )


def _lone_row(row: TraceRow, index: int) -> _Row:
    """Mooncake's say nothing of sessions: each is one of its own, whose answer may be seen again anywhere."""
    return _Row(row.arrived, index, row.num_in, row.num_out, reappears=True, path=row.ids, boundaries=())


def _with_answers(rows: list[_Row], unit: int) -> tuple[TraceRequest, ...]:
    """Give each row its answer's content: that of the first later prompt that goes on from it, else its own."""
    followers = _followers(rows)
    requests, private = [], 0
    for index, row in enumerate(rows):
        end = max(len(row.path), (row.num_in + row.num_out) // unit)
        if index in followers:
            answer = rows[followers[index]].path[len(row.path) : end]
        else:
            count = end - len(row.path)
            answer = np.arange(-1 - private, -1 - private - count, -1, dtype=np.int64)
            private += count
        requests.append(TraceRequest(row.arrived, row.num_in, row.path, answer, row.boundaries))
    return tuple(requests)


def _begins_with(path: Ids, start: Ids) -> bool:
    return len(path) >= len(start) and np.array_equal(path[: len(start)], start)


def _followers(rows: list[_Row]) -> dict[int, int]:
    """The first row that goes on from a row's prompt and answer, where there is one: of its session or, where every row
    is a session of its own, any that has the last id of its path.

    A row waits, under the last id of its path, for one with this id whose prompt is long enough; those that are content
    with the least are looked at first.
    """
    alone = len({row.session for row in rows}) == len(rows)
    sessions: dict[int, dict[int, list[tuple[int, int]]]] = {}
    followers: dict[int, int] = {}
    for index, row in enumerate(rows):
        waiting = sessions.setdefault(0 if alone else row.session, {})
        for last in waiting.keys() & {_ANY, *row.path.tolist()}:
            queue = waiting[last]
            others: list[tuple[int, int]] = []
            while queue and queue[0][0] <= row.num_in:
                least, earlier = heapq.heappop(queue)
                if _begins_with(row.path, rows[earlier].path):
                    followers[earlier] = index
                else:
                    others.append((least, earlier))
            for other in others:
                heapq.heappush(queue, other)
        if row.reappears and (len(row.path) or not alone):
            last = int(row.path[-1]) if len(row.path) else _ANY
            heapq.heappush(waiting.setdefault(last, []), (row.num_in + row.num_out, index))
    return followers
