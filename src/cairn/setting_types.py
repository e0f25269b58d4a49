"""Types of settings: counts, sizes in bytes, lists, JSON, and flags that take several words as `a b` (vLLM's form)."""

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, StringConstraints, TypeAdapter, ValidationError
from pydantic_settings import NoDecode

from cairn.errors import ConfigError
from cairn.paths import is_unicode

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_COUNT = re.compile(r"\s*([0-9]{1,18})(\.[0-9]{1,18})?([kKmMgGtT])\s*")
_BETWEEN_NUMBERS = re.compile(r'[\[\]",\s]+')
_POWERS = "kmgt"
_MAX_BYTES = 1 << 50
_MAX_KEYS = 64
_MAX_NAMES = 64
_MAX_SIZES = 1024
_MAX_LIST_TEXT = 1 << 16


def parse_count(text: str) -> int | None:
    """vLLM's numbers with a letter: small ones are powers of 1000 (`8k`, `25.6k`), large ones of 1024 (`8K`), which
    take no fraction. None for anything else."""
    match = _COUNT.fullmatch(text)
    if match is None or (match[2] and match[3].isupper()):
        return None
    base, power = (1024, match[3].lower()) if match[3].isupper() else (1000, match[3])
    return int(Decimal(match[1] + (match[2] or "")) * base ** (_POWERS.index(power) + 1))


def _count(value: Any) -> Any:
    number = parse_count(value) if isinstance(value, str) else None
    return value if number is None else number


def _count_or_auto(value: Any) -> Any:
    return None if value in ("auto", "-1", -1) else _count(value)


def _size_in_bytes(value: Any) -> Any:
    """`512MiB`, `1.5 GB`, `8g`, `8G`, `1e9`, `4096` -> a number of bytes. Other things are left for the type check to
    refuse."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    number, unit = match.groups()
    if unit in ("K", "M", "G", "T"):
        unit += "iB"  # as vLLM's
    return f"{float(number):.0f}" if not unit else f"{float(number):f}{unit}"


def split_commas(value: Any) -> Any:
    """`a,b` as a list; anything else as it is."""
    return value.split(",") if isinstance(value, str) else value


def _list_as_text(value: Any) -> Any:
    """What YAML gives as a list, as a flag would have it."""
    return json.dumps(value) if isinstance(value, list) else value


def _backend_name(value: Any) -> Any:
    return value.lower().removesuffix("_attn") if isinstance(value, str) else value


def _text_as_list(value: Any) -> Any:
    """A text as a list of one, unless it is a JSON list."""
    if not isinstance(value, str):
        return value
    entries = list_entries(value) if value.lstrip().startswith("[") else None
    return [value] if entries is None else entries


def _numbers(value: Any) -> Any:
    """`1,2`, `1 2`, a JSON list, or one number as a list; anything else as it is."""
    return _BETWEEN_NUMBERS.split(value.strip('[]" ')) if isinstance(value, str) else value


def _check_texts(text: str) -> str:
    if list_entries(text) is None:
        raise ValueError('must be texts as a,b or a JSON list as ["a", "b"]')
    return text


def _check_object(text: str) -> str:
    try:
        decoded = json.loads(text)
        is_object = isinstance(decoded, dict) and is_unicode(json.dumps(decoded, ensure_ascii=False))
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError('must be a JSON object as {"name": true}')
    return text


def _object_as_text(value: Any) -> Any:
    """What YAML gives as an object, as a flag would have it."""
    return json.dumps(value) if isinstance(value, dict) else value


BytesOrZero = Annotated[ByteSize, BeforeValidator(_size_in_bytes), Field(ge=0, le=_MAX_BYTES)]
Bytes = Annotated[ByteSize, BeforeValidator(_size_in_bytes), Field(ge=1, le=_MAX_BYTES)]

ListText = Annotated[str, BeforeValidator(_list_as_text), Field(max_length=_MAX_LIST_TEXT)]
"""`a,b` or a JSON list, as text; `list_entries` takes it apart."""

JsonText = Annotated[str, BeforeValidator(_object_as_text), Field(max_length=4096)]
"""A JSON object as text."""

Texts = Annotated[ListText, AfterValidator(_check_texts)]
"""As ListText, and nothing else than a list of texts."""

JsonObject = Annotated[JsonText, AfterValidator(_check_object)]
"""As JsonText, and nothing else than an object."""

SERVED_DTYPES: Mapping[str, str] = MappingProxyType({"float": "float32", "half": "bfloat16", "float16": "bfloat16"})
"""vLLM's other names of dtypes, and what is served for them: float16 in as many bytes, with its exponents and more."""

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]
"""In capitals, too."""

Count = Annotated[int, BeforeValidator(_count)]
"""A whole number, also as `8k` or `8K`."""

CountOrAuto = Annotated[int | None, BeforeValidator(_count_or_auto)]
"""As Count; `auto` and -1 are None."""

ServedNames = Annotated[
    Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=512)]],
        Field(min_length=1, max_length=_MAX_NAMES),
    ]
    | None,
    NoDecode,
    BeforeValidator(_text_as_list),
]
"""`a b` as words, a JSON list, or one name."""

GraphSizes = Annotated[
    Annotated[list[Annotated[int, Field(ge=1, le=65536)]], Field(min_length=1, max_length=_MAX_SIZES)] | None,
    NoDecode,
    BeforeValidator(_numbers),
]
"""`1 2 4` as words, `1,2,4`, or a JSON list."""

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


def size_flag(text: str) -> int:
    """The same as a type of argparse's. Raises ArgumentTypeError."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error


def list_entries(text: str) -> list[str] | None:
    """The entries of `a,b` or `["a", "b"]`, without blanks around them; None for JSON that is no list of texts."""
    entries: object = text.split(",")
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError):
            return None
    if not isinstance(entries, list) or not all(isinstance(entry, str) and is_unicode(entry) for entry in entries):
        return None
    return [entry.strip() for entry in entries]


AttentionBackend = Annotated[Literal["auto", "triton", "flashinfer"], BeforeValidator(_backend_name)]
"""Upper case and vLLM's TRITON_ATTN, too."""

GdnPrefillBackend = Annotated[Literal["auto", "triton", "fla"], BeforeValidator(_backend_name)]
