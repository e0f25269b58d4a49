"""Prompts as token ids: completion prompts tokenized, chats rendered with the model's template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Annotated, Any, cast

import msgspec
import numpy as np
from pydantic import ValidationError

from cairn.engine.contract import (
    MAX_BREAKPOINTS,
    SYSTEM_ROLES,
    Breakpoint,
    Pixels,
    RenderedPrompt,
    TemplateValue,
    TextTokenizer,
    check_token_ids,
)
from cairn.errors import ConfigError, InvalidRequest
from cairn.http.volatile_text import drop_volatile
from cairn.server.images import MediaConnector
from cairn.server.images.memory import ImageAllocation
from cairn.server.notices import Notices
from cairn.server.openai.engine_request import encode_json
from cairn.server.openai.field_types import SinglePrompt
from cairn.server.openai.messages import CacheControl, Message, Tool, predicted_text
from cairn.server.openai.requests import NOT_VARIABLES, ChatRequest, CompletionRequest, SamplingFields, TemplateFields
from cairn.server.tokenizer_thread import TokenizerThread

_MAX_CHOICES = 256
"""Most answers to all prompts of one request together."""

MAX_KWARGS_BYTES = 256 << 10
MAX_KWARGS_DEPTH = 16
"""Of `chat_template_kwargs`, as JSON."""

_REUSED = "kv_transfer_params.prompt_token_ids"
_TRUNCATE = "truncate_prompt_tokens"
_KWARGS = "chat_template_kwargs"
_TTL_SECONDS: Mapping[str, int] = MappingProxyType({"5m": 300, "1h": 3600})


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What prompts are held to: the model's sizes, in tokens, and whether clients may send chat templates of theirs,
    which are programs that run here."""

    vocab_size: int
    max_model_len: int
    trust_request_chat_template: bool = False


