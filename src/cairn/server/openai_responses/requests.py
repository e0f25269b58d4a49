"""The body of POST /v1/responses, as OpenAI defines it, with the fields that vLLM adds."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, get_args

from pydantic import BeforeValidator, Field, Tag, WrapValidator
from typing_extensions import TypedDict

from cairn.server.openai.field_types import (
    Int64,
    JsonSchema,
    NumLogprobs,
    Text,
    Unicode,
    in_range,
    kind_discriminator,
)
from cairn.server.openai.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Cacheable,
    HostedType,
    InputFilePart,
    ItemTextPart,
    RefusalPart,
    TextPart,
    as_sent,
    kind_of_tool_choice,
)
from cairn.server.openai.requests import ProcessorFields, ReasoningEffort, SharedFields, TemplateKwargs

_MAX_PAIRS = 16
_NOTHING = (
    "background_options context_management conversation ec_transfer_params guided_choice guided_grammar guided_json "
    "guided_regex max_completion_tokens max_tokens messages min_tokens moderation n previous_input_messages "
    "prompt prompt_logprobs reasoning_effort response_format truncate_prompt_tokens"
)
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_NOTHING.split(), (None,)),
        **dict.fromkeys(("logprobs", "watermarking"), (None, False)),
        **dict.fromkeys(("bad_words", "functions"), (None, [])),
        "media_io_kwargs": (None, {}),
    }
)
"""Fields that have no meaning or no support here, with the values that change nothing."""

ItemId: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]

# -- input -------------------------------------------------------------------------------------------------------------


class InputImage(Cacheable):
    """An image: a data URI, http or https. `detail` changes nothing."""

    type: Literal["input_image"]
    image_url: Text
    detail: NotRequired[Literal["auto", "low", "high", "original"] | None]


InputPart: TypeAlias = Annotated[TextPart | ItemTextPart | InputImage | InputFilePart, Field(discriminator="type")]
MessagePart: TypeAlias = Annotated[
    TextPart | ItemTextPart | InputImage | InputFilePart | RefusalPart, Field(discriminator="type")
]


class Item(TypedDict):
    """What items of inputs and outputs have in common."""

    id: NotRequired[ItemId | None]
    status: NotRequired[ItemStatus | None]


class MessageItem(Item):
    """A message. `developer` means `system`; images are the user's, refusals the assistant's. The assistant's as the
    last item, with a status that is not completed, is what the answer begins with."""

    type: NotRequired[Literal["message"]]
    role: Literal["user", "system", "developer", "assistant"]
    content: Annotated[
        Annotated[Unicode, Tag("text")] | Annotated[list[MessagePart], Tag("list")],
        kind_discriminator("text or a list of parts"),
    ]


ToolOutput: TypeAlias = Annotated[
    Annotated[Unicode, Tag("text")]
    | Annotated[list[InputPart], Tag("list")]
    | Annotated[dict[str, Any], Tag("object")],
    kind_discriminator("text, a list of parts or an object"),
]
"""An object is its JSON."""


class FunctionCallItem(Item):
    """A tool call of an earlier answer. `arguments`: JSON; of a call that was cut off they are none."""

    type: Literal["function_call"]
    call_id: ItemId
    name: Text
    namespace: NotRequired[Unicode | None]
    arguments: Unicode | None


class FunctionCallOutputItem(Item):
    """What a tool call has given."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ItemId
    output: ToolOutput


class CustomToolCallItem(Item):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: ItemId
    name: Text
    namespace: NotRequired[Unicode | None]
    input: Unicode


class ShellAction(TypedDict):
    """A command, and how it is run; its environment is not read."""

    type: NotRequired[Literal["exec"]]
    command: list[Unicode]
    env: NotRequired[dict[str, Unicode] | None]
    timeout_ms: NotRequired[Int64 | None]
    user: NotRequired[Unicode | None]
    working_directory: NotRequired[Unicode | None]


class LocalShellCallItem(Item):
    """A call of the local shell; without `call_id` its `id` is what the output names."""

    type: Literal["local_shell_call"]
    action: ShellAction
    call_id: NotRequired[ItemId | None]


