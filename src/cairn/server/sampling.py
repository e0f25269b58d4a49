"""How a body's answers are drawn, in the engine's words. Ranges are the core's to check."""

from collections.abc import Callable, Sequence
from typing import Any

from cairn.engine.contract import StopConditions
from cairn.errors import InvalidRequest, RequestError
from cairn.server.requests import ChatRequest, CompletionRequest, SamplingFields
from cairn.types import SamplingParams

_GREEDY_BELOW = 1e-5
_COMPLETION_MAX_TOKENS = 16
_DRAWN = ("top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed")
_ENDED = ("min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos")
_AS_SENT = ("n", "skip_special_tokens", "priority", "cache_salt")
"""Fields of bodies that `SamplingParams`, `StopConditions` and `GenerateRequest` have under the same names."""


def get_sampling_params(body: SamplingFields, bad_words: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Fields of `GenerateRequest`: what the body says, where that is not the engine's own default. `bad_words`: their
    tokens. Raises InvalidRequest naming the field."""
    drawn = _sent(body, _DRAWN)
    if body.temperature is not None:
        drawn["temperature"] = 0.0 if 0 <= body.temperature < _GREEDY_BELOW else body.temperature
    if body.top_k is not None:
        drawn["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.allowed_token_ids is not None:
        drawn["allowed_token_ids"] = tuple(body.allowed_token_ids)
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    more: dict[str, Any] = {"n": 1} if is_remote_decode(body) else {}
    return {
        **_sent(body, _AS_SENT),
        **more,
        "sampling": SamplingParams(**drawn, logit_bias=tuple(bias.items()), bad_words=tuple(map(tuple, bad_words))),
        "stop_conditions": StopConditions(**_sent(body, _ENDED), stop=stop, max_tokens=get_max_tokens(body)),
        "logprobs": get_num_logprobs(body),
        "prompt_logprobs": _prompt_logprobs(body),
    }


def _sent(body: SamplingFields, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def is_remote_decode(body: SamplingFields) -> bool:
    """Whether the prompt is computed for another server, which then draws the answers."""
    return (body.kv_transfer_params or {}).get("do_remote_decode") is True


def get_max_tokens(body: SamplingFields) -> int | None:
    """None: as many as fit. A completion of no token at all takes one, which is not shown."""
    if isinstance(body, ChatRequest):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens == 0:
        if not (isinstance(body, CompletionRequest) and body.echo):
            raise InvalidRequest("max_tokens is 0, and nothing is to be echoed: ask for at least 1", "max_tokens")
        return 1
    return _COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens


def get_max_tokens_field(body: SamplingFields) -> str | None:
    """The field that `get_max_tokens` goes by; None where the client has sent none."""
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return None if body.max_tokens is None else "max_tokens"


def rename_error_param(error: RequestError, body: SamplingFields) -> RequestError:
    """The core's error, about the field that the client has sent."""
    if not isinstance(error, InvalidRequest) or not isinstance(body, ChatRequest) or error.param is None:
        return error
    names = {"max_tokens": get_max_tokens_field(body) or "max_tokens", "logprobs": "top_logprobs"}
    name = names.get(error.param, error.param)
    return InvalidRequest(error.message.replace(error.param, name, 1), name)


def get_num_logprobs(body: SamplingFields) -> int | None:
    """How many of the best tokens are told of beside each of the answer; None: nothing is told."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if not isinstance(body, ChatRequest):
        return None
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: send logprobs=true with it", "top_logprobs")
    return body.top_logprobs or 0 if body.logprobs else None


def _prompt_logprobs(body: SamplingFields) -> int | None:
    if body.prompt_logprobs is not None:
        if body.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed: leave stream out", "prompt_logprobs")
        return body.prompt_logprobs
    return body.logprobs if isinstance(body, CompletionRequest) and body.echo else None


def encode_bad_words(encode: Callable[[str, bool], list[int]], words: Sequence[str]) -> list[list[int]]:
    """The tokens of each word as it begins an answer and, where they are others, as it stands behind a space.

    Raises InvalidRequest that names the word.
    """
    found = []
    for place, word in enumerate(words):
        text = word.lstrip()
        plain, spaced = encode(text, False), encode(f" {text}", False)
        if not text or not plain:
            raise InvalidRequest(f"bad_words[{place}] is blank: leave it out", "bad_words")
        found += [plain] if spaced == plain else [plain, spaced]
    return found
