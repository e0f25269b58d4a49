"""A server's own request log, read as a trace: `cairn.engine.request_log` says what is in it.

Tokens are not in the log, but which sequences share how many of them is. So the sequences are made again from tokens of
our own, each of which stands in one place of one tree: two sequences have the same token somewhere iff the originals
had the same tokens up to there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from cairn.cache.checkpoint import Kind
from cairn.cache.layout import CacheLayout
from cairn.cache.reasons import Reason
from cairn.errors import ConfigError
from cairn.models.forward_sizes import ForwardSizes
from cairn.replay.log_branches import counted_elsewhere
from cairn.replay.log_header import Count, LoggedPolicy, Positive, converted, read_header
from cairn.replay.traces import Trace, TraceRequest
from cairn.types import Boundary, BoundaryKind, Keys

__all__ = ["LoggedRequest", "LoggedTrace", "Op", "read_request_log"]

Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Who = Annotated[int, Meta(gt=-(1 << 53), lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e15)]
Flag = Annotated[int, Meta(ge=0, le=1)]
RowKind = Annotated[int, Meta(ge=0, le=3)]

Run = tuple[int, int]
"""Key tokens first, first + 1, ...: the first of them, and how many."""

Located = tuple[str, Mapping[str, Any]]
"""Where a line stands, and the object that it is."""

Op = tuple[Any, ...]
"""A call at the cache's door: a letter, and what `FORMS` says for it."""

FORMS: Mapping[str, Any] = MappingProxyType(
    {
        "l": tuple[str, Number, Positive, Flag, Flag],
        "a": tuple[str, Number, Flag],
        "h": tuple[str, Number],
        "x": tuple[str, Number, Count, Flag],
        "p": tuple[str, Number, list[tuple[Number, Count, RowKind]]],
        "c": tuple[str, Number, Count, Flag],
        "s": tuple[str, Number],
        "w": tuple[str, Number, Positive, Kind, Flag],
        "f": tuple[str, Number, Positive, Flag],
        "v": tuple[str, Number, Positive, Positive, Positive],
        "k": tuple[str, Number],
        "b": tuple[str, Who, Who, Number],
        "g": tuple[str, Number],
        "m": tuple[str, Count],
        "t": tuple[str, Seconds],
        "r": tuple[str, Who, Reason | None],
    }
)

KINDS: Mapping[str, BoundaryKind] = MappingProxyType(
    {"s": "system_end", "m": "message_end", "i": "image_end", "b": "breakpoint"}
)


class _Line(msgspec.Struct, frozen=True, rename={"num_in": "in", "num_out": "out"}):
    n: Number
    id: str
    t: Seconds
    num_in: Positive
    num_out: Count
    finish: str
    ns: Number
    shares: list[Number]
    h: list[Number]
    ops: list[list[Any]]
    b: list[Count] = []
    kinds: str = ""
    hold: list[Count] = []
    cached_tokens: Count | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoggedRequest:
    """A request as it was served; `finish` as in the API, `namespace` 0 without a salt.

    `runs` make its sequence, prompt and answer. `boundaries`: as the client sent them. `cached_tokens`: what the server
    had found, None for a request that it never came to; a replay does not look at it. `branches`: one of several
    answers to a prompt, which was counted with another.
    """

    number: int
    request_id: str
    arrived: float
    num_prompt_tokens: int
    num_tokens: int
    namespace: int
    finish: str
    runs: tuple[Run, ...]
    boundaries: tuple[Boundary, ...]
    cached_tokens: int | None
    branches: bool = False

    def keys(self) -> Keys:
        """Key tokens of prompt and answer, shape [num_tokens]."""
        return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in self.runs])


@dataclass(frozen=True, slots=True)
class LoggedTrace(Trace):
    """A trace with all that the log says besides. `requests` are those that the server has come to; `logged` are the
    same, in the same order (that of arrival), and `ops` what was called, in the order of the calls.

    `layout`, `budget_bytes`, `policy`, `max_num_batched_tokens`: those of the server. `forward_sizes`: of its whole
    model, None where the log does not say.
    """

    logged: tuple[LoggedRequest, ...]
    ops: tuple[Op, ...]
    layout: CacheLayout
    forward_sizes: ForwardSizes | None
    budget_bytes: int
    policy: LoggedPolicy
    max_num_batched_tokens: int


