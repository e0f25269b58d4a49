"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cairn.errors import RequestError
from cairn.http.clients import cancel_on_disconnect
from cairn.server.anthropic.requests import CountTokensRequest, MessagesRequest
from cairn.server.anthropic.translation import to_chat
from cairn.server.anthropic.writer import MessagesWriter
from cairn.server.chat_translation import TranslationRules
from cairn.server.dependencies import JsonBodyRoute, get_allocation, json_response, owner_of
from cairn.server.openai.answers import Answers
from cairn.server.openai.generate import Deadline
from cairn.server.openai.prompts import PromptRenderer
from cairn.server.options import ServerOptions


class MessagesEndpoints:
    """What the routes of bodies need: how these are translated, answered and counted, and the settings."""

    def __init__(
        self, answers: Answers, renderer: PromptRenderer, rules: TranslationRules, options: ServerOptions
    ) -> None:
        self._answers = answers
        self._renderer = renderer
        self._rules = rules
        self._options = options

    def router(self) -> APIRouter:
        routes = APIRouter(route_class=JsonBodyRoute)
        routes.add_api_route("/v1/messages", self.create_message, methods=["POST"], response_model=None)
        routes.add_api_route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"], response_model=None)
        return routes

    async def create_message(self, http: Request, body: MessagesRequest) -> Response:
        owner, seal = owner_of(http, body.cache_salt), self._rules.seal
        chat = to_chat(body, lambda sealed: seal.open(sealed, owner))
        chat.settle_left_out(self._rules)
        # there is nothing to bound, and agents send a budget to every model
        if not self._answers.parsers.has_reasoning:
            chat.request.thinking_token_budget = None

        is_shown = body.thinking is None or body.thinking.get("display") != "omitted"

        def make_writer(*fields: Any) -> MessagesWriter:
            return MessagesWriter(*fields, seal=lambda text: seal.close(text, owner), shows_thinking=is_shown)

        allocation = get_allocation(http)
        try:
            return await self._answers.generate(http, chat.request, allocation, id_prefix="msg_", writer=make_writer)
        except RequestError as error:
            raise chat.rename_error(error) from None

    async def count_tokens(self, http: Request, body: CountTokensRequest) -> Response:
        self._answers.model.check_name(body.model)
        owner, seal = owner_of(http, None), self._rules.seal
        chat = to_chat(body, lambda sealed: seal.open(sealed, owner))
        chat.settle_left_out(self._rules)
        try:
            async with Deadline(self._options.request_timeout).enforce():
                rendering = self._renderer.render_chat(chat.request, chat.request.messages, get_allocation(http))
                prompt = await cancel_on_disconnect(http.receive, rendering)
        except RequestError as error:
            raise chat.rename_error(error) from None
        return json_response({"input_tokens": len(prompt.token_ids)})
