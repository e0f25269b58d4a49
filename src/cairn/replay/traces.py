"""Requests of a trace. `cairn.trace_rows` explains two forms of files; in cairn's own form each line also has `s` (its
session), `v` (whether its answer is part of a later prompt) and optionally `b` (where messages end). The third form is
a server's own log: `cairn.replay.server_log`.
"""

import heapq
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cairn.errors import ConfigError
from cairn.replay.server_log import read_server_log
from cairn.replay.trace import MAX_TOKENS, MAX_UNIT, Trace, TraceRequest
from cairn.trace_rows import TraceBounds, TraceRow, has_header, parse_integer, trace_lines, trace_rows
from cairn.types import Boundary

__all__ = ["read_trace"]

MAX_ID = 1 << 46
"""Ids times the largest unit stay within int64."""
MAX_REQUESTS = 1 << 22
_BOUNDS = TraceBounds(lines=MAX_REQUESTS, unit=MAX_UNIT, tokens=MAX_TOKENS, ids=MAX_ID)

_ANY = -1
"""In the place of an id: none is below 0."""


@dataclass(frozen=True, slots=True, eq=False)
class _SessionRow:
    """A row of a trace's file. `reappears`: whether its answer may be part of a later prompt of its session."""

    row: TraceRow
    session: int | None
    reappears: bool = True
    boundaries: tuple[Boundary, ...] = ()


def read_trace(path: Path) -> Trace:
    """Read a trace of any form. Raises ConfigError naming the file, the line and the field."""
    try:
        return _read_lines(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _read_lines(path: Path) -> Trace:
    lines = trace_lines(path, MAX_REQUESTS)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{path} is empty: a trace has one JSON object a line")
    where, header = first
    if header.get("source") == "cairn":
        return read_server_log(where, header, lines)
    unit, parsed_rows = trace_rows(first, lines, _BOUNDS)
    if has_header(header):
        name, rows = str(header.get("name", path.name)), [_parse_row(row, unit) for row in parsed_rows]
    else:
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        # Mooncake's say nothing of sessions: an answer may be seen again anywhere.
        rows = [_SessionRow(row, None) for row in parsed_rows]
    if not rows:
        raise ConfigError(f"{path} has a header and no requests")
    return Trace(name, unit, _add_answers(rows, unit))


def _parse_row(row: TraceRow, unit: int) -> _SessionRow:
    ends = row.line.get("b", [])
    if not isinstance(ends, list) or any(type(end) is not int or not 0 <= end <= row.num_in for end in ends):
        raise ConfigError(f"{row.where}: `b` must list token positions of the prompt")
    floored = {min(end // unit, len(row.ids)) * unit for end in ends} - {0}
    session = parse_integer(row.line, "s", row.where, 0, MAX_ID)
    reappears = parse_integer(row.line, "v", row.where, 0, 1) == 1
    return _SessionRow(row, session, reappears, tuple(map(Boundary, sorted(floored))))


def _add_answers(rows: list[_SessionRow], unit: int) -> tuple[TraceRequest, ...]:
    """Give each row its answer's content: that of the first later prompt that continues it, else content of its own."""
    followers = _find_followers(rows)
    requests, num_private = [], 0
    for index, session_row in enumerate(rows):
        row, start = session_row.row, len(session_row.row.ids)
        end = max(start, (row.num_in + row.num_out) // unit)
        if index in followers:
            answer = rows[followers[index]].row.ids[start:end]
        else:
            answer = -1 - np.arange(num_private, num_private + end - start, dtype=np.int64)
            num_private += end - start
        requests.append(
            TraceRequest(row.arrived, row.num_in, row.ids, answer, session_row.boundaries, session=session_row.session)
        )
    return tuple(requests)


def _find_followers(rows: list[_SessionRow]) -> dict[int, int]:
    """For each row the first one that continues its prompt and answer, where there is one: of its session or, where
    every row is a session of its own, any that contains the last id of its path.

    A row waits, under the last id of its path, for one with this id whose prompt is long enough; rows that need the
    shortest prompts are looked at first.
    """
    single = rows[0].session is None or len({session_row.session for session_row in rows}) == len(rows)
    sessions: dict[int | None, dict[int, list[tuple[int, int]]]] = {}
    followers: dict[int, int] = {}
    for index, session_row in enumerate(rows):
        path, num_in = session_row.row.ids, session_row.row.num_in
        waiting = sessions.setdefault(0 if single else session_row.session, {})
        for last in waiting.keys() & {_ANY, *path.tolist()}:
            queue = waiting[last]
            others: list[tuple[int, int]] = []
            while queue and queue[0][0] <= num_in:
                min_length, earlier = heapq.heappop(queue)
                start = rows[earlier].row.ids
                if np.array_equal(path[: len(start)], start):
                    followers[earlier] = index
                else:
                    others.append((min_length, earlier))
            for other in others:
                heapq.heappush(queue, other)
        if session_row.reappears and (len(path) or not single):
            last = int(path[-1]) if len(path) else _ANY
            heapq.heappush(waiting.setdefault(last, []), (num_in + session_row.row.num_out, index))
    return followers
