"""The endpoints that make work: completions, chat completions, tokenize, detokenize."""

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from cairn.engine.contract import MAX_ANSWERS, RenderedPrompt, check_token_ids
from cairn.errors import InvalidRequest
from cairn.http.clients import cancel_on_disconnect, get_client_id
from cairn.server.generate import Deadline, Job, respond
from cairn.server.images.memory import ImageAllocation
from cairn.server.prompts import (
    add_echo_text,
    build_engine_request,
    check_model,
    encode_prompts,
    render_chat_prompt,
    truncate_prompt,
)
from cairn.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    refuse_unsupported,
)
from cairn.server.response_format import parse_response_format
from cairn.server.response_writer import ChatWriter, CompletionWriter
from cairn.server.service import Service

Result = TypeVar("Result")


def get_service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


async def image_share(request: Request, service: ServiceDep) -> AsyncIterator[ImageAllocation]:
    """A request's share of the room for images, until the last byte of its answer is sent."""
    share = ImageAllocation(service.images.memory, get_client_id(request.scope))
    try:
        yield share
    finally:
        share.keep(0)


ShareOfRequest = Annotated[ImageAllocation, Depends(image_share)]


class JsonBodyRoute(APIRoute):
    """Reads bodies in half the time that `json` takes, which still reads what msgspec does not take: NaN, infinity and
    half a surrogate pair, so that they can be refused by their field."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            request.json = partial(_json_of, request)  # type: ignore[method-assign]
            return await handle(request)

        return handle_json


async def _json_of(request: Request) -> Any:
    body = await request.body()
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return json.loads(body)


def router() -> APIRouter:
    routes = APIRouter(route_class=JsonBodyRoute)
    routes.add_api_route("/v1/completions", create_completion, methods=["POST"], response_model=None)
    routes.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"], response_model=None)
    routes.add_api_route("/tokenize", tokenize, methods=["POST"], response_model=None)
    routes.add_api_route("/detokenize", detokenize, methods=["POST"], response_model=None)
    return routes


async def create_completion(http: Request, body: CompletionRequest, service: ServiceDep) -> Response:
    return await _generate(http, service, body, lambda: encode_prompts(service, body))


async def create_chat_completion(
    http: Request, body: ChatRequest, service: ServiceDep, share: ShareOfRequest
) -> Response:
    async def prompts() -> list[RenderedPrompt]:
        return [await render_chat_prompt(service, body, body.messages, share)]

    return await _generate(http, service, body, prompts)


MakePrompts: TypeAlias = Callable[[], Coroutine[Any, Any, list[RenderedPrompt]]]


async def _generate(http: Request, service: Service, body: SamplingFields, make: MakePrompts) -> Response:
    deadline = Deadline(service.options.request_timeout)
    job = await _in_time(http, deadline, _job(http, service, body, make, deadline))
    return await respond(http, service, job)


async def _job(http: Request, service: Service, body: SamplingFields, make: MakePrompts, deadline: Deadline) -> Job:
    arrived, max_model_len = service.clock.now(), service.engine.info.max_model_len
    check_model(service, body.model)
    refuse_unsupported(body)
    prompts = [truncate_prompt(one, body, max_model_len) for one in await make()]
    chat = isinstance(body, ChatRequest)
    answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{_request_id(http, body)}"
    structure, new_message = await parse_response_format(service, body, prompts[0])
    bad_words = await service.tokenizer.bad_words(body.bad_words or [])
    requests = tuple(
        build_engine_request(
            service,
            body,
            prompt,
            # Two clients may send the same id; inside the engine an id has to be one request's alone.
            request_id=f"{answer_id}-{service.new_id()}",
            client=get_client_id(http.scope),
            structure=structure,
            bad_words=bad_words,
        )
        for prompt in prompts
    )
    shown = await add_echo_text(service, body, prompts)
    # The core refuses more answers than that.
    n = min(requests[0].n, MAX_ANSWERS)
    told = (answer_id, int(service.wall()), service.options.model_name, body, shown, n, service.token_texts)
    writer = ChatWriter(*told, new_message=new_message) if chat else CompletionWriter(*told)
    return Job(requests, writer, arrived, deadline)


async def _in_time(http: Request, deadline: Deadline, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result, unless the client leaves or the deadline is missed first."""
    try:
        async with deadline.limit():
            return await cancel_on_disconnect(http.receive, work)
    except TimeoutError:
        raise deadline.missed() from None


def _request_id(http: Request, body: SamplingFields) -> str:
    own: str = http.scope["cairn.request_id"]
    given: bool = http.scope["cairn.request_id_given"]
    return own if given or body.request_id is None else body.request_id


async def tokenize(http: Request, body: TokenizeRequest, service: ServiceDep, share: ShareOfRequest) -> Response:
    deadline = Deadline(service.options.request_timeout)
    check_model(service, body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    tokens = await _in_time(http, deadline, _tokens_of(body, service, share))
    limit = service.engine.info.max_model_len
    return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})


async def _tokens_of(body: TokenizeRequest, service: Service, share: ImageAllocation) -> list[int]:
    if body.messages is not None:
        return (await render_chat_prompt(service, body, body.messages, share)).token_ids
    return await service.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)


async def detokenize(http: Request, body: DetokenizeRequest, service: ServiceDep) -> Response:
    deadline = Deadline(service.options.request_timeout)
    check_model(service, body.model)
    refuse_unsupported(body)
    check_token_ids(np.array(body.tokens, np.int64), service.engine.info.vocab_size, "tokens")
    return _json({"prompt": await _in_time(http, deadline, service.tokenizer.decode(body.tokens))})


def _json(body: dict[str, Any]) -> Response:
    """Without the framework's look at every item of it: there may be millions."""
    return Response(msgspec.json.encode(body), media_type="application/json")
