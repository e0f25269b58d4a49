"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

import msgspec
from starlette.responses import Response

from cairn.errors import RequestError


class ClientDisconnected(Exception):
    """The client has closed the connection before its answer was there. Nobody is left to be told."""


def make_error(message: str, status: int, code: str) -> RequestError:
    """A RequestError with a status of its own."""
    error = RequestError(message)
    error.status, error.code = status, code
    return error


def error_body(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """What a message quotes of the client may be half a surrogate pair, which JSON cannot carry: it is written out."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    shown = message.encode(errors="backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "param": param, "code": code}}


def encode_error(error: RequestError) -> bytes:
    """The body of an error as JSON."""
    return msgspec.json.encode(error_body(error.message, error.status, error.code, error.param))


def error_response(error: RequestError) -> Response:
    """With when the request may be sent again, where that is known, and what a key is sent in, where one is missing."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return Response(encode_error(error), error.status, headers, media_type="application/json")


def internal_error() -> RequestError:
    """What a client gets to see of a bug."""
    return make_error("internal error", 500, "internal_error")
