"""What becomes of an error that a route raises, and what is wrong with a body that cannot be read."""

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from cairn.errors import CairnError, EngineDead, InvalidRequest, RequestError
from cairn.http.application import http_error
from cairn.http.error_responses import ClientDisconnected, error_response, internal_error, make_error
from cairn.server.requests import WRONG_KIND

MAX_NESTING = 256
"""Objects and lists within each other; fewer than what any JSON decoder here gives up at."""

_SIGNS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{%d,}" % (sys.int_info.default_max_str_digits + 1))
_MAX_NAME = 64
_SHOWN_INPUT = 80

_KINDS: Mapping[type, str] = MappingProxyType(
    {str: "text", bool: "a boolean", int: "a number", float: "a fraction", list: "a list", dict: "an object"}
)
_OF_KIND: Mapping[str, str] = MappingProxyType(
    {
        "string_type": "must be text",
        "bool_type": "must be true or false",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "list_type": "must be a list",
        **dict.fromkeys(("dict_type", "model_attributes_type", "model_type"), "must be an object"),
        WRONG_KIND: "{msg}",
    }
)
_RULES: Mapping[str, str] = MappingProxyType(
    {
        **_OF_KIND,
        "string_unicode": "is not valid Unicode",
        **dict.fromkeys(("too_short", "string_too_short"), "must not be empty"),
        **dict.fromkeys(("missing", "union_tag_not_found"), "is missing"),
        "string_too_long": "must have at most {max_length} characters",
        "string_pattern_mismatch": "must match {pattern}",
        "too_long": "must have at most {max_length} entries",
        "greater_than_equal": "must be at least {ge}",
        "less_than": "must be below {lt}",
        "finite_number": "must be a finite number",
        "literal_error": "must be {expected}",
        "union_tag_invalid": "must be one of {expected_tags}",
        "extra_forbidden": "is not supported: leave it out",
    }
)
"""pydantic's types of errors in plain words."""

_NAMED_WHOLE = frozenset(
    (
        *("allowed_token_ids", "cache_control", "chat_template_kwargs", "content", "prompt", "response_format"),
        *("structured_outputs", "tokens", "tool_calls", "tool_choice", "tools"),
    )
)
"""Fields within which `param` names the whole field of the body, and the message the place."""

logger = logging.getLogger(__name__)


def to_request_error(error: CairnError) -> RequestError:
    """An error as the client gets to see it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDead):
        return make_error(f"the engine has ended: {error}", 503, "service_unavailable")
    logger.error("an error that no client should see: %r", error)
    return internal_error()


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(CairnError, _cairn_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnected, _client_gone)


async def _cairn_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CairnError)
    return error_response(to_request_error(error))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return error_response(InvalidRequest(f"the body is not valid JSON: {reason}"))
    (source, *loc), body = first["loc"], error.body
    steps = loc[:1]
    if source == "body" and loc:
        whole = _place(loc[1:], body.get(loc[0]) if isinstance(body, dict) else None, first["type"] == "missing")
        steps = [*loc[:1], *whole]
    if not steps:
        message = 'the body must be a JSON object, sent with the header "Content-Type: application/json"'
        return error_response(InvalidRequest(message))
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        steps.append("type")
    context = {name: str(value).replace("'", '"') for name, value in first.get("ctx", {}).items()}
    rule = _RULES.get(first["type"], "is wrong: {msg}").format_map({**context, "msg": first["msg"]})
    if first["type"] in _OF_KIND:
        rule += f", not {_kind(first['input'])}"
    elif not rule.endswith("missing"):
        shown = repr(first["input"])
        rule += f" (got {shown if len(shown) <= _SHOWN_INPUT else shown[:_SHOWN_INPUT] + '…'})"
    inner = steps[-1] in ("content", "cache_control") or not _NAMED_WHOLE.isdisjoint(steps[:-1])
    return error_response(InvalidRequest(f"{_path(steps)} {rule}", _path(steps[:1] if inner else steps)))


def _place(loc: Sequence[int | str], body: Any, missing: bool) -> list[int | str]:
    """Where in a body something is wrong, or `missing`. pydantic also tells which member of a union it has tried: such
    steps lead nowhere in the body, so the way that goes on for longest is taken."""
    if not loc:
        return []
    (step, *rest), found = loc, list[int | str]()
    if isinstance(step, int):
        there = isinstance(body, list) and step < len(body)
        return [step, *_place(rest, body[step], missing)] if there else []
    if isinstance(body, dict) and step in body:
        found = [step, *_place(rest, body[step], missing)]
    elif missing and not rest and isinstance(body, dict):
        found = [step]
    return max(_place(rest, body, missing), found, key=len)


def _path(steps: Sequence[int | str]) -> str:
    """As `messages[0].role`."""
    named = (f"[{step}]" if isinstance(step, int) else f".{step[:_MAX_NAME]}" for step in steps)
    return "".join(named).removeprefix(".")


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "something else")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        # the body that could not be parsed: the framework keeps it, and does not say what was wrong
        found = explain_unreadable(getattr(request, "_body", b""))
        if found is not None:
            return error_response(InvalidRequest(*found))
    return await http_error(request, error)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


# -- bodies that no JSON decoder has read ----------------------------------------------------------------------------


def explain_unreadable(body: bytes) -> tuple[str, str | None] | None:
    """A text, and the top-level field where that is known; None where nothing is found."""
    field = find_deep_field(body)
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


def find_deep_field(body: bytes) -> str | None:
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
