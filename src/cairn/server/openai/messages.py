"""A chat's messages, the parts of their content, and the tools that a model may call."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    with_config,
)
from typing_extensions import TypedDict

from cairn.server.openai.field_types import LENIENT, IgnoredUnlessText, Text, Unicode, kind_discriminator
from cairn.server.openai.file_text import read_file_text

MAX_MESSAGES = 16_384
MAX_PREDICTION_CHARS = 1 << 20
MAX_PREDICTION_PARTS = 1024
MAX_TOOLS = 1024


class CacheControl(TypedDict):
    """Anthropic's breakpoint: keep the prompt up to here in the cache."""

    type: Literal["ephemeral"]
    ttl: NotRequired[Literal["5m", "1h"] | None]


class Cacheable(TypedDict):
    """What may end a part of the prompt that is to be kept."""

    cache_control: NotRequired[CacheControl | None]


class TextPart(Cacheable):
    """A part of a message's content."""

    type: Literal["text"]
    text: Unicode


class ItemTextPart(Cacheable):
    """The same under the Responses API's names."""

    type: Literal["input_text", "output_text"]
    text: Unicode


class RefusalPart(Cacheable):
    """What an assistant has said in the place of an answer: text like any other."""

    type: Literal["refusal"]
    refusal: Unicode


class ThinkingPart(Cacheable):
    """What an assistant has thought aloud: text like any other, as in vLLM."""

    type: Literal["thinking"]
    thinking: Unicode


class ImageUrl(TypedDict):
    """Where an image is: a data URI, http or https. `detail` changes nothing."""

    url: NotRequired[Text | None]


class ImagePart(Cacheable):
    """An image in a message's content. `uuid`: a name for it, by which alone it may be sent again."""

    type: Literal["image_url"]
    image_url: NotRequired[ImageUrl | None]
    uuid: NotRequired[Text | None]


class InputImagePart(Cacheable):
    """The same as the Responses API has it, or as chats have it."""

    type: Literal["input_image"]
    image_url: NotRequired[
        Annotated[
            Annotated[Text, Tag("text")] | Annotated[ImageUrl, Tag("object")],
            kind_discriminator("a URL, or an object with one as url"),
        ]
    ]
    uuid: NotRequired[Text | None]


class FileContent(TypedDict):
    """A file of text: UTF-8 in base64, or a data URL. `filename` stands before it."""

    file_data: NotRequired[Unicode | None]
    filename: NotRequired[Unicode | None]


class FilePart(Cacheable):
    """A file in a message's content."""

    type: Literal["file"]
    file: FileContent


class InputFilePart(FileContent, Cacheable):
    """The same as the Responses API has it; `file_url` may be a data URL."""

    type: Literal["input_file"]
    file_url: NotRequired[Unicode | None]


def _plain_part(part: Any) -> Any:
    """The same text in the one form that what comes after knows. Raises PydanticCustomError for a file of no text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part["type"] in ("file", "input_file"):
        file = part.get("file", part)
        text = read_file_text(file.get("file_data") or file.get("file_url"), file.get("filename"))
        return {"type": "text", "text": text, "cache_control": part.get("cache_control")}
    if part["type"] in ("image_url", "input_image"):
        image = part.get("image_url")
        return part | {"image_url": {"url": image} if isinstance(image, str) else image}
    text = part.get("text", part.get("refusal", part.get("thinking")))
    return {"type": "text", "text": text, "cache_control": part.get("cache_control")}


def _any_of(schema: dict[str, Any]) -> None:
    """Its members exclude each other by their types; tools that draw wrong values of a schema get stuck on `oneOf`
    within `oneOf` within a list."""
    schema["anyOf"] = schema.pop("oneOf")


ContentPart: TypeAlias = Annotated[
    Annotated[Unicode, Tag("text")]
    | Annotated[
        TextPart | ItemTextPart | RefusalPart | ThinkingPart | ImagePart | InputImagePart | FilePart | InputFilePart,
        Field(discriminator="type"),
        Tag("object"),
    ],
    kind_discriminator("text or a part: an object with a type"),
    AfterValidator(_plain_part),
    Field(json_schema_extra=_any_of),
]

MessageContent: TypeAlias = Annotated[
    Annotated[Unicode, Tag("text")] | Annotated[list[ContentPart], Tag("list")],
    kind_discriminator("text or a list of parts"),
]


class Prediction(TypedDict):
    """A text that the answer is expected to be much like: tokens that go on as it does are computed several at a
    time. The answer is the same without."""

    type: Literal["content"]
    content: Annotated[
        Annotated[Unicode, Field(max_length=MAX_PREDICTION_CHARS), Tag("text")]
        | Annotated[list[TextPart], Field(max_length=MAX_PREDICTION_PARTS), Tag("list")],
        kind_discriminator("text or a list of text parts"),
    ]


def predicted_text(prediction: Prediction) -> str:
    """The whole text of a prediction."""
    content = prediction["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@with_config(ConfigDict(extra="ignore"))
class CalledFunction(TypedDict):
    """The function and the arguments of a tool call."""

    name: Text
    arguments: NotRequired[
        Annotated[
            Annotated[Unicode, Tag("text")] | Annotated[dict[str, Any], Tag("object")],
            kind_discriminator("JSON in text"),
        ]
        | None
    ]


class ToolCall(TypedDict):
    """A tool call of an earlier answer."""

    id: NotRequired[Annotated[Any, WithJsonSchema({"type": "string"})]]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class Message(BaseModel):
    """One message of a chat. `reasoning`: another name of `reasoning_content`."""

    model_config = LENIENT

    role: str = Field(min_length=1, max_length=64)
    content: MessageContent | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: IgnoredUnlessText = None
    reasoning: IgnoredUnlessText = None
    cache_control: CacheControl | None = None

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        """The parts of its content, those of texts with the type `text`; none where that is one text."""
        return cast(list[TextPart | ImagePart], self.content) if isinstance(self.content, list) else []


HostedType: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
"""The type of a tool that OpenAI or Anthropic run themselves, or that only their models know."""


class Function(Cacheable):
    """A tool's name, its description, and the JSON schema of its parameters."""

    name: Text
    description: NotRequired[Unicode | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class Tool(Cacheable):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


def as_sent(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Templates write tools with the client's order of fields, and with unknown fields."""
    handler(value)
    return value


ToolList: TypeAlias = Annotated[list[Annotated[Tool, WrapValidator(as_sent)]], Field(max_length=MAX_TOOLS)]


class AllowedTools(TypedDict):
    """Those of the tools that may be called: if the model likes, or one at least."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(TypedDict):
    """The prompt has all tools as ever, and the answer calls none but these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_tool_choice(value: Any) -> str | None:
    """The tag of a member of a union: `text`, `object` or `allowed_tools`."""
    if isinstance(value, dict):
        return "allowed_tools" if value.get("type") == "allowed_tools" else "object"
    return "text" if isinstance(value, str) else None


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[Tool, Tag("object")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    kind_discriminator(
        '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}', kind_of_tool_choice
    ),
]