def read_request_log(where: str, first: Mapping[str, Any], lines: Iterable[Located]) -> LoggedTrace:
    """From the first line, at `where`, and the others. Raises ConfigError naming the line and the field."""
    header = read_header(first, where)
    sequences, requests, ops = _Sequences(header.unit), [], []
    for place, line in lines:
        told = converted(line, _Line, place)
        requests.append(_request(told, sequences, place))
        ops += [_op(op, place) for op in told.ops]
    came = sorted((request for request in requests if request.cached_tokens is not None), key=lambda each: each.number)
    if not came:
        raise ConfigError(f"{where}: a header, and no request that the server has come to")
    branches = counted_elsewhere(ops)
    came = [replace(request, branches=request.number in branches) for request in came]
    return LoggedTrace(
        name=header.name,
        unit=1,
        requests=tuple(_as_in_traces(request) for request in came),
        logged=tuple(came),
        ops=tuple(ops),
        layout=header.layout,
        forward_sizes=header.forward_sizes,
        budget_bytes=header.budget_bytes,
        policy=header.policy,
        max_num_batched_tokens=header.max_num_batched_tokens,
    )


class _Sequences:
    """Makes sequences that share what the originals did. Tokens count up, so none is made twice."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._runs: dict[int, tuple[Run, ...]] = {}
        self._units: dict[int, tuple[int, int]] = {}
        self._next = 0

    def add(self, line: _Line, where: str) -> tuple[Run, ...]:
        if line.n in self._runs:
            raise ConfigError(f"{where}: `n` {line.n} stands in a line above: a request has one")
        length = line.num_in + line.num_out
        other, shared = line.shares if len(line.shares) == 2 else (None, 0)
        start = shared // self._unit
        if len(line.shares) not in (0, 2) or shared > length or (other is not None and other not in self._runs):
            raise ConfigError(f"{where}: `shares` must be a request above and tokens of both, or nothing")
        if len(line.h) != length // self._unit - start:
            raise ConfigError(f"{where}: `h` must have one hash for each full unit behind `shares`")
        for index, known in enumerate(line.h, start + 1):
            if known not in self._units:
                break
            if index * self._unit > shared:
                (other, _), shared = self._units[known], index * self._unit
        runs = self._cut(other, shared, where) if other is not None else []
        if shared < length:
            runs.append((self._next, length - shared))
            self._next += length - shared
        self._runs[line.n] = tuple(runs)
        for index, new in enumerate(line.h, start + 1):
            self._units.setdefault(new, (line.n, index))
        return tuple(runs)

    def _cut(self, other: int, length: int, where: str) -> list[Run]:
        """The first `length` tokens of the sequence of request `other`."""
        runs: list[Run] = []
        for first, count in self._runs[other]:
            if length:
                runs.append((first, min(count, length)))
                length -= runs[-1][1]
        if length:
            raise ConfigError(f"{where}: `shares` names more tokens than request {other} has")
        return runs


def _request(line: _Line, sequences: _Sequences, where: str) -> LoggedRequest:
    if len(line.kinds) != len(line.b) or any(kind not in KINDS for kind in line.kinds):
        raise ConfigError(f"{where}: `kinds` must have one of the letters {', '.join(KINDS)} for each of `b`")
    holds = line.hold or [0] * len(line.b)
    if len(holds) != len(line.b) or any(not 1 <= position <= line.num_in for position in line.b):
        raise ConfigError(f"{where}: `b` must list positions of the prompt, and `hold` seconds for each")
    ends = zip(line.b, line.kinds, holds, strict=True)
    return LoggedRequest(
        number=line.n,
        request_id=line.id,
        arrived=line.t,
        num_prompt_tokens=line.num_in,
        num_tokens=line.num_in + line.num_out,
        namespace=line.ns,
        finish=line.finish,
        runs=sequences.add(line, where),
        boundaries=tuple(Boundary(position, KINDS[kind], seconds) for position, kind, seconds in ends),
        cached_tokens=line.cached_tokens,
    )


def _as_in_traces(request: LoggedRequest) -> TraceRequest:
    """A log knows what is shared to the token, so its unit is one. A branch's prompt is there for what it is the
    beginning of, and counts for nothing."""
    keys = request.keys()
    return TraceRequest(
        arrived=request.arrived,
        num_prompt_tokens=0 if request.branches else request.num_prompt_tokens,
        path=keys[: request.num_prompt_tokens],
        answer=keys[request.num_prompt_tokens :],
        boundaries=tuple(sorted({boundary.position for boundary in request.boundaries})),
        name=request.request_id,
        branches=request.branches,
    )


def _op(op: list[Any], where: str) -> Op:
    form = FORMS.get(op[0]) if op and isinstance(op[0], str) else None
    if form is None:
        raise ConfigError(f"{where}: `ops` has {str(op)[:60]}, which is none of {', '.join(FORMS)}")
    read: Op = converted(op, form, f"{where}: `ops`")
    return read
