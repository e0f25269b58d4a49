"""The response bodies of the Responses API."""

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from cairn.server.openai.responses import RequestMetrics, TokenLogprob
from cairn.server.responses import CacheUse, Count


class OutputTextPart(TypedDict):
    """Text of an answer, with its tokens' log-probabilities if they were asked for."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


ItemState: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ShellActionTaken(TypedDict):
    """A command of the local shell; without one where the call was cut off."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    timeout_ms: int | None
    user: None
    working_directory: str | None


class AnswerItem(TypedDict):
    """An item of a response's output: a message, reasoning or a tool call."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call", "local_shell_call"]
    status: ItemState
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputTextPart]]
    summary: NotRequired[list[Any]]
    encrypted_content: NotRequired[str | None]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    action: NotRequired[ShellActionTaken]


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


class RawMessage(TypedDict):
    """With `enable_response_messages`: what the model has read, or written."""

    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[Count]


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
    input_messages: list[RawMessage] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[AnswerItem]
    output_messages: list[RawMessage] | None
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
    metrics: NotRequired[RequestMetrics]
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
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
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
    input: NotRequired[str]
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
