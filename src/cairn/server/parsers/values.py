"""A parameter's text as the JSON value that its schema asks for.

The rules are those of vLLM's `qwen3_coder` parser, with two differences: unions (`anyOf`, lists of types, references)
are looked into, and a value of the wrong type stays text, also where a boolean was asked for.
"""

import ast
import json
import math
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
    """JSON types that the parameter `name` of a tool may have by the schema of all its parameters; empty where it says
    nothing."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_kinds(own, schema))


def is_text_only(kinds: frozenset[str]) -> bool:
    """Whether there is nothing but text, or null, that the value may be."""
    return kinds <= {"string", "null"}


def _kinds(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Level by level, and into no schema twice: references may go in circles, and multiply from turn to turn."""
    level, seen = [schema], set[int]()
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, Mapping) and id(one) not in seen:
                seen.add(id(one))
                yield from _own_kinds(one)
                inner += _parts(one, root)
        level = inner


def _own_kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    kind = schema.get("type")
    for one in kind if isinstance(kind, list) else [kind]:
        if isinstance(one, str):
            yield _kind(one)
    if kind is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        for value in values if isinstance(values, list) else []:
            yield _kind_of_value(value)


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    """What it is put together from."""
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list):
            yield from parts
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        yield _at(reference, root)


def _kind(name: str) -> str:
    name = name.strip().lower()
    return next((kind for prefixes, kind in _PREFIXES if name.startswith(prefixes)), "string")


def _kind_of_value(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _at(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def convert_value(text: str, kinds: frozenset[str]) -> Any:
    """The value of `text`: of one of `kinds` where it can be read so, else `text` itself. Always a JSON value."""
    if text.strip().lower() == "null":
        return None
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    number = _number(text, kinds)
    if number is not None:
        return number
    if kinds & {"object", "array"}:
        value = _structure(text)
        if isinstance(value, dict | list):
            return value
    return text


def _number(text: str, kinds: frozenset[str]) -> int | float | None:
    if not kinds & {"integer", "number"}:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    if "number" not in kinds:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else number


def _structure(text: str) -> Any:
    """JSON, or what a model takes for it: a Python literal."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        return None
