"""Reads the requests of a trace, of three forms.

`cairn.trace_rows` explains two of them; in cairn's own form each line also has `s` (its session), `v` (whether its
answer is part of a later prompt) and optionally `b` (where messages end) and `called_tools` (whether its answer is a
call, so that its session goes on once its tools are done).

The third form is a server's own log, whose fields `cairn.engine.request_log.log` describes. It has no tokens but a
keyed hash of each token and all tokens before it. The hashes serve as token ids: two sequences share the first n hashes
iff the originals share the first n tokens.
"""

import heapq
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cairn.engine.request_log.header import VERSION
from cairn.engine.request_log.lines import HASH_BYTES
from cairn.errors import ConfigError
from cairn.replay.trace import (
    MAX_TOKENS,
    MAX_UNIT,
    Ids,
    Number,
    ReplayedServer,
    Seconds,
    Timeline,
    Trace,
    TraceRequest,
)
from cairn.trace_rows import TraceBounds, TraceRow, has_header, parse_integer, trace_lines, trace_rows
from cairn.types import Boundary, BoundaryKind, Count, Positive

MAX_ID = 1 << 46
"""Ids times the largest unit stay within int64."""
_MAX_REQUESTS = 1 << 22
_BOUNDS = TraceBounds(lines=_MAX_REQUESTS, unit=MAX_UNIT, tokens=MAX_TOKENS, ids=MAX_ID)

_ANY = -1
"""In the place of an id: none is below 0."""


class _Row(NamedTuple):
    """A request of a trace's file, before its answer is known: it has `num_out` tokens, which may be part of a later
    prompt of its session if it `reappears`."""

    request: TraceRequest
    num_out: int
    reappears: bool = True