class LocalShellOutputItem(Item):
    """What it has given. `id`: that of the call, where there is no `call_id`."""

    type: Literal["local_shell_call_output"]
    output: ToolOutput
    call_id: NotRequired[ItemId | None]


_HostedItemType: TypeAlias = Literal[
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_summary",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
]
HOSTED_ITEMS = frozenset(get_args(_HostedItemType))


class HostedItem(TypedDict):
    """What tools that OpenAI runs itself have done, and summaries that only OpenAI can read: left out of the prompt."""

    type: _HostedItemType
    id: NotRequired[ItemId | None]


class ReasoningText(TypedDict):
    """A piece of reasoning, or of what is said of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: Unicode


class ReasoningItem(Item):
    """Reasoning of an earlier answer; without `content`, what this server has encrypted is read, and without that the
    summary. What others have encrypted is left out."""

    type: Literal["reasoning"]
    summary: NotRequired[list[ReasoningText] | None]
    content: NotRequired[list[ReasoningText] | None]
    encrypted_content: NotRequired[Unicode | None]


class ItemReference(TypedDict):
    """An item of a response that this server has stored."""

    type: NotRequired[Literal["item_reference"]]
    id: ItemId


def _name_type(value: Any) -> Any:
    """Messages, and references, may come without a type."""
    if isinstance(value, dict) and value.get("type") is None:
        return value | {"type": "message" if "role" in value or "id" not in value else "item_reference"}
    return value


InputItem: TypeAlias = Annotated[
    Annotated[
        MessageItem
        | FunctionCallItem
        | FunctionCallOutputItem
        | CustomToolCallItem
        | LocalShellCallItem
        | LocalShellOutputItem
        | ReasoningItem
        | ItemReference
        | HostedItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_name_type),
]

# -- tools -------------------------------------------------------------------------------------------------------------


class FunctionTool(Cacheable):
    """A function that the model may call."""

    type: Literal["function"]
    name: Text
    description: NotRequired[Unicode | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class GrammarFormat(TypedDict):
    """What a custom tool's text has to be. The model is told, and nothing holds it to that."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Unicode


class AnyTextFormat(TypedDict):
    """Any text."""

    type: Literal["text"]


class CustomTool(Cacheable):
    """A tool that is called with a text: a function with one text, `input`, to the model."""

    type: Literal["custom"]
    name: Text
    description: NotRequired[Unicode | None]
    format: NotRequired[Annotated[GrammarFormat | AnyTextFormat, Field(discriminator="type")] | None]


class LocalShellTool(TypedDict):
    """The client's shell."""

    type: Literal["local_shell"]


_OWN_TOOLS = ("function", "custom", "local_shell", "namespace")


class HostedResponsesTool(TypedDict):
    """A tool that OpenAI runs itself, or that its models know. Left out."""

    type: Annotated[HostedType, Field(json_schema_extra={"not": {"enum": [*_OWN_TOOLS]}})]


