"""What becomes of an error that a route raises, and what is wrong with a body that cannot be read."""

import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from cairn.errors import CairnError, EngineDead, InvalidRequest, RequestError
from cairn.http.application import http_error
from cairn.http.failures import ClientGone, error_response, failed, internal_error

MAX_NESTING = 256
"""Objects and lists within each other; fewer than what any JSON decoder here gives up at."""

_SIGNS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{%d,}" % (sys.int_info.default_max_str_digits + 1))
_MAX_NAME = 64
_SHOWN_INPUT = 80

logger = logging.getLogger(__name__)


def request_error(error: CairnError) -> RequestError:
    """An error as the client gets to see it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDead):
        return failed(f"the engine has ended: {error}", 503, "service_unavailable")
    logger.error("an error that no client should see: %r", error)
    return internal_error()


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(CairnError, _cairn_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)


async def _cairn_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CairnError)
    return error_response(request_error(error))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return error_response(InvalidRequest(f"the body is not valid JSON: {reason}"))
    param = _path(first["loc"][1:]) or None
    if param is None:
        message = 'the body must be a JSON object, sent with the header "Content-Type: application/json"'
    elif first["type"] == "missing":
        message = f"{param} is missing"
    else:
        shown = repr(first.get("input"))
        shown = shown if len(shown) <= _SHOWN_INPUT else shown[:_SHOWN_INPUT] + "…"
        message = f"{param}: {first['msg']} (got {shown})"
    return error_response(InvalidRequest(message, param))


def _path(steps: Sequence[int | str]) -> str:
    """Where in a body something is, as `messages[0].role`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        # the body that could not be parsed: the framework keeps it, and does not say what was wrong
        found = why_unreadable(getattr(request, "_body", b""))
        if found is not None:
            return error_response(InvalidRequest(*found))
    return await http_error(request, error)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


# -- bodies that no JSON decoder has read ----------------------------------------------------------------------------


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
