"""What is wrong with a body that no JSON decoder has read, and in which of its fields."""

import json
import re
import sys

from cairn.server.nesting import MAX_NESTING, too_deep_field

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


def _field_at(body: bytes, place: int) -> str | None:
    """The top-level field of an object that byte number `place` belongs to."""
    depth, name = 0, b""
    for sign in _SIGNS.finditer(body):
        if sign.start() > place:
            break
        text = sign[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and body[sign.end() : sign.end() + 16].lstrip().startswith(b":"):
            name = text
    try:
        return str(json.loads(name))[:_MAX_NAME]
    except ValueError:
        return None
