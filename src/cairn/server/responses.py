"""The response bodies. The OpenAPI document is made of these types, and tests check what is sent against them."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from cairn.engine.contract import CacheReport, EngineInfo

Count: TypeAlias = Annotated[int, Meta(ge=0)]
FinishName: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "repetition"]


class Usage(TypedDict):
    """Tokens of all prompts and answers. The details come when all answers have ended."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: NotRequired[dict[Literal["cached_tokens"], Count]]
    completion_tokens_details: NotRequired[dict[Literal["reasoning_tokens"], Count] | None]


class CacheUse(TypedDict):
    """What the prefix cache did, and why not more: a record, or a list of them for several prompts."""

    cache: CacheReport | list[CacheReport | None] | None


class TokenLogprob(TypedDict):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Count]
    top_logprobs: NotRequired[list[dict[str, Any]]]


class ChatLogprobs(TypedDict):
    """Of a chat's choice."""

    content: list[TokenLogprob]


class CompletionLogprobs(TypedDict):
    """Of a completion's choice, by token; null for a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptLogprob(TypedDict):
    """vLLM's, by token id."""

    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


class BaseChoice(TypedDict):
    """The fields of all choices."""

    index: Count
    finish_reason: FinishName | None


class WholeChoice(BaseChoice):
    """The fields of all complete choices."""

    stop_reason: str | int | None
    token_ids: list[Count] | None
    routed_experts: None


class CompletionChoice(WholeChoice):
    """One text."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[Count] | None


class CompletionChunkChoice(BaseChoice):
    """A piece of a text. `prompt_token_ids` come with the first one."""

    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: str | int | None
    prompt_token_ids: list[Count] | None
    token_ids: list[Count] | None


class CallText(TypedDict):
    """A tool call's name and arguments, or what a stream adds to them."""

    name: NotRequired[str]
    arguments: str


class AnsweredCall(TypedDict):
    """A tool call, or what a stream adds to the one with this `index`."""

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
    """A whole message, with `tool_calls` if it has some."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning_content: str | None
    reasoning: str | None
    tool_calls: NotRequired[list[AnsweredCall]]


class ChatChoice(WholeChoice):
    """One answer of a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(BaseChoice):
    """A piece of an answer of a chat. `token_ids` come with all but the first, `stop_reason` with the last."""

    delta: Delta
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[Count] | None]
    stop_reason: NotRequired[str | int | None]


class BaseResponse(TypedDict):
    """The fields of all responses and chunks."""

    id: str
    created: Count
    model: str


class WholeResponse(BaseResponse):
    """The fields of both responses."""

    usage: Usage
    service_tier: None
    system_fingerprint: str
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: None
    metrics: None
    cairn: CacheUse


class CompletionResponse(WholeResponse):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatResponse(WholeResponse):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[Count] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_text: str | None


class BaseChunk(BaseResponse):
    """The fields of all chunks; the optional ones come with the last chunks."""

    kv_transfer_params: NotRequired[dict[str, Any]]
    usage: NotRequired[Usage]
    system_fingerprint: NotRequired[str]
    cairn: NotRequired[CacheUse]


class CompletionChunk(BaseChunk):
    """One event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class ChatChunk(BaseChunk):
    """One event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[Count] | None]
    prompt_text: NotRequired[str | None]


class ContentBlock(TypedDict):
    """A block of a message's content: text, thinking or a tool call."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[Any]


class MessageUsage(TypedDict):
    """Anthropic's: the prompt is the sum of the first three."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesResponse(TypedDict):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    kv_transfer_params: dict[str, Any] | None
    cairn: CacheUse


class OpenedMessage(TypedDict):
    """A message as its stream begins."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: None
    stop_sequence: None
    usage: MessageUsage


class MessageDelta(TypedDict):
    """What is added to a block, or how a message has ended."""

    type: NotRequired[Literal["text_delta", "thinking_delta", "input_json_delta"]]
    text: NotRequired[str]
    thinking: NotRequired[str]
    partial_json: NotRequired[str]
    stop_reason: NotRequired[StopReason]
    stop_sequence: NotRequired[str | None]


class AnthropicErrorDetail(TypedDict):
    """`param` names the field."""

    type: str
    message: str
    param: str | None


class MessagesEvent(TypedDict):
    """One event of a message's stream: which fields it has depends on its type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: NotRequired[OpenedMessage]
    index: NotRequired[Count]
    content_block: NotRequired[ContentBlock]
    delta: NotRequired[MessageDelta]
    usage: NotRequired[MessageUsage]
    cairn: NotRequired[CacheUse]
    kv_transfer_params: NotRequired[dict[str, Any]]
    error: NotRequired[AnthropicErrorDetail]
    request_id: NotRequired[str | None]


class AnthropicErrorResponse(TypedDict):
    """An error, in Anthropic's form."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class CountTokensResponse(TypedDict):
    """POST /v1/messages/count_tokens."""

    input_tokens: Count


class OutputTextPart(TypedDict):
    """Text of an answer, with its tokens' log-probabilities if they were asked for."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


ItemState: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class AnswerItem(TypedDict):
    """An item of a response's output: a message, reasoning or a tool call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: ItemState
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputTextPart]]
    summary: NotRequired[list[Any]]
    encrypted_content: NotRequired[None]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokensDetails(TypedDict):
    """Of the prompt's tokens, those from the cache. `cache_write_tokens`: always 0, for no write is charged for."""

    cached_tokens: Count
    cache_write_tokens: Count


class ResponsesUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: dict[Literal["reasoning_tokens"], Count]
    total_tokens: Count


class ResponsesFailure(TypedDict):
    """Why there is no answer."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponsesResponse(TypedDict):
    """POST /v1/responses. What was asked for is said again; what is known at the end is null before."""

    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponsesFailure | None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[AnswerItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None
    user: str | None
    kv_transfer_params: NotRequired[dict[str, Any] | None]
    cairn: NotRequired[CacheUse]


class ResponsesEvent(TypedDict):
    """One event of a response's stream: which fields it has depends on its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: Count
    response: NotRequired[ResponsesResponse]
    item: NotRequired[AnswerItem]
    part: NotRequired[OutputTextPart]
    item_id: NotRequired[str]
    output_index: NotRequired[Count]
    content_index: NotRequired[Count]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    arguments: NotRequired[str]
    name: NotRequired[str]
    code: NotRequired[str]
    message: NotRequired[str]
    param: NotRequired[str | None]


class DeletedResponse(TypedDict):
    """DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    """GET /v1/responses/{response_id}/input_items: the items that the response's own body had."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


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


class TokenizeResponse(TypedDict):
    """POST /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class TokenizerInfoResponse(TypedDict):
    """GET /tokenizer_info, with the settings that tokenizer_config.json has."""

    tokenizer_class: str
    chat_template: NotRequired[Any]


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
