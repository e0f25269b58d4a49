"""The endpoints that generate and tokenize: completions, chat completions, tokenize, detokenize."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from cairn.errors import InvalidRequest
from cairn.http.clients import cancel_on_disconnect
from cairn.server import load_report
from cairn.server.dependencies import (
    AnswersDep,
    ImageAllocationDep,
    JsonBodyRoute,
    ModelDep,
    OptionsDep,
    QueriesDep,
    RendererDep,
    json_response,
)
from cairn.server.openai.generate import Deadline
from cairn.server.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Invocation,
    SamplingFields,
    TokenizeRequest,
    refuse_unsupported,
)
from cairn.server.openai.response_writer import CompletionWriter
from cairn.server.operator_queries import OperatorQueries


def router() -> APIRouter:
    routes = APIRouter(route_class=JsonBodyRoute)
    routes.add_api_route("/v1/completions", create_completion, methods=["POST"], response_model=None)
    routes.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"], response_model=None)
    routes.add_api_route("/invocations", invoke, methods=["POST"], response_model=None)
    routes.add_api_route("/tokenize", tokenize, methods=["POST"], response_model=None)
    routes.add_api_route("/detokenize", detokenize, methods=["POST"], response_model=None)
    return routes


async def create_completion(
    http: Request, body: CompletionRequest, answers: AnswersDep, queries: QueriesDep, allocation: ImageAllocationDep
) -> Response:
    response = await answers.generate(http, body, allocation, id_prefix="cmpl-", writer=CompletionWriter)
    return await _add_load_report(response, http, queries, body)


async def create_chat_completion(
    http: Request, body: ChatRequest, answers: AnswersDep, queries: QueriesDep, allocation: ImageAllocationDep
) -> Response:
    response = await answers.generate(http, body, allocation, id_prefix="chatcmpl-")
    return await _add_load_report(response, http, queries, body)


async def _add_load_report(
    response: Response, http: Request, queries: OperatorQueries, body: SamplingFields
) -> Response:
    """A stream has none, as in vLLM: its headers are sent before there is anything to tell."""
    format_name = http.headers.get(load_report.FORMAT_HEADER)
    if format_name and not body.stream:
        report = load_report.format_load_report(await queries.get_stats(), format_name)
        if report is not None:
            response.headers[load_report.REPORT_HEADER] = report
    return response


async def invoke(
    http: Request, body: Invocation, answers: AnswersDep, queries: QueriesDep, allocation: ImageAllocationDep
) -> Response:
    """SageMaker's one path, as vLLM's: a chat where there are messages, else a completion."""
    if isinstance(body, ChatRequest):
        return await create_chat_completion(http, body, answers, queries, allocation)
    return await create_completion(http, body, answers, queries, allocation)


async def tokenize(
    http: Request,
    body: TokenizeRequest,
    model: ModelDep,
    renderer: RendererDep,
    options: OptionsDep,
    allocation: ImageAllocationDep,
) -> Response:
    model.check_name(body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")

    async def encode() -> list[int]:
        if body.messages is not None:
            return (await renderer.render_chat(body, body.messages, allocation)).token_ids
        return await renderer.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)

    async with Deadline(options.request_timeout).enforce():
        tokens = await cancel_on_disconnect(http.receive, encode())
        token_strs = await renderer.spell(tokens) if body.return_token_strs else None
    limit = model.info.max_model_len
    return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": token_strs})


async def detokenize(
    http: Request, body: DetokenizeRequest, model: ModelDep, renderer: RendererDep, options: OptionsDep
) -> Response:
    model.check_name(body.model)
    refuse_unsupported(body)
    renderer.check_token_ids(body.tokens, "tokens")
    async with Deadline(options.request_timeout).enforce():
        decoding = renderer.tokenizer.decode(body.tokens)
        return json_response({"prompt": await cancel_on_disconnect(http.receive, decoding)})
