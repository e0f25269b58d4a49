"""What routes of all APIs share: parts of the service, a request's part of the memory for images, JSON in and out."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cairn.engine.contract import EngineClient
from cairn.errors import InvalidBody, InvalidRequest, Overloaded
from cairn.http.clients import get_client_id, get_key_digest
from cairn.http.handover import restore_client_fields
from cairn.http.middleware import Gate
from cairn.http.sessions import record_session
from cairn.server.error_handlers import explain_unreadable
from cairn.server.images.memory import ImageAllocation
from cairn.server.metrics import Metrics
from cairn.server.openai.engine_request import encode_release_params
from cairn.server.operator_queries import OperatorQueries
from cairn.server.options import ServerLimits, ServerOptions
from cairn.server.served_model import ServedModel
from cairn.server.service import Service

_TRANSFER_PARAMS = "cairn.kv_transfer_params"
"""Where a request's scope has those of its body, in nothing checked."""


_ALLOCATION = "cairn.images"
"""Where it has its part of the memory for images."""

Part = TypeVar("Part")


def _service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def _part(get: Callable[[Service], Part]) -> Any:
    """What a route asks for to get this part of the service, and no more."""

    async def get_part(request: Request) -> Part:
        return get(_service_of(request))

    return Depends(get_part)


EngineDep = Annotated[EngineClient, _part(lambda service: service.engine)]
GateDep = Annotated[Gate, _part(lambda service: service.gate)]
LimitsDep = Annotated[ServerLimits, _part(lambda service: service.limits)]
MetricsDep = Annotated[Metrics, _part(lambda service: service.metrics)]
ModelDep = Annotated[ServedModel, _part(lambda service: service.model)]
OptionsDep = Annotated[ServerOptions, _part(lambda service: service.options)]
QueriesDep = Annotated[OperatorQueries, _part(lambda service: service.queries)]


def get_allocation(http: Request) -> ImageAllocation:
    """A request's part of the memory for images, until its response has been sent; of routes with a body."""
    allocation = http.scope[_ALLOCATION]
    assert isinstance(allocation, ImageAllocation)
    return allocation


class JsonBodyRoute(APIRoute):
    """A route of a method that takes a request and its body, `endpoint(http, body)`, no more. Bodies are decoded with
    msgspec, in half the time of `json`, which still gets what msgspec refuses: NaN, infinity and half a surrogate pair,
    so that they can be refused by their field. What was handed over with a request that has no answer is released.

    The framework writes the document of such a route; to bring a body to it would take it longer than all that is done
    with the body. Errors are raised as the framework would, for the application's handlers."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._body: TypeAdapter[Any] = TypeAdapter(get_type_hints(endpoint, include_extras=True)["body"])

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            return await super().handle(scope, receive, send)
        request, memory = Request(scope, receive, send), scope["app"].state.service.renderer.images.memory
        scope[_ALLOCATION] = allocation = ImageAllocation(memory, get_client_id(scope))
        try:
            try:
                response = await self.endpoint(request, await self._read(request))
            except BaseException as error:
                if not isinstance(error, Overloaded):  # a proxy may ask another server with it
                    _release_kv_transfer(request)
                raise
            await response(scope, receive, send)
        finally:
            allocation.shrink(0)

    async def _read(self, request: Request) -> Any:
        """The body, of the endpoint's type. Raises RequestValidationError, and InvalidBody for what is no JSON."""
        body = await request.body()
        decoded = _decode_json(request, body) if body and _is_json(request) else body
        try:
            return self._body.validate_python(decoded)
        except ValidationError as error:
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            raise RequestValidationError(errors, body=decoded) from error


def _is_json(request: Request) -> bool:
    kind, _, subtype = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _decode_json(request: Request, body: bytes) -> Any:
    """Raises InvalidBody."""
    try:
        decoded = _decode(body)
    except json.JSONDecodeError as error:
        raise InvalidBody(f"the body is not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else "cannot be read"
        raise InvalidBody(*(explain_unreadable(body) or (f"the body {why}", None))) from error
    if isinstance(decoded, dict):
        request.scope[_TRANSFER_PARAMS] = decoded.get("kv_transfer_params")
        record_session(request.scope, decoded)
    return restore_client_fields(decoded)


def _decode(body: bytes) -> Any:
    """Raises ValueError, RecursionError."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return json.loads(body)


def _release_kv_transfer(request: Request) -> None:
    """Let go of what another server has handed over with this request: nobody is going to fetch it, unless the engine
    has begun to."""
    params = request.scope.get(_TRANSFER_PARAMS)
    if isinstance(params, dict) and params.get("do_remote_prefill") is True:
        engine = _service_of(request).engine
        with suppress(InvalidRequest):
            if (encoded := encode_release_params(params, engine.info)) is not None:
                engine.release_kv_transfer(encoded)


def owner_of(http: Request, salt: str | None) -> tuple[str, str]:
    """For whom something is kept: requests with the same API key and `cache_salt`."""
    return get_key_digest(http.scope), salt or ""


def json_response(body: dict[str, Any]) -> Response:
    """Encoded without the framework, which would visit every item: there may be millions."""
    return Response(msgspec.json.encode(body), media_type="application/json")
