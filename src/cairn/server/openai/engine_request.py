"""The engine's request of a body: sampling parameters, stop conditions and `kv_transfer_params`."""

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

from cairn.engine.contract import (
    RANGES,
    EngineInfo,
    GenerateRequest,
    RenderedPrompt,
    RepetitionDetection,
    StopConditions,
    Structure,
    ThinkingBudget,
)
from cairn.errors import InvalidRequest, RequestError
from cairn.http.handover import CLIENT_FIELDS, RELEASE_KEY, find_release_key
from cairn.server.openai.requests import ChatRequest, CompletionRequest, SamplingFields
from cairn.types import SamplingParams

_GREEDY_BELOW = 1e-5
_SAMPLING_FIELDS = ("top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed")
_STOP_FIELDS = ("min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos")
_REQUEST_FIELDS = ("n", "skip_special_tokens", "priority", "cache_salt")
"""Fields of bodies that `SamplingParams`, `StopConditions` and `GenerateRequest` have under the same names."""

_PARAMS = "kv_transfer_params"
_READ_HERE = ("prompt_token_ids", CLIENT_FIELDS, RELEASE_KEY)
_REFERENCE = ("do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_MAX_REFERENCE_BYTES = 8192
_MAX_DEPTH = 32


def build_engine_request(
    info: EngineInfo,
    body: SamplingFields,
    prompt: RenderedPrompt,
    *,
    request_id: str,
    client: str,
    session: str = "",
    structure: Structure | None,
    bad_words: Sequence[Sequence[int]],
    thinking: ThinkingBudget | None,
    prediction: Sequence[int] = (),
) -> GenerateRequest:
    """`client`: who sends it; `session`: the name of its session. `bad_words`: their token ids. `thinking`: the bound
    of the reasoning, None for none. `prediction`: the token ids of the body's own. Raises InvalidRequest naming the
    field. Ranges are checked by the engine."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for streams: send stream=true with it", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: leave stream out", "prompt_logprobs")
    _check_length(info.max_model_len, prompt, body)
    sampling = _fields_sent(body, _SAMPLING_FIELDS)
    if body.temperature is not None:
        sampling["temperature"] = 0.0 if 0 <= body.temperature < _GREEDY_BELOW else body.temperature
    if body.top_k is not None:
        sampling["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.allowed_token_ids is not None:
        sampling["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.logprob_token_ids:
        sampling["logprob_token_ids"] = _logprob_token_ids(body, body.logprob_token_ids)
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    until = _fields_sent(body, _STOP_FIELDS) | {"thinking": thinking, "prefill_only": body.is_prefill_only}
    if body.repetition_detection is not None:
        until["repetition_detection"] = RepetitionDetection(**body.repetition_detection.model_dump(exclude_none=True))
    num_logprobs, num_prompt_logprobs = body.get_num_logprobs(), body.prompt_logprobs
    if num_prompt_logprobs is None and _echoes_logprobs(body):
        num_prompt_logprobs = num_logprobs
    if body.has_one_answer and body.n is not None and body.n not in RANGES["n"]:
        raise InvalidRequest(f"n must be {RANGES['n']}, not {body.n}", "n")
    return GenerateRequest(
        **_fields_sent(body, _REQUEST_FIELDS) | ({"n": 1} if body.has_one_answer else {}),
        request_id=request_id,
        prompt=_pack(prompt.token_ids),
        prediction=_pack(prediction),
        sampling=SamplingParams(**sampling, logit_bias=tuple(bias.items()), bad_words=tuple(map(tuple, bad_words))),
        stop_conditions=StopConditions(**until, stop=stop, max_tokens=body.get_max_tokens()),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        boundaries=prompt.boundaries,
        images=prompt.images,
        kv_transfer_params=encode_transfer_params(body.kv_transfer_params, info),
        structure=structure,
        client=client,
        session=session,
    )


def _pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def resolve_num_logprobs(body: SamplingFields, most: int, vocab_size: int) -> SamplingFields:
    """The body with the number of tokens in the vocabulary for -1. `most`: --max-logprobs.

    Raises InvalidRequest for more log-probabilities of a token than these, and for other numbers below 0."""
    field, most = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs", vocab_size if most == -1 else most
    updates = {}
    for name, number in ((field, body.get_num_logprobs()), ("prompt_logprobs", body.prompt_logprobs)):
        if number is None or 0 <= number <= most:
            continue
        if number < -1:
            raise InvalidRequest(f"{name} must be 0 to {most}, or -1 for the whole vocabulary, not {number}", name)
        shown = f"-1, which means all {vocab_size} tokens" if number == -1 else str(number)
        if number > most or vocab_size > most:
            raise InvalidRequest(f"{name} is {shown}; this server gives at most {most} (--max-logprobs)", name)
        updates[name] = vocab_size
    return body.model_copy(update=updates) if updates else body


def _echoes_logprobs(body: SamplingFields) -> bool:
    """Whether log-probabilities are of the prompt, too; a chat's stream has no place for those."""
    is_streamed_chat = isinstance(body, ChatRequest) and body.stream
    return isinstance(body, CompletionRequest | ChatRequest) and bool(body.echo) and not is_streamed_chat


def _fields_sent(body: SamplingFields, names: Sequence[str]) -> dict[str, Any]:
    """Without those that are left to the engine's defaults."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _logprob_token_ids(body: SamplingFields, tokens: list[int]) -> tuple[int, ...]:
    """Each once. Raises InvalidRequest where no log-probabilities are asked for."""
    name = "logprob_token_ids"
    if body.get_num_logprobs() is None:
        raise InvalidRequest(f"{name} needs logprobs: send logprobs with it", name)
    if body.max_tokens == 0:
        raise InvalidRequest(f"{name} is about tokens of the answer, and max_tokens is 0: leave it out", name)
    return tuple(dict.fromkeys(tokens))


def _check_length(limit: int, prompt: RenderedPrompt, body: SamplingFields) -> None:
    n, max_tokens, param = len(prompt.token_ids), body.get_max_tokens(), prompt.field.partition("[")[0]
    which = prompt.field if prompt.field != param else "the prompt"
    if n == 0:
        raise InvalidRequest(f"{which} is empty", param)
    # By vLLM's beginning of this sentence, or by Anthropic's "is too long", clients know that they must shorten it.
    limited = f"This model's maximum context length is {limit} tokens, the answer included"
    if n >= limit:
        raise InvalidRequest(f"{limited}: {which} is too long: {n} tokens > {limit - 1}", param)
    if max_tokens is None or n + max_tokens <= limit:
        return
    field = body.max_tokens_field
    if field is None:
        raise InvalidRequest(
            f"{limited}: {which} has {n} tokens, and without max_tokens an answer may have {max_tokens}; send "
            f"max_tokens of at most {limit - n}",
            "max_tokens",
        )
    text = f"{limited}: {which} has {n} tokens and {field} asks for {max_tokens} more"
    raise InvalidRequest(text, field)


def rename_error_param(error: RequestError, body: SamplingFields) -> RequestError:
    """The engine's error under the name that the field has in the body."""
    if not isinstance(error, InvalidRequest) or not isinstance(body, ChatRequest) or error.param is None:
        return error
    names = {"max_tokens": body.max_tokens_field or "max_tokens", "logprobs": "top_logprobs"}
    name = names.get(error.param, error.param)
    return InvalidRequest(error.message.replace(error.param, name, 1), name)


def encode_bad_words(encode: Callable[[str, bool], list[int]], words: Sequence[str]) -> list[list[int]]:
    """The tokens of each word, without and, if they are others, with a space before it.

    Raises InvalidRequest naming the word.
    """
    token_lists = []
    for i, word in enumerate(words):
        text = word.lstrip()
        plain, spaced = encode(text, False), encode(f" {text}", False)
        if not text or not plain:
            raise InvalidRequest(f"bad_words[{i}] is blank: leave it out", "bad_words")
        token_lists += [plain] if spaced == plain else [plain, spaced]
    return token_lists


def encode_transfer_params(params: dict[str, Any] | None, info: EngineInfo) -> bytes | None:
    """The JSON that the engine gets, which checks what it says; None if there is nothing for it. `prompt_token_ids` are
    the prompt already, a proxy's CLIENT_FIELDS the body's, and its RELEASE_KEY a part of the request's id.

    Raises InvalidRequest for what is no JSON, is nested too deeply, or asks a server without a side channel for a
    transfer.
    """
    if params is None:
        return None
    if not isinstance(fields := params.get(CLIENT_FIELDS) or {}, dict):
        param = f"{_PARAMS}.{CLIENT_FIELDS}"
        raise InvalidRequest(f"{param} must be an object, not {type(fields).__name__}", param)
    params = {name: value for name, value in params.items() if name not in _READ_HERE}
    if info.side_channel is None:
        for flag in ("do_remote_decode", "do_remote_prefill"):
            value, param = params.get(flag), f"{_PARAMS}.{flag}"
            if value is True:
                text = "this server takes no part in transfers; start it with --kv-transfer-config"
                raise InvalidRequest(f"{param}: {text}", param)
            if value is not None and value is not False:
                raise InvalidRequest(f"{param} must be true or false, not {type(value).__name__}", param)
        return None
    # Not msgspec: it writes NaN as null, and null means something here.
    return encode_json(params, _PARAMS, _MAX_DEPTH, separators=(",", ":"))


def encode_release_params(params: dict[str, Any], info: EngineInfo) -> bytes | None:
    """What the engine is told of a prompt that was handed over and is not fetched: where it is and what it is called,
    or the key of who had it computed. None where nothing was, and for more than a reference has.

    Raises InvalidRequest as `encode_transfer_params`.
    """
    if params.get("do_remote_prefill") is not True:
        key = find_release_key(params)
        return None if key is None or info.side_channel is None else encode_json({RELEASE_KEY: key}, _PARAMS, 1)
    names = {name: params.get(name) for name in _REFERENCE}
    encoded = encode_transfer_params(names | {"remote_block_ids": []}, info)
    return encoded if encoded is not None and len(encoded) <= _MAX_REFERENCE_BYTES else None


def encode_json(
    value: dict[str, Any], name: str, max_depth: int, *, separators: tuple[str, str] | None = None
) -> bytes:
    """A field of a body as JSON. Raises InvalidRequest that names the field, for what is nested more than `max_depth`
    deep, half a surrogate pair, NaN and infinity."""
    if _is_deeper_than(value, max_depth):
        raise InvalidRequest(f"{name} is nested more than {max_depth} levels deep", name)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} has text that is not valid Unicode: {error.reason}", name) from None
    except ValueError:
        raise InvalidRequest(f"{name} has a number that is none", name) from None


def _is_deeper_than(value: object, limit: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_is_deeper_than(element, limit - 1) for element in inner)
