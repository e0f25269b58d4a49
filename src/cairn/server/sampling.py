"""How a body's answers are drawn, in the engine's words. Ranges are the bodies' and the engine's to check."""

from collections.abc import Callable, Sequence
from typing import Any

from cairn.errors import InvalidRequest
from cairn.server.messages import check_text
from cairn.server.requests import ChatRequest, CompletionRequest, SamplingFields

_GREEDY_BELOW = 1e-5
_COMPLETION_MAX_TOKENS = 16
_LONGEST_ID = 12
_MOST_BIAS = 100
_AS_SENT = (
    *("top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "min_tokens", "stop"),
    *("include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "priority", "cache_salt"),
)
"""Fields of bodies that the engine's request has under the same name."""


def sampling_of(body: SamplingFields) -> dict[str, Any]:
    """Fields of `GenerateRequest`: what the body says, where that is not the engine's own default. Raises
    InvalidRequest naming the field."""
    sampling = {name: value for name in _AS_SENT if (value := getattr(body, name)) is not None}
    if body.temperature is not None:
        sampling["temperature"] = 0.0 if body.temperature < _GREEDY_BELOW else body.temperature
    return sampling | {
        "top_k": max(body.top_k or 0, 0),
        "logit_bias": _logit_bias(body.logit_bias or {}),
        "n": answers_per_prompt(body),
        "max_tokens": max_tokens_of(body),
        "logprobs": logprobs_of(body),
        "prompt_logprobs": _prompt_logprobs(body),
    }


def answers_per_prompt(body: SamplingFields) -> int:
    """One where the prompt is computed for another server: the answers are that one's to draw."""
    params = body.kv_transfer_params or {}
    return 1 if params.get("do_remote_decode") is True else body.n or 1


def max_tokens_of(body: SamplingFields) -> int | None:
    """None: as many as fit. A completion of no token at all takes one, which is not shown."""
    if isinstance(body, ChatRequest):
        return body.max_completion_tokens or body.max_tokens
    if body.max_tokens == 0:
        if not (isinstance(body, CompletionRequest) and body.echo):
            raise InvalidRequest("max_tokens is 0, and nothing is to be echoed: ask for at least 1", "max_tokens")
        return 1
    return body.max_tokens or _COMPLETION_MAX_TOKENS


def max_tokens_field(body: SamplingFields) -> str | None:
    """The field that `max_tokens_of` goes by; None where the client has sent none."""
    if isinstance(body, ChatRequest) and body.max_completion_tokens:
        return "max_completion_tokens"
    return None if body.max_tokens is None else "max_tokens"


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= _LONGEST_ID):
            raise InvalidRequest(f"logit_bias: {name[:_LONGEST_ID]!r} is no token id", "logit_bias")
        if abs(value) > _MOST_BIAS:
            raise InvalidRequest(f"logit_bias: {value:g} is not between -{_MOST_BIAS} and {_MOST_BIAS}", "logit_bias")
        bias[int(name)] = value
    return bias


def logprobs_of(body: SamplingFields) -> int | None:
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


def bad_word_tokens(encode: Callable[[str, bool], list[int]], words: Sequence[str]) -> list[list[int]]:
    """The tokens of each word as it begins an answer and, where they are others, as it stands behind a space.

    Raises InvalidRequest that names the word.
    """
    found = []
    for place, word in enumerate(words):
        text = check_text(word, f"bad_words[{place}]", "bad_words").lstrip()
        plain, spaced = encode(text, False), encode(f" {text}", False)
        if not text or not plain:
            raise InvalidRequest(f"bad_words[{place}] is blank: leave it out", "bad_words")
        found += [plain] if spaced == plain else [plain, spaced]
    return found
