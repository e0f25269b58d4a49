"""What is wrong with a body that no JSON decoder has read, and in which of its fields."""

import json
import re
import sys
from collections.abc import Iterator

MAX_NESTING = 256
"""Objects and lists within each other; fewer than what any JSON decoder here gives up at."""

_SIGNS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{%d,}" % (sys.int_info.default_max_str_digits + 1))
_MAX_NAME = 64


def why_unreadable(body: bytes) -> tuple[str, str | None] | None:
    """A text, and the top-level field where that is known; None where nothing is found."""
    field = too_deep_field(body)
    if field is not None:
        return f"{field} is nested too deeply: at most {MAX_NESTING} objects and lists within each other", field
    try:
        body.decode()
    except UnicodeDecodeError as error:
        field = _field_at(body, error.start)
        return f"{field or 'the body'} is not valid UTF-8: byte {error.start} of the body", field
    digits = _DIGITS.search(body)
    if digits is not None:
        field = _field_at(body, digits.start())
        return f"{field or 'the body'} has a number of {digits.end() - digits.start()} digits", field
    return None


def too_deep_field(body: bytes) -> str | None:
    """The top-level field of an object that goes deeper than `MAX_NESTING`; None where there is none. One pass."""
    return next((_name(field) for _, depth, field in _signs(body) if depth > MAX_NESTING), None)


def _field_at(body: bytes, place: int) -> str | None:
    """The top-level field of an object that byte number `place` belongs to."""
    name = b""
    for start, _, field in _signs(body):
        if start > place:
            break
        name = field
    return _name(name)


def _signs(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Strings and brackets: where each begins, how deep it is behind it, and the top-level field's name as written."""
    depth, field = 0, b""
    for sign in _SIGNS.finditer(body):
        text = sign[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and body[sign.end() : sign.end() + 16].lstrip().startswith(b":"):
            field = text
        yield sign.start(), depth, field


def _name(field: bytes) -> str | None:
    try:
        return str(json.loads(field))[:_MAX_NAME]
    except ValueError:
        return None
