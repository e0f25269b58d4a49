"""From a body to the engine's request: text and chats to tokens, and what the client may hand through to the engine."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import msgspec
import numpy as np

from cairn.engine.contract import (
    MAX_BREAKPOINTS,
    Breakpoint,
    EngineInfo,
    GenerateRequest,
    Pixels,
    RenderedPrompt,
    Structure,
    TemplateValue,
    check_token_ids,
)
from cairn.errors import InvalidRequest, NotFound
from cairn.server.images.memory import ImageAllocation
from cairn.server.requests import (
    CacheControl,
    CompletionRequest,
    Message,
    OnePrompt,
    SamplingFields,
    TemplateFields,
    Tool,
)
from cairn.server.sampling import get_max_tokens, get_max_tokens_field, get_sampling_params, is_remote_decode
from cairn.server.service import Service

_MAX_CHOICES = 256
"""Most answers to all prompts of one request together."""

_TRUNCATE = "truncate_prompt_tokens"
_PARAMS = "kv_transfer_params"
_FLAGS = ("do_remote_decode", "do_remote_prefill")
_MAX_DEPTH = 32
_HOLD_SECONDS: Mapping[str, int] = MappingProxyType({"5m": 300, "1h": 3600})


def check_model(service: Service, model: str | None) -> None:
    """Raises NotFound when another model is asked for; without a name, any is meant."""
    if model is not None and model != service.options.model_name:
        raise NotFound(f"the model {model!r} is not served here; {service.options.model_name!r} is", "model")


async def encode_prompts(service: Service, body: CompletionRequest) -> list[RenderedPrompt]:
    """One or more. Raises InvalidRequest naming the place of the one that is wrong."""
    given = body.prompt
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [await _completion_prompt(service, body, cast(OnePrompt, given), "prompt")]
    n = 1 if is_remote_decode(body) or body.n is None else body.n
    most = _MAX_CHOICES // max(1, n)
    if len(given) > most:
        raise InvalidRequest(
            f"{len(given)} prompts are too many: with this n, at most {most} can be answered", "prompt"
        )
    if len(given) > 1 and body.kv_transfer_params:
        raise InvalidRequest(f"kv_transfer_params are for one prompt, not {len(given)}", "kv_transfer_params")
    fields = ["prompt"] if len(given) == 1 else [f"prompt[{i}]" for i in range(len(given))]
    named = zip(given, fields, strict=True)
    return [await _completion_prompt(service, body, one, field) for one, field in named]


async def _completion_prompt(
    service: Service, body: CompletionRequest, prompt: OnePrompt, field: str
) -> RenderedPrompt:
    if isinstance(prompt, str):
        tokens = await service.tokenizer.encode(prompt, body.add_special_tokens is not False)
        return RenderedPrompt(token_ids=tokens, boundaries=[], field=field, text=prompt)
    if body.echo or body.truncate_prompt_tokens is not None or field != "prompt":
        # The core sees neither what is echoed or cut off before, nor which of several prompts this is.
        check_token_ids(np.array(prompt, np.int64), service.engine.info.vocab_size, field)
    return RenderedPrompt(token_ids=prompt, boundaries=[], field=field)


def encode_token_ids(token_ids: Sequence[int]) -> bytes:
    """As `GenerateRequest.prompt` has them."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def build_engine_request(
    service: Service,
    body: SamplingFields,
    prompt: RenderedPrompt,
    *,
    request_id: str,
    client: str,
    structure: Structure | None,
    bad_words: list[list[int]],
) -> GenerateRequest:
    """`client`: who asks. Raises InvalidRequest when the request does not fit the model."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for streams: send stream=true with it", "stream_options")
    _check_length(service.engine.info.max_model_len, prompt, body)
    return GenerateRequest(
        request_id=request_id,
        prompt=encode_token_ids(prompt.token_ids),
        **get_sampling_params(body, bad_words),
        boundaries=prompt.boundaries,
        images=prompt.images,
        kv_transfer_params=encode_transfer_params(body.kv_transfer_params, service.engine.info),
        structure=structure,
        client=client,
    )


def truncate_prompt(prompt: RenderedPrompt, body: SamplingFields, max_model_len: int) -> RenderedPrompt:
    """The prompt, or its last tokens where it has more than the body wants kept. -1: as many as leave room for
    `max_tokens`, or for one.

    Raises InvalidRequest for a number out of range, and where images would be cut off or in two.
    """
    asked = body.truncate_prompt_tokens
    if asked is None:
        return prompt
    if not (asked == -1 or 1 <= asked <= max_model_len):
        raise InvalidRequest(f"{_TRUNCATE} is {asked}: it must be -1, or 1 to {max_model_len}", _TRUNCATE)
    keep = max(1, max_model_len - (get_max_tokens(body) or 1)) if asked == -1 else asked
    cut = len(prompt.token_ids) - keep
    if cut <= 0:
        return prompt
    if prompt.images:
        text = f"the prompt has images and is {cut} tokens longer: shorten it yourself"
        raise InvalidRequest(f"{_TRUNCATE}: {text}", _TRUNCATE)
    kept = [replace(place, position=place.position - cut) for place in prompt.boundaries if place.position > cut]
    # An echo is what the model has seen.
    return msgspec.structs.replace(prompt, token_ids=prompt.token_ids[cut:], boundaries=kept, text=None)


async def add_echo_text(service: Service, body: SamplingFields, prompts: list[RenderedPrompt]) -> list[RenderedPrompt]:
    """The prompts, each with its text where that is to be echoed."""
    if not (isinstance(body, CompletionRequest) and body.echo):
        return prompts
    texts = [await service.tokenizer.decode(one.token_ids) if one.text is None else one.text for one in prompts]
    return [msgspec.structs.replace(one, text=text) for one, text in zip(prompts, texts, strict=True)]


def _check_length(limit: int, prompt: RenderedPrompt, body: SamplingFields) -> None:
    n, max_tokens, param = len(prompt.token_ids), get_max_tokens(body), prompt.field.partition("[")[0]
    which = prompt.field if prompt.field != param else "the prompt"
    if n == 0:
        raise InvalidRequest(f"{which} is empty", param)
    if n >= limit:
        raise InvalidRequest(f"{which} has {n} tokens; the model takes {limit}, the answer included", param)
    if max_tokens is not None and n + max_tokens > limit:
        field = get_max_tokens_field(body)
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


def encode_transfer_params(params: dict[str, Any] | None, info: EngineInfo) -> bytes | None:
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


# -- chats -------------------------------------------------------------------------------------------------------------


async def render_chat_prompt(
    service: Service, body: TemplateFields, messages: list[Message], share: ImageAllocation
) -> RenderedPrompt:
    """The chat as tokens, with every image fetched and decoded. Raises InvalidRequest naming the part, Overloaded."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other: send one of them",
            "continue_final_message",
        )
    switches = cast(dict[str, TemplateValue], body.chat_template_kwargs or {})
    tokenizer, breakpoints = service.engine.tokenizer, _breakpoints(body, messages)
    images = await service.images.load_images(messages, tokenizer.image_markers, share)
    render = partial(
        tokenizer.render_chat,
        [_message(message, i, images) for i, message in enumerate(messages)],
        tools=[_tool(tool, i) for i, tool in enumerate(body.tools or ())],
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        template_kwargs={name: value for name, value in switches.items() if value is not None},
        breakpoints=breakpoints,
        continue_final_message=continues,
    )
    return await service.tokenizer.run(render)


def _message(message: Message, number: int, images: Mapping[tuple[int, int], Pixels]) -> dict[str, Any]:
    content: str | list[dict[str, Any]] = message.content if isinstance(message.content, str) else ""
    if isinstance(message.content, list):
        content = [
            {"type": "text", "text": part["text"]}
            if part["type"] == "text"
            else {"type": "image", "image": images[number, place]}
            for place, part in enumerate(message.content)
        ]
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": dict(call["function"])}
            for call in message.tool_calls
        ]
    named = {
        "reasoning_content": message.reasoning_content or message.reasoning,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    return found | {name: value for name, value in named.items() if value is not None}


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
    found: list[Breakpoint] = []

    def add(mark: CacheControl | None, where: str, message: int | None = None, part: int | None = None) -> None:
        if mark is None:
            return
        if len(found) == MAX_BREAKPOINTS:
            text = f"{where}.cache_control is one too many: at most {MAX_BREAKPOINTS} can be held"
            raise InvalidRequest(text, where.partition("[")[0])
        found.append(Breakpoint(message=message, part=part, seconds=_HOLD_SECONDS[mark.get("ttl") or "5m"]))

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
    return found
