"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

import msgspec
from starlette.responses import Response

from cairn.errors import RequestError


class ClientDisconnected(Exception):
    """The client has closed the connection before its response was there."""


def make_error(message: str, status: int, code: str) -> RequestError:
    """A RequestError with this status and code."""
    error = RequestError(message)
    error.status, error.code = status, code
    return error


def error_body(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """Messages may quote half a surrogate pair, which JSON cannot encode: it is escaped."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    shown = message.encode(errors="backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "param": param, "code": code}}


def encode_error(error: RequestError) -> bytes:
    """The body of an error as JSON."""
    return msgspec.json.encode(error_body(error.message, error.status, error.code, error.param))


def error_response(error: RequestError) -> Response:
    """With `Retry-After` if the error has one, and `WWW-Authenticate` for a missing key."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return Response(encode_error(error), error.status, headers, media_type="application/json")


def internal_error() -> RequestError:
    """The error that a client is sent for a bug."""
    return make_error("internal error", 500, "internal_error")
