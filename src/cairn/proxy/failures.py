"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

import msgspec

from cairn.errors import RequestError

__all__ = ["ClientGone", "error_content", "failed"]


class ClientGone(Exception):
    """The client has closed the connection before its answer was there. Nobody is left to be told."""


def failed(message: str, status: int, code: str) -> RequestError:
    """A RequestError with a status of its own."""
    error = RequestError(message)
    error.status, error.code = status, code
    return error


def error_content(error: RequestError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body: dict[str, Any] = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": body})
