"""The types of fields that request bodies share: texts, token ids, prompts, stop strings. The OpenAPI document is made
of them. The engine checks the ranges of numbers (`RANGES`); here they are only documented."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import msgspec
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from cairn.engine.contract import RANGES

_INT64 = 1 << 63

WRONG_KIND = "wrong_kind"
"""pydantic's error type for a value of no type that a union has."""

NO_PROMPT = "no_prompt"

LENIENT = ConfigDict(extra="allow", allow_inf_nan=False)
"""Numbers and booleans may be written in other types that say the same, by pydantic's table of conversions, as vLLM has
it: 5 as 5.0, "5" or "5.0", true as 1 or "true". Texts may not."""

Unicode: TypeAlias = Annotated[str, Field(min_length=0)]
"""Text without half a surrogate pair, which JSON can spell and no tokenizer can read: pydantic looks for one only where
a text has bounds."""

Text: TypeAlias = Annotated[str, Field(min_length=1)]
CacheSalt: TypeAlias = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
"""Any text without control characters: blanks may be in it, as in vLLM."""
Int64: TypeAlias = Annotated[
    int, Field(ge=-_INT64, le=_INT64 - 1), WithJsonSchema({"type": "integer", "format": "int64"})
]
"""What the engine's messages can carry."""

_TokenId: TypeAlias = Annotated[
    int, Field(ge=-_INT64, le=_INT64 - 1), WithJsonSchema({"type": "integer", "minimum": 0, "format": "token-id"})
]
_Int64s: TypeAlias = list[Annotated[int, msgspec.Meta(ge=-_INT64, le=_INT64 - 1)]]


def _token_ids(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """A prompt may have a hundred thousand: msgspec checks them in a third of the time. What it refuses is checked
    again, to find out where it is wrong."""
    try:
        return msgspec.convert(value, _Int64s)
    except msgspec.ValidationError:
        return handler(value)


TokenIds: TypeAlias = Annotated[list[_TokenId], Field(fail_fast=True), WrapValidator(_token_ids)]


_KINDS: Mapping[type, str] = MappingProxyType({str: "text", list: "list", dict: "object"})


def _kind(value: Any) -> str | None:
    return _KINDS.get(type(value))


def kind_discriminator(expected: str, kind_of: Callable[[Any], str | None] = _kind) -> Discriminator:
    """Tells the members of a union apart by their JSON type. `expected`: the types, in words."""
    return Discriminator(kind_of, custom_error_type=WRONG_KIND, custom_error_message=f"must be {expected}")


def _kind_of_prompt(value: Any) -> str | None:
    kind = _kind(value)
    return "several" if kind == "list" and value and isinstance(value[0], str | list) else kind


_PROMPT_KIND = kind_discriminator("text or a list of token ids", _kind_of_prompt)
SinglePrompt: TypeAlias = Annotated[Annotated[Text, Tag("text")] | Annotated[TokenIds, Tag("list")], _PROMPT_KIND]


def _refuse_null(value: Any) -> Any:
    """In vLLM's words, which clients look for."""
    if value is None:
        text = "Either prompt or prompt_embeds must be provided and non-empty. prompt_embeds are not supported here"
        raise PydanticCustomError(NO_PROMPT, text)
    return value


Prompts: TypeAlias = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("list")]
    | Annotated[list[SinglePrompt], Field(json_schema_extra={"minItems": 1, "maxItems": 256}), Tag("several")],
    _PROMPT_KIND,
    BeforeValidator(_refuse_null),
]

JsonSchema: TypeAlias = Annotated[Any, WithJsonSchema({"type": ["object", "boolean", "string", "null"]})]
"""As an object or as text. Checked when it is compiled."""

Choices: TypeAlias = Annotated[
    Any, WithJsonSchema({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1024})
]
IgnoredUnlessText: TypeAlias = Annotated[
    Unicode | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)
]
BadWord: TypeAlias = Annotated[str, Field(max_length=256, json_schema_extra={"pattern": "[!-~]"})]
ModelName: TypeAlias = Annotated[str, WithJsonSchema({"type": "string", "format": "model-name"})]
TokenKey: TypeAlias = Annotated[str, Field(pattern="^[0-9]{1,12}$")]
BiasValue: TypeAlias = Annotated[float, WithJsonSchema({"type": "number", **RANGES["logit_bias.*"].schema()})]
TruncateTo: TypeAlias = Annotated[Int64, WithJsonSchema({"type": "integer", "minimum": -1, "format": "to-model-len"})]
NumLogprobs: TypeAlias = Annotated[Int64, WithJsonSchema({"type": "integer", "minimum": -1, "format": "num-logprobs"})]
"""-1: as many as there are tokens."""
StopText: TypeAlias = Annotated[Unicode, WithJsonSchema({"type": "string", **RANGES["stop[]"].schema()})]
Stops: TypeAlias = Annotated[
    Annotated[StopText, Tag("text")]
    | Annotated[list[StopText], Field(json_schema_extra=RANGES["stop"].schema()), Tag("list")],
    kind_discriminator("text or a list of texts"),
]


def in_range(name: str) -> Any:
    """An optional field whose range the engine checks under this name."""
    return Field(None, json_schema_extra=RANGES[name].schema())
