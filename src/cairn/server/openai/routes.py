"""The endpoints that generate and tokenize: completions, chat completions, tokenize, detokenize."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from cairn.errors import InvalidRequest
from cairn.http.clients import cancel_on_disconnect
from cairn.server import load_report
from cairn.server.dependencies import JsonBodyRoute, get_allocation, json_response
from cairn.server.openai.answers import Answers
from cairn.server.openai.generate import Deadline
from cairn.server.openai.prompts import PromptRenderer
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
from cairn.server.options import ServerOptions


class OpenAIEndpoints:
    """What the routes of bodies need: how these are answered, the counters, the tokenizer, and the settings."""

    def __init__(
        self, answers: Answers, queries: OperatorQueries, renderer: PromptRenderer, options: ServerOptions
    ) -> None:
        self._answers = answers
        self._queries = queries
        self._renderer = renderer
        self._options = options

    def router(self) -> APIRouter:
        routes = APIRouter(route_class=JsonBodyRoute)
        routes.add_api_route("/v1/completions", self.create_completion, methods=["POST"], response_model=None)
        routes.add_api_route("/v1/chat/completions", self.create_chat_completion, methods=["POST"], response_model=None)
        routes.add_api_route("/invocations", self.invoke, methods=["POST"], response_model=None)
        routes.add_api_route("/tokenize", self.tokenize, methods=["POST"], response_model=None)
        routes.add_api_route("/detokenize", self.detokenize, methods=["POST"], response_model=None)
        return routes

    async def create_completion(self, http: Request, body: CompletionRequest) -> Response:
        allocation = get_allocation(http)
        response = await self._answers.generate(http, body, allocation, id_prefix="cmpl-", writer=CompletionWriter)
        return await self._add_load_report(response, http, body)

    async def create_chat_completion(self, http: Request, body: ChatRequest) -> Response:
        response = await self._answers.generate(http, body, get_allocation(http), id_prefix="chatcmpl-")
        return await self._add_load_report(response, http, body)

    async def _add_load_report(self, response: Response, http: Request, body: SamplingFields) -> Response:
        """A stream has none, as in vLLM: its headers are sent before there is anything to tell."""
        format_name = http.headers.get(load_report.FORMAT_HEADER)
        if format_name and not body.stream:
            report = load_report.format_load_report(await self._queries.get_stats(), format_name)
            if report is not None:
                response.headers[load_report.REPORT_HEADER] = report
        return response

    async def invoke(self, http: Request, body: Invocation) -> Response:
        """SageMaker's one path, as vLLM's: a chat where there are messages, else a completion."""
        if isinstance(body, ChatRequest):
            return await self.create_chat_completion(http, body)
        return await self.create_completion(http, body)

    async def tokenize(self, http: Request, body: TokenizeRequest) -> Response:
        renderer, model = self._renderer, self._answers.model
        model.check_name(body.model)
        refuse_unsupported(body)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", "prompt")

        async def encode() -> list[int]:
            if body.messages is not None:
                return (await renderer.render_chat(body, body.messages, get_allocation(http))).token_ids
            return await renderer.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)

        async with Deadline(self._options.request_timeout).enforce():
            tokens = await cancel_on_disconnect(http.receive, encode())
            token_strs = await renderer.spell(tokens) if body.return_token_strs else None
        limit = model.info.max_model_len
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": token_strs})

    async def detokenize(self, http: Request, body: DetokenizeRequest) -> Response:
        self._answers.model.check_name(body.model)
        refuse_unsupported(body)
        self._renderer.check_token_ids(body.tokens, "tokens")
        async with Deadline(self._options.request_timeout).enforce():
            decoding = self._renderer.tokenizer.decode(body.tokens)
            return json_response({"prompt": await cancel_on_disconnect(http.receive, decoding)})
