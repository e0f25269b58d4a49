"""Reads a server's own request log as a trace; `cairn.engine.request_log.log` describes its fields.

The log has no tokens but a keyed hash of each token and all tokens before it. The hashes serve as token ids: two
sequences share the first n hashes iff the originals share the first n tokens.
"""

import binascii
import math
from base64 import b64decode
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.errors import ConfigError
from cairn.models.layer_sizes import ForwardSizes
from cairn.replay.trace import MAX_TOKENS, MAX_UNIT, Ids, LoggedPolicy, LogHeader, Timeline, Trace, TraceRequest
from cairn.types import Boundary, BoundaryKind

__all__ = ["read_server_log"]

VERSION = 3
MAX_BYTES = MAX_ELEMENTS = 1 << 50
HASH_BYTES = 2

Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Positive = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Elements = Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
Seconds = Annotated[float, Meta(ge=0, le=1e15)]


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
    checkpoint_dtype: str = "float32"


class _ForwardSizes(msgspec.Struct, frozen=True):
    active_weights: Annotated[int, Meta(ge=1, le=MAX_ELEMENTS)]
    score_numbers: Elements


class _Header(msgspec.Struct, frozen=True):
    unit: Annotated[int, Meta(ge=1, le=MAX_UNIT)]
    layout: _Layout
    forward_sizes: _ForwardSizes
    budget_bytes: Size
    policy: LoggedPolicy
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    in_flight_sharing: bool
    name: str = "request log"


class _LogLine(msgspec.Struct, frozen=True, rename={"num_in": "in", "num_out": "out"}):
    id: str
    t: Seconds
    num_in: Positive
    num_out: Count
    finish: str
    namespace: Number
    block_hashes: list[Number]
    token_hashes: str
    arrived_step: Number
    finished_step: Number
    finished: Seconds
    prefix: tuple[Number, Positive] | None = None
    boundaries: list[tuple[Positive, BoundaryKind, Count]] = []
    scheduled: Seconds | None = None
    in_flight: Positive = 1
    priority: int = 0
    parallel_sample: bool = False
    kv_export: bool = False
    bypasses_cache: bool = False
    cached_tokens: Count = 0
    received_tokens: Count = 0


def read_server_log(where: str, first: Mapping[str, Any], lines: Iterable[tuple[str, Mapping[str, Any]]]) -> Trace:
    """The trace of a log with this first line, at `where`, and these others. They are sorted by the
    time when they were scheduled; those that never were are `unserved`. Raises ConfigError naming the line and the
    field."""
    if first.get("version") != VERSION:
        raise ConfigError(
            f"{where}: `version` {first.get('version')!r:.40} is not {VERSION}: another cairn has written this log; "
            "record a new one with `cairn serve --request-log FILE`"
        )
    header: _Header = _parse(first, _Header, where)
    sequences, requests, in_flight = _Sequences(header.unit), [], 1
    for place, raw in lines:
        line: _LogLine = _parse(raw, _LogLine, place)
        in_flight = max(in_flight, line.in_flight)
        requests.append(_make_request(line, sequences.add(line, place), place))
    requests.sort(key=lambda request: request.scheduled_time)
    num_served = sum(math.isfinite(request.scheduled_time) for request in requests)
    if not num_served:
        raise ConfigError(f"{where}: a header, and no request that was scheduled")
    log_header = LogHeader(
        layout=_make_layout(header.layout, where),
        forward_sizes=ForwardSizes(*msgspec.structs.astuple(header.forward_sizes)),
        budget_bytes=header.budget_bytes,
        policy=header.policy,
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        max_in_flight=in_flight,
        in_flight_sharing=header.in_flight_sharing,
    )
    return Trace(header.name, 1, tuple(requests[:num_served]), log_header, tuple(requests[num_served:]))


def _parse(value: object, form: Any, where: str) -> Any:
    """`value`, a JSON object, validated as `form`. Raises ConfigError naming the line."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}: write it as the server did, or take the line out") from error


def _make_layout(layout: _Layout, where: str) -> CacheLayout:
    groups = tuple(AttentionGroup(*msgspec.structs.astuple(group)) for group in layout.groups)
    try:
        return CacheLayout(**msgspec.structs.asdict(layout) | {"groups": groups})
    except ValueError as error:
        raise ConfigError(f"{where}: `layout`: {error}") from error


class _Sequences:
    """The token hashes of all sequences so far, by the hashes at the ends of their blocks."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._blocks: dict[int, tuple[Ids, int]] = {}

    def add(self, line: _LogLine, where: str) -> Ids:
        """The token hashes of a line's prompt and answer, shape [in + out]."""
        length, prefix_length = line.num_in + line.num_out, 0
        beginning: Ids = np.empty(0, np.uint16)
        if line.prefix is not None:
            block_hash, prefix_length = line.prefix
            earlier, end = self._blocks.get(block_hash, (beginning, 0))
            if end != prefix_length or prefix_length > length:
                raise ConfigError(
                    f"{where}: `prefix` names no beginning of this length in a line above: lines were cut out, so take "
                    "this one out as well"
                )
            beginning = earlier[:end]
        hashes = _decode_hashes(line.token_hashes, where)
        if len(hashes) != length - prefix_length:
            raise ConfigError(f"{where}: `token_hashes` must have a hash for each token after `prefix`")
        if len(line.block_hashes) != length // self._unit - prefix_length // self._unit:
            raise ConfigError(f"{where}: `block_hashes` must have a hash for each full unit of tokens after `prefix`")
        sequence = np.concatenate([beginning, hashes])
        for index, block_hash in enumerate(line.block_hashes, prefix_length // self._unit + 1):
            self._blocks[block_hash] = sequence, index * self._unit
        return sequence


def _decode_hashes(text: str, where: str) -> Ids:
    try:
        raw = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{where}: `token_hashes` is no base64: {error}") from error
    if len(raw) % HASH_BYTES:
        raise ConfigError(f"{where}: `token_hashes` must have {HASH_BYTES} bytes for each token")
    return np.frombuffer(raw, "<u2")


def _make_request(line: _LogLine, tokens: Ids, where: str) -> TraceRequest:
    if max((boundary[0] for boundary in line.boundaries), default=0) > line.num_in:
        raise ConfigError(f"{where}: `boundaries` must name tokens of the prompt")
    if line.finished_step < line.arrived_step:
        raise ConfigError(f"{where}: `finished_step` must not be before `arrived_step`")
    if line.cached_tokens + line.received_tokens > line.num_in:
        raise ConfigError(f"{where}: `cached_tokens` and `received_tokens` must be tokens of the prompt")
    # the last token of an answer is sampled and not computed, unless its client left while that was under way
    completed = line.finish in ("stop", "length")
    num_computed = max(line.num_in, line.num_in + line.num_out - completed)
    timeline = Timeline(
        scheduled_time=math.inf if line.scheduled is None else line.scheduled,
        finished_time=line.finished,
        arrived_step=line.arrived_step,
        finished_step=line.finished_step,
        completed=completed,
        priority=line.priority,
        received_end=line.cached_tokens + line.received_tokens if line.received_tokens else 0,
        kv_export=line.kv_export,
        bypasses_cache=line.bypasses_cache,
        cached_tokens=line.cached_tokens,
    )
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
