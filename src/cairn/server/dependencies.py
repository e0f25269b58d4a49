"""What routes of all APIs share: parts of the service, a request's part of the memory for images, JSON in and out."""

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

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


async def allocate_images(request: Request, renderer: RendererDep) -> AsyncIterator[ImageAllocation]:
    """A request's part of the memory for images, until the last byte of its response is sent."""
    allocation = ImageAllocation(renderer.images.memory, get_client_id(request.scope))
    try:
        yield allocation
    finally:
        allocation.shrink(0)


ImageAllocationDep = Annotated[ImageAllocation, Depends(allocate_images)]


class JsonBodyRoute(APIRoute):
    """Decodes bodies with msgspec, in half the time of `json`, which still gets what msgspec refuses: NaN, infinity and
    half a surrogate pair, so that they can be refused by their field. What was handed over with a request that has no
    answer is released."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

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
