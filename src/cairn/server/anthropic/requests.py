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
from cairn.server.openai.messages import MAX_MESSAGES, MAX_TOOLS, Cacheable, HostedType
from cairn.server.openai.requests import TemplateKwargs


class TextBlock(Cacheable):
    """Text. Citations are not read."""

    type: Literal["text"]
    text: Unicode


class Base64Source(TypedDict):
    """An image's bytes."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Text


class UrlSource(TypedDict):
    """Where an image is."""

    type: Literal["url"]
    url: Text


class ImageBlock(Cacheable):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class TextSource(TypedDict):
    """A document as text."""

    type: Literal["text"]
    data: Unicode


class FileSource(TypedDict):
    """A document's bytes. Only text is read: what has another type than text is refused."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(min_length=1, max_length=128)]
    data: Unicode


class ContentSource(TypedDict):
    """A document as blocks."""

    type: Literal["content"]
    content: Annotated[
        Annotated[Unicode, Tag("text")]
        | Annotated[list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], Tag("list")],
        kind_discriminator("text or a list of text and image blocks"),
    ]


class DocumentBlock(Cacheable):
    """A document of text, after its title and what it is about. Citations are not made."""

    type: Literal["document"]
    source: Annotated[TextSource | FileSource | ContentSource, Field(discriminator="type")]
    title: NotRequired[Unicode | None]
    context: NotRequired[Unicode | None]


class SearchResultBlock(Cacheable):
    """What a search has found: the text after its title and where it is from."""

    type: Literal["search_result"]
    source: Unicode
    title: Unicode
    content: list[TextBlock]


class ToolReferenceBlock(Cacheable):
    """The name of a tool that was looked for."""

    type: Literal["tool_reference"]
    tool_name: Text


class ToolUseBlock(Cacheable):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Text
    input: dict[str, Any] | None


ResultContent: TypeAlias = Annotated[
    Annotated[Unicode, Tag("text")]
    | Annotated[
        list[
            Annotated[
                TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
                Field(discriminator="type"),
            ]
        ],
        Tag("list"),
    ],
    kind_discriminator("text or a list of blocks"),
]


class ToolResultBlock(Cacheable):
    """What a tool call of the message before has given."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: NotRequired[ResultContent | None]
    is_error: NotRequired[bool | None]


class ThinkingBlock(TypedDict):
    """Reasoning of an earlier answer. Where it has no text, that is in its signature if this server has written it."""

    type: Literal["thinking"]
    thinking: Unicode
    signature: NotRequired[Unicode | None]


class RedactedThinkingBlock(TypedDict):
    """Encrypted reasoning, which only Anthropic can read: left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: Unicode


class HostedBlock(TypedDict):
    """What a tool that Anthropic runs itself was asked, and has found: left out of the prompt."""

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    ]


UserBlock: TypeAlias = Annotated[
    TextBlock | ImageBlock | ToolResultBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")
]
AssistantBlock: TypeAlias = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock | HostedBlock, Field(discriminator="type")
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


class AnthropicTool(Cacheable):
    """What the model may call."""

    type: NotRequired[Literal["custom"] | None]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: NotRequired[Unicode | None]
    input_schema: dict[str, Any]
    strict: NotRequired[bool | None]


class HostedTool(TypedDict):
    """A tool that Anthropic runs itself, or that its models know: they have types of their own. Left out."""

    type: Annotated[HostedType, Field(json_schema_extra={"not": {"const": "custom"}})]
    name: NotRequired[Unicode | None]


def _kind_of_tool(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    return "own" if value.get("type") in (None, "custom") else "hosted"


AnyTool: TypeAlias = Annotated[
    Annotated[AnthropicTool, Tag("own")] | Annotated[HostedTool, Tag("hosted")],
    kind_discriminator("an object", _kind_of_tool),
]


class AnthropicToolChoice(TypedDict):
    """Whether and what the model has to call. `name`: of the one tool, with type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[Text | None]
    disable_parallel_tool_use: NotRequired[bool | None]


class ThinkingEnabled(TypedDict):
    """Reasoning before the answer, of at most `budget_tokens`. `display`: whether its text is in the answer; it is
    never a summary."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    display: NotRequired[Literal["summarized", "omitted"] | None]


class ThinkingWithoutBudget(TypedDict):
    """No reasoning, or as much as the model wants."""

    type: Literal["disabled", "adaptive"]
    display: NotRequired[Literal["summarized", "omitted"] | None]


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
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingWithoutBudget, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class Metadata(BaseModel):
    """About the request. `user_id` changes nothing."""

    model_config = ConfigDict(extra="ignore")

    user_id: str | None = Field(None, max_length=4096)


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
