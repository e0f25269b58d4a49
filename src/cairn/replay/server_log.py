"""A server's own request log, read as a trace: `cairn.engine.request_log` says what is in it.

Tokens are not in the log; what is there of each, its code, takes its place: two sequences have the same codes up to
somewhere iff the originals had the same tokens up to there.
"""

import binascii
from base64 import b64decode
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.errors import ConfigError
from cairn.models.forward_sizes import ForwardSizes
from cairn.replay.traces import MAX_TOKENS, MAX_UNIT, Ids, LoggedPolicy, Served, Server, Trace, TraceRequest
from cairn.types import Boundary, BoundaryKind

__all__ = ["read_server_log"]

VERSION = 2
MAX_BYTES = MAX_ELEMENTS = 1 << 50
CODE_BYTES = 2

Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Positive = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Elements = Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
Seconds = Annotated[float, Meta(ge=0, le=1e15)]

KINDS: Mapping[str, BoundaryKind] = MappingProxyType(
    {"s": "system_end", "m": "message_end", "i": "image_end", "b": "breakpoint"}
)


class _Group(msgspec.Struct, frozen=True):
    name: str
    tokens_per_page: Positive
    reach: Positive | None = None


class _Layout(msgspec.Struct, frozen=True):
    block_size: Positive
    page_bytes: Size
    page_units: Positive
    groups: tuple[_Group, ...]
    header_bytes: Size
    state_bytes: Size
    state_units: Count


class _ForwardSizes(msgspec.Struct, frozen=True):
    active_weights: Annotated[int, Meta(ge=1, le=MAX_ELEMENTS)]
    score_numbers: Elements


class _Header(msgspec.Struct, frozen=True):
    unit: Annotated[int, Meta(ge=1, le=MAX_UNIT)]
    layout: _Layout
    forward_sizes: _ForwardSizes
    budget_bytes: Size
    policy: LoggedPolicy
    max_num_batched_tokens: Positive
    name: str = "request log"


class _Line(msgspec.Struct, frozen=True, rename={"num_in": "in", "num_out": "out"}):
    id: str
    t: Seconds
    num_in: Positive
    num_out: Count
    finish: str
    ns: Number
    h: list[Number]
    codes: str
    chunks: list[tuple[Seconds, Positive]]
    finished: Seconds
    released: Seconds
    prefix: tuple[Number, Positive] | None = None
    b: list[Count] = []
    kinds: str = ""
    hold: list[Count] = []
    started: Seconds | None = None
    asked: list[tuple[Seconds, Positive]] = []
    branch: bool = False
    computed_whole: bool = False
    cached_tokens: Count = 0
    received_tokens: Count = 0


def read_server_log(where: str, first: Mapping[str, Any], lines: Iterable[tuple[str, Mapping[str, Any]]]) -> Trace:
    """From the first line, at `where`, and the others. Requests that the server never came to are left out; the others
    are in the order in which they began. Raises ConfigError naming the line and the field."""
    if first.get("version") != VERSION:
        raise ConfigError(
            f"{where}: `version` {first.get('version')!r:.40} is not {VERSION}: another cairn has written this log; "
            "record a new one with `cairn serve --request-log FILE`"
        )
    header: _Header = _converted(first, _Header, where)
    sequences, requests = _Sequences(header.unit), []
    for place, line in lines:
        told: _Line = _converted(line, _Line, place)
        tokens = sequences.add(told, place)
        request = _request(told, tokens, place)
        if request is not None:
            requests.append(request)
    if not requests:
        raise ConfigError(f"{where}: a header, and no request that the server has come to")
    requests.sort(key=lambda request: request.started)
    server = Server(
        layout=_layout(header.layout, where),
        forward_sizes=ForwardSizes(header.forward_sizes.active_weights, header.forward_sizes.score_numbers),
        budget_bytes=header.budget_bytes,
        policy=header.policy,
        max_num_batched_tokens=header.max_num_batched_tokens,
    )
    return Trace(header.name, 1, tuple(requests), server)


