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
from typing import Any, TypeVar, cast

import numpy as np

from cairn.cache.events import BlockNames, block_hash, root_digest
from cairn.cache.sequence_blocks import Namespace
from cairn.cli.run import read_chat_template
from cairn.deploy.ray.settings import RaySettings
from cairn.engine.contract import CacheInfo, EngineClient, EngineInfo, RenderedPrompt, TextTokenizer
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest
from cairn.models.weights.hub import ModelSource, find_tokenizer
from cairn.proxy.protocol import parse_body
from cairn.proxy.server_pool import Headers
from cairn.routing.rule import RoutedRequest
from cairn.routing.sessions import session_name
from cairn.server.anthropic import translation as anthropic
from cairn.server.anthropic.requests import MessagesRequest
from cairn.server.images.memory import ImageAllocation
from cairn.server.openai.messages import Message
from cairn.server.openai.prompts import (
    encode_prompts,
    parse_template_kwargs,
    render_chat_prompt,
    reuse_prompt,
    truncate_prompt,
)
from cairn.server.openai.requests import ChatRequest, CompletionRequest, SamplingFields
from cairn.server.openai_responses import translation as responses
from cairn.server.openai_responses.requests import ResponsesRequest
from cairn.server.openai_responses.tools import ToolTable
from cairn.server.options import ServerLimits
from cairn.server.service import Service

_MAX_READING = 64
_SMALL_BYTES = 8 << 10
"""Bodies that are read in less time than a thread takes to be asked and to answer."""
_UNBOUNDED = 1 << 31

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class PromptReader:
    """Reads prompts, large ones in a thread of its own: at most `seconds` for one, and at most 64 at once. Texts are
    always tokenized in that thread."""

    def __init__(self, service: Service, block_size: int, seconds: float = 2.0) -> None:
        self._service = service
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
        run = _run_here if len(content) <= _SMALL_BYTES else self._service.tokenizer.run
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
        service = self._service
        prompt = reuse_prompt(service, body)
        if prompt is None and isinstance(body, ChatRequest):
            allocation = ImageAllocation(service.images.memory, "")
            prompt = await render_chat_prompt(service, body, _before_images(body.messages), allocation)
        elif prompt is None:
            prompt = (await encode_prompts(service, cast(CompletionRequest, body)))[0]
        return truncate_prompt(prompt, body, service.engine.info.max_model_len)

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
    engine = _Tokenizing(ModelTokenizer(folder, None, read_chat_template(settings.chat_template)), settings)
    service = Service(
        cast(EngineClient, engine),
        settings,
        ServerLimits(),
        default_template_kwargs=parse_template_kwargs(settings.default_chat_template_kwargs),
    )
    return PromptReader(service, settings.block_size)


class _Tokenizing:
    """An engine as far as prompts are read with it. Whether they fit is the replica's to say."""

    dead: str | None = None

    def __init__(self, tokenizer: TextTokenizer, settings: RaySettings) -> None:
        self.tokenizer = tokenizer
        max_model_len = settings.max_model_len or _UNBOUNDED
        self.info = EngineInfo(
            model=settings.model,
            architecture="",
            dtype=settings.dtype,
            vocab_size=_UNBOUNDED,
            max_model_len=max_model_len,
            max_num_seqs=1,
            exact=settings.exact,
            cache=CacheInfo(
                block_size=settings.block_size,
                num_pages=0,
                page_bytes=0,
                bytes_per_token=0.0,
                checkpoint_bytes=0,
                pages_per_checkpoint=0,
                min_cacheable_tokens=0,
                mamba_cache_mode=settings.mamba_cache_mode,
                enable_prefix_caching=settings.enable_prefix_caching,
            ),
        )


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
