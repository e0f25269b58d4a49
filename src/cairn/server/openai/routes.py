"""The endpoints that generate and tokenize: completions, chat completions, tokenize, detokenize."""

from collections.abc import Callable
from typing import Any, TypeAlias

from fastapi import APIRouter, Request
from starlette.responses import Response

from cairn.engine.contract import MAX_ANSWERS
from cairn.errors import InvalidRequest
from cairn.http.clients import cancel_on_disconnect, get_client_id
from cairn.server import load_report
from cairn.server.dependencies import ImageAllocationDep, JsonBodyRoute, ServiceDep, json_response
from cairn.server.images.memory import ImageAllocation
from cairn.server.openai.engine_request import build_engine_request, encode_bad_words, resolve_num_logprobs
from cairn.server.openai.generate import Deadline, Generation
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


async def create_completion(
    http: Request, body: CompletionRequest, service: ServiceDep, allocation: ImageAllocationDep
) -> Response:
    response = await generate(http, service, body, allocation, id_prefix="cmpl-", writer=CompletionWriter)
    return await _add_load_report(response, http, service, body)


async def create_chat_completion(
    http: Request, body: ChatRequest, service: ServiceDep, allocation: ImageAllocationDep
) -> Response:
    response = await generate(http, service, body, allocation, id_prefix="chatcmpl-")
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
    return await create_completion(http, body, service, allocation)


WriterType: TypeAlias = Callable[..., ResponseWriter]


async def generate(
    http: Request,
    service: Service,
    body: SamplingFields,
    allocation: ImageAllocation,
    *,
    id_prefix: str,
    writer: WriterType = ChatWriter,
) -> Response:
    """Have a body answered as `writer` writes it. Raises RequestError for what has no answer."""
    generation = await prepare(http, service, body, allocation, id_prefix=id_prefix, writer=writer)
    return await generation.respond(http)


async def prepare(
    http: Request,
    service: Service,
    body: SamplingFields,
    allocation: ImageAllocation,
    *,
    id_prefix: str,
    writer: WriterType,
) -> Generation:
    """All but the answer itself. Raises RequestError."""
    deadline = Deadline(service.options.request_timeout)
    async with deadline.enforce():
        preparing = _prepare(http, service, body, allocation, deadline, id_prefix, writer)
        return await cancel_on_disconnect(http.receive, preparing)


async def _prepare(
    http: Request,
    service: Service,
    body: SamplingFields,
    allocation: ImageAllocation,
    deadline: Deadline,
    id_prefix: str,
    writer_type: WriterType,
) -> Generation:
    """Raises RequestError for what can be refused without the engine."""
    arrival_time, info = service.clock.now(), service.engine.info
    service.model.check_name(body.model)
    refuse_unsupported(body)
    body = resolve_num_logprobs(body, service.options.max_logprobs, info.vocab_size)
    body = _with_flags(body.with_defaults(service.default_sampling), service.options)
    prompts = await service.renderer.render(body, allocation)
    own_id: str = http.scope["cairn.request_id"]
    if body.request_id is not None and not http.scope["cairn.has_own_request_id"]:
        own_id = body.request_id
    opened = [await is_reasoning_open(service, body, prompt) for prompt in prompts]
    answer = parse_response_format(service, body, opened=opened[0])
    bad_words: list[list[int]] = []
    if words := body.bad_words:
        bad_words = await service.renderer.tokenizer.run(
            lambda: encode_bad_words(service.engine.tokenizer.encode, words)
        )
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
    prompts = await service.renderer.add_text(body, prompts)
    n = min(requests[0].num_answers, MAX_ANSWERS)  # the core refuses more
    created, model = int(service.wall()), service.options.model_name
    has_listed = bool(body.logprob_token_ids)
    formatter = service.logprobs_formatter.configure(body.return_tokens_as_token_ids, has_listed=has_listed)
    fields = (answer_id, created, model, service.system_fingerprint, body, prompts, n, formatter, answer.new_message)
    writer = writer_type(*fields, service.options)
    return Generation(service, requests, writer, arrival_time, deadline)


def _with_flags(body: SamplingFields, options: ServerOptions) -> SamplingFields:
    """The body as the server's flags have it."""
    found: dict[str, Any] = {}
    if body.stream and options.enable_force_include_usage:
        found["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
    if body.stream_interval is None and options.stream_interval > 1:
        found["stream_interval"] = options.stream_interval
    return body.model_copy(update=found) if found else body


async def tokenize(
    http: Request, body: TokenizeRequest, service: ServiceDep, allocation: ImageAllocationDep
) -> Response:
    service.model.check_name(body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")

    async def encode() -> list[int]:
        if body.messages is not None:
            return (await service.renderer.render_chat(body, body.messages, allocation)).token_ids
        return await service.renderer.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)

    async with Deadline(service.options.request_timeout).enforce():
        tokens = await cancel_on_disconnect(http.receive, encode())
        token_strs = await service.renderer.spell(tokens) if body.return_token_strs else None
    limit = service.engine.info.max_model_len
    return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": token_strs})


async def detokenize(http: Request, body: DetokenizeRequest, service: ServiceDep) -> Response:
    service.model.check_name(body.model)
    refuse_unsupported(body)
    service.renderer.check_token_ids(body.tokens, "tokens")
    async with Deadline(service.options.request_timeout).enforce():
        decoding = service.renderer.tokenizer.decode(body.tokens)
        return json_response({"prompt": await cancel_on_disconnect(http.receive, decoding)})