class PromptRenderer:
    """Makes token ids of what bodies ask, for whoever needs them: the engine, a router, or a client that counts.

    `default_template_kwargs`: variables of the chat template for requests that do not send them. `notices`: says what
    is left out of prompts.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        options: PromptOptions,
        images: MediaConnector,
        default_template_kwargs: Mapping[str, TemplateValue] = MappingProxyType({}),
        notices: Notices | None = None,
    ) -> None:
        self.tokenizer = TokenizerThread(tokenizer)
        self.images = images
        self._text_tokenizer = tokenizer
        self._options = options
        self._default_template_kwargs = default_template_kwargs
        self._notices = notices or Notices()

    async def aclose(self) -> None:
        self.tokenizer.close()
        await self.images.aclose()

    async def render(self, body: SamplingFields, allocation: ImageAllocation) -> list[RenderedPrompt]:
        """One prompt of a chat, or of a body with one that was handed over; one or more of a completion. Each as long
        as the body lets it be. Raises InvalidRequest naming what is wrong, Overloaded."""
        handed_over = self._reuse_prompt(body)
        if handed_over is not None:
            prompts = [handed_over]
        elif isinstance(body, ChatRequest):
            prompts = [await self.render_chat(body, body.messages, allocation)]
        else:
            prompts = await self._encode_prompts(cast(CompletionRequest, body))
        return [truncate_prompt(prompt, body, self._options.max_model_len) for prompt in prompts]

    async def render_chat(
        self, body: TemplateFields, messages: list[Message], allocation: ImageAllocation
    ) -> RenderedPrompt:
        """The chat as tokens, with every image fetched and decoded. Raises InvalidRequest naming the part, and
        Overloaded."""
        if body.add_special_tokens and await self.tokenizer.encode("", add_special_tokens=True):
            text = "add_special_tokens: the chat template writes the special tokens: leave it out"
            raise InvalidRequest(text, "add_special_tokens")
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt contradict each other: send one of them",
                "continue_final_message",
            )
        if body.chat_template is not None and not self._options.trust_request_chat_template:
            text = "chat_template is a program to be run here, which this server takes only with"
            raise InvalidRequest(f"{text} --trust-request-chat-template: leave it out", "chat_template")
        messages = self._drop_volatile(messages)
        tokenizer, breakpoints = self._text_tokenizer, _breakpoints(body, messages)
        salt = (body.cache_salt if isinstance(body, ChatRequest) else None) or ""
        images = await self.images.load_images(messages, tokenizer.image_markers, allocation, salt)
        if body.mm_processor_kwargs is not None:
            bounds = body.mm_processor_kwargs.bounds
            images = {place: msgspec.structs.replace(image, bounds=bounds) for place, image in images.items()}
        render = partial(
            tokenizer.render_chat,
            [_message(message, i, images) for i, message in enumerate(messages)],
            tools=[_tool(tool, i) for i, tool in enumerate(body.tools or ())],
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            template_kwargs={**self._default_template_kwargs, **_template_kwargs(body)},
            breakpoints=breakpoints,
            continue_final_message=continues,
            chat_template=body.chat_template or None,
        )
        return await self.tokenizer.run(render)

    async def add_text(self, body: SamplingFields, prompts: list[RenderedPrompt]) -> list[RenderedPrompt]:
        """The prompts, each with its text if the answer shows that."""
        is_echoed = isinstance(body, CompletionRequest) and body.echo
        if not (is_echoed or (isinstance(body, ChatRequest) and body.return_prompt_text)):
            return prompts
        texts = [
            await self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text for prompt in prompts
        ]
        return [msgspec.structs.replace(prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)]

    async def encode_prediction(self, body: SamplingFields) -> list[int]:
        """The tokens of the text that the answer is expected to be much like; none where none is. Raises InvalidRequest
        for more than an answer can have."""
        if not isinstance(body, ChatRequest) or body.prediction is None:
            return []
        tokens = await self.tokenizer.encode(predicted_text(body.prediction), add_special_tokens=False)
        most = self._options.max_model_len
        if len(tokens) > most:
            text = (
                f"prediction has {len(tokens)} tokens, and prompt and answer together have at most {most}: shorten it"
            )
            raise InvalidRequest(text, "prediction")
        return tokens

    async def spell(self, token_ids: list[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return await self.tokenizer.apply(lambda tokenizer: tokenizer.convert_ids_to_tokens(token_ids))

    async def _encode_prompts(self, body: CompletionRequest) -> list[RenderedPrompt]:
        """One or more. Raises InvalidRequest naming the one that is wrong."""
        prompts = body.prompt
        if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
            return [await self._encode_prompt(body, cast(SinglePrompt, prompts), "prompt")]
        most = _MAX_CHOICES // max(1, 1 if body.has_one_answer or body.n is None else body.n)
        if len(prompts) > most:
            text = f"{len(prompts)} prompts are too many: with this n, at most {most} can be answered"
            raise InvalidRequest(text, "prompt")
        if len(prompts) > 1 and body.kv_transfer_params:
            raise InvalidRequest(f"kv_transfer_params are for one prompt, not {len(prompts)}", "kv_transfer_params")
        fields = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
        return [await self._encode_prompt(body, *pair) for pair in zip(prompts, fields, strict=True)]

    async def _encode_prompt(self, body: CompletionRequest, prompt: SinglePrompt, field: str) -> RenderedPrompt:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            prompt = await self.tokenizer.encode(prompt, body.add_special_tokens is not False)
        elif body.echo or body.truncate_prompt_tokens is not None or field != "prompt":
            # The core sees neither what is echoed or cut off before, nor which of several prompts this is.
            self.check_token_ids(prompt, field)
        return RenderedPrompt(token_ids=prompt, boundaries=[], field=field, text=text)

    def _reuse_prompt(self, body: SamplingFields) -> RenderedPrompt | None:
        """The prompt that a router hands on from a prefill server, instead of the body's own; None where it does not.

        Raises InvalidRequest for what are no token ids.
        """
        ids = body.reused_prompt_ids
        if ids is None:
            return None
        try:
            token_ids = msgspec.convert(ids, Annotated[list[int], msgspec.Meta(min_length=1)])
            self.check_token_ids(token_ids, _REUSED)
        except (msgspec.ValidationError, OverflowError):
            raise InvalidRequest(f"{_REUSED} must be a list of token ids that is not empty", _REUSED) from None
        return RenderedPrompt(token_ids=token_ids, boundaries=[], field=_REUSED)

    def check_token_ids(self, token_ids: list[int], field: str) -> None:
        """Raises InvalidRequest naming `field` for ids outside the vocabulary."""
        check_token_ids(np.array(token_ids, np.int64), self._options.vocab_size, field)

    def _drop_volatile(self, messages: list[Message]) -> list[Message]:
        """Without what is new in every request at the front of the system messages that the chat begins with."""
        leading = list(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))
        dropped = [message.model_copy(update={"content": drop_volatile(message.content)}) for message in leading]
        if dropped != leading:
            self._notices.say("text that clients change with every request is left out of prompts (docs/agents.md)")
        return [*dropped, *messages[len(leading) :]]


def truncate_prompt(prompt: RenderedPrompt, body: SamplingFields, max_model_len: int) -> RenderedPrompt:
    """The prompt's last `truncate_prompt_tokens` tokens, its first ones with `truncation_side` right, or the prompt
    itself. -1: as many as leave room for `max_tokens`, or for one.

    Raises InvalidRequest for a number out of range, and if images would be cut off or in two.
    """
    num_tokens = body.truncate_prompt_tokens
    if num_tokens is None:
        return prompt
    if not (num_tokens == -1 or 1 <= num_tokens <= max_model_len):
        raise InvalidRequest(f"{_TRUNCATE} is {num_tokens}: it must be -1, or 1 to {max_model_len}", _TRUNCATE)
    if num_tokens == -1:
        num_tokens = max(1, max_model_len - (body.get_max_tokens() or 1))
    excess = len(prompt.token_ids) - num_tokens
    if excess <= 0:
        return prompt
    if prompt.images:
        text = f"the prompt has images and is {excess} tokens longer: shorten it yourself"
        raise InvalidRequest(f"{_TRUNCATE}: {text}", _TRUNCATE)
    first = 0 if body.truncation_side == "right" else excess
    token_ids = prompt.token_ids[first : first + num_tokens]
    ends = [replace(end, position=end.position - first) for end in prompt.boundaries]
    ends = [end for end in ends if 0 < end.position <= num_tokens]
    # An echo is what the model has seen.
    return msgspec.structs.replace(prompt, token_ids=token_ids, boundaries=ends, text=None)


def parse_template_kwargs(text: str | None) -> dict[str, TemplateValue]:
    """The template's variables for requests that do not send them. `text`: a JSON object. Raises ConfigError."""
    try:
        return _template_kwargs(TemplateFields.model_validate({"chat_template_kwargs": json.loads(text or "{}")}))
    except (InvalidRequest, ValidationError) as error:
        reason = error.message if isinstance(error, InvalidRequest) else error.errors()[0]["msg"]
        raise ConfigError(f"--default-chat-template-kwargs: {reason}") from None


