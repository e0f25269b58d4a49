"""Requests as a trace records them: lengths, and ids of content instead of text.

Two forms, plain or gzip, one JSON object a line:

    own        line 1 {"name", "unit"}, then {"t", "s", "in", "out", "v", "h": [[first id, count], ...], "b": [...]}
    Mooncake   {"timestamp" (ms), "input_length", "output_length", "hash_ids"}, units of 512 tokens

`h` and `hash_ids` name the full units of the prompt; two prompts share k units of tokens iff their first k ids are
equal. A prompt's *path* is those ids; the tokens behind the last full unit are its own and never hit.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.errors import ConfigError
from cairn.types import Keys

__all__ = ["MOONCAKE_UNIT", "Ids", "Trace", "TraceRequest", "key_tokens", "read_trace"]

MOONCAKE_UNIT = 512
MAX_UNIT = 1 << 16
MAX_TOKENS = 1 << 24
MAX_ID = 1 << 46
"""Ids times the largest unit stay within int64."""
MAX_REQUESTS = 1 << 22

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request, arrived `arrived` seconds after the trace's start.

    `num_prompt_tokens` counts what is behind the path, too; `path` holds the ids of its full units, shape [u]; `answer`
    the ids of the units that the answer fills behind them, shape [a], negative where nobody else has them.
    `boundaries`: ends of messages in tokens, ascending, rounded down to the unit, within the path. `name`: what the
    trace calls it, if anything.
    """

    arrived: float
    num_prompt_tokens: int
    path: Ids
    answer: Ids
    boundaries: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; `unit`: tokens of one id."""

    name: str
    unit: int
    requests: tuple[TraceRequest, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    arrived: float
    session: int
    num_in: int
    num_out: int
    reappears: bool
    path: Ids
    boundaries: tuple[int, ...]


def key_tokens(ids: Ids, unit: int) -> Keys:
    """`unit` key tokens for each id, shape [len(ids) * unit]: equal for equal ids and for no others."""
    return (ids[:, None] * unit + np.arange(unit, dtype=np.int64)).reshape(-1)


def read_trace(path: Path) -> Trace:
    """Read a trace of either form. Raises ConfigError naming the file, the line and the field."""
    try:
        return _trace(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _trace(path: Path) -> Trace:
    lines = _lines(path)
    where, first = next(lines, ("", None))
    if first is None:
        raise ConfigError(f"{path} is empty: a trace has one JSON object a line")
    if first.get("source") == "cairn":
        from cairn.replay.request_log import read_request_log  # which is built on this module

        return read_request_log(where, first, lines)
    if "unit" in first:
        unit = _whole(first, "unit", where, 1, MAX_UNIT)
        name = str(first.get("name", path.name))
        rows = [_own_row(line, unit, where) for where, line in lines]
    else:
        unit, name = MOONCAKE_UNIT, path.name.removesuffix(".gz").removesuffix(".jsonl")
        rows = [_mooncake_row(first, 0, where)]
        rows += [_mooncake_row(line, index, where) for index, (where, line) in enumerate(lines, 1)]
    if not rows:
        raise ConfigError(f"{path} has a header and no requests")
    return Trace(name, unit, _with_answers(rows, unit))


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, object) of each line that is not empty."""
    with path.open("rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            where = f"{path}:{number}"
            if number > MAX_REQUESTS:
                raise ConfigError(f"{where}: a trace may have {MAX_REQUESTS} lines; cut it")
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where} is no JSON: {error}") from error
            if not isinstance(line, dict):
                raise ConfigError(f"{where} must be a JSON object")
            yield where, line


