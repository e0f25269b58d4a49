"""A trace: requests, and of a server's log the server that served them.

A prompt's *path* is the ids of its full units; the tokens after the last one are never hit.
"""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cairn.engine.request_log.header import LogHeader
from cairn.types import Boundary, Count, Keys, Positive

MAX_UNIT = 1 << 16
MAX_TOKENS = 1 << 24

Ids = NDArray[np.integer[Any]]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e15)]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a server served a request, as the line of its log says: in seconds since the start of the log, and in
    steps, which are counted as they are planned.

    `scheduled`: the request got its pages, infinite if it never did; `finished`: its answer was complete, or its client
    left. `arrived_step` and `finished_step`: steps planned before it arrived, and before it was finished. `in_flight`:
    steps that were out at once, at most, so far. `priority`: as the client gave it. `kv_export`: its pages were leased
    to another server. `bypasses_cache`: no lookup was made. `cached_tokens`: the server's own hit, to compare a replay
    with; `received_tokens`: of another server. `session`, `client`: hashes of their names, 0 for none.
    """

    finish: str
    arrived_step: Number
    finished_step: Number
    finished: Seconds
    scheduled: Seconds = math.inf
    in_flight: Positive = 1
    priority: int = 0
    kv_export: bool = False
    bypasses_cache: bool = False
    cached_tokens: Count = 0
    received_tokens: Count = 0
    session: Number = 0
    client: Number = 0

    def __post_init__(self) -> None:
        if self.finished_step < self.arrived_step:
            raise ValueError("`finished_step` must not be before `arrived_step`")

    @property
    def completed(self) -> bool:
        """Whether the answer ended by itself."""
        return self.finish in ("stop", "length")

    @property
    def received_end(self) -> int:
        """The number of prompt tokens available after another server's pages came, 0 if none came."""
        return self.cached_tokens + self.received_tokens if self.received_tokens else 0


UNLOGGED = Timeline("stop", 0, sys.maxsize, 0.0)
"""Of a request that no log knows: nobody waits for its end."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request, arrived `arrived` seconds after the trace's start.

    `num_prompt_tokens` counts what is after the path, too; `path` holds the ids of its full units, shape [u]; `answer`
    the ids of the units that are computed of the answer, shape [a], negative where nobody else has them.
    `boundaries`: ends of messages, ascending, rounded down to the unit, within the path. `name`: what the trace calls
    it, if anything. `namespace`: requests of different namespaces share nothing. `is_parallel_sample`: one of several
    answers to a prompt that is counted with another answer, so its own prompt is not counted. `timeline`: of a server's
    log; without one the request is served alone, at once, when it arrives. `session`: its number in the trace, None
    where sessions are not known. `tools_step`: its answer was a call, and so many steps of a log had been
    planned when the cache was told; None: it was none.
    """

    arrived: float
    num_prompt_tokens: int
    path: Ids
    answer: Ids
    boundaries: tuple[Boundary, ...] = ()
    name: str = ""
    namespace: str | None = None
    is_parallel_sample: bool = False
    timeline: Timeline = UNLOGGED
    session: int | None = None
    tools_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedServer(LogHeader):
    """What a log says of its server. `max_in_flight`: steps that were out at once at most, by its requests."""

    max_in_flight: int = 1


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they were scheduled; `unit`: tokens of one id. `header`: None if it is no server's
    log. `unserved`: requests of a log whose clients left before they got their pages, and that only kept others
    waiting."""

    name: str
    unit: int
    requests: tuple[TraceRequest, ...]
    header: ReplayedServer | None = None
    unserved: tuple[TraceRequest, ...] = ()


def key_tokens(ids: Ids, unit: int) -> Keys:
    """`unit` key tokens for each id, shape [len(ids) * unit]: equal for equal ids and for no others."""
    return (ids.astype(np.int64)[:, None] * unit + np.arange(unit, dtype=np.int64)).reshape(-1)
