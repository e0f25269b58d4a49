"""The first line of a request log, as the server writes it and a replay reads it: the server and its rules."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from cairn.cache.layout import CacheLayout
from cairn.models.layer_sizes import ForwardSizes
from cairn.scheduler.state import SchedulingPolicy
from cairn.types import Positive, Size

VERSION = 3
"""Of the form. A log of another version is not read."""


@dataclass(frozen=True, slots=True)
class LoggedPolicy:
    """The cache policy of a server, by the names that its flags have. `placement`: `none` without prefix caching."""

    placement: str
    eviction: str
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """The server that wrote a log. `unit`: tokens of a block hash; `layout`, `budget_bytes`: of one rank;
    `forward_sizes`: of the whole model. The others: as its scheduler had them."""

    name: str = "request log"
    unit: Annotated[int, Meta(ge=1, le=1 << 16)]
    layout: CacheLayout
    forward_sizes: ForwardSizes
    budget_bytes: Size
    policy: LoggedPolicy
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    in_flight_sharing: bool
    scheduling_policy: SchedulingPolicy = "fcfs"
