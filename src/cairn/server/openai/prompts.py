"""Prompts as token ids: completion prompts tokenized, chats rendered with the model's template."""

import json
from collections.abc import Mapping
from dataclasses import replace
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
    check_token_ids,
)
from cairn.errors import ConfigError, InvalidRequest, NotFound
from cairn.http.volatile_text import drop_volatile
from cairn.server.images.memory import ImageAllocation
from cairn.server.openai.engine_request import encode_json
from cairn.server.openai.field_types import SinglePrompt
from cairn.server.openai.messages import CacheControl, Message, Tool
from cairn.server.openai.requests import NOT_VARIABLES, ChatRequest, CompletionRequest, SamplingFields, TemplateFields
from cairn.server.service import Service

_MAX_CHOICES = 256
"""Most answers to all prompts of one request together."""

MAX_KWARGS_BYTES = 256 << 10
MAX_KWARGS_DEPTH = 16
"""Of `chat_template_kwargs`, as JSON."""

_REUSED = "kv_transfer_params.prompt_token_ids"
_TRUNCATE = "truncate_prompt_tokens"
_KWARGS = "chat_template_kwargs"
_TTL_SECONDS: Mapping[str, int] = MappingProxyType({"5m": 300, "1h": 3600})


def check_model(service: Service, model: str | None) -> None:
    """Raises NotFound if another model is asked for; without a name, any is meant."""
    names = service.options.model_names
    if model is not None and model not in names:
        raise NotFound(f"the model {model!r} is not served here; {' or '.join(map(repr, names))} is", "model")


async def encode_prompts(service: Service, body: CompletionRequest) -> list[RenderedPrompt]:
    """One or more. Raises InvalidRequest naming the one that is wrong."""
    prompts = body.prompt
    if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
        return [await _encode_prompt(service, body, cast(SinglePrompt, prompts), "prompt")]
    most = _MAX_CHOICES // max(1, 1 if body.has_one_answer or body.n is None else body.n)
    if len(prompts) > most:
        text = f"{len(prompts)} prompts are too many: with this n, at most {most} can be answered"
        raise InvalidRequest(text, "prompt")
    if len(prompts) > 1 and body.kv_transfer_params:
        raise InvalidRequest(f"kv_transfer_params are for one prompt, not {len(prompts)}", "kv_transfer_params")
    fields = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    return [await _encode_prompt(service, body, *pair) for pair in zip(prompts, fields, strict=True)]


async def _encode_prompt(service: Service, body: CompletionRequest, prompt: SinglePrompt, field: str) -> RenderedPrompt:
    text = prompt if isinstance(prompt, str) else None
    if isinstance(prompt, str):
        prompt = await service.tokenizer.encode(prompt, body.add_special_tokens is not False)
    elif body.echo or body.truncate_prompt_tokens is not None or field != "prompt":
        # The core sees neither what is echoed or cut off before, nor which of several prompts this is.
        check_token_ids(np.array(prompt, np.int64), service.engine.info.vocab_size, field)
    return RenderedPrompt(token_ids=prompt, boundaries=[], field=field, text=text)


def reuse_prompt(service: Service, body: SamplingFields) -> RenderedPrompt | None:
    """The prompt that a router hands on from a prefill server, instead of the body's own; None where it does not.

    Raises InvalidRequest for what are no token ids.
    """
    ids = body.reused_prompt_ids
    if ids is None:
        return None
    try:
        token_ids = msgspec.convert(ids, Annotated[list[int], msgspec.Meta(min_length=1)])
        tokens = np.array(token_ids, np.int64)
    except (msgspec.ValidationError, OverflowError):
        raise InvalidRequest(f"{_REUSED} must be a list of token ids that is not empty", _REUSED) from None
    check_token_ids(tokens, service.engine.info.vocab_size, _REUSED)
    return RenderedPrompt(token_ids=token_ids, boundaries=[], field=_REUSED)


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


async def add_prompt_text(
    service: Service, body: SamplingFields, prompts: list[RenderedPrompt]
) -> list[RenderedPrompt]:
    """The prompts, each with its text if the answer shows that."""
    is_echoed = isinstance(body, CompletionRequest) and body.echo
    if not (is_echoed or (isinstance(body, ChatRequest) and body.return_prompt_text)):
        return prompts
    texts = [
        await service.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text for prompt in prompts
    ]
    return [msgspec.structs.replace(prompt, text=text) for prompt, text in zip(prompts, texts, strict=True)]


# -- chats -------------------------------------------------------------------------------------------------------------


async def render_chat_prompt(
    service: Service, body: TemplateFields, messages: list[Message], allocation: ImageAllocation
) -> RenderedPrompt:
    """The chat as tokens, with every image fetched and decoded. Raises InvalidRequest naming the part, Overloaded."""
    if body.add_special_tokens and await service.tokenizer.encode("", add_special_tokens=True):
        text = "add_special_tokens: the chat template writes the special tokens: leave it out"
        raise InvalidRequest(text, "add_special_tokens")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other: send one of them",
            "continue_final_message",
        )
    _check_chat_template(service, body)
    messages = _drop_volatile(service, messages)
    tokenizer, breakpoints = service.engine.tokenizer, _breakpoints(body, messages)
    salt = (body.cache_salt if isinstance(body, ChatRequest) else None) or ""
    images = await service.images.load_images(messages, tokenizer.image_markers, allocation, salt)
    if body.mm_processor_kwargs is not None:
        bounds = body.mm_processor_kwargs.bounds
        images = {place: msgspec.structs.replace(image, bounds=bounds) for place, image in images.items()}
    render = partial(
        tokenizer.render_chat,
        [_message(message, i, images) for i, message in enumerate(messages)],
        tools=[_tool(tool, i) for i, tool in enumerate(body.tools or ())],
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        template_kwargs={**service.default_template_kwargs, **_template_kwargs(body)},
        breakpoints=breakpoints,
        continue_final_message=continues,
        chat_template=body.chat_template or None,
    )
    return await service.tokenizer.run(render)


def _drop_volatile(service: Service, messages: list[Message]) -> list[Message]:
    """Without what is new in every request at the front of the system messages that the chat begins with."""
    leading = list(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))
    dropped = [message.model_copy(update={"content": drop_volatile(message.content)}) for message in leading]
    if dropped != leading:
        service.notices.say("text that clients change with every request is left out of prompts (docs/agents.md)")
    return [*dropped, *messages[len(leading) :]]


def _check_chat_template(service: Service, body: TemplateFields) -> None:
    """Raises InvalidRequest for a template of a client that may not have its own."""
    if body.chat_template is not None and not service.options.trust_request_chat_template:
        text = "chat_template is a program to be run here, which this server takes only with"
        raise InvalidRequest(f"{text} --trust-request-chat-template: leave it out", "chat_template")


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
