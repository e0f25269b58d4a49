"""The bodies of POST /v1/messages and /v1/messages/count_tokens, as Anthropic defines them. Beside its fields vLLM's
`cache_salt`, `kv_transfer_params` and `chat_template_kwargs`."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, Tag
from typing_extensions import TypedDict

from cairn.engine.contract import RANGES
from cairn.server.openai.field_types import (
    LENIENT,
    CacheSalt,
    Int64,
    ModelName,
    StopText,
    Text,
    Unicode,
    in_range,
    kind_discriminator,
)
from cairn.server.openai.messages import MAX_MESSAGES, MAX_TOOLS, CacheControl
from cairn.server.openai.requests import TemplateKwargs


class TextBlock(TypedDict):
    """Text. Citations are not read."""

    type: Literal["text"]
    text: Unicode
    cache_control: NotRequired[CacheControl | None]


class Base64Source(TypedDict):
    """An image's bytes."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Text


class UrlSource(TypedDict):
    """Where an image is."""

    type: Literal["url"]
    url: Text


class ImageBlock(TypedDict):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: NotRequired[CacheControl | None]


class ToolUseBlock(TypedDict):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Text
    input: dict[str, Any]
    cache_control: NotRequired[CacheControl | None]


ResultContent: TypeAlias = Annotated[
    Annotated[Unicode, Tag("text")]
    | Annotated[list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], Tag("list")],
    kind_discriminator("text or a list of text and image blocks"),
]


class ToolResultBlock(TypedDict):
    """What a tool call of the message before has given."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: NotRequired[ResultContent | None]
    is_error: NotRequired[bool | None]
    cache_control: NotRequired[CacheControl | None]


class ThinkingBlock(TypedDict):
    """Reasoning of an earlier answer. The signature is not looked at: this server signs nothing."""

    type: Literal["thinking"]
    thinking: Unicode
    signature: NotRequired[Unicode | None]


class RedactedThinkingBlock(TypedDict):
    """Encrypted reasoning, which only Anthropic can read: left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: Unicode


UserBlock: TypeAlias = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]
SystemContent: TypeAlias = Annotated[
    Annotated[Unicode, Tag("text")] | Annotated[list[Annotated[TextBlock, Field()]], Tag("list")],
    kind_discriminator("text or a list of text blocks"),
]


class UserMessage(TypedDict):
    """The user's turn, the results of tool calls included."""

    role: Literal["user"]
    content: Annotated[
        Annotated[Unicode, Tag("text")] | Annotated[list[UserBlock], Tag("list")],
        kind_discriminator("text or a list of blocks"),
    ]


class AssistantMessage(TypedDict):
    """An earlier answer. As the last message it is what the answer begins with."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[Unicode, Tag("text")] | Annotated[list[AssistantBlock], Tag("list")],
        kind_discriminator("text or a list of blocks"),
    ]


class SystemMessage(TypedDict):
    """Instructions between turns."""

    role: Literal["system"]
    content: SystemContent


AnthropicMessage: TypeAlias = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class AnthropicTool(TypedDict):
    """What the model may call. Tools that Anthropic runs itself have other types and are refused."""

    type: NotRequired[Literal["custom"] | None]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: NotRequired[Unicode | None]
    input_schema: dict[str, Any]
    strict: NotRequired[bool | None]
    cache_control: NotRequired[CacheControl | None]


class AnthropicToolChoice(TypedDict):
    """Whether and what the model has to call. `name`: of the one tool, with type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[Text | None]
    disable_parallel_tool_use: NotRequired[bool | None]


class ThinkingEnabled(TypedDict):
    """Reasoning before the answer, of at most `budget_tokens`."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]


class ThinkingWithoutBudget(TypedDict):
    """No reasoning, or as much as the model wants."""

    type: Literal["disabled", "adaptive"]


class JsonOutput(TypedDict):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(TypedDict):
    """The form of the answer, and how much effort goes into it."""

    format: NotRequired[JsonOutput | None]
    effort: NotRequired[Literal["low", "medium", "high", "xhigh", "max"] | None]


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens."""

    model_config = LENIENT

    model: ModelName
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: SystemContent | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingWithoutBudget, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class Metadata(BaseModel):
    """About the request. `user_id` changes nothing."""

    model_config = ConfigDict(extra="ignore")

    user_id: str | None = Field(None, max_length=256)


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Int64 = Field(json_schema_extra=RANGES["max_tokens"].schema())
    temperature: float | None = in_range("temperature")
    top_p: float | None = in_range("top_p")
    top_k: Int64 | None = Field(None, json_schema_extra={"minimum": -1, "maximum": RANGES["top_k"].high})
    stop_sequences: list[StopText] | None = Field(None, json_schema_extra=RANGES["stop"].schema())
    stream: bool | None = False
    metadata: Metadata | None = None
    service_tier: str | None = Field(None, max_length=64)
    cache_salt: CacheSalt | None = in_range("cache_salt")
    kv_transfer_params: dict[str, Any] | None = None
