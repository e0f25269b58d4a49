"""The blocks of a request's prompt by the names that caches announce them under: read as the server reads it.

A prompt that cannot be read has no names: it is routed by load, and the replica says what is wrong. One with images has
those before the first one.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from cairn.cache.events import BlockNames, block_hash, root_digest
from cairn.cache.sequence_blocks import Namespace
from cairn.cli.run import read_chat_template
from cairn.deploy.ray.settings import RaySettings
from cairn.engine.contract import RenderedPrompt
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest
from cairn.http.sessions import session_name
from cairn.models.weights.hub import ModelSource, find_tokenizer
from cairn.proxy.protocol import parse_body
from cairn.proxy.server_pool import Headers
from cairn.routing.rule import RoutedRequest
from cairn.server.anthropic import translation as anthropic
from cairn.server.anthropic.requests import MessagesRequest
from cairn.server.images import MediaConnector
from cairn.server.images.memory import ImageAllocation
from cairn.server.openai.messages import Message
from cairn.server.openai.prompts import PromptOptions, PromptRenderer, parse_template_kwargs
from cairn.server.openai.requests import ChatRequest, CompletionRequest, SamplingFields
from cairn.server.openai_responses import translation as responses
from cairn.server.openai_responses.requests import ResponsesRequest
from cairn.server.openai_responses.tools import ToolTable
from cairn.server.options import ServerLimits

_MAX_READING = 64
_SMALL_BYTES = 8 << 10
"""Bodies that are read in less time than a thread takes to be asked and to answer."""
_UNBOUNDED = 1 << 31

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class PromptReader:
    """Reads prompts, large ones in a thread of its own: at most `seconds` for one, and at most 64 at once. Texts are
    always tokenized in that thread."""

    def __init__(self, renderer: PromptRenderer, block_size: int, seconds: float = 2.0) -> None:
        self._renderer = renderer
        self._names = BlockNames(block_size)
        self._seconds = seconds
        self._num_reading = 0

    async def read(self, path: str, content: bytes, headers: Headers = ()) -> RoutedRequest:
        """What the router gets to know of a request to this path; of several prompts the first counts. `headers`: the
        client's."""
        parse = _BODIES.get(path)
        if parse is None or self._num_reading >= _MAX_READING:
            return RoutedRequest()
        self._num_reading += 1
        session: str | None = None
        run = _run_here if len(content) <= _SMALL_BYTES else self._renderer.tokenizer.run
        try:
            async with asyncio.timeout(self._seconds):
                body, session = await run(lambda: (parse(content), session_name(parse_body(content), headers)))
                prompt = await self._render(body)
                return await run(partial(self._name, prompt, body.cache_salt, session))
        except Exception as error:  # whatever is wrong with it, the replica says it
            logger.debug("a prompt is routed by load alone: %r", error)
            return RoutedRequest(session=session)
        finally:
            self._num_reading -= 1

    async def _render(self, body: SamplingFields) -> RenderedPrompt:
        if isinstance(body, ChatRequest):
            body = body.model_copy(update={"messages": _before_images(body.messages)})
        prompts = await self._renderer.render(body, ImageAllocation(self._renderer.images.memory, ""))
        return prompts[0]

    def _name(self, prompt: RenderedPrompt, cache_salt: str | None, session: str | None) -> RoutedRequest:
        root = root_digest(Namespace(cache_salt=cache_salt))
        chain = self._names.chain(root, np.array(prompt.token_ids, np.int64).tobytes())
        hashes = tuple(map(block_hash, chain))
        return RoutedRequest(hashes, self._names.block_size, len(prompt.token_ids), session)


async def _run_here(work: Callable[[], Result]) -> Result:
    return work()


def create_prompt_reader(settings: RaySettings) -> PromptReader:
    """With the tokenizer of these settings, which may be downloaded. Raises ConfigError, ModelError, DownloadError."""
    has_model_tokenizer = settings.tokenizer is None
    revision = settings.revision if has_model_tokenizer else settings.tokenizer_revision
    source = ModelSource(settings.tokenizer or settings.model, revision, settings.download_dir)
    path: Path = find_tokenizer(source)
    folder = path.parent if path.is_file() else path
    # Whether prompts fit, and whether ids are in the vocabulary, is the replica's to say.
    options = PromptOptions(_UNBOUNDED, settings.max_model_len or _UNBOUNDED, settings.trust_request_chat_template)
    renderer = PromptRenderer(
        ModelTokenizer(folder, None, read_chat_template(settings.chat_template)),
        options,
        MediaConnector(ServerLimits().images),
        parse_template_kwargs(settings.default_chat_template_kwargs),
    )
    return PromptReader(renderer, settings.block_size)


def _before_images(messages: list[Message]) -> list[Message]:
    """What comes before the first image: names of later blocks have the image in them, which is not fetched here."""
    for number, message in enumerate(messages):
        before = list(takewhile(lambda part: part["type"] == "text", message.parts))
        if len(before) < len(message.parts):
            return [*messages[:number], *([message.model_copy(update={"content": before})] if before else [])]
    return messages


def _parse_response(content: bytes) -> SamplingFields:
    body = ResponsesRequest.model_validate_json(content)
    items, tools = responses.make_input_items(body, "resp_", _no_item), ToolTable(body.tools)
    return responses.to_chat(body, [], items, tools, _open_nothing).request


def _open_nothing(sealed: str) -> None:
    """Encrypted reasoning is for the replicas to read: block names end before it."""


def _no_item(item_id: str, param: str) -> Any:
    raise InvalidRequest(f"{item_id} is known where it is stored", param)


_BODIES: Mapping[str, Callable[[bytes], SamplingFields]] = MappingProxyType(
    {
        "/v1/completions": CompletionRequest.model_validate_json,
        "/v1/chat/completions": ChatRequest.model_validate_json,
        "/v1/messages": lambda content: (
            anthropic.to_chat(MessagesRequest.model_validate_json(content), _open_nothing).request
        ),
        "/v1/responses": _parse_response,
    }
)
