"""The files of request traces: lengths, times, and ids of content instead of text.

Two forms, plain or gzip, one JSON object a line:

    own        line 1 {"unit", ...}, then {"t", "in", "out", "h": [[first id, count], ...], ...}
    Mooncake   {"timestamp" (ms), "input_length", "output_length", "hash_ids"}, units of 512 tokens

`h` and `hash_ids` name the full units of the prompt; two prompts share k units of tokens iff their first k ids are
equal.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.errors import ConfigError

MOONCAKE_UNIT = 512
_LAST_TIME = 1e15

Line = tuple[str, Mapping[str, Any]]
"""Its place (`file:number`) and its JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceBounds:
    """The most that a reader accepts: lines of a file, tokens of a unit, tokens of a prompt or an answer. Ids must be
    below `ids`."""

    lines: int
    unit: int
    tokens: int
    ids: int


@dataclass(frozen=True, slots=True, eq=False)
class TraceRow:
    """One request. `arrived`: seconds, from a start of the trace's own; `ids`: of the prompt's full units, at most so
    many as it has, shape [u]; `line`: the whole JSON object, at `where`."""

    arrived: float
    num_in: int
    num_out: int
    ids: NDArray[np.int64]
    where: str
    line: Mapping[str, Any]


def trace_lines(path: Path, most: int) -> Iterator[Line]:
    """Each line that is not empty. Raises ConfigError naming the line, and the exceptions of `open`, gzip and UTF-8."""
    with path.open("rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            where = f"{path}:{number}"
            if number > most:
                raise ConfigError(f"{where}: a trace may have {most} lines; cut it")
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where} is no JSON: {error}") from error
            if not isinstance(line, dict):
                raise ConfigError(f"{where} must be a JSON object")
            yield where, line


def has_header(first: Mapping[str, Any]) -> bool:
    """Whether a trace that begins with this line has the own form: then it is no request."""
    return "unit" in first


def trace_rows(first: Line, others: Iterator[Line], bounds: TraceBounds) -> tuple[int, Iterator[TraceRow]]:
    """Tokens of one id, and an iterator over the requests. Raises ConfigError naming line and field, for a request when
    the iterator comes to it."""
    where, header = first
    if not has_header(header):
        return MOONCAKE_UNIT, (_mooncake_row(line, where, bounds) for where, line in chain([first], others))
    unit = parse_integer(header, "unit", where, 1, bounds.unit)
    return unit, (_cairn_row(line, where, unit, bounds) for where, line in others)


def parse_integer(line: Mapping[str, Any], name: str, where: str, least: int, most: int) -> int:
    """The whole number in the field `name` of a line. Raises ConfigError naming line and field."""
    value = line.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{where}: `{name}` must be a whole number from {least} to {most}, not {value!r:.40}")
    return value


def _cairn_row(line: Mapping[str, Any], where: str, unit: int, bounds: TraceBounds) -> TraceRow:
    num_in = parse_integer(line, "in", where, 1, bounds.tokens)
    num_out = parse_integer(line, "out", where, 0, bounds.tokens)
    ids = _expand_runs(line.get("h"), num_in // unit, where, bounds.ids)
    return TraceRow(_parse_time(line, "t", where), num_in, num_out, ids, where, line)


def _mooncake_row(line: Mapping[str, Any], where: str, bounds: TraceBounds) -> TraceRow:
    num_in = parse_integer(line, "input_length", where, 1, bounds.tokens)
    num_out = parse_integer(line, "output_length", where, 0, bounds.tokens)
    ids = line.get("hash_ids")
    if not isinstance(ids, list) or any(type(hash_id) is not int or not 0 <= hash_id < bounds.ids for hash_id in ids):
        raise ConfigError(f"{where}: `hash_ids` must list whole numbers from 0 to {bounds.ids - 1}")
    path = np.array(ids[: num_in // MOONCAKE_UNIT], np.int64)
    return TraceRow(_parse_time(line, "timestamp", where) / 1000, num_in, num_out, path, where, line)


def _parse_time(line: Mapping[str, Any], name: str, where: str) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LAST_TIME:
        raise ConfigError(f"{where}: `{name}` must be a time from 0 to {_LAST_TIME:g}, not {value!r:.40}")
    return float(value)


def _expand_runs(runs: object, most: int, where: str, max_id: int) -> NDArray[np.int64]:
    """The ids of a run-length list, at most `most`."""
    if not isinstance(runs, list):
        raise ConfigError(f"{where}: `h` must be a list of [first id, count]")
    parts, length = [np.empty(0, np.int64)], 0
    for run in runs:
        if not isinstance(run, list) or len(run) != 2 or any(type(n) is not int or not 0 <= n < max_id for n in run):
            raise ConfigError(f"{where}: `h` must list pairs [first id, count] of whole numbers below {max_id}")
        count = min(run[1], most - length)
        parts.append(np.arange(run[0], run[0] + count, dtype=np.int64))
        length += count
    return np.concatenate(parts)
