"""Prompts: random ones, those of a ShareGPT file, or made after a trace (`cairn.trace_rows`), with its times and its
shared prefixes. The same seed gives the same prompts."""

import json
import math
import zlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.bench.work import MAX_PROMPTS, MAX_TOKENS, Conversation, Speller, Turn, Vocabulary, flag
from cairn.errors import ConfigError
from cairn.trace_rows import TraceBounds, TraceRow, trace_lines, trace_rows

_MAX_FILE_BYTES = 4 << 30
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048

_BOUNDS = TraceBounds(lines=1 << 24, unit=1 << 20, tokens=1 << 26, ids=1 << 40)
# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Lengths in tokens. Each is drawn from (1 - range_ratio) to (1 + range_ratio) times the given one."""

    input_len: int = flag(1024, 0, MAX_TOKENS)
    output_len: int = flag(128, 1, MAX_TOKENS)
    range_ratio: float = flag(0.0, 0.0, 0.999, "lengths vary by this share up and down")
    prefix_len: int = flag(0, 0, MAX_TOKENS, "what all prompts share")


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """Lengths in tokens."""

    prefix_len: int = flag(256, 0, MAX_TOKENS)
    suffix_len: int = flag(256, 1, MAX_TOKENS)
    num_prefixes: int = flag(10, 1, MAX_PROMPTS)
    output_len: int = flag(128, 1, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """`output_len`: tokens; None takes the length of the recorded answer."""

    path: Path
    output_len: int | None = flag(None, 1, MAX_TOKENS, "as recorded unless given")


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations of `turns` requests; lengths in tokens, counted before the server's template."""

    turns: int = flag(4, 1, 4096, "requests of one conversation")
    num_systems: int = flag(1, 1, MAX_PROMPTS, "different system messages")
    system_len: int = flag(256, 1, MAX_TOKENS)
    user_len: int = flag(64, 1, MAX_TOKENS)
    output_len: int = flag(128, 1, MAX_TOKENS)


def make_random_prompts(
    settings: RandomPrompts, count: int, vocabulary: Vocabulary, rng: np.random.Generator
) -> list[Conversation]:
    """Prompts that share nothing but a first part of `prefix_len` tokens. Raises ConfigError naming the flag."""
    prefix = vocabulary.draw(rng, settings.prefix_len)
    inputs, outputs = (
        rng.integers(
            math.floor(length * (1 - settings.range_ratio)),
            math.ceil(length * (1 + settings.range_ratio)) + 1,
            size=count,
        )
        for length in (settings.input_len, settings.output_len)
    )
    if settings.prefix_len + int(inputs.min()) < 1:
        raise ConfigError("--random-input-len leaves prompts without a token: raise it, or lower --random-range-ratio")
    work = []
    for input_len, output_len in zip(inputs.tolist(), outputs.tolist(), strict=True):
        prompt = prefix + vocabulary.draw(rng, input_len)
        work.append(Conversation((Turn(prompt, len(prompt), max(1, output_len)),)))
    return work


def make_prefix_repetition(
    settings: PrefixRepetition, count: int, vocabulary: Vocabulary, rng: np.random.Generator
) -> list[Conversation]:
    """Prompts of one of `num_prefixes` first parts and a suffix of their own, in random order.

    Raises ConfigError when there are fewer prompts than prefixes.
    """
    if count < settings.num_prefixes:
        raise ConfigError(
            f"--num-prompts {count} is less than --prefix-repetition-num-prefixes {settings.num_prefixes}: raise it"
        )
    prefixes = [vocabulary.draw(rng, settings.prefix_len) for _ in range(settings.num_prefixes)]
    work = []
    for number in range(count):
        prompt = prefixes[number % settings.num_prefixes] + vocabulary.draw(rng, settings.suffix_len)
        work.append(Conversation((Turn(prompt, len(prompt), settings.output_len),)))
    return [work[index] for index in rng.permutation(count).tolist()]


def make_chats(
    settings: Chats, count: int, vocabulary: Vocabulary, rng: np.random.Generator, speller: Speller
) -> list[Conversation]:
    """Conversations with `count` requests in all; every history grows by the server's own answers."""
    systems = [speller.text(vocabulary.draw(rng, settings.system_len)) for _ in range(settings.num_systems)]
    work = []
    for first in range(0, count, settings.turns):
        system = systems[int(rng.integers(settings.num_systems))]
        turns = [
            Turn(speller.text(vocabulary.draw(rng, settings.user_len)), settings.user_len, settings.output_len)
            for _ in range(min(settings.turns, count - first))
        ]
        work.append(Conversation(tuple(turns), system=system))
    return work


def read_sharegpt(settings: ShareGpt, count: int, speller: Speller, rng: np.random.Generator) -> list[Conversation]:
    """First questions of a ShareGPT file, in random order, at most `count`; none is sent twice.

    Those that are very short or long are left out, as other load generators do: less than 4 tokens of prompt or answer,
    more than 1024 of prompt or 2048 of both. Raises ConfigError naming the file and the field.
    """
    entries = _pairs(settings.path)
    work: list[Conversation] = []
    for index in rng.permutation(len(entries)).tolist():
        if len(work) == count:
            break
        question, answer = entries[index]
        prompt_len = speller.count(question)
        recorded = speller.count(answer)
        output_len = recorded if settings.output_len is None else settings.output_len
        fits = prompt_len <= _MAX_PROMPT_TOKENS and prompt_len + output_len <= _MAX_TOTAL_TOKENS
        long_enough = prompt_len >= _MIN_TOKENS and (settings.output_len is not None or recorded >= _MIN_TOKENS)
        if fits and long_enough:
            work.append(Conversation((Turn(question, prompt_len, output_len),)))
    if not work:
        raise ConfigError(
            f"--dataset-path {settings.path}: no conversation in it has a question and an answer that fit"
        )
    return work


def _pairs(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of each conversation that begins with both."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"--dataset-path {path} has more than {_MAX_FILE_BYTES >> 30} GiB; cut it")
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"--dataset-path {path} must be a JSON list of conversations")
    pairs = (_pair(entry, f"--dataset-path {path}, entry {index}") for index, entry in enumerate(entries))
    return [pair for pair in pairs if pair is not None]


def _pair(entry: Any, where: str) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ConfigError(f"{where}: `conversations` must list the turns")
    if len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    if not isinstance(texts[0], str) or not isinstance(texts[1], str):
        raise ConfigError(f"{where}: `value` of a turn must be text")
    return texts[0], texts[1]


# -- traces ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceCut:
    """The part of a trace that is sent, and how fast. `most`: the largest number of requests."""

    speedup: float = flag(1.0, 1e-6, 1e9, "send so many times faster")
    length_divisor: int = flag(1, 1, 1 << 20, "divide all lengths by this")
    duration: float | None = flag(None, 1e-6, 1e12, "take so many seconds of the trace; all unless given")
    most: int | None = None


def read_trace_prompts(path: Path, cut: TraceCut, vocabulary: Vocabulary, seed: int) -> list[Conversation]:
    """One request a line, in order of arrival, the first one due at 0.

    Every `length_divisor`-th token of the trace is sent: prompts that share k tokens there share k // divisor here, and
    differ in nearly all others. What comes after a prompt's last id is its own. Raises ConfigError naming the file, the
    line and the field.
    """
    try:
        unit, rows = _read(path, cut)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error
    salt = _splitmix(np.array([seed], np.uint64))[0]
    start = rows[0].arrived
    work = []
    for number, row in enumerate(rows):
        prompt = vocabulary.map_hashes(_token_hashes(row, number, unit, cut.length_divisor, salt))
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
    paths = np.cumsum(_splitmix(ids.astype(np.uint64) * _STEP + _splitmix(order)), dtype=np.uint64)
    shared = positions < len(ids) * unit
    base = np.full(len(positions), _splitmix(np.array([~np.uint64(number)], np.uint64))[0])
    base[shared] = paths[positions[shared] // unit]
    return _splitmix(base + salt + positions.astype(np.uint64) * _STEP)


def _splitmix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: every bit of the input moves every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def _read(path: Path, cut: TraceCut) -> tuple[int, list[TraceRow]]:
    lines = trace_lines(path, _BOUNDS.lines)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"--dataset-path {path} is empty: a trace has one JSON object a line")
    unit, parsed_rows = trace_rows(first, lines, _BOUNDS)
    rows: list[TraceRow] = []
    for row in islice(parsed_rows, cut.most):
        if rows and row.arrived < rows[-1].arrived:
            raise ConfigError(f"{row.where}: requests must be in order of arrival")
        if rows and cut.duration is not None and row.arrived - rows[0].arrived >= cut.duration:
            break
        rows.append(row)
    if not rows:
        raise ConfigError(f"--dataset-path {path} has a header and no requests")
    return unit, rows
