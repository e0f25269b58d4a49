"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cairn.errors import RequestError
from cairn.http.clients import cancel_on_disconnect
from cairn.server.anthropic.requests import CountTokensRequest, MessagesRequest
from cairn.server.anthropic.translation import to_chat
from cairn.server.anthropic.writer import MessagesWriter
from cairn.server.dependencies import (
    AnswersDep,
    ImageAllocationDep,
    JsonBodyRoute,
    ModelDep,
    OptionsDep,
    RendererDep,
    TranslationDep,
    json_response,
    owner_of,
)
from cairn.server.openai.generate import Deadline


def router() -> APIRouter:
    routes = APIRouter(route_class=JsonBodyRoute)
    routes.add_api_route("/v1/messages", create_message, methods=["POST"], response_model=None)
    routes.add_api_route("/v1/messages/count_tokens", count_tokens, methods=["POST"], response_model=None)
    return routes


async def create_message(
    http: Request, body: MessagesRequest, answers: AnswersDep, rules: TranslationDep, allocation: ImageAllocationDep
) -> Response:
    owner, seal = owner_of(http, body.cache_salt), rules.seal
    chat = to_chat(body, lambda sealed: seal.open(sealed, owner))
    chat.settle_left_out(rules)
    if not answers.parsers.has_reasoning:  # there is nothing to bound, and agents send a budget to every model
        chat.request.thinking_token_budget = None

    is_shown = body.thinking is None or body.thinking.get("display") != "omitted"

    def make_writer(*fields: Any) -> MessagesWriter:
        return MessagesWriter(*fields, seal=lambda text: seal.close(text, owner), shows_thinking=is_shown)

    try:
        return await answers.generate(http, chat.request, allocation, id_prefix="msg_", writer=make_writer)
    except RequestError as error:
        raise chat.rename_error(error) from None


async def count_tokens(
    http: Request,
    body: CountTokensRequest,
    model: ModelDep,
    renderer: RendererDep,
    rules: TranslationDep,
    options: OptionsDep,
    allocation: ImageAllocationDep,
) -> Response:
    model.check_name(body.model)
    owner, seal = owner_of(http, None), rules.seal
    chat = to_chat(body, lambda sealed: seal.open(sealed, owner))
    chat.settle_left_out(rules)
    try:
        async with Deadline(options.request_timeout).enforce():
            rendering = renderer.render_chat(chat.request, chat.request.messages, allocation)
            prompt = await cancel_on_disconnect(http.receive, rendering)
    except RequestError as error:
        raise chat.rename_error(error) from None
    return json_response({"input_tokens": len(prompt.token_ids)})
