"""How a request's answers are drawn: checked, and as the scheduler takes it."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from math import isfinite

from cairn.engine.contract import (
    MAX_ALLOWED_TOKENS,
    MAX_ANSWERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    GenerateRequest,
)
from cairn.errors import InvalidRequest
from cairn.scheduler.request import Spec
from cairn.types import RequestId, SamplingParams

_INT64 = 1 << 63
_MAX_WORD_TOKENS = 1088
"""A word has at most 256 characters, which are at most four tokens each; a tokenizer may put some of its own around."""


def check_sampling(request: GenerateRequest) -> None:
    """Hold a request's numbers to their ranges. Raises InvalidRequest that names the field."""
    num_prompt_tokens = len(request.prompt) // 8
    shown = (request.prompt_logprobs or 0) + 1
    rules: Iterable[tuple[str, bool, str]] = (
        ("n", 1 <= request.n <= MAX_ANSWERS, f"must be 1 to {MAX_ANSWERS}"),
        ("max_tokens", request.max_tokens is None or request.max_tokens >= 1, "must be at least 1"),
        ("temperature", isfinite(request.temperature) and request.temperature >= 0, "must be a number from 0 on"),
        ("top_k", request.top_k >= 0, "must be 0 for none, or more"),
        ("top_p", 0 < request.top_p <= 1, "must be above 0 and at most 1"),
        ("min_p", 0 <= request.min_p <= 1, "must be 0 to 1"),
        ("frequency_penalty", abs(request.frequency_penalty) <= 2, "must be -2 to 2"),
        ("presence_penalty", abs(request.presence_penalty) <= 2, "must be -2 to 2"),
        ("repetition_penalty", 0 < request.repetition_penalty <= 100, "must be above 0 and at most 100"),
        ("logit_bias", len(request.logit_bias) <= MAX_LOGIT_BIAS, f"has more than {MAX_LOGIT_BIAS} entries"),
        ("logit_bias", all(abs(bias) <= 100 for bias in request.logit_bias.values()), "values must be -100 to 100"),
        (
            "allowed_token_ids",
            request.allowed_token_ids is None or 1 <= len(request.allowed_token_ids) <= MAX_ALLOWED_TOKENS,
            f"must be 1 to {MAX_ALLOWED_TOKENS} token ids",
        ),
        ("bad_words", len(request.bad_words) <= 2 * MAX_BAD_WORDS, f"are more than {MAX_BAD_WORDS}"),
        (
            "bad_words",
            all(1 <= len(word) <= _MAX_WORD_TOKENS for word in request.bad_words),
            f"must have 1 to {_MAX_WORD_TOKENS} tokens each",
        ),
        ("min_tokens", request.min_tokens >= 0, "must not be negative"),
        (
            "min_tokens",
            request.max_tokens is None or request.min_tokens <= request.max_tokens,
            f"{request.min_tokens} is more than max_tokens {request.max_tokens}",
        ),
        ("logprobs", 0 <= (request.logprobs or 0) <= MAX_LOGPROBS, f"must be 0 to {MAX_LOGPROBS}"),
        ("prompt_logprobs", 1 <= shown <= MAX_LOGPROBS + 1, f"must be 0 to {MAX_LOGPROBS}"),
        (
            "prompt_logprobs",
            request.prompt_logprobs is None or shown * num_prompt_tokens <= MAX_PROMPT_LOGPROBS,
            f"of {num_prompt_tokens} tokens are too many: ask for fewer, or send a shorter prompt",
        ),
    )
    for name, kept, rule in rules:
        if not kept:
            raise InvalidRequest(f"{name} {rule}", name)


def check_token_ids(request: GenerateRequest, vocab_size: int) -> None:
    """Raises InvalidRequest for a token that the model does not have."""
    named: Iterable[tuple[str, Iterable[int]]] = (
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", request.logit_bias),
        ("allowed_token_ids", request.allowed_token_ids or ()),
        ("bad_words", chain.from_iterable(request.bad_words)),
    )
    for name, tokens in named:
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"{name}: {token} is no token; ids go from 0 to {vocab_size - 1}", name)


def sampling_params(request: GenerateRequest, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=seed,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        allowed_tokens=tuple(sorted(set(request.allowed_token_ids or ()))),
        bad_words=tuple(sorted(set(map(tuple, request.bad_words)))),
    )


def seed_of(seed: int, index: int) -> int:
    """The seed of answer `index`: that of a request of its own with `seed + index`, within int64."""
    return (seed + index + _INT64) % (2 * _INT64) - _INT64


def answers_to(spec: Spec, n: int) -> list[Spec]:
    """`spec` and n - 1 more of it, with seeds of their own. What the first one tells of the prompt, or fetches, they do
    not."""
    more = [
        replace(
            spec,
            request_id=RequestId(f"{spec.request_id}/{index}"),
            sampling=replace(spec.sampling, seed=seed_of(spec.sampling.seed, index)),
            prompt_logprobs=None,
            source=None,
        )
        for index in range(1, n)
    ]
    return [spec, *more]