def read_trace(path: Path) -> Trace:
    """Read a trace of any form. Raises ConfigError naming the file, the line and the field."""
    try:
        return _read_lines(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _read_lines(path: Path) -> Trace:
    lines = trace_lines(path, _MAX_REQUESTS)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{path} is empty: a trace has one JSON object a line")
    where, header = first
    if header.get("source") == "cairn":
        return _read_server_log(where, header, lines)
    unit, lines_of_requests = trace_rows(first, lines, _BOUNDS)
    if has_header(header):
        name, rows = str(header.get("name", path.name)), [_parse_row(row, unit) for row in lines_of_requests]
    else:
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        # Mooncake's say nothing of sessions: an answer may be seen again anywhere.
        rows = [_Row(_request_of(row), row.num_out) for row in lines_of_requests]
    if not rows:
        raise ConfigError(f"{path} has a header and no requests")
    return Trace(name, unit, _add_answers(rows, unit))


def _request_of(row: TraceRow) -> TraceRequest:
    return TraceRequest(row.arrived, row.num_in, row.ids, row.ids[:0])


def _parse_row(row: TraceRow, unit: int) -> _Row:
    ends = row.line.get("b", [])
    if not isinstance(ends, list) or any(type(end) is not int or not 0 <= end <= row.num_in for end in ends):
        raise ConfigError(f"{row.where}: `b` must list token positions of the prompt")
    floored = {min(end // unit, len(row.ids)) * unit for end in ends} - {0}
    session = parse_integer(row.line, "s", row.where, 0, MAX_ID)
    reappears = parse_integer(row.line, "v", row.where, 0, 1) == 1
    called_tools = row.line.get("called_tools", False)
    if not isinstance(called_tools, bool):
        raise ConfigError(f"{row.where}: `called_tools` must be true or false, not {called_tools!r:.40}")
    request = replace(
        _request_of(row),
        boundaries=tuple(map(Boundary, sorted(floored))),
        session=session,
        tools_step=0 if called_tools else None,
    )
    return _Row(request, row.num_out, reappears)


def _add_answers(rows: list[_Row], unit: int) -> tuple[TraceRequest, ...]:
    """Give each row its answer's content: that of the first later prompt that continues it, else content of its own."""
    followers = _find_followers(rows)
    requests, num_private = [], 0
    for index, (request, num_out, _) in enumerate(rows):
        start = len(request.path)
        end = max(start, (request.num_prompt_tokens + num_out) // unit)
        if index in followers:
            answer = rows[followers[index]].request.path[start:end]
        else:
            answer = -1 - np.arange(num_private, num_private + end - start, dtype=np.int64)
            num_private += end - start
        requests.append(replace(request, answer=answer))
    return tuple(requests)


def _find_followers(rows: list[_Row]) -> dict[int, int]:
    """For each row the first one that continues its prompt and answer, where there is one: of its session or, where
    every row is a session of its own, any that contains the last id of its path.

    A row waits, under the last id of its path, for one with this id whose prompt is long enough; rows that need the
    shortest prompts are looked at first.
    """
    single = rows[0].request.session is None or len({each.request.session for each in rows}) == len(rows)
    sessions: dict[int | None, dict[int, list[tuple[int, int]]]] = {}
    followers: dict[int, int] = {}
    for index, (request, num_out, reappears) in enumerate(rows):
        path, num_in = request.path, request.num_prompt_tokens
        waiting = sessions.setdefault(0 if single else request.session, {})
        for last in waiting.keys() & {_ANY, *path.tolist()}:
            others: list[tuple[int, int]] = []
            while waiting[last] and waiting[last][0][0] <= num_in:
                entry = heapq.heappop(waiting[last])
                start = rows[entry[1]].request.path
                if np.array_equal(path[: len(start)], start):
                    followers[entry[1]] = index
                else:
                    others.append(entry)
            for entry in others:
                heapq.heappush(waiting[last], entry)
        if reappears and (len(path) or not single):
            last = int(path[-1]) if len(path) else _ANY
            heapq.heappush(waiting.setdefault(last, []), (num_in + num_out, index))
    return followers


# -- a server's own log ------------------------------------------------------------------------------------------------


class _Prompt(msgspec.Struct, frozen=True, rename={"num_in": "in", "num_out": "out"}):
    """What a line says of prompt and answer; a `Timeline` is the rest of it. `tool_waits`: requests whose answers were
    calls, each with the steps that had been planned when the cache was told, since the line before."""

    id: str
    t: Seconds
    num_in: Positive
    num_out: Count
    namespace: Number
    block_hashes: list[Number]
    token_hashes: bytes
    prefix: tuple[Number, Positive] | None = None
    boundaries: list[tuple[Positive, BoundaryKind, Count]] = []
    parallel_sample: bool = False
    tool_waits: list[tuple[str, Number]] = []

    def __post_init__(self) -> None:
        if max((boundary[0] for boundary in self.boundaries), default=0) > self.num_in:
            raise ValueError("`boundaries` must name tokens of the prompt")
        if len(self.token_hashes) % HASH_BYTES:
            raise ValueError(f"`token_hashes` must have {HASH_BYTES} bytes for each token")


def _read_server_log(where: str, first: Mapping[str, Any], lines: Iterable[tuple[str, Mapping[str, Any]]]) -> Trace:
    """The trace of a log with this first line, at `where`, and these others. They are sorted by the time when they were
    scheduled; those that never were are `unserved`."""
    if first.get("version") != VERSION:
        raise ConfigError(
            f"{where}: `version` {first.get('version')!r:.40} is not {VERSION}: another cairn has written this log; "
            "record a new one with `cairn serve --request-log FILE`"
        )
    with _naming(where):
        header = msgspec.convert(first, ReplayedServer)
    sequences, requests, tool_waits = _Sequences(header.unit), list[TraceRequest](), dict[str, int]()
    for place, raw in lines:
        with _naming(place):
            line = msgspec.convert(raw, _Prompt)
            requests.append(_make_request(line, msgspec.convert(raw, Timeline), sequences))
        tool_waits.update(line.tool_waits)
    requests = [replace(each, tools_step=tool_waits.get(each.name)) for each in requests]
    requests.sort(key=lambda request: request.timeline.scheduled)
    num_served = sum(math.isfinite(request.timeline.scheduled) for request in requests)
    if not num_served:
        raise ConfigError(f"{where}: a header, and no request that was scheduled")
    header = replace(header, max_in_flight=max(request.timeline.in_flight for request in requests))
    return Trace(header.name, 1, tuple(requests[:num_served]), header, tuple(requests[num_served:]))


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}: {error}: write it as the server did, or take the line out") from error


class _Sequences:
    """The token hashes of all sequences so far, by the hashes at the ends of their blocks."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._blocks: dict[int, tuple[Ids, int]] = {}

    def add(self, line: _Prompt) -> Ids:
        """The token hashes of a line's prompt and answer, shape [in + out]. Raises ValueError naming the field."""
        length, prefix_length = line.num_in + line.num_out, 0
        beginning: Ids = np.empty(0, np.uint16)
        if line.prefix is not None:
            block_hash, prefix_length = line.prefix
            earlier, end = self._blocks.get(block_hash, (beginning, 0))
            if end != prefix_length or prefix_length > length:
                raise ValueError("`prefix` names no beginning of this length in a line above: lines were cut out")
            beginning = earlier[:end]
        hashes = np.frombuffer(line.token_hashes, "<u2")
        if len(hashes) != length - prefix_length:
            raise ValueError("`token_hashes` must have a hash for each token after `prefix`")
        if len(line.block_hashes) != length // self._unit - prefix_length // self._unit:
            raise ValueError("`block_hashes` must have a hash for each full unit of tokens after `prefix`")
        sequence = np.concatenate([beginning, hashes])
        for index, block_hash in enumerate(line.block_hashes, prefix_length // self._unit + 1):
            self._blocks[block_hash] = sequence, index * self._unit
        return sequence


def _make_request(line: _Prompt, timeline: Timeline, sequences: _Sequences) -> TraceRequest:
    """Of a line. Raises ValueError naming the field."""
    if timeline.cached_tokens + timeline.received_tokens > line.num_in:
        raise ValueError("`cached_tokens` and `received_tokens` must be tokens of the prompt")
    tokens = sequences.add(line)
    # the last token of an answer is sampled and not computed, unless its client left while that was under way
    num_computed = max(line.num_in, line.num_in + line.num_out - timeline.completed)
    return TraceRequest(
        arrived=line.t,
        num_prompt_tokens=line.num_in,
        path=tokens[: line.num_in],
        answer=tokens[line.num_in : num_computed],
        boundaries=tuple(Boundary(*boundary) for boundary in line.boundaries),
        name=line.id,
        namespace=str(line.namespace) if line.namespace else None,
        is_parallel_sample=line.parallel_sample,
        timeline=timeline,
    )
