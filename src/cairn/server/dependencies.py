"""What routes of all APIs share: parts of the service, a request's part of the memory for images, JSON in and out."""

import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cairn.engine.contract import EngineClient
from cairn.errors import InvalidRequest, Overloaded
from cairn.http.clients import get_client_id, get_key_digest
from cairn.http.handover import restore_client_fields
from cairn.http.middleware import Gate
from cairn.http.sessions import record_session
from cairn.server.chat_translation import TranslationRules
from cairn.server.images.memory import ImageAllocation
from cairn.server.metrics import Metrics
from cairn.server.openai.answers import Answers
from cairn.server.openai.engine_request import encode_release_params
from cairn.server.openai.prompts import PromptRenderer
from cairn.server.openai_responses.background import BackgroundTasks
from cairn.server.openai_responses.store import ResponseStore
from cairn.server.operator_queries import OperatorQueries
from cairn.server.options import ServerLimits, ServerOptions
from cairn.server.served_model import ServedModel
from cairn.server.service import Service

_TRANSFER_PARAMS = "cairn.kv_transfer_params"
"""Where a request's scope has those of its body, in nothing checked."""


_ALLOCATION = "cairn.images"
"""Where it has its part of the memory for images."""

Part = TypeVar("Part")
_GetPart: TypeAlias = Callable[[Request], Awaitable[Any]]


def _service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def _part(get: Callable[[Service], Part]) -> Any:
    """What a route asks for to get this part of the service, and no more."""

    async def get_part(request: Request) -> Part:
        return get(_service_of(request))

    return Depends(get_part)


AnswersDep = Annotated[Answers, _part(lambda service: service.answers)]
BackgroundDep = Annotated[BackgroundTasks, _part(lambda service: service.background)]
EngineDep = Annotated[EngineClient, _part(lambda service: service.engine)]
GateDep = Annotated[Gate, _part(lambda service: service.gate)]
LimitsDep = Annotated[ServerLimits, _part(lambda service: service.limits)]
MetricsDep = Annotated[Metrics, _part(lambda service: service.metrics)]
ModelDep = Annotated[ServedModel, _part(lambda service: service.model)]
OptionsDep = Annotated[ServerOptions, _part(lambda service: service.options)]
QueriesDep = Annotated[OperatorQueries, _part(lambda service: service.queries)]
RendererDep = Annotated[PromptRenderer, _part(lambda service: service.renderer)]
ResponseStoreDep = Annotated[ResponseStore, _part(lambda service: service.responses)]
TranslationDep = Annotated[TranslationRules, _part(lambda service: service.translation)]


async def _get_allocation(request: Request) -> ImageAllocation:
    allocation = request.scope[_ALLOCATION]
    assert isinstance(allocation, ImageAllocation)
    return allocation


ImageAllocationDep = Annotated[ImageAllocation, Depends(_get_allocation)]
"""A request's part of the memory for images, until the last byte of its response is sent."""


class JsonBodyRoute(APIRoute):
    """Decodes bodies with msgspec, in half the time of `json`, which still gets what msgspec refuses: NaN, infinity and
    half a surrogate pair, so that they can be refused by their field. What was handed over with a request that has no
    answer is released.

    The framework's own way from a body to its route takes longer than all that is done with it, and is left to bodies
    that are to be refused, which it has the words for."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        memory = scope["app"].state.service.renderer.images.memory
        scope[_ALLOCATION] = allocation = ImageAllocation(memory, get_client_id(scope))
        try:
            await super().handle(scope, receive, send)
        finally:
            allocation.shrink(0)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        explain, takes, body = super().get_route_handler(), self.dependant, self.body_field
        has_more = takes.path_params or takes.query_params or takes.header_params or takes.cookie_params
        parts = [(part.name or "", cast(_GetPart, part.call)) for part in takes.dependencies]

        async def handle(request: Request) -> Response:
            is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
            if body is None or has_more or not is_json:
                return await explain(request)
            try:
                decoded = await request.json()
            except Exception:
                return await explain(request)
            value, errors = body.validate(decoded, {}, loc=("body",))
            if errors or decoded is None:
                return await explain(request)
            values = {name: await get_part(request) for name, get_part in parts}
            values |= {takes.body_params[0].name: value}
            if takes.request_param_name:
                values[takes.request_param_name] = request
            return cast(Response, await self.endpoint(**values))

        async def handle_json(request: Request) -> Response:
            request.json = partial(_decode_json, request)  # type: ignore[method-assign]
            try:
                return await handle(request)
            except BaseException as error:
                if not isinstance(error, Overloaded):  # a proxy may ask another server with it
                    _release_kv_transfer(request)
                raise

        return handle_json


async def _decode_json(request: Request) -> Any:
    body = await request.body()
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        decoded = json.loads(body)
    if isinstance(decoded, dict):
        request.scope[_TRANSFER_PARAMS] = decoded.get("kv_transfer_params")
        record_session(request.scope, decoded)
    return restore_client_fields(decoded)


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