def _converted(value: object, form: Any, where: str) -> Any:
    """`value`, parsed JSON, as `form` has it."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}: write it as the server did, or take the line out") from error


def _layout(told: _Layout, where: str) -> CacheLayout:
    groups = tuple(AttentionGroup(group.name, group.tokens_per_page, group.reach) for group in told.groups)
    sizes = {name: getattr(told, name) for name in told.__struct_fields__ if name != "groups"}
    try:
        return CacheLayout(groups=groups, **sizes)
    except ValueError as error:
        raise ConfigError(f"{where}: `layout`: {error}") from error


class _Sequences:
    """The codes of each line's prompt and answer, shape [in + out], and where digests stand in them."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._ends: dict[int, tuple[Ids, int]] = {}

    def add(self, line: _Line, where: str) -> Ids:
        length, behind = line.num_in + line.num_out, 0
        beginning: Ids = np.empty(0, np.uint16)
        if line.prefix is not None:
            digest, behind = line.prefix
            known, end = self._ends.get(digest, (beginning, 0))
            if end != behind or behind > length:
                raise ConfigError(
                    f"{where}: `prefix` names no beginning of this length in a line above: lines were cut out, so take "
                    "this one out as well"
                )
            beginning = known[:end]
        codes = _codes(line.codes, where)
        if len(codes) != length - behind:
            raise ConfigError(f"{where}: `codes` must have one code for each of `in` + `out` tokens behind `prefix`")
        if len(line.h) != length // self._unit - behind // self._unit:
            raise ConfigError(f"{where}: `h` must have one digest for each full unit of tokens behind `prefix`")
        sequence = np.concatenate([beginning, codes])
        for index, digest in enumerate(line.h, behind // self._unit + 1):
            self._ends[digest] = sequence, index * self._unit
        return sequence


def _codes(text: str, where: str) -> Ids:
    try:
        raw = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{where}: `codes` is no base64: {error}") from error
    if len(raw) % CODE_BYTES:
        raise ConfigError(f"{where}: `codes` must have {CODE_BYTES} bytes for each token")
    return np.frombuffer(raw, "<u2")


def _request(line: _Line, tokens: Ids, where: str) -> TraceRequest | None:
    """None for one that the server has not come to."""
    boundaries = _boundaries(line, where)
    if (
        max((end for _, end in line.chunks), default=0) > len(tokens)
        or max((end for _, end in line.asked), default=0) > line.num_in
    ):
        raise ConfigError(f"{where}: `chunks` and `asked` must name tokens of the request")
    if line.cached_tokens + line.received_tokens > line.num_in:
        raise ConfigError(f"{where}: `cached_tokens` and `received_tokens` must be tokens of the prompt")
    if line.started is None:
        return None
    # the last token of an answer is sampled and not computed
    computed = max(line.num_in, line.num_in + line.num_out - 1)
    served = Served(
        started=line.started,
        chunks=tuple(chunk for chunk in line.chunks if chunk[1] <= line.num_in),
        pages=tuple(chunk for chunk in line.chunks if chunk[1] > line.num_in),
        finished=max(line.started, line.finished),
        released=max(line.started, line.finished, line.released),
        finished_well=line.finish in ("stop", "length"),
        asked=tuple(line.asked),
        received_end=line.cached_tokens + line.received_tokens if line.received_tokens else 0,
        computed_whole=line.computed_whole,
        cached_tokens=line.cached_tokens,
    )
    return TraceRequest(
        arrived=line.t,
        num_prompt_tokens=line.num_in,
        path=tokens[: line.num_in],
        answer=tokens[line.num_in : computed],
        boundaries=boundaries,
        name=line.id,
        namespace=str(line.ns) if line.ns else None,
        branches=line.branch,
        served=served,
    )


def _boundaries(line: _Line, where: str) -> tuple[Boundary, ...]:
    if len(line.kinds) != len(line.b) or any(kind not in KINDS for kind in line.kinds):
        raise ConfigError(f"{where}: `kinds` must have one of the letters {', '.join(KINDS)} for each of `b`")
    holds = line.hold or [0] * len(line.b)
    if len(holds) != len(line.b) or any(not 1 <= position <= line.num_in for position in line.b):
        raise ConfigError(f"{where}: `b` must list positions of the prompt, and `hold` seconds for each")
    return tuple(Boundary(end, KINDS[kind], hold) for end, kind, hold in zip(line.b, line.kinds, holds, strict=True))
