"""The forms that an answer may be held to, as OpenAI's `response_format` and vLLM's `structured_outputs` name them."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from cairn.server.openai.field_types import Choices, JsonSchema, Text


class PlainFormat(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaHolder(TypedDict, total=False):
    """The JSON schema of `response_format`. `json_schema`: another name of `schema`."""

    schema: JsonSchema
    json_schema: JsonSchema


class JsonSchemaFormat(TypedDict):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaHolder


class StructuralTagFormat(TypedDict):
    """Forms of parts of an answer, as xgrammar has them: `format`, or the older `structures` and `triggers`. Checked
    when it is compiled."""

    type: Literal["structural_tag"]
    format: NotRequired[dict[str, Any] | None]
    structures: NotRequired[list[dict[str, Any]] | None]
    triggers: NotRequired[list[Text] | None]


ResponseFormat: TypeAlias = Annotated[PlainFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")]


StructuralTagText: TypeAlias = Annotated[Any, WithJsonSchema({"type": ["object", "string"]})]
"""As an object or as text."""


class StructuredOutputs(TypedDict, total=False):
    """vLLM's: one of these. Other fields say how, not what, and are ignored."""

    json: JsonSchema
    regex: Text | None
    choice: Choices | None
    grammar: Text | None
    json_object: bool | None
    structural_tag: StructuralTagText | None
