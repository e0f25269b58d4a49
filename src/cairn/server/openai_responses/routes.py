"""POST /v1/responses, and what may be done with a response that has been stored."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cairn.errors import CairnError, InvalidRequest, NotFound, RequestError
from cairn.http.error_responses import internal_error
from cairn.server.chat_translation import TranslationRules
from cairn.server.dependencies import JsonBodyRoute, get_allocation, json_response, owner_of
from cairn.server.error_handlers import to_request_error
from cairn.server.openai.answers import Answers
from cairn.server.openai.field_types import CacheSalt
from cairn.server.openai.generate import Generation
from cairn.server.openai_responses.background import BackgroundTasks
from cairn.server.openai_responses.requests import ResponsesRequest
from cairn.server.openai_responses.store import Owner, ResponseStore, StoredResponse
from cairn.server.openai_responses.tools import ToolTable
from cairn.server.openai_responses.translation import get_response_id, make_input_items, to_chat
from cairn.server.openai_responses.writer import ResponsesWriter
from cairn.server.options import ServerOptions

_PATH = "/v1/responses/{response_id}"
_PREVIOUS = "previous_response_id"

logger = logging.getLogger(__name__)

SaltQuery = Annotated[CacheSalt | None, Query(description="that the response was made with")]


class ResponsesEndpoints:
    """What the routes need: how bodies are translated and answered, where responses are kept, those in the background,
    and the settings."""

    def __init__(
        self,
        answers: Answers,
        store: ResponseStore,
        background: BackgroundTasks,
        rules: TranslationRules,
        options: ServerOptions,
    ) -> None:
        self._answers = answers
        self._store = store
        self._background = background
        self._rules = rules
        self._options = options

    def router(self) -> APIRouter:
        routes = APIRouter()
        routes.add_api_route(
            "/v1/responses",
            self.create_response,
            methods=["POST"],
            response_model=None,
            route_class_override=JsonBodyRoute,
        )
        routes.add_api_route(_PATH, self.get_response, methods=["GET"], response_model=None)
        routes.add_api_route(_PATH, self.delete_response, methods=["DELETE"], response_model=None)
        routes.add_api_route(f"{_PATH}/cancel", self.cancel_response, methods=["POST"], response_model=None)
        routes.add_api_route(f"{_PATH}/input_items", self.list_input_items, methods=["GET"], response_model=None)
        return routes

    async def create_response(self, http: Request, body: ResponsesRequest) -> Response:
        answers, store, background, rules = self._answers, self._store, self._background, self._rules
        answers.model.check_name(body.model)
        owner, response_id = owner_of(http, body.cache_salt), f"resp_{answers.stamps.new_id()}"
        history = _load_history(store, owner, body.previous_response_id, self._options.max_body_bytes)
        items = make_input_items(body, response_id, partial(_find_item, store, owner))
        tools, seal = ToolTable(body.tools), rules.seal
        chat = to_chat(body, history, items, tools, lambda sealed: seal.open(sealed, owner))
        chat.settle_left_out(rules)
        is_sealed = "reasoning.encrypted_content" in (body.include or ())
        encoded = msgspec.json.encode(items)
        keep: Callable[[bytes], None] | None = None
        can_keep = body.store is not False and store.can_hold(len(encoded))
        if can_keep and not chat.request.is_kv_export:

            def keep(response: bytes) -> None:
                stored = StoredResponse(response, encoded, body.previous_response_id)
                store.put(owner, response_id, stored)

        def make_writer(_: str, *fields: Any) -> ResponsesWriter:
            options: dict[str, Any] = {"asked": body, "tools": tools, "wall": answers.stamps.wall, "keep": keep}
            options["seal"] = (lambda text: seal.close(text, owner)) if is_sealed else None
            return ResponsesWriter(response_id, *fields, **options)

        id_prefix = f"{response_id}-"
        try:
            if body.background:
                is_kept = can_keep and (keep is not None or chat.request.is_prefill_only)
                _check_background(body, background, can_keep=is_kept)
            if not body.background or chat.request.is_prefill_only:
                return await answers.generate(
                    http, chat.request, get_allocation(http), id_prefix=id_prefix, writer=make_writer
                )
            generation = await answers.prepare(
                http, chat.request, get_allocation(http), id_prefix=id_prefix, writer=make_writer
            )
        except RequestError as error:
            raise chat.rename_error(error) from None
        background.check_room()  # others may have come while this one was prepared
        writer = cast(ResponsesWriter, generation.writer)
        queued, images = writer.store_state("queued"), get_allocation(http).split_off()
        background.start((owner, response_id), _make(generation, writer), lambda: images.shrink(0))
        return Response(queued, media_type="application/json")

    async def get_response(
        self,
        http: Request,
        response_id: str,
        cache_salt: SaltQuery = None,
        stream: Annotated[bool, Query(description="only responses in the background could be streamed again")] = False,
    ) -> Response:
        if stream:
            raise InvalidRequest("stream: a response that has ended is not streamed again: leave it out", "stream")
        return Response(self._get(http, response_id, cache_salt).response, media_type="application/json")

    async def delete_response(self, http: Request, response_id: str, cache_salt: SaltQuery = None) -> Response:
        owner = owner_of(http, cache_salt)
        await self._background.cancel((owner, response_id))
        self._store.delete(owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, http: Request, response_id: str, cache_salt: SaltQuery = None) -> Response:
        was_running = await self._background.cancel((owner_of(http, cache_salt), response_id))
        response = self._get(http, response_id, cache_salt).response
        if was_running:
            return Response(response, media_type="application/json")
        if msgspec.json.decode(response)["background"]:
            raise InvalidRequest(f"{response_id} has ended already", "response_id")
        text = f"{response_id}: Cannot cancel a synchronous response. To cancel one, close its connection"
        raise InvalidRequest(text, "response_id")

    async def list_input_items(
        self,
        http: Request,
        response_id: str,
        cache_salt: SaltQuery = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(max_length=256)] = None,
    ) -> Response:
        items = self._get(http, response_id, cache_salt).decode_items()
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise InvalidRequest(f"after: {after!r} is no item of this response's input", "after")
        start = 0 if after is None else ids.index(after) + 1
        page = items[start : start + limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": page, **ends, "has_more": start + limit < len(items)})

    def _get(self, http: Request, response_id: str, salt: str | None) -> StoredResponse:
        return self._store.get(owner_of(http, salt), response_id)


def _check_background(body: ResponsesRequest, background: BackgroundTasks, *, can_keep: bool) -> None:
    """Raises InvalidRequest, QueueFull."""
    if not can_keep:
        text = "background can only be used when `store` is true: nobody could get the response otherwise"
        raise InvalidRequest(text, "background")
    if body.stream:
        raise InvalidRequest("stream: a response in the background is not streamed: leave one of the two out", "stream")
    background.check_room()


async def _make(generation: Generation, writer: ResponsesWriter) -> None:
    """Make a response; how far it is stands in the store."""
    has_begun = False
    try:
        async with aclosing(generation.outputs()) as outputs:
            async for prompt, output in outputs:
                if not has_begun:
                    writer.store_state("in_progress")
                    has_begun = True
                await generation.write(partial(writer.add, prompt, output), output)
        writer.write_response()
        generation.tell_of_calls(writer.choices)
    except CairnError as error:
        writer.store_failure(to_request_error(error))
    except Exception as error:
        logger.error("a response in the background failed: %r", error)
        writer.store_failure(internal_error())
    except asyncio.CancelledError:
        writer.store_state("cancelled")


def _load_history(store: ResponseStore, owner: Owner, previous: str | None, limit: int) -> list[Any]:
    """The items of the conversation so far. Raises NotFound, and InvalidRequest for more than `limit` bytes."""
    if previous is None:
        return []
    chain = store.get_chain(owner, previous, _PREVIOUS)
    if (num_bytes := sum(response.num_bytes for response in chain)) > limit:
        text = f"{_PREVIOUS}: the conversation has {num_bytes} bytes, at most {limit} are read: begin a new one"
        raise InvalidRequest(text, _PREVIOUS)
    _check_ended(chain[-1], _PREVIOUS)
    return [item for response in chain for item in (*response.decode_items(), *response.decode_output())]


def _check_ended(stored: StoredResponse, param: str) -> None:
    if not stored.has_ended():
        raise InvalidRequest(f"{param}: this response is still being made: wait for its end, or cancel it", param)


def _find_item(store: ResponseStore, owner: Owner, item_id: str, param: str) -> Any:
    """What an item_reference refers to. Raises NotFound."""
    response_id = get_response_id(item_id)
    if response_id is not None:
        stored = store.get(owner, response_id, param)
        _check_ended(stored, param)
        for item in (*stored.decode_items(), *stored.decode_output()):
            if item["id"] == item_id:
                return item
    raise NotFound(f"{param}: there is no item {item_id!r}: send the item itself", param)
