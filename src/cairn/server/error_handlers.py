"""Exceptions to error responses, and which field makes a body invalid or unreadable."""

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

from cairn.errors import CairnError, EngineDead, InvalidBody, RequestError
from cairn.http.application import http_error
from cairn.http.error_responses import ClientDisconnected, error_response, internal_error, make_error
from cairn.server.openai.field_types import NO_PROMPT, WRONG_KIND
from cairn.server.openai.file_text import NO_TEXT_FILE
from cairn.server.openai.requests import CHAT_TAG, COMPLETION_TAG

MAX_NESTING = 256
"""Objects and lists within each other; JSON decoders give up later."""

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{%d,}" % (sys.int_info.default_max_str_digits + 1))
_MAX_NAME = 64
_MAX_KEYS = 16
_MAX_INPUT_CHARS = 80

_TYPE_NAMES: Mapping[type, str] = MappingProxyType(
    {str: "text", bool: "a boolean", int: "a number", float: "a fraction", list: "a list", dict: "an object"}
)
_TYPE_RULES: Mapping[str, str] = MappingProxyType(
    {
        "string_type": "must be text",
        **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
        **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
        **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
        "list_type": "must be a list",
        **dict.fromkeys(("dict_type", "model_attributes_type", "model_type"), "must be an object"),
        WRONG_KIND: "{msg}",
    }
)
_RANGE_RULES: Mapping[str, str] = MappingProxyType(
    {"greater_than_equal": "must be at least {ge}", "less_than_equal": "must be at most {le}"}
)
_RULES: Mapping[str, str] = MappingProxyType(
    {
        **_TYPE_RULES,
        NO_PROMPT: "must be sent. {msg}",
        NO_TEXT_FILE: "{msg}",
        "string_unicode": "is not valid Unicode",
        **dict.fromkeys(("too_short", "string_too_short"), "must not be empty"),
        **dict.fromkeys(("missing", "union_tag_not_found"), "is missing"),
        "string_too_long": "must have at most {max_length} characters",
        "string_pattern_mismatch": "must match {pattern}",
        "too_long": "must have at most {max_length} entries",
        **_RANGE_RULES,
        "finite_number": "must be a finite number",
        "int_parsing_size": "has too many digits",
        "literal_error": "must be {expected}",
        "union_tag_invalid": "must be one of {expected_tags}",
        "extra_forbidden": "is not supported: leave it out",
    }
)
"""By pydantic's error type."""

_WHOLE_FIELDS = frozenset(
    (
        *("allowed_token_ids", "cache_control", "chat_template_kwargs", "content", "documents", "prompt"),
        *("response_format", "structured_outputs", "tokens", "tool_calls", "tool_choice", "tools"),
    )
)
"""Fields for which `param` names the whole field of the body, and the message the place in it."""

logger = logging.getLogger(__name__)


def to_request_error(error: CairnError) -> RequestError:
    """The error that the client is sent."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDead):
        return make_error(f"the engine has ended: {error}", 503)
    logger.error("an error that no client should see: %r", error)
    return internal_error()


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(CairnError, _cairn_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnected, _client_disconnected)


async def _cairn_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CairnError)
    return error_response(to_request_error(error), request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        # The framework keeps a body that it could not parse, and does not say what was wrong.
        explanation = explain_unreadable(getattr(request, "_body", b""))
        if explanation is not None:
            return error_response(InvalidBody(*explanation), request.scope)
    return await http_error(request, error)


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


# -- bodies of a wrong form --------------------------------------------------------------------------------------------


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first, *others = error.errors()
    if first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}"
        return error_response(InvalidBody(message), request.scope)
    request_error = explain_validation_error(first, error.body)
    if keys := _wrong_keys(first, others):
        request_error = InvalidBody(f"{request_error.message}; so must {', '.join(keys)}", request_error.param)
    return error_response(request_error, request.scope)


def _wrong_keys(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Further keys of the object in which `first` is about a key, for the same reason."""
    place, wrong = first["loc"], [first["type"], "[key]"]
    places = [
        other["loc"]
        for other in others
        if [other["type"], other["loc"][-1]] == wrong and other["loc"][:-2] == place[:-2]
    ]
    return [str(loc[-2])[:_MAX_NAME] for loc in places[:_MAX_KEYS]] if place[-1] == "[key]" else []


