"""The process wire: msgpack frames between an engine client and its core, nothing else.

    client -> core   Submit, Abort, AwaitTools, ReleaseKvTransfer, StatsQuery, CacheQuery, Reset, Shutdown  (`ToCore`)
    core -> client   Ready, BuildRefused | Outputs, Refusal, StatsReply, CacheReply, ResetReply, Fatal  (`FromCore`)

The first frame to the core is its EngineConfig, as JSON; it answers Ready or BuildRefused. Key tokens travel as raw
bytes and are read in place (`key_tokens`), so 128k of them cost one copy and no parsing.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

import msgspec
from pydantic import ValidationError

from cairn.engine.contract import (
    MAX_SHOWN,
    CacheView,
    EngineConfig,
    EngineInfo,
    EngineStats,
    GenerateOutput,
    GenerateRequest,
)
from cairn.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    LeasesFull,
    ModelError,
    NotFound,
    Overloaded,
    QueueFull,
    RequestError,
)
from cairn.paths import check_encoding

MAX_FRAME_BYTES = 64 << 20
"""No frame is larger; sockets refuse one that claims to be. Room for a prompt of eight million tokens."""

MAX_ID = 256

RequestIdText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
Number = Annotated[int, msgspec.Meta(ge=0)]


_RefusalKind: TypeAlias = Literal["not_found", "leases_full", "queue_full", "overloaded", "invalid"]
_REQUEST_ERRORS: Mapping[_RefusalKind, type[NotFound | Overloaded | InvalidRequest]] = MappingProxyType(
    {
        "not_found": NotFound,
        "leases_full": LeasesFull,
        "queue_full": QueueFull,
        "overloaded": Overloaded,
        "invalid": InvalidRequest,
    }
)
"""The first that fits is what is told: a full queue is an overload, too."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Take these requests, all of them or none. Answered by Outputs that name them, or by one Refusal that names the
    first."""

    requests: Annotated[list[GenerateRequest], msgspec.Meta(min_length=1)]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget this request. Not answered."""

    request_id: RequestIdText


class AwaitTools(msgspec.Struct, frozen=True, tag="await_tools"):
    """Answer `index` to this request, which has ended, was a call. Not answered."""

    request_id: RequestIdText
    index: Number = 0


class ReleaseKvTransfer(msgspec.Struct, frozen=True, tag="release_kv_transfer"):
    """Nobody here is going to fetch what these `kv_transfer_params`, as JSON, speak of. Not answered."""

    kv_transfer_params: bytes


class StatsQuery(msgspec.Struct, frozen=True, tag="stats"):
    """Answered by the StatsReply with the same number."""

    number: Number


class CacheQuery(msgspec.Struct, frozen=True, tag="cache"):
    """Answered, some steps later, by the CacheReply with the same number."""

    number: Number
    max_paths: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHOWN)]


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Drop what is cached. Answered by the ResetReply with the same number."""

    number: Number


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End now. The client drains first where it wants to."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The core has been built."""

    info: EngineInfo


class BuildRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The core, or a rank of it, cannot be built from this configuration."""

    kind: Literal["config", "model"]
    text: str

    @classmethod
    def of(cls, error: ConfigError) -> "BuildRefused":
        return cls("model" if isinstance(error, ModelError) else "config", str(error))

    def error(self) -> ConfigError:
        return ModelError(self.text) if self.kind == "model" else ConfigError(self.text)


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step put out. Sent after every step, also when empty: the core's sign of life."""

    outputs: list[GenerateOutput]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The core did not take a request, nor any that came with it."""

    request_id: RequestIdText
    kind: _RefusalKind
    message: str
    param: str | None

    @classmethod
    def of(cls, request_id: str, error: RequestError) -> "Refusal":
        kinds = (kind for kind, form in _REQUEST_ERRORS.items() if isinstance(error, form))
        return cls(request_id, next(kinds, "invalid"), error.message, error.param)

    def error(self) -> RequestError:
        return _REQUEST_ERRORS[self.kind](self.message, self.param)


class StatsReply(msgspec.Struct, frozen=True, tag="stats_reply"):
    """The answer to the StatsQuery with this number."""

    number: Number
    stats: EngineStats


class CacheReply(msgspec.Struct, frozen=True, tag="cache_reply"):
    """The answer to the CacheQuery with this number."""

    number: Number
    view: CacheView


class ResetReply(msgspec.Struct, frozen=True, tag="reset_reply"):
    """The answer to the Reset with this number. `held_pages`: those that stood in its way."""

    number: Number
    held_pages: Number


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The core, or a rank of it, has ended, and why. Its last frame."""

    text: str


ToCore: TypeAlias = Submit | Abort | AwaitTools | ReleaseKvTransfer | StatsQuery | CacheQuery | Reset | Shutdown
FromCore: TypeAlias = Ready | BuildRefused | Outputs | Refusal | StatsReply | CacheReply | ResetReply | Fatal

Message = TypeVar("Message")


class Frames(Generic[Message]):
    """Messages of one direction as msgpack bytes. `enc_hook`: bytes of what msgspec does not know."""

    def __init__(
        self, decoder: "msgspec.msgpack.Decoder[Message]", enc_hook: Callable[[object], bytes] | None = None
    ) -> None:
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)

    def encode(self, message: Message) -> bytes:
        """Raises InvalidRequest when the message is larger than a frame may be, or has text that is no Unicode."""
        try:
            frame = self._encoder.encode(message)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the request has text that is not valid Unicode: {error.reason}") from error
        if len(frame) > MAX_FRAME_BYTES:
            raise InvalidRequest(f"the request takes {len(frame)} bytes; at most {MAX_FRAME_BYTES} can be sent")
        return frame

    def decode(self, frame: bytes) -> Message:
        """Raises EngineDead when the frame does not follow the schema: nothing sensible can come after it."""
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise EngineDead(f"a frame of {len(frame)} bytes on the engine's wire cannot be read: {error}") from error


def frames_to_core() -> Frames[ToCore]:
    return Frames(msgspec.msgpack.Decoder(ToCore))


def frames_from_core() -> Frames[FromCore]:
    return Frames(msgspec.msgpack.Decoder(FromCore))


def encode_config(config: EngineConfig) -> bytes:
    """The first frame to the core. Raises ConfigError for a path that is no UTF-8, as a cache's folder may be."""
    for name, value in config.model_dump().items():
        try:
            check_encoding(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}: {value!r}") from None
    return config.model_dump_json().encode()


def decode_config(frame: bytes) -> EngineConfig:
    """Raises EngineDead when the frame is none."""
    try:
        return EngineConfig.model_validate_json(frame)
    except ValidationError as error:
        raise EngineDead(f"the engine's configuration cannot be read: {error}") from error
