"""From a request body to the engine's request: text to tokens, defaults, and checks against what is served."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.engine.contract import GenerateRequest, ImageInput
from cairn.errors import InvalidRequest, NotFound
from cairn.server.gate import ImageShare
from cairn.server.messages import Conversation, breakpoints_of, check_text, conversation
from cairn.server.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    TemplateFields,
    refuse_unsupported,
)
from cairn.server.service import Service
from cairn.server.transfers import transfer_params
from cairn.types import Boundary

__all__ = [
    "Prompt",
    "chat_prompt",
    "check_model",
    "completion_prompt",
    "conversation_of",
    "engine_request",
    "valid_tokens",
]

_GREEDY_BELOW = 1e-5
_COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the places at which its messages end. `field`: where the client put it."""

    field: str
    token_ids: list[int]
    boundaries: list[Boundary]
    images: Sequence[ImageInput] = ()


def check_model(service: Service, model: str | None) -> None:
    """Raises NotFound when another model is asked for; without a name, any is meant."""
    if model is not None and model != service.options.model_name:
        raise NotFound(f"the model {model!r} is not served here; {service.options.model_name!r} is", "model")


def valid_tokens(service: Service, values: list[Any], name: str) -> list[int]:
    """Token ids of the model's vocabulary, else InvalidRequest that names the first wrong position."""
    vocab_size = service.engine.info.vocab_size
    if not values or (all(type(value) is int for value in values) and min(values) >= 0 and max(values) < vocab_size):
        return values
    for i, value in enumerate(values):
        if type(value) is not int:
            raise InvalidRequest(f"{name}[{i}] is {_kind(value)}, not a token id", name)
        if not 0 <= value < vocab_size:
            shown = value if abs(value) < 1 << 64 else "a huge number"
            raise InvalidRequest(f"{name}[{i}] is {shown}; token ids of this model are 0 to {vocab_size - 1}", name)
    return values


def _kind(value: Any) -> str:
    return "null" if value is None else {"str": "text", "bool": "a boolean"}.get(type(value).__name__, "no integer")


async def completion_prompt(service: Service, body: CompletionRequest) -> Prompt:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequest(f"{len(prompt)} prompts in one request are not supported yet: send one each", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        check_text(prompt, "prompt", "prompt")
        return Prompt("prompt", await service.encode(prompt, body.add_special_tokens is not False), [])
    if isinstance(prompt, list):
        return Prompt("prompt", valid_tokens(service, prompt, "prompt"), [])
    raise InvalidRequest(f"prompt must be text or a list of token ids, not {_kind(prompt)}", "prompt")


async def chat_prompt(service: Service, body: ChatRequest, share: ImageShare) -> Prompt:
    if body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice is not supported yet but for auto and none: leave it out", "tool_choice")
    rendered = await service.render_chat(await conversation_of(service, body, body.messages, share))
    return Prompt("messages", rendered.token_ids, rendered.boundaries, rendered.images)


async def conversation_of(
    service: Service, body: TemplateFields, messages: list[Message], share: ImageShare
) -> Conversation:
    """The chat with every image fetched and decoded. Raises InvalidRequest naming the part, Overloaded."""
    breakpoints = breakpoints_of(body, messages)
    decoded = await service.images.decoded(messages, service.engine.tokenizer.image_markers, share)
    return conversation(body, decoded, breakpoints)


def engine_request(service: Service, body: SamplingFields, prompt: Prompt, request_id: str) -> GenerateRequest:
    """Raises InvalidRequest when the request does not fit the model."""
    refuse_unsupported(body)
    _check_stream_options(body)
    max_tokens = _max_tokens(body)
    _check_length(service.engine.info.max_model_len, prompt, max_tokens)
    temperature = 1.0 if body.temperature is None else body.temperature
    return GenerateRequest(
        request_id=request_id,
        prompt=np.array(prompt.token_ids, dtype="<i8").tobytes(),
        max_tokens=max_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=body.stop or [],
        stop_token_ids=valid_tokens(service, body.stop_token_ids or [], "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
        cache_salt=body.cache_salt,
        boundaries=prompt.boundaries,
        images=list(prompt.images),
        kv_transfer_params=transfer_params(body.kv_transfer_params, service.engine.info),
    )


def _check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for streams: send stream=true with it", "stream_options")


def _max_tokens(body: SamplingFields) -> int | None:
    if isinstance(body, ChatRequest):
        return body.max_completion_tokens or body.max_tokens
    return body.max_tokens or _COMPLETION_MAX_TOKENS


def _check_length(limit: int, prompt: Prompt, max_tokens: int | None) -> None:
    n = len(prompt.token_ids)
    if n == 0:
        raise InvalidRequest("the prompt is empty", prompt.field)
    if n >= limit:
        raise InvalidRequest(f"the prompt has {n} tokens; the model takes {limit}, the answer included", prompt.field)
    if max_tokens is not None and n + max_tokens > limit:
        raise InvalidRequest(
            f"the prompt has {n} tokens and max_tokens asks for {max_tokens} more; the model takes {limit} together",
            "max_tokens",
        )
