"""The first line of a server's own request log: what the server was and by which rules it served, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.errors import ConfigError
from cairn.models.forward_sizes import ForwardSizes
from cairn.replay.traces import MAX_TOKENS, MAX_UNIT

__all__ = ["Count", "LogHeader", "LoggedPolicy", "Positive", "converted", "read_header"]

VERSION = 1
MAX_BYTES = 1 << 50
MAX_ELEMENTS = 1 << 50
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Positive = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]


class LoggedPolicy(msgspec.Struct, frozen=True):
    """The server's rules, by the names that its flags have."""

    placement: str
    eviction: str
    exact: bool


@dataclass(frozen=True, slots=True)
class LogHeader:
    """`unit`: how many tokens further each hash of a line reaches. `layout`, `budget_bytes`: of one rank;
    `forward_sizes`: of the whole model, None where the log does not say."""

    name: str
    unit: int
    layout: CacheLayout
    forward_sizes: ForwardSizes | None
    budget_bytes: int
    policy: LoggedPolicy
    max_num_batched_tokens: int


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
    score_numbers: Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]


class _Header(msgspec.Struct, frozen=True):
    unit: Annotated[int, Meta(ge=1, le=MAX_UNIT)]
    version: int
    layout: _Layout
    budget_bytes: Size
    policy: LoggedPolicy
    max_num_batched_tokens: Positive
    name: str = "request log"
    forward_sizes: Any = None


def read_header(first: Mapping[str, Any], where: str) -> LogHeader:
    """From the first line, which stands at `where`. Raises ConfigError naming the line and the field."""
    told: _Header = converted(first, _Header, where)
    if told.version != VERSION:
        raise ConfigError(f"{where}: `version` {told.version} is not {VERSION}: read it with the cairn that wrote it")
    return LogHeader(
        name=told.name,
        unit=told.unit,
        layout=_layout(told.layout, where),
        forward_sizes=None if told.forward_sizes is None else _forward_sizes(told.forward_sizes, where),
        budget_bytes=told.budget_bytes,
        policy=told.policy,
        max_num_batched_tokens=told.max_num_batched_tokens,
    )


def converted(value: object, form: Any, where: str) -> Any:
    """`value`, parsed JSON, as `form` has it. Raises ConfigError naming `where` and the field."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _layout(told: _Layout, where: str) -> CacheLayout:
    groups = tuple(AttentionGroup(group.name, group.tokens_per_page, group.reach) for group in told.groups)
    sizes = {name: getattr(told, name) for name in told.__struct_fields__ if name != "groups"}
    try:
        return CacheLayout(groups=groups, **sizes)
    except ValueError as error:
        raise ConfigError(f"{where}: `layout`: {error}") from error


def _forward_sizes(told: object, where: str) -> ForwardSizes:
    try:
        sizes = msgspec.convert(told, _ForwardSizes)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: `forward_sizes`: {error}; write it as the server did, or take it out and name the model with "
            "--layout"
        ) from error
    return ForwardSizes(sizes.active_weights, sizes.score_numbers)
