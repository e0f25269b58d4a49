"""From a request body to the engine's request: text to tokens, defaults, and checks against what is served."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cairn.engine.contract import EngineInfo, GenerateRequest, ImageInput
from cairn.errors import InvalidRequest, NotFound
from cairn.server.images.room import ImageShare
from cairn.server.messages import ChatInput, breakpoints_of, check_text, conversation
from cairn.server.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    TemplateFields,
    refuse_unsupported,
)
from cairn.server.sampling import answers_per_prompt, logprobs_of, max_tokens_field, max_tokens_of, sampling_of
from cairn.server.service import Service
from cairn.server.shapes import ResponseOptions
from cairn.types import Boundary

_MAX_CHOICES = 256
"""Most answers to all prompts of one request together."""

_TRUNCATE = "truncate_prompt_tokens"
_PARAMS = "kv_transfer_params"
_FLAGS = ("do_remote_decode", "do_remote_prefill")
_MAX_DEPTH = 32

_KINDS: Mapping[type, str] = MappingProxyType(
    {
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number with a fraction",
        list: "a list",
        dict: "an object",
    }
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the places at which its messages end. `field`: where the client put it, `prompt[1]`
    for one of several; `text`: what it said there, None where that was no text."""

    field: str
    token_ids: list[int]
    boundaries: list[Boundary]
    images: Sequence[ImageInput] = ()
    text: str | None = None


def check_model(service: Service, model: str | None) -> None:
    """Raises NotFound when another model is asked for; without a name, any is meant."""
    if model is not None and model != service.options.model_name:
        raise NotFound(f"the model {model!r} is not served here; {service.options.model_name!r} is", "model")


def valid_tokens(service: Service, values: list[Any], name: str) -> list[int]:
    """Token ids of the model's vocabulary, else InvalidRequest that names the first wrong position."""
    vocab_size, field = service.engine.info.vocab_size, name.partition("[")[0]
    if not values or (all(type(value) is int for value in values) and min(values) >= 0 and max(values) < vocab_size):
        return values
    for i, value in enumerate(values):
        if type(value) is not int:
            raise InvalidRequest(f"{name}[{i}] is {_kind(value)}, not a token id", field)
        if not 0 <= value < vocab_size:
            shown = value if abs(value) < 1 << 64 else "a huge number"
            raise InvalidRequest(f"{name}[{i}] is {shown}; token ids of this model are 0 to {vocab_size - 1}", field)
    return values


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "something else")


async def completion_prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    """One or more. Raises InvalidRequest naming the place of the one that is wrong."""
    given = body.prompt
    if not (isinstance(given, list) and given and isinstance(given[0], str | list)):
        return [await _completion_prompt(service, body, given, "prompt")]
    most = _MAX_CHOICES // answers_per_prompt(body)
    if len(given) > most:
        raise InvalidRequest(
            f"{len(given)} prompts are too many: with this n, at most {most} can be answered", "prompt"
        )
    if len(given) > 1 and body.kv_transfer_params:
        raise InvalidRequest(f"kv_transfer_params are for one prompt, not {len(given)}", "kv_transfer_params")
    if len(given) == 1:
        return [await _completion_prompt(service, body, given[0], "prompt")]
    return [await _completion_prompt(service, body, one, f"prompt[{i}]") for i, one in enumerate(given)]


async def _completion_prompt(service: Service, body: CompletionRequest, prompt: Any, where: str) -> Prompt:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest(f"{where} is empty", "prompt")
        check_text(prompt, where, "prompt")
        tokens = await service.tokenizer.encode(prompt, body.add_special_tokens is not False)
        return Prompt(where, tokens, [], text=prompt)
    if isinstance(prompt, list):
        return Prompt(where, valid_tokens(service, prompt, where), [])
    raise InvalidRequest(f"{where} must be text or a list of token ids, not {_kind(prompt)}", "prompt")


async def chat_prompt(service: Service, body: ChatRequest, share: ImageShare) -> Prompt:
    rendered = await service.tokenizer.render_chat(await conversation_of(service, body, body.messages, share))
    return Prompt("messages", rendered.token_ids, rendered.boundaries, rendered.images)


async def conversation_of(
    service: Service, body: TemplateFields, messages: list[Message], share: ImageShare
) -> ChatInput:
    """The chat with every image fetched and decoded. Raises InvalidRequest naming the part, Overloaded."""
    breakpoints = breakpoints_of(body, messages)
    decoded = await service.images.decoded(messages, service.engine.tokenizer.image_markers, share)
    return conversation(body, decoded, breakpoints)


