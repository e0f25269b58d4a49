"""Which field of a JSON body is nested more deeply than it can be read."""

import json
import re

MAX_NESTING = 256
"""Objects and lists within each other; fewer than what any JSON decoder here gives up at."""

_SIGNS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]', re.DOTALL)
_MAX_NAME = 64


def too_deep_field(body: bytes) -> str | None:
    """The top-level field of an object that goes deeper than `MAX_NESTING`; None where there is none. One pass."""
    depth, field = 0, b""
    for sign in _SIGNS.finditer(body):
        text = sign[0]
        if text in (b"{", b"["):
            depth += 1
            if depth > MAX_NESTING:
                return _name(field)
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and body[sign.end() : sign.end() + 16].lstrip().startswith(b":"):
            field = text
    return None


def _name(field: bytes) -> str | None:
    try:
        return str(json.loads(field))[:_MAX_NAME]
    except ValueError:
        return None
