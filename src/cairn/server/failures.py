"""What becomes of an error that a route raises."""

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from cairn.errors import CairnError, EngineDead, RequestError
from cairn.http.failures import ClientGone, error_body, retry_headers
from cairn.server.unreadable import why_unreadable

_SHOWN_INPUT = 80

logger = logging.getLogger(__name__)


def describe(error: CairnError) -> tuple[dict[str, Any], int]:
    """The body and the HTTP status of an error."""
    if isinstance(error, RequestError):
        return error_body(error.message, error.status, error.code, error.param), error.status
    if isinstance(error, EngineDead):
        return error_body(f"the engine has ended: {error}", 503, "service_unavailable"), 503
    logger.error("an error that no client should see: %r", error)
    return error_body("internal error", 500, "internal_error"), 500


def response_for(error: CairnError) -> JSONResponse:
    body, status = describe(error)
    return JSONResponse(body, status, retry_headers(error) if isinstance(error, RequestError) else None)


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(CairnError, _cairn_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)


async def _cairn_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CairnError)
    return response_for(error)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return JSONResponse(error_body(f"the body is not valid JSON: {reason}", 400, "invalid_request_error"), 400)
    param = _path(first["loc"][1:]) or None
    if param is None:
        message = 'the body must be a JSON object, sent with the header "Content-Type: application/json"'
    elif first["type"] == "missing":
        message = f"{param} is missing"
    else:
        shown = repr(first.get("input"))
        shown = shown if len(shown) <= _SHOWN_INPUT else shown[:_SHOWN_INPUT] + "…"
        message = f"{param}: {first['msg']} (got {shown})"
    return JSONResponse(error_body(message, 400, "invalid_request_error", param), 400)


def _path(steps: Sequence[int | str]) -> str:
    """Where in a body something is, as `messages[0].role`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        # the body that could not be parsed: the framework keeps it, and does not say what was wrong
        found = why_unreadable(getattr(request, "_body", b""))
        if found is not None:
            return JSONResponse(error_body(found[0], 400, "invalid_request_error", found[1]), 400)
    code = {404: "not_found_error", 405: "method_not_allowed"}.get(error.status_code, "invalid_request_error")
    return JSONResponse(error_body(error.detail, error.status_code, code), error.status_code, error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
