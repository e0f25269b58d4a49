"""What becomes of an error that a route raises."""

import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from cairn.errors import CairnError, EngineDead, InvalidRequest, RequestError
from cairn.http.application import http_error
from cairn.http.failures import ClientGone, error_response, failed, internal_error
from cairn.server.unreadable import why_unreadable

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
