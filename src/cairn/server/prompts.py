"""From a request body to the engine's request: text to tokens, defaults, and checks against what is served."""

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np

from cairn.engine.contract import EngineInfo, GenerateRequest, RenderedPrompt, Structure, check_token_ids
from cairn.errors import InvalidRequest, NotFound
from cairn.server.requests import CompletionRequest, OnePrompt, SamplingFields
from cairn.server.sampling import is_for_another_server, max_tokens_field, max_tokens_of, sampling_of
from cairn.server.service import Service

_MAX_CHOICES = 256
"""Most answers to all prompts of one request together."""

_TRUNCATE = "truncate_prompt_tokens"
_PARAMS = "kv_transfer_params"
_FLAGS = ("do_remote_decode", "do_remote_prefill")
_MAX_DEPTH = 32


def check_model(service: Service, model: str | None) -> None:
    """Raises NotFound when another model is asked for; without a name, any is meant."""
    if model is not None and model != service.options.model_name:
        raise NotFound(f"the model {model!r} is not served here; {service.options.model_name!r} is", "model")


async def completion_prompts(service: Service, body: CompletionRequest) -> list[RenderedPrompt]:
    """One or more. Raises InvalidRequest naming the place of the one that is wrong."""
    given = body.prompt
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [await _completion_prompt(service, body, cast(OnePrompt, given), "prompt")]
    n = 1 if is_for_another_server(body) or body.n is None else body.n
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


def raw_tokens(token_ids: Sequence[int]) -> bytes:
    """As `GenerateRequest.prompt` has them."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def engine_request(
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
        prompt=raw_tokens(prompt.token_ids),
        **sampling_of(body),
        boundaries=prompt.boundaries,
        images=prompt.images,
        kv_transfer_params=transfer_params(body.kv_transfer_params, service.engine.info),
        structure=structure,
        bad_words=bad_words,
        client=client,
    )


def truncated(prompt: RenderedPrompt, body: SamplingFields, max_model_len: int) -> RenderedPrompt:
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
    return msgspec.structs.replace(prompt, token_ids=prompt.token_ids[cut:], boundaries=kept, text=None)


async def echoed(service: Service, body: SamplingFields, prompts: list[RenderedPrompt]) -> list[RenderedPrompt]:
    """The prompts, each with its text where that is to be echoed."""
    if not (isinstance(body, CompletionRequest) and body.echo):
        return prompts
    texts = [await service.tokenizer.decode(one.token_ids) if one.text is None else one.text for one in prompts]
    return [msgspec.structs.replace(one, text=text) for one, text in zip(prompts, texts, strict=True)]


def _check_length(limit: int, prompt: RenderedPrompt, body: SamplingFields) -> None:
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
