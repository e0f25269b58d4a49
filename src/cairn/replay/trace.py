"""A trace: requests, and of a server's log the server that served them.

A prompt's *path* is the ids of its full units; the tokens after the last one are never hit.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.models.layer_sizes import ForwardSizes
from cairn.types import Boundary, Keys

MAX_UNIT = 1 << 16
MAX_TOKENS = 1 << 24

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a server served a request: in seconds since the start of its log, and in steps, which are counted as they
    are planned.

    `scheduled_time`: the request got its pages, infinite if it never did; `finished_time`: its answer was complete, or
    its client left. `arrived_step` and `finished_step`: steps planned before it arrived, and before it was finished.
    `completed`: the answer ended with `stop` or `length`. `priority`: as the client gave it. `received_end`: the number
    of prompt tokens available after another server's pages came, 0 if none came; `kv_export`: its own were leased to
    another server. `bypasses_cache`: no lookup was made. `cached_tokens`: the server's own hit, to compare a replay
    with.
    """

    scheduled_time: float
    finished_time: float
    arrived_step: int
    finished_step: int
    completed: bool = True
    priority: int = 0
    received_end: int = 0
    kv_export: bool = False
    bypasses_cache: bool = False
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request, arrived `arrived` seconds after the trace's start.

    `num_prompt_tokens` counts what is after the path, too; `path` holds the ids of its full units, shape [u]; `answer`
    the ids of the units that are computed of the answer, shape [a], negative where nobody else has them.
    `boundaries`: ends of messages, ascending, rounded down to the unit, within the path. `name`: what the trace calls
    it, if anything. `namespace`: requests of different namespaces share nothing. `is_parallel_sample`: one of several
    answers to a prompt that is counted with another answer, so its own prompt is not counted. `timeline`: None if the
    trace is no server's log; then the request is served alone, at once, when it arrives. `session`: its number in the
    trace, None where sessions are not known.
    """

    arrived: float
    num_prompt_tokens: int
    path: Ids
    answer: Ids
    boundaries: tuple[Boundary, ...] = ()
    name: str = ""
    namespace: str | None = None
    is_parallel_sample: bool = False
    timeline: Timeline | None = None
    session: int | None = None

    @property
    def scheduled_time(self) -> float:
        """Seconds since the trace's start."""
        return self.arrived if self.timeline is None else self.timeline.scheduled_time


class LoggedPolicy(msgspec.Struct, frozen=True):
    """The cache policy of a server, by the names that its flags have."""

    placement: str
    eviction: str
    exact: bool


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The server that wrote a log. `layout`, `budget_bytes`: of one rank; `forward_sizes`: of the whole model.
    The others: as its
    scheduler had them."""

    layout: CacheLayout
    forward_sizes: ForwardSizes
    budget_bytes: int
    policy: LoggedPolicy
    max_num_seqs: int
    max_num_batched_tokens: int
    max_in_flight: int
    in_flight_sharing: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their `scheduled_time`; `unit`: tokens of one id. `header`: None if it is no server's
    log. `unserved`: requests of a log whose clients left before they got their pages, and that only kept others
    waiting."""

    name: str
    unit: int
    requests: tuple[TraceRequest, ...]
    header: LogHeader | None = None
    unserved: tuple[TraceRequest, ...] = ()


def key_tokens(ids: Ids, unit: int) -> Keys:
    """`unit` key tokens for each id, shape [len(ids) * unit]: equal for equal ids and for no others."""
    return (ids.astype(np.int64)[:, None] * unit + np.arange(unit, dtype=np.int64)).reshape(-1)
