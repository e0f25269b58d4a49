"""The response bodies that belong to no API, and what all of them have.

The OpenAPI document is made of these types and of those in the APIs' own `responses`. Tests check what is sent against
them.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from cairn.engine.contract import CacheReport, EngineInfo

Count: TypeAlias = Annotated[int, Meta(ge=0)]


class CacheUse(TypedDict):
    """What the prefix cache did, and why not more: a record, or a list of them for several prompts."""

    cache: CacheReport | list[CacheReport | None] | None


class ErrorDetail(TypedDict):
    """`param` names the field; `code`: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: Annotated[int, Meta(ge=400, lt=600)]


class ErrorResponse(TypedDict):
    """An error, in vLLM's form."""

    error: ErrorDetail


class StatusResponse(TypedDict):
    """Why a probe fails."""

    status: str


class TokenizerInfoResponse(TypedDict):
    """GET /tokenizer_info, with the settings that tokenizer_config.json has."""

    tokenizer_class: str
    chat_template: NotRequired[Any]


class ModelCard(TypedDict):
    """The model that is served. `root`: where it was loaded from."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: Literal["cairn"]
    root: str
    parent: None
    max_model_len: Count


class ModelList(TypedDict):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class LoadResponse(TypedDict):
    """GET /load: open requests, waiting ones included."""

    server_load: Count


class VersionResponse(TypedDict):
    """GET /version."""

    version: str


class ServerInfoResponse(TypedDict):
    """GET /server_info: the engine's configuration and the limits of requests. No keys."""

    version: str
    model_name: str
    engine: EngineInfo
    limits: dict[str, float]


class CacheHead(TypedDict):
    """GET /cache: the fields before those of a CacheView."""

    object: Literal["cairn.cache"]
    server: dict[str, Any]
