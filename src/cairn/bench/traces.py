"""Prompts as a trace has them: sent when it says, and sharing what it says. Its two forms: `cairn.trace_rows`."""

import zlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cairn.bench.work import Conversation, Turn, Vocabulary, flag
from cairn.errors import ConfigError
from cairn.trace_rows import TraceBounds, TraceRow, trace_lines, trace_rows

_BOUNDS = TraceBounds(lines=1 << 24, unit=1 << 20, tokens=1 << 26, ids=1 << 40)
# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class TraceCut:
    """What of a trace is sent, and how fast. `most`: requests at most."""

    speedup: float = flag(1.0, 1e-6, 1e9, "send so many times faster")
    length_divisor: int = flag(1, 1, 1 << 20, "divide all lengths by this")
    duration: float | None = flag(None, 1e-6, 1e12, "take so many seconds of the trace; all unless given")
    most: int | None = None


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


def _token_hashes(row: TraceRow, number: int, unit: int, divisor: int, salt: np.uint64) -> NDArray[np.uint64]:
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


def _read(path: Path, cut: TraceCut) -> tuple[int, list[TraceRow]]:
    lines = trace_lines(path, _BOUNDS.lines)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"--dataset-path {path} is empty: a trace has one JSON object a line")
    unit, found = trace_rows(first, lines, _BOUNDS)
    rows: list[TraceRow] = []
    for row in islice(found, cut.most):
        if rows and row.arrived < rows[-1].arrived:
            raise ConfigError(f"{row.where}: requests must be in order of arrival")
        if rows and cut.duration is not None and row.arrived - rows[0].arrived >= cut.duration:
            break
        rows.append(row)
    if not rows:
        raise ConfigError(f"--dataset-path {path} has a header and no requests")
    return unit, rows