def _own_row(line: Mapping[str, Any], unit: int, where: str) -> _Row:
    num_in = _whole(line, "in", where, 1, MAX_TOKENS)
    path = _expand(line.get("h"), num_in // unit, where)
    ends = line.get("b", [])
    if not isinstance(ends, list) or any(type(end) is not int or not 0 <= end <= num_in for end in ends):
        raise ConfigError(f"{where}: `b` must list token positions of the prompt")
    floored = {min(end // unit, len(path)) * unit for end in ends} - {0}
    return _Row(
        arrived=_seconds(line, "t", where),
        session=_whole(line, "s", where, 0, MAX_ID),
        num_in=num_in,
        num_out=_whole(line, "out", where, 0, MAX_TOKENS),
        reappears=_whole(line, "v", where, 0, 1) == 1,
        path=path,
        boundaries=tuple(sorted(floored)),
    )


def _mooncake_row(line: Mapping[str, Any], index: int, where: str) -> _Row:
    num_in = _whole(line, "input_length", where, 1, MAX_TOKENS)
    ids = line.get("hash_ids")
    if not isinstance(ids, list) or any(type(found) is not int or not 0 <= found < MAX_ID for found in ids):
        raise ConfigError(f"{where}: `hash_ids` must list whole numbers from 0 to {MAX_ID - 1}")
    return _Row(
        arrived=_seconds(line, "timestamp", where) / 1000,
        session=index,
        num_in=num_in,
        num_out=_whole(line, "output_length", where, 0, MAX_TOKENS),
        reappears=True,
        path=np.array(ids[: num_in // MOONCAKE_UNIT], np.int64),
        boundaries=(),
    )


def _whole(line: Mapping[str, Any], name: str, where: str, least: int, most: int) -> int:
    value = line.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{where}: `{name}` must be a whole number from {least} to {most}, not {value!r:.40}")
    return value


def _seconds(line: Mapping[str, Any], name: str, where: str) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:
        raise ConfigError(f"{where}: `{name}` must be a time from 0 to 1e15, not {value!r:.40}")
    return float(value)


def _expand(runs: object, most: int, where: str) -> Ids:
    """The ids of a run-length list, at most `most`."""
    if not isinstance(runs, list):
        raise ConfigError(f"{where}: `h` must be a list of [first id, count]")
    parts, length = [np.empty(0, np.int64)], 0
    for run in runs:
        if not isinstance(run, list) or len(run) != 2 or any(type(n) is not int or not 0 <= n < MAX_ID for n in run):
            raise ConfigError(f"{where}: `h` must list pairs [first id, count] of whole numbers below {MAX_ID}")
        count = min(run[1], most - length)
        parts.append(np.arange(run[0], run[0] + count, dtype=np.int64))
        length += count
    return np.concatenate(parts)


def _with_answers(rows: list[_Row], unit: int) -> tuple[TraceRequest, ...]:
    """Give each row its answer's content: that of the first later prompt that goes on from it, else its own."""
    later = _followers(rows)
    requests, private = [], 0
    for index, row in enumerate(rows):
        end = max(len(row.path), (row.num_in + row.num_out) // unit)
        answer: Ids | None = None
        for other in later[index] if row.reappears else ():
            follower = rows[other]
            if follower.num_in >= row.num_in + row.num_out and _begins_with(follower.path, row.path):
                answer = follower.path[len(row.path) : end]
                break
        if answer is None:
            count = end - len(row.path)
            answer = np.arange(-1 - private, -1 - private - count, -1, dtype=np.int64)
            private += count
        requests.append(TraceRequest(row.arrived, row.num_in, row.path, answer, row.boundaries))
    return tuple(requests)


def _begins_with(path: Ids, start: Ids) -> bool:
    return len(path) >= len(start) and np.array_equal(path[: len(start)], start)


def _followers(rows: list[_Row]) -> list[list[int]]:
    """Per row the later rows that may go on from it: those of its session, or, where every row is a session of its own,
    those whose path has this path's last id."""
    if all(row.session == index for index, row in enumerate(rows)):
        return _sharing_last_id(rows)
    later: list[list[int]] = [[] for _ in rows]
    sessions: dict[int, list[int]] = {}
    for index in range(len(rows) - 1, -1, -1):
        members = sessions.setdefault(rows[index].session, [])
        later[index] = members[::-1]
        members.append(index)
    return later


def _sharing_last_id(rows: list[_Row]) -> list[list[int]]:
    later: list[list[int]] = [[] for _ in rows]
    ending: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        for found in np.unique(row.path).tolist():
            for earlier in ending.get(found, ()):
                later[earlier].append(index)
        if len(row.path):
            ending.setdefault(int(row.path[-1]), []).append(index)
    return later
