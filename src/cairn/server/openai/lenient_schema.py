"""Schemas without the keywords that no grammar is made for: a form that is held to the rest of the schema.

zod and pydantic write such keywords as a matter of course. What is left out makes the form wider, never narrower.
"""

import re
from collections.abc import Callable
from typing import Any

LEFT_OUT = frozenset(
    (
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "propertyNames"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
        *("if", "then", "else", "not"),
    )
)
"""Keywords that llguidance has no grammar for."""

_MAX_DEPTH = 64
"""Deeper schemas are refused anyway."""

_SCHEMAS = frozenset(("additionalProperties", "additionalItems", "items", "prefixItems", "allOf", "anyOf", "oneOf"))
"""Keywords whose value is a schema, or a list of them."""
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords whose value has schemas under names."""

# Look-around, and escapes for what lies outside of the text that a regular expression matches, or before it.
_UNSUPPORTED = re.compile(r"\\(?:([1-9bBkGZ])|.)|(\(\?<?[=!])", re.DOTALL)


def make_lenient(schema: Any, tell: Callable[[str], None]) -> Any:
    """A copy of a schema without what there is no grammar for. `tell`: is given each keyword that is left out, as it is
    written, with `pattern` and `patternProperties` for expressions that are not supported."""
    return _lenient(schema, tell, _MAX_DEPTH)


def _lenient(schema: Any, tell: Callable[[str], None], depth: int) -> Any:
    if not isinstance(schema, dict) or depth <= 0:
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in LEFT_OUT or (name == "pattern" and not _is_supported(value)):
            tell(name)
        else:
            kept[name] = _inner(name, value, tell, depth - 1)
    patterns = kept.get("patternProperties")
    if isinstance(patterns, dict) and not all(map(_is_supported, patterns)):
        tell("patternProperties")
        del kept["patternProperties"]
        # what the patterns have allowed must not be forbidden by what is said of all others
        kept.pop("additionalProperties", None)
    return kept


def _inner(keyword: str, value: Any, tell: Callable[[str], None], depth: int) -> Any:
    if keyword in _BY_NAME and isinstance(value, dict):
        return {name: _lenient(schema, tell, depth - 1) for name, schema in value.items()}
    if keyword in _SCHEMAS:
        is_list = isinstance(value, list)
        return [_lenient(schema, tell, depth - 1) for schema in value] if is_list else _lenient(value, tell, depth)
    return value


def _is_supported(pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return True
    return not any(match[1] or match[2] for match in _UNSUPPORTED.finditer(pattern))
