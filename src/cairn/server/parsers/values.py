"""A parameter's text as the JSON value that its schema asks for.

The rules are those of vLLM's `qwen3_coder` parser, with two differences: unions (`anyOf`, lists of types, references)
are followed, and a value of the wrong type stays text, also where a boolean was asked for.
"""

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_DEPTH = 8
_PREFIXES = (
    (("int", "uint", "long", "short", "unsigned"), "integer"),
    (("num", "float", "double", "decimal"), "number"),
    (("bool", "binary"), "boolean"),
    (("object", "dict", "map"), "object"),
    (("arr", "list", "tuple", "seq"), "array"),
    (("null", "none"), "null"),
)


def get_json_types(name: str, schema: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that the parameter `name` of a tool may have, by the schema of all its parameters; empty if the schema
    does not say."""
    properties = schema.get("properties")
    level, seen, types = [properties.get(name) if isinstance(properties, Mapping) else None], set[int](), set[str]()
    # Level by level, and into no schema twice: references may be cyclic, and may multiply from level to level.
    for _ in range(_MAX_DEPTH):
        by_id = {id(part): part for part in level if isinstance(part, Mapping) and id(part) not in seen}
        seen |= by_id.keys()
        parts = by_id.values()
        types.update(json_type for part in parts for json_type in _own_types(part))
        level = [inner for part in parts for inner in _inner_schemas(part, schema)]
    return frozenset(types)


def is_text_only(types: frozenset[str]) -> bool:
    """Whether the value may be nothing but text, or null."""
    return types <= {"string", "null"}


def _own_types(schema: Mapping[str, Any]) -> Iterator[str]:
    names = schema.get("type")
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str):
            spelled = name.strip().lower()
            yield next((kind for prefixes, kind in _PREFIXES if spelled.startswith(prefixes)), "string")
    if names is None:
        kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        for value in values if isinstance(values, list) else []:
            yield kinds.get(type(value), "null")


def _inner_schemas(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    """The members of a union, and what a reference refers to."""
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        if isinstance(members, list):
            yield from members
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield target


def convert_value(text: str, types: frozenset[str]) -> Any:
    """`text` as a JSON value of one of `types`; the text itself if it cannot be read so."""
    word = text.strip().lower()
    if word == "null":
        return None
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    number = _read_number(text, types)
    if number is not None:
        return number
    value = _read_literal(text) if types & {"object", "array"} else None
    return value if isinstance(value, dict | list) else text


def _read_number(text: str, types: frozenset[str]) -> int | float | None:
    if not types & {"integer", "number"}:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text) if "number" in types else math.nan
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else number


def _read_literal(text: str) -> Any:
    try:
        return parse_literal(text)
    except ValueError:
        return None


def parse_literal(text: str) -> Any:
    """JSON, or what a model takes for it: a Python literal. Raises ValueError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(_STRINGS.sub(_mend_string, text.strip()))
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError("no literal") from error
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError("no JSON") from error


def dump_json(value: Any) -> str:
    """JSON that every decoder takes: half a surrogate pair, which is no text, becomes U+FFFD."""
    return _SURROGATES.sub("\ufffd", json.dumps(value, ensure_ascii=False))


_SURROGATES = re.compile("[\ud800-\udfff]")
# An open string goes up to the end, so that no text is looked at twice.
_STRINGS = re.compile(
    r"""(?<![A-Za-z])([A-Za-z]{0,2})"""
    r"""("{3}(?:[^\\]|\\.)*?(?:"{3}|\\?\Z)|'{3}(?:[^\\]|\\.)*?(?:'{3}|\\?\Z)|"""
    r""""(?:[^"\\]|\\.)*(?:"|\\?\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z))""",
    re.DOTALL,
)
_NO_ESCAPE = re.compile(r"""\\(?P<kept>[\n\\'"abfnrtvxuUN0-7])|\\|\n""")


def _mend_string(match: re.Match[str]) -> str:
    """A Python string without line breaks, which only longer quotes allow, and without escapes that are none."""
    return match[1] + _NO_ESCAPE.sub(_mend_escape, match[2]) if not match[1] else match[0]


def _mend_escape(match: re.Match[str]) -> str:
    if match["kept"] is not None:
        return match[0]
    return "\\n" if match[0] == "\n" else "\\\\"
