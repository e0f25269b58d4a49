"""The bodies of answers. The OpenAPI document is made of these types, and tests hold what is sent to them."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from cairn.engine.contract import CacheReport, EngineInfo

Count: TypeAlias = Annotated[int, Meta(ge=0)]
FinishName: TypeAlias = Literal["stop", "length", "tool_calls", "abort"]


class Usage(TypedDict):
    """Tokens of all prompts and answers; the details come when all answers have ended."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: NotRequired[dict[Literal["cached_tokens"], Count]]


class CacheUse(TypedDict):
    """What the prefix cache did, and why not more: a record, or a list of them for several prompts."""

    cache: CacheReport | list[CacheReport | None] | None


class TokenLogprob(TypedDict):
    """One token, and how likely it was held."""

    token: str
    logprob: float
    bytes: list[Count]
    top_logprobs: NotRequired[list[dict[str, Any]]]


class ChatLogprobs(TypedDict):
    """Of a chat's choice."""

    content: list[TokenLogprob]


class CompletionLogprobs(TypedDict):
    """Of a completion's choice, token by token; null where nothing is known of a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptLogprob(TypedDict):
    """vLLM's, by token id."""

    logprob: float
    rank: Count
    decoded_token: str


class AnyChoice(TypedDict):
    """What choices of both endpoints have."""

    index: Count
    finish_reason: FinishName | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[Count]]


class CompletionChoice(AnyChoice):
    """One text, or a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]
    prompt_token_ids: NotRequired[list[Count]]


class CallText(TypedDict):
    """A tool call's name and arguments, or what a stream adds to them."""

    name: NotRequired[str]
    arguments: str


class AnsweredCall(TypedDict):
    """A tool call, or what a stream adds to one: its `index` tells which."""

    index: NotRequired[Count]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallText


class Delta(TypedDict, total=False):
    """What a stream adds to a message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    reasoning: str
    tool_calls: list[AnsweredCall]


class AnswerMessage(TypedDict):
    """A whole message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[AnsweredCall]]


class ChatChoice(AnyChoice):
    """One answer of a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(AnyChoice):
    """A piece of an answer of a chat."""

    delta: Delta
    logprobs: ChatLogprobs | None


class AnyAnswer(TypedDict):
    """What all answers and their pieces have."""

    id: str
    created: Count
    model: str


class CompletionResponse(AnyAnswer):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | None
    cairn: CacheUse


class ChatResponse(AnyAnswer):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | None
    cairn: CacheUse
    prompt_token_ids: NotRequired[list[Count]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class AnyChunk(AnyAnswer):
    """What the pieces of all streams have; the last ones have the rest."""

    kv_transfer_params: NotRequired[dict[str, Any]]
    usage: NotRequired[Usage]
    cairn: NotRequired[CacheUse]


class CompletionChunk(AnyChunk):
    """One event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatChunk(AnyChunk):
    """One event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[Count]]


class ErrorDetail(TypedDict):
    """`param` names the field."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class ErrorResponse(TypedDict):
    """OpenAI's error object."""

    error: ErrorDetail


class StatusResponse(TypedDict):
    """Why a probe fails."""

    status: str


class TokenizeResponse(TypedDict):
    """POST /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: None


class DetokenizeResponse(TypedDict):
    """POST /detokenize."""

    prompt: str


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
    """GET /load: requests that are being answered, those that wait included."""

    server_load: Count


class VersionResponse(TypedDict):
    """GET /version."""

    version: str


class ServerInfoResponse(TypedDict):
    """GET /server_info: what was built, and the limits of requests. No keys."""

    version: str
    model_name: str
    engine: EngineInfo
    limits: dict[str, float]


class CacheHead(TypedDict):
    """GET /cache: what stands before the fields of a CacheView."""

    object: Literal["cairn.cache"]
    server: dict[str, Any]