def _kind_of_tool(value: Any) -> str | None:
    """A tag of the unions below; without a type, as what most tools are."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "function")
    return kind if isinstance(kind, str) and kind in _OWN_TOOLS else "hosted"


class NamespaceTool(TypedDict):
    """Tools under one name. They are called by their own names, or with this one in front where another tool has the
    same."""

    type: Literal["namespace"]
    name: Text
    description: NotRequired[Unicode | None]
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, WrapValidator(as_sent), Tag("function")]
                | Annotated[CustomTool, Tag("custom")]
                | Annotated[LocalShellTool, Tag("local_shell")]
                | Annotated[HostedResponsesTool, Tag("hosted")],
                kind_discriminator("a tool: an object with a type", _kind_of_tool),
            ]
        ],
        Field(max_length=MAX_TOOLS),
    ]


ResponsesTool: TypeAlias = Annotated[
    Annotated[FunctionTool, WrapValidator(as_sent), Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[LocalShellTool, Tag("local_shell")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedResponsesTool, Tag("hosted")],
    kind_discriminator("a tool: an object with a type", _kind_of_tool),
]


class FunctionChoice(TypedDict):
    """The one function, or custom tool, that has to be called."""

    type: Literal["function", "custom"]
    name: Text
    namespace: NotRequired[Unicode | None]


class OtherChoice(TypedDict):
    """The local shell; or a tool that nobody here can run: then the model may choose."""

    type: Annotated[HostedType, Field(json_schema_extra={"not": {"enum": ["function", "custom", "allowed_tools"]}})]


def _kind_of_choice(value: Any) -> str | None:
    kind = kind_of_tool_choice(value)
    is_named = not isinstance(value, dict) or value.get("type", "function") in ("function", "custom")
    return kind if kind != "object" or is_named else "other"


NamedTool: TypeAlias = Annotated[
    Annotated[FunctionChoice, Tag("object")] | Annotated[OtherChoice, Tag("other")],
    kind_discriminator('{"type": "function", "name": ...}', _kind_of_choice),
]


class AllowedFunctionsChoice(TypedDict):
    """The prompt has all tools as ever, and the answer calls none but these: if the model likes, or one at least."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


ResponsesToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[FunctionChoice, Tag("object")]
    | Annotated[OtherChoice, Tag("other")]
    | Annotated[AllowedFunctionsChoice, Tag("allowed_tools")],
    kind_discriminator('"none", "auto", "required" or {"type": "function", "name": ...}', _kind_of_choice),
]

# -- the form of an answer ---------------------------------------------------------------------------------------------


class PlainTextFormat(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaTextFormat(TypedDict):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    schema: JsonSchema
    name: NotRequired[Annotated[str, Field(max_length=256)] | None]
    description: NotRequired[Unicode | None]
    strict: NotRequired[bool | None]


class TextConfig(TypedDict):
    """The form of the answer. `verbosity` changes nothing."""

    format: NotRequired[Annotated[PlainTextFormat | SchemaTextFormat, Field(discriminator="type")] | None]
    verbosity: NotRequired[Literal["low", "medium", "high"] | None]


class ReasoningConfig(TypedDict):
    """How much to reason. No summaries are made: `summary` and `generate_summary` change nothing."""

    effort: NotRequired[ReasoningEffort | None]
    summary: NotRequired[Literal["auto", "concise", "detailed"] | None]
    generate_summary: NotRequired[Literal["auto", "concise", "detailed"] | None]


Includable: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "web_search_call.results",
    "web_search_call.action.sources",
]
"""Log-probabilities are included, and reasoning in a form that this server can read again. Images are there anyway, and
the tools that OpenAI runs itself are not here: the others change nothing."""


class ResponsesStreamOptions(TypedDict):
    """`include_obfuscation` changes nothing: nothing is added to events."""

    include_obfuscation: NotRequired[bool | None]


class ResponsesRequest(SharedFields):
    """POST /v1/responses.

    `enable_response_messages`: the response has prompt and answer as the model has seen and written them.
    `max_tool_calls` bounds calls of tools that OpenAI runs itself, of which there are none here; `user`,
    `safety_identifier` and `service_tier` change nothing either. `prompt_cache_key`: as in chats.
    """

    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("list")],
        kind_discriminator("text or a list of items"),
    ]
    instructions: Unicode | None = None
    previous_response_id: ItemId | None = None
    background: bool | None = False
    store: bool | None = True
    stream_options: ResponsesStreamOptions | None = None
    tools: list[ResponsesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: Int64 | None = Field(None, json_schema_extra={"minimum": 1})
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool | None = True
    include: list[Includable] | None = Field(None, max_length=16)
    truncation: Literal["auto", "disabled"] | None = "disabled"
    max_output_tokens: Int64 | None = in_range("max_tokens")
    top_logprobs: NumLogprobs | None = None
    enable_response_messages: bool | None = False
    chat_template_kwargs: TemplateKwargs | None = None
    mm_processor_kwargs: ProcessorFields | None = None
    user: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=256)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=_MAX_PAIRS),
        ]
        | None
    ) = None