def engine_request(
    service: Service, body: SamplingFields, prompt: Prompt, request_id: str, client: str
) -> GenerateRequest:
    """`client`: who asks. Raises InvalidRequest when the request does not fit the model."""
    refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for streams: send stream=true with it", "stream_options")
    _check_length(service.engine.info.max_model_len, prompt, body)
    allowed = body.allowed_token_ids
    return GenerateRequest(
        request_id=request_id,
        prompt=np.array(prompt.token_ids, dtype="<i8").tobytes(),
        **sampling_of(body),
        stop_token_ids=valid_tokens(service, body.stop_token_ids or [], "stop_token_ids"),
        allowed_token_ids=None if allowed is None else valid_tokens(service, allowed, "allowed_token_ids"),
        boundaries=prompt.boundaries,
        images=list(prompt.images),
        kv_transfer_params=transfer_params(body.kv_transfer_params, service.engine.info),
        client=client,
    )


def truncated(prompt: Prompt, body: SamplingFields, max_model_len: int) -> Prompt:
    """The prompt, or its last tokens where it has more than the body wants kept. -1: as many as leave room for
    `max_tokens`, or for one.

    Raises InvalidRequest for a number out of range, and where images would be cut off or in two.
    """
    asked = body.truncate_prompt_tokens
    if asked is None:
        return prompt
    if not (asked == -1 or 1 <= asked <= max_model_len):
        raise InvalidRequest(f"{_TRUNCATE} is {asked}: it must be -1, or 1 to {max_model_len}", _TRUNCATE)
    keep = max(1, max_model_len - (max_tokens_of(body) or 1)) if asked == -1 else asked
    cut = len(prompt.token_ids) - keep
    if cut <= 0:
        return prompt
    if prompt.images:
        text = f"the prompt has images and is {cut} tokens longer: shorten it yourself"
        raise InvalidRequest(f"{_TRUNCATE}: {text}", _TRUNCATE)
    kept = [replace(place, position=place.position - cut) for place in prompt.boundaries if place.position > cut]
    # An echo is what the model has seen.
    return replace(prompt, token_ids=prompt.token_ids[cut:], boundaries=kept, text=None)


async def response_options(service: Service, body: SamplingFields, prompts: Sequence[Prompt]) -> ResponseOptions:
    """What the answers show besides their text."""
    echo = [""] * len(prompts)
    if isinstance(body, CompletionRequest) and body.echo:
        echo = [await service.tokenizer.decode(one.token_ids) if one.text is None else one.text for one in prompts]
    return ResponseOptions(
        prompts=tuple(prompt.token_ids for prompt in prompts),
        echo=tuple(echo),
        token_ids=bool(body.return_token_ids),
        logprobs=logprobs_of(body) is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        texts=service.token_texts,
    )


def _check_length(limit: int, prompt: Prompt, body: SamplingFields) -> None:
    n, max_tokens, param = len(prompt.token_ids), max_tokens_of(body), prompt.field.partition("[")[0]
    which = prompt.field if prompt.field != param else "the prompt"
    if n == 0:
        raise InvalidRequest(f"{which} is empty", param)
    if n >= limit:
        raise InvalidRequest(f"{which} has {n} tokens; the model takes {limit}, the answer included", param)
    if max_tokens is not None and n + max_tokens > limit:
        field = max_tokens_field(body)
        if field is None:
            raise InvalidRequest(
                f"{which} has {n} tokens, and without max_tokens an answer may have {max_tokens}; the model takes "
                f"{limit} together: send max_tokens of at most {limit - n}",
                "max_tokens",
            )
        raise InvalidRequest(
            f"{which} has {n} tokens and {field} asks for {max_tokens} more; the model takes {limit} together", field
        )


# -- kv_transfer_params -----------------------------------------------------------------------------------------------


def transfer_params(params: dict[str, Any] | None, info: EngineInfo) -> bytes | None:
    """The JSON that the engine gets; None when there is nothing for it.

    Raises InvalidRequest for what is no JSON, is nested too deeply, or asks a server without a side channel for a
    transfer. What else the object may say is the engine's to judge.
    """
    if params is None:
        return None
    if info.side_channel is None:
        _refuse_transfers(params)
        return None
    if _depth_exceeds(params, _MAX_DEPTH):
        raise InvalidRequest(f"{_PARAMS} is nested more than {_MAX_DEPTH} levels deep", _PARAMS)
    try:
        # Not msgspec: it writes NaN as null, and null means something here.
        return json.dumps(params, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{_PARAMS} has text that is not valid Unicode: {error.reason}", _PARAMS) from None
    except ValueError:
        raise InvalidRequest(f"{_PARAMS} has a number that is none", _PARAMS) from None


def _refuse_transfers(params: dict[str, Any]) -> None:
    for flag in _FLAGS:
        wanted = params.get(flag)
        if wanted is None or wanted is False:
            continue
        param = f"{_PARAMS}.{flag}"
        if wanted is True:
            raise InvalidRequest(
                f"{param}: this server takes no part in transfers; start it with --kv-transfer-config", param
            )
        raise InvalidRequest(f"{param} must be true or false, not {type(wanted).__name__}", param)


def _depth_exceeds(value: object, limit: int) -> bool:
    """Whether lists and objects stand in each other more than `limit` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_depth_exceeds(one, limit - 1) for one in inner)
