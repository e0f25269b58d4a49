"""The endpoints that generate and tokenize: completions, chat completions, tokenize, detokenize."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from cairn.engine.contract import MAX_ANSWERS, RenderedPrompt, check_token_ids
from cairn.errors import InvalidRequest
from cairn.http.clients import cancel_on_disconnect, get_client_id
from cairn.server import load_report
from cairn.server.dependencies import ImageAllocationDep, JsonBodyRoute, ServiceDep, json_response
from cairn.server.openai.engine_request import build_engine_request, encode_bad_words, resolve_num_logprobs
from cairn.server.openai.generate import Deadline, Generation
from cairn.server.openai.prompts import (
    add_prompt_text,
    check_model,
    encode_prompts,
    render_chat_prompt,
    reuse_prompt,
    truncate_prompt,
)
from cairn.server.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Invocation,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
    refuse_unsupported,
)
from cairn.server.openai.response_format import parse_response_format
from cairn.server.openai.response_writer import ChatWriter, CompletionWriter, ResponseWriter
from cairn.server.openai.thinking_budget import is_reasoning_open, limit_thinking
from cairn.server.options import ServerOptions
from cairn.server.service import Service


def router() -> APIRouter:
    routes = APIRouter(route_class=JsonBodyRoute)
    routes.add_api_route("/v1/completions", create_completion, methods=["POST"], response_model=None)
    routes.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"], response_model=None)
    routes.add_api_route("/invocations", invoke, methods=["POST"], response_model=None)
    routes.add_api_route("/tokenize", tokenize, methods=["POST"], response_model=None)
    routes.add_api_route("/detokenize", detokenize, methods=["POST"], response_model=None)
    return routes


async def create_completion(http: Request, body: CompletionRequest, service: ServiceDep) -> Response:
    response = await generate(
        http, service, body, lambda: encode_prompts(service, body), id_prefix="cmpl-", writer=CompletionWriter
    )
    return await _add_load_report(response, http, service, body)


async def create_chat_completion(
    http: Request, body: ChatRequest, service: ServiceDep, allocation: ImageAllocationDep
) -> Response:
    async def render() -> list[RenderedPrompt]:
        return [await render_chat_prompt(service, body, body.messages, allocation)]

    response = await generate(http, service, body, render, id_prefix="chatcmpl-")
    return await _add_load_report(response, http, service, body)


async def _add_load_report(response: Response, http: Request, service: Service, body: SamplingFields) -> Response:
    """A stream has none, as in vLLM: its headers are sent before there is anything to tell."""
    format_name = http.headers.get(load_report.FORMAT_HEADER)
    if format_name and not body.stream:
        report = load_report.format_load_report(await service.get_stats(), format_name)
        if report is not None:
            response.headers[load_report.REPORT_HEADER] = report
    return response


async def invoke(http: Request, body: Invocation, service: ServiceDep, allocation: ImageAllocationDep) -> Response:
    """SageMaker's one path, as vLLM's: a chat where there are messages, else a completion."""
    if isinstance(body, ChatRequest):
        return await create_chat_completion(http, body, service, allocation)
    return await create_completion(http, body, service)


MakePrompts: TypeAlias = Callable[[], Coroutine[Any, Any, list[RenderedPrompt]]]
WriterType: TypeAlias = Callable[..., ResponseWriter]


async def generate(
    http: Request,
    service: Service,
    body: SamplingFields,
    make_prompts: MakePrompts,
    *,
    id_prefix: str,
    writer: WriterType = ChatWriter,
) -> Response:
    """Have a body answered as `writer` writes it. Raises RequestError for what has no answer."""
    generation = await prepare(http, service, body, make_prompts, id_prefix=id_prefix, writer=writer)
    return await generation.respond(http)


async def prepare(
    http: Request,
    service: Service,
    body: SamplingFields,
    make_prompts: MakePrompts,
    *,
    id_prefix: str,
    writer: WriterType,
) -> Generation:
    """All but the answer itself. Raises RequestError."""
    deadline = Deadline(service.options.request_timeout)
    async with deadline.enforce():
        preparing = _prepare(http, service, body, make_prompts, deadline, id_prefix, writer)
        return await cancel_on_disconnect(http.receive, preparing)


async def _prepare(
    http: Request,
    service: Service,
    body: SamplingFields,
    make_prompts: MakePrompts,
    deadline: Deadline,
    id_prefix: str,
    writer_type: WriterType,
) -> Generation:
    """Raises RequestError for what can be refused without the engine."""
    arrival_time, info = service.clock.now(), service.engine.info
    check_model(service, body.model)
    refuse_unsupported(body)
    body = resolve_num_logprobs(body, service.options.max_logprobs, info.vocab_size)
    body = _with_flags(body.with_defaults(service.default_sampling), service.options)
    reused = reuse_prompt(service, body)
    prompts = await make_prompts() if reused is None else [reused]
    prompts = [truncate_prompt(prompt, body, info.max_model_len) for prompt in prompts]
    own_id: str = http.scope["cairn.request_id"]
    if body.request_id is not None and not http.scope["cairn.has_own_request_id"]:
        own_id = body.request_id
    opened = [await is_reasoning_open(service, body, prompt) for prompt in prompts]
    answer = parse_response_format(service, body, opened=opened[0])
    bad_words: list[list[int]] = []
    if words := body.bad_words:
        bad_words = await service.tokenizer.run(lambda: encode_bad_words(service.engine.tokenizer.encode, words))
    answer_id = f"{id_prefix}{own_id}"
    thinking = [
        await limit_thinking(service, body, prompt, is_open=is_open, call_heads=answer.call_heads)
        for prompt, is_open in zip(prompts, opened, strict=True)
    ]
    requests = tuple(
        build_engine_request(
            info,
            body,
            prompt,
            # Two clients may send the same id; inside the engine an id has to be one request's alone.
            request_id=f"{answer_id}-{body.release_key or service.new_id()}",
            client=get_client_id(http.scope),
            structure=answer.structure,
            bad_words=bad_words,
            thinking=budget,
        )
        for prompt, budget in zip(prompts, thinking, strict=True)
    )
    if body.is_prefill_only:
        body = body.as_prefill()
    prompts = await add_prompt_text(service, body, prompts)
    n = min(requests[0].num_answers, MAX_ANSWERS)  # the core refuses more
    created, model = int(service.wall()), service.options.model_name
    has_listed = bool(body.logprob_token_ids)
    formatter = service.logprobs_formatter.configure(body.return_tokens_as_token_ids, has_listed=has_listed)
    fields = (answer_id, created, model, service.system_fingerprint, body, prompts, n, formatter, answer.new_message)
    writer = writer_type(*fields, service.options)
    return Generation(service, requests, writer, arrival_time, deadline)


def _with_flags(body: SamplingFields, options: ServerOptions) -> SamplingFields:
    """The body as the server's flags have it."""
    updates: dict[str, Any] = {}
    if body.stream and options.enable_force_include_usage:
        updates["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
    if body.stream_interval is None and options.stream_interval > 1:
        updates["stream_interval"] = options.stream_interval
    return body.model_copy(update=updates) if updates else body


async def tokenize(
    http: Request, body: TokenizeRequest, service: ServiceDep, allocation: ImageAllocationDep
) -> Response:
    check_model(service, body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")

    async def encode() -> list[int]:
        if body.messages is not None:
            return (await render_chat_prompt(service, body, body.messages, allocation)).token_ids
        return await service.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)

    async with Deadline(service.options.request_timeout).enforce():
        tokens = await cancel_on_disconnect(http.receive, encode())
        convert = partial(service.engine.tokenizer.convert_ids_to_tokens, tokens)
        token_strs = await service.tokenizer.run(convert) if body.return_token_strs else None
    limit = service.engine.info.max_model_len
    return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": token_strs})


async def detokenize(http: Request, body: DetokenizeRequest, service: ServiceDep) -> Response:
    check_model(service, body.model)
    refuse_unsupported(body)
    check_token_ids(np.array(body.tokens, np.int64), service.engine.info.vocab_size, "tokens")
    async with Deadline(service.options.request_timeout).enforce():
        return json_response(
            {"prompt": await cancel_on_disconnect(http.receive, service.tokenizer.decode(body.tokens))}
        )
