"""Types of settings: sizes in bytes, lists, and `--api-key`, which takes several as `a b` (vLLM's form) or `a,b`."""

import json
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, Field, StringConstraints, TypeAdapter, ValidationError
from pydantic_settings import NoDecode

from cairn.errors import ConfigError

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_MAX_BYTES = 1 << 50
_MAX_KEYS = 64
_MAX_LIST_TEXT = 1 << 16


def _size_in_bytes(value: Any) -> Any:
    """`512MiB`, `1.5 GB`, `1e9`, `4096` -> a number of bytes. Other things are left for the type check to refuse."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    number, unit = match.groups()
    return f"{float(number):.0f}" if not unit else f"{float(number):f}{unit}"


def split_commas(value: Any) -> Any:
    """`a,b` as a list; anything else as it is."""
    return value.split(",") if isinstance(value, str) else value


def _list_as_text(value: Any) -> Any:
    """What YAML gives as a list, as a flag would have it."""
    return json.dumps(value) if isinstance(value, list) else value


def _object_as_text(value: Any) -> Any:
    """What YAML gives as an object, as a flag would have it."""
    return json.dumps(value) if isinstance(value, dict) else value


BytesOrZero = Annotated[ByteSize, BeforeValidator(_size_in_bytes), Field(ge=0, le=_MAX_BYTES)]
Bytes = Annotated[ByteSize, BeforeValidator(_size_in_bytes), Field(ge=1, le=_MAX_BYTES)]

ListText = Annotated[str, BeforeValidator(_list_as_text), Field(max_length=_MAX_LIST_TEXT)]
"""`a,b` or a JSON list, as text; `list_entries` takes it apart."""

JsonText = Annotated[str, BeforeValidator(_object_as_text), Field(max_length=4096)]
"""A JSON object as text."""

ApiKey = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=512)]
ApiKeys = Annotated[
    Annotated[list[ApiKey], Field(min_length=1, max_length=_MAX_KEYS)] | None, NoDecode, BeforeValidator(split_commas)
]


def parse_size(text: str) -> int:
    """The number of bytes that `text` names. Raises ConfigError."""
    try:
        return int(TypeAdapter(Bytes).validate_python(text))
    except ValidationError as error:
        raise ConfigError(f"{text!r} is no size: write it as 512MiB, 1.5GB, 1e9 or plain bytes") from error


def list_entries(text: str) -> list[str] | None:
    """The entries of `a,b` or `["a", "b"]`, without blanks around them; None for JSON that is no list of texts."""
    entries: object = text.split(",")
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError):
            return None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return None
    return [entry.strip() for entry in entries]