def _template_kwargs(body: TemplateFields) -> dict[str, TemplateValue]:
    """The template's variables, by vLLM's rules: fields of their own come before `chat_template_kwargs`, and a
    `reasoning_effort` switches thinking on or off unless those say it. Raises InvalidRequest."""
    sent = body.chat_template_kwargs or {}
    for name in sent.keys() & NOT_VARIABLES:
        is_field = name in type(body).model_fields or name == "messages"
        advice = "it is a field of its own" if is_field else "leave it out"
        raise InvalidRequest(f"{_KWARGS}.{name} is no variable of a chat template: {advice}", _KWARGS)
    size = len(encode_json(sent, _KWARGS, MAX_KWARGS_DEPTH))
    if size > MAX_KWARGS_BYTES:
        raise InvalidRequest(f"{_KWARGS} has {size} bytes as JSON: at most {MAX_KWARGS_BYTES} are taken", _KWARGS)
    fields: dict[str, TemplateValue] = {}
    if body.documents is not None:
        fields["documents"] = body.documents
    if body.reasoning_effort is not None:
        fields["reasoning_effort"] = body.reasoning_effort
        fields["enable_thinking"] = sent.get("enable_thinking", body.reasoning_effort != "none")
    return {**sent, **fields}


def _message(message: Message, number: int, images: Mapping[tuple[int, int], Pixels]) -> dict[str, Any]:
    content: str | list[dict[str, Any]] = message.content if isinstance(message.content, str) else ""
    if message.parts:
        content = [
            {"type": "text", "text": part["text"]}
            if part["type"] == "text"
            else {"type": "image", "image": images[number, place]}
            for place, part in enumerate(message.parts)
        ]
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": dict(call["function"])}
            for call in message.tool_calls
        ]
    optional = {
        "reasoning_content": message.reasoning_content or message.reasoning,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    return rendered | {name: value for name, value in optional.items() if value is not None}


def _tool(tool: Tool, number: int) -> dict[str, Any]:
    """Without the client's mark, which is no part of the tool: the model must not read it."""
    try:
        json.dumps(tool, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"tools[{number}] is not valid Unicode: {error.reason}", "tools") from None
    function = {name: value for name, value in tool["function"].items() if name != "cache_control"}
    return {name: value for name, value in tool.items() if name != "cache_control"} | {"function": function}


def _breakpoints(body: TemplateFields, messages: list[Message]) -> list[Breakpoint]:
    """The places that a client has marked with `cache_control`: tools, messages and parts of their content.

    Anthropic's convention, as gateways pass it on. Raises InvalidRequest naming the part that is wrong.
    """
    breakpoints: list[Breakpoint] = []

    def add(mark: CacheControl | None, where: str, message: int | None = None, part: int | None = None) -> None:
        if mark is None:
            return
        if len(breakpoints) == MAX_BREAKPOINTS:
            text = f"{where}.cache_control is one too many: at most {MAX_BREAKPOINTS} can be held"
            raise InvalidRequest(text, where.partition("[")[0])
        breakpoints.append(Breakpoint(message=message, part=part, seconds=_TTL_SECONDS[mark.get("ttl") or "5m"]))

    for i, tool in enumerate(body.tools or ()):
        add(tool.get("cache_control"), f"tools[{i}]")
        add(tool["function"].get("cache_control"), f"tools[{i}]")
    for i, message in enumerate(messages):
        for j, part in enumerate(message.parts):
            mark, where = part.get("cache_control"), f"messages[{i}].content[{j}]"
            if mark is not None and part["type"] == "text" and not part["text"]:
                raise InvalidRequest(f"{where}.cache_control: an empty text cannot be held", "messages")
            add(mark, where, i, j if j + 1 < len(message.parts) else None)
        add(message.cache_control, f"messages[{i}]", i)
    return breakpoints