def explain_validation_error(first: Mapping[str, Any], body: Any) -> InvalidBody:
    """`first`: of pydantic's `errors()`, with the source (body, query) as the first step of its `loc`."""
    kind, context = first["type"], first.get("ctx", {})
    source, *loc = first["loc"]
    if loc[:1] in ([CHAT_TAG], [COMPLETION_TAG]):
        del loc[0]
    path = loc[:1]
    if source == "body" and loc:
        path += _locate(loc[1:], body.get(loc[0]) if isinstance(body, dict) else None, is_missing=kind == "missing")
    if not path:
        return InvalidBody('the body must be a JSON object, sent with the header "Content-Type: application/json"')
    value = first["input"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        # What is wrong is the field by which the members are told apart, not the object that has it.
        tag = context["discriminator"].strip("'")
        path.append(tag)
        value = value.get(tag) if isinstance(value, dict) else value
    context = {name: str(value).replace("'", '"') for name, value in context.items()}
    rule = _RULES.get(kind, "is wrong: {msg}").format_map({**context, "msg": first["msg"]})
    if kind in _TYPE_RULES:
        rule += f", not {'null' if value is None else _TYPE_NAMES.get(type(value), 'something else')}"
    elif not rule.endswith("missing"):
        shown = repr(value)
        reason = f"{kind}: " if kind in _RANGE_RULES else ""
        rule += f" ({reason}got {shown if len(shown) <= _MAX_INPUT_CHARS else shown[:_MAX_INPUT_CHARS] + '…'})"
    is_inner = path[-1] in ("content", "cache_control") or not _WHOLE_FIELDS.isdisjoint(path[:-1])
    # OpenAI's Responses API names the place itself.
    param = _join(path[:1] if is_inner and path[0] != "input" else path)
    return InvalidBody(f"{_join(path)} {rule}", param)


def _locate(loc: Sequence[int | str], value: Any, *, is_missing: bool) -> list[int | str]:
    """The steps of pydantic's `loc` that exist in `value`, or of which the last is missing. The others name the member
    of a union that pydantic has tried: of the ways that leave them out, the longest is taken."""
    if not loc:
        return []
    (step, *rest), steps = loc, list[int | str]()
    if isinstance(step, int):
        exists = isinstance(value, list) and step < len(value)
        return [step, *_locate(rest, value[step], is_missing=is_missing)] if exists else []
    if isinstance(value, dict) and step in value:
        steps = [step, *_locate(rest, value[step], is_missing=is_missing)]
    elif is_missing and not rest and isinstance(value, dict):
        steps = [step]
    return max(_locate(rest, value, is_missing=is_missing), steps, key=len)


def _join(path: Sequence[int | str]) -> str:
    """As `messages[0].role`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:_MAX_NAME]}" for step in path)
    return "".join(steps).removeprefix(".")


# -- bodies that no JSON decoder has read ----------------------------------------------------------------------------


def explain_unreadable(body: bytes) -> tuple[str, str | None] | None:
    """What is wrong with a body, and the top-level field if known; None if nothing is found."""
    field = find_deep_field(body)
    if field is not None:
        return f"{field} is nested too deeply: at most {MAX_NESTING} objects and lists within each other", field
    try:
        body.decode()
    except UnicodeDecodeError as error:
        field = _find_field(body, error.start)
        return f"{field or 'the body'} is not valid UTF-8: byte {error.start} of the body", field
    digits = _DIGITS.search(body)
    if digits is not None:
        field = _find_field(body, digits.start())
        return f"{field or 'the body'} has a number of {digits.end() - digits.start()} digits", field
    return None


def find_deep_field(body: bytes) -> str | None:
    """The top-level field that is nested deeper than `MAX_NESTING`; None if there is none. One pass."""
    return next((_decode_name(field) for _, depth, field in _scan(body) if depth > MAX_NESTING), None)


def _find_field(body: bytes, position: int) -> str | None:
    """The top-level field that this byte of the body belongs to."""
    name = b""
    for start, _, field in _scan(body):
        if start > position:
            break
        name = field
    return _decode_name(name)


def _scan(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Strings and brackets: position, depth after it, and the name of the top-level field as written."""
    depth, field = 0, b""
    for token in _TOKENS.finditer(body):
        text = token[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and body[token.end() : token.end() + 16].lstrip().startswith(b":"):
            field = text
        yield token.start(), depth, field


def _decode_name(field: bytes) -> str | None:
    try:
        return str(json.loads(field))[:_MAX_NAME]
    except ValueError:
        return None
