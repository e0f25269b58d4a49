"""Errors as clients read them: vLLM's `{"error": {"message", "type", "param", "code"}}`, and below /v1/messages
Anthropic's `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from cairn.errors import RequestError

ANTHROPIC_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
_TYPES: Mapping[int, str] = MappingProxyType(
    {400: "BadRequestError", 404: "NotFoundError", 422: "UnprocessableEntityError", 500: "InternalServerError"}
)
"""By status; the others have the status' own name."""

_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


class ClientDisconnected(Exception):
    """The client has closed the connection before its response was there."""


def make_error(message: str, status: int) -> RequestError:
    """A RequestError with this status and its type."""
    error = RequestError(message)
    error.status, error.type = status, _TYPES.get(status) or HTTPStatus(status).phrase
    return error


def error_body(error: RequestError) -> dict[str, Any]:
    """`code` is the HTTP status. Messages may quote half a surrogate pair, which JSON cannot encode: it is escaped."""
    shown = error.message.encode(errors="backslashreplace").decode()
    return {"error": {"message": shown, "type": error.type, "param": error.param, "code": error.status}}


def encode_error(error: RequestError) -> bytes:
    """The body of an error as JSON, in vLLM's form."""
    return msgspec.json.encode(error_body(error))


def encode_anthropic_error(error: RequestError, request_id: str | None) -> bytes:
    """The body of an error as JSON, in Anthropic's form; `param` names the field, as in OpenAI's."""
    shown = error_body(error)["error"]
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail = {"type": kind, "message": shown["message"], "param": shown["param"]}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})


def encode_error_of(error: RequestError, scope: Scope) -> bytes:
    """The body of an error as JSON, in the form of the API that `scope` is a request of."""
    if scope["path"].startswith(ANTHROPIC_PATH):
        return encode_anthropic_error(error, scope.get("cairn.request_id"))
    return encode_error(error)


def encode_error_events(error: RequestError, scope: Scope, num_events: int) -> bytes:
    """What ends a stream of that API after `num_events` events."""
    if scope["path"].startswith(ANTHROPIC_PATH):
        return b"event: error\ndata: " + encode_error_of(error, scope) + b"\n\n"
    if scope["path"] == RESPONSES_PATH:
        shown = error_body(error)["error"]
        event = {"type": "error", "sequence_number": num_events, "code": str(error.status)}
        event |= {"message": shown["message"], "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + encode_error(error) + b"\n\ndata: [DONE]\n\n"


def error_response(error: RequestError, scope: Scope | None = None) -> Response:
    """In the form of the API that `scope` is a request of; with `Retry-After` if the error has one, and
    `WWW-Authenticate` for a missing key."""
    content = encode_error(error) if scope is None else encode_error_of(error, scope)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return Response(content, error.status, headers, media_type="application/json")


def internal_error() -> RequestError:
    """The error that a client is sent for a bug."""
    return make_error("internal error", 500)
