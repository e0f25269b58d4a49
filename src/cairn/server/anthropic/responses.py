"""The response bodies of the Messages API."""

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from cairn.server.responses import CacheUse, Count


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

    type: NotRequired[Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
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
