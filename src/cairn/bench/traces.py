"""Request traces: when each prompt was sent, and which first part it shares with others.

Two forms: a header line with `unit` and then lines of `t`, `in`, `out` and run-length ids `h`; and Mooncake's, lines of
`timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids` of 512 tokens each. Plain or gzip.
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

from cairn.bench.work import Conversation, Ids, Turn, Vocabulary
from cairn.errors import ConfigError

__all__ = ["MOONCAKE_UNIT", "TraceCut", "trace_prompts"]

MOONCAKE_UNIT = 512
_MAX_LINES = 1 << 24
_MAX_UNIT = 1 << 20
_MAX_TOKENS = 1 << 26
_MAX_ID = 1 << 40
# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class TraceCut:
    """`duration`: seconds of the trace that are taken, None for all; `speedup`: how much faster they are sent;
    `length_divisor`: by which all lengths are divided; `most`: requests at most."""

    speedup: float = 1.0
    length_divisor: int = 1
    duration: float | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    arrived: float
    num_in: int
    num_out: int
    ids: Ids


def trace_prompts(path: Path, cut: TraceCut, vocabulary: Vocabulary, seed: int) -> list[Conversation]:
    """One request a line, in order of arrival, the first one due at 0.

    Every `length_divisor`-th token of the trace is sent: prompts that share k tokens there share k // divisor here, and
    differ in nearly all others. What comes after a prompt's last id is its own. Raises ConfigError naming the file, the
    line and the field.
    """
    try:
        unit, rows = _read(path, cut)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error
    salt = _mixed(np.array([seed], np.uint64))[0]
    start = rows[0].arrived
    work = []
    for number, row in enumerate(rows):
        prompt = vocabulary.named(_token_hashes(row, number, unit, cut.length_divisor, salt))
        turn = Turn(prompt, len(prompt), max(1, row.num_out // cut.length_divisor))
        work.append(Conversation((turn,), at=(row.arrived - start) / cut.speedup))
    return work


def _token_hashes(row: _Row, number: int, unit: int, divisor: int, salt: np.uint64) -> NDArray[np.uint64]:
    """A hash for each token that is sent, of the whole path up to it."""
    # The last token of each run of `divisor` ones: it knows all ids of its run.
    positions = np.arange(divisor - 1, max(row.num_in, divisor), divisor, dtype=np.int64)
    ids = row.ids[: row.num_in // unit]
    order = np.arange(len(ids), dtype=np.uint64)
    # Sums wrap around. A prefix sum of mixed ids stands for the path so far.
    paths = np.cumsum(_mixed(ids.astype(np.uint64) * _STEP + _mixed(order)), dtype=np.uint64)
    shared = positions < len(ids) * unit
    base = np.full(len(positions), _mixed(np.array([~np.uint64(number)], np.uint64))[0])
    base[shared] = paths[positions[shared] // unit]
    return _mixed(base + salt + positions.astype(np.uint64) * _STEP)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: every bit of the input moves every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def _read(path: Path, cut: TraceCut) -> tuple[int, list[_Row]]:
    lines = _lines(path)
    where, first = next(lines, ("", None))
    if first is None:
        raise ConfigError(f"--dataset-path {path} is empty: a trace has one JSON object a line")
    rows: list[_Row] = []
    if "unit" in first:
        unit, make = _whole(first, "unit", where, 1, _MAX_UNIT), _own_row
    else:
        unit, make = MOONCAKE_UNIT, _mooncake_row
        rows.append(make(first, where, unit))
    for where, line in lines:
        if cut.most is not None and len(rows) >= cut.most:
            break
        row = make(line, where, unit)
        if rows and row.arrived < rows[-1].arrived:
            raise ConfigError(f"{where}: requests must be in order of arrival")
        if rows and cut.duration is not None and row.arrived - rows[0].arrived >= cut.duration:
            break
        rows.append(row)
    if not rows:
        raise ConfigError(f"--dataset-path {path} has a header and no requests")
    return unit, rows


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            where = f"{path}:{number}"
            if number > _MAX_LINES:
                raise ConfigError(f"{where}: a trace may have {_MAX_LINES} lines; cut it")
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where} is no JSON: {error}") from error
            if not isinstance(line, dict):
                raise ConfigError(f"{where} must be a JSON object")
            yield where, line


def _own_row(line: Mapping[str, Any], where: str, unit: int) -> _Row:
    num_in = _whole(line, "in", where, 1, _MAX_TOKENS)
    return _Row(
        arrived=_time(line, "t", where),
        num_in=num_in,
        num_out=_whole(line, "out", where, 0, _MAX_TOKENS),
        ids=_expanded(line.get("h"), num_in // unit, where),
    )


def _mooncake_row(line: Mapping[str, Any], where: str, unit: int) -> _Row:
    num_in = _whole(line, "input_length", where, 1, _MAX_TOKENS)
    ids = line.get("hash_ids")
    if not isinstance(ids, list) or any(type(found) is not int or not 0 <= found < _MAX_ID for found in ids):
        raise ConfigError(f"{where}: `hash_ids` must list whole numbers from 0 to {_MAX_ID - 1}")
    return _Row(
        arrived=_time(line, "timestamp", where) / 1000,
        num_in=num_in,
        num_out=_whole(line, "output_length", where, 0, _MAX_TOKENS),
        ids=np.array(ids[: num_in // unit], np.int64),
    )


def _whole(line: Mapping[str, Any], name: str, where: str, least: int, most: int) -> int:
    value = line.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{where}: `{name}` must be a whole number from {least} to {most}, not {value!r:.40}")
    return value


def _time(line: Mapping[str, Any], name: str, where: str) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:
        raise ConfigError(f"{where}: `{name}` must be a time from 0 to 1e15, not {value!r:.40}")
    return float(value)


def _expanded(runs: object, most: int, where: str) -> Ids:
    """The ids of a run-length list, at most `most`."""
    if not isinstance(runs, list):
        raise ConfigError(f"{where}: `h` must be a list of [first id, count]")
    parts, length = [np.empty(0, np.int64)], 0
    for run in runs:
        if not isinstance(run, list) or len(run) != 2 or any(type(n) is not int or not 0 <= n < _MAX_ID for n in run):
            raise ConfigError(f"{where}: `h` must list pairs [first id, count] of whole numbers below {_MAX_ID}")
        count = min(run[1], most - length)
        parts.append(np.arange(run[0], run[0] + count, dtype=np.int64))
        length += count
    return np.concatenate(parts)
