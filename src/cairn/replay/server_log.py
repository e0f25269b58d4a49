"""Reads a server's own request log as a trace; `cairn.engine.request_log.log` describes its fields.

The log has no tokens but a keyed hash of each token and all tokens before it. The hashes serve as token ids: two
sequences share the first n hashes iff the originals share the first n tokens.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from cairn.errors import ConfigError
from cairn.replay.trace import Count, Ids, LogHeader, Number, Positive, Seconds, Timeline, Trace, TraceRequest
from cairn.types import Boundary, BoundaryKind

__all__ = ["read_server_log"]

VERSION = 3
HASH_BYTES = 2


class _Prompt(msgspec.Struct, frozen=True, rename={"num_in": "in", "num_out": "out"}):
    """What a line says of prompt and answer; a `Timeline` is the rest of it."""

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

    def __post_init__(self) -> None:
        if max((boundary[0] for boundary in self.boundaries), default=0) > self.num_in:
            raise ValueError("`boundaries` must name tokens of the prompt")
        if len(self.token_hashes) % HASH_BYTES:
            raise ValueError(f"`token_hashes` must have {HASH_BYTES} bytes for each token")


def read_server_log(where: str, first: Mapping[str, Any], lines: Iterable[tuple[str, Mapping[str, Any]]]) -> Trace:
    """The trace of a log with this first line, at `where`, and these others. They are sorted by the
    time when they were scheduled; those that never were are `unserved`. Raises ConfigError naming the line and the
    field."""
    if first.get("version") != VERSION:
        raise ConfigError(
            f"{where}: `version` {first.get('version')!r:.40} is not {VERSION}: another cairn has written this log; "
            "record a new one with `cairn serve --request-log FILE`"
        )
    with _naming(where):
        header = msgspec.convert(first, LogHeader)
    sequences, requests = _Sequences(header.unit), list[TraceRequest]()
    for place, raw in lines:
        with _naming(place):
            requests.append(_make_request(raw, sequences))
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


def _make_request(raw: Mapping[str, Any], sequences: _Sequences) -> TraceRequest:
    """Of a line. Raises ValueError naming the field."""
    line, timeline = msgspec.convert(raw, _Prompt), msgspec.convert(raw, Timeline)
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
