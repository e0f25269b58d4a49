"""From a request, held to what a core may rely on, to what the scheduler is asked for: a spec for each answer."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from operator import attrgetter

import msgspec
import numpy as np

from cairn.cache.sequence_blocks import Namespace
from cairn.engine.contract import (
    FREE_LOGPROBS,
    MAX_BREAKPOINTS,
    MAX_LOGPROB_ENTRIES,
    MAX_PATTERN_SIZE,
    MAX_RETAIN_SECONDS,
    RANGES,
    GenerateRequest,
    RepetitionDetection,
    StopConditions,
    check_token_ids,
)
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.engine.multimodal_keys import ImageKeys
from cairn.errors import InvalidRequest
from cairn.scheduler.request import Spec
from cairn.step import Image
from cairn.transfer.contract import TransferRole
from cairn.types import Keys, RequestId, SamplingParams

_INT64 = 1 << 63
_MAX_COUNT = (1 << 31) - 1
_MAX_END = 64
_MAX_WORD_TOKENS = 1088
"""A word has at most 256 characters, which are at most four tokens each; a tokenizer may put some of its own around."""


def key_tokens(request: GenerateRequest) -> Keys:
    """The prompt's key tokens, shape [n], read-only and without a copy. Call `check_request` first."""
    return np.frombuffer(request.prompt, dtype="<i8")


def predicted_tokens(request: GenerateRequest) -> Keys:
    """The prediction's tokens, shape [n], read-only and without a copy. Call `check_request` first."""
    return np.frombuffer(request.prediction, dtype="<i8")


def transfer_params(encoded: bytes | None) -> object:
    """A request's `kv_transfer_params`, decoded and in nothing trusted; None when it has none.

    Raises InvalidRequest when they are no JSON, or are nested too deeply to be read.
    """
    if encoded is None:
        return None
    try:
        return msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"kv_transfer_params cannot be read: {error}", "kv_transfer_params") from error
    except RecursionError as error:
        raise InvalidRequest("kv_transfer_params is nested too deeply", "kv_transfer_params") from error


def check_request(request: GenerateRequest) -> None:
    """Hold a request to what a core may rely on: the one check of ranges. Raises InvalidRequest naming the field."""
    if not request.prompt:
        raise InvalidRequest("the prompt is empty: send at least one token", "prompt")
    if len(request.prompt) % 8:
        raise InvalidRequest(f"prompt must be int64 tokens; {len(request.prompt)} bytes are no multiple of 8", "prompt")
    if len(request.prediction) % 8:
        text = f"prediction must be int64 tokens; {len(request.prediction)} bytes are no multiple of 8"
        raise InvalidRequest(text, "prediction")
    num_retained = sum(boundary.retain_seconds > 0 for boundary in request.boundaries)
    if num_retained > MAX_BREAKPOINTS:
        raise InvalidRequest(
            f"{num_retained} boundaries are to be held; at most {MAX_BREAKPOINTS} can be", "boundaries"
        )
    if any(not 0 <= boundary.retain_seconds <= MAX_RETAIN_SECONDS for boundary in request.boundaries):
        raise InvalidRequest(f"boundaries can be held for at most {MAX_RETAIN_SECONDS} seconds", "boundaries")
    for (name, allowed), value in zip(RANGES.items(), _READ_FIELDS(request), strict=True):
        if value is None:
            continue
        if name.endswith(".*"):
            entries = [(f"{name[:-1]}{key}", entry) for key, entry in dict(value).items()]
        elif name.endswith("[]"):
            entries = [(f"{name[:-1]}{i}]", entry) for i, entry in enumerate(value)]
        else:
            entries = [(name, value)]
        for where, entry in entries:
            number = len(entry) if allowed.lengths else entry
            if number not in allowed:
                param = where if name.endswith("]") else name.removesuffix(".*")
                raise InvalidRequest(f"{where} must be {allowed}, not {number}", param)
    _check_together(request)


def _path_of(name: str) -> str:
    """Where a request has what one of the `RANGES` speaks of."""
    field = name.removesuffix("[]").removesuffix(".*")
    parts = {"": GenerateRequest, "sampling.": SamplingParams, "stop_conditions.": StopConditions}
    return next(part for part, kind in parts.items() if hasattr(kind, field)) + field


_READ_FIELDS = attrgetter(*map(_path_of, RANGES))


def _check_together(request: GenerateRequest) -> None:
    """What no range says. Raises InvalidRequest that names the field."""
    num_prompt_tokens = len(request.prompt) // 8
    if any(not 1 <= len(word) <= _MAX_WORD_TOKENS for word in request.sampling.bad_words):
        raise InvalidRequest(f"bad_words must have 1 to {_MAX_WORD_TOKENS} tokens each", "bad_words")
    least, most = request.stop_conditions.min_tokens, request.stop_conditions.max_tokens
    if most is not None and least > most:
        text = f"min_tokens {least} is more than max_tokens {most}"
        raise InvalidRequest(text, "min_tokens")
    _check_repetition(request.stop_conditions.repetition_detection)
    thinking = request.stop_conditions.thinking
    if thinking is not None and not (0 <= thinking.num_tokens < 1 << 31 and 0 < len(thinking.end) <= _MAX_END):
        text = f"thinking_token_budget must be 0 to {(1 << 31) - 1}, with a text that ends the thinking"
        raise InvalidRequest(text, "thinking_token_budget")
    shown = 0 if request.prompt_logprobs is None else request.prompt_logprobs + 1
    if shown * num_prompt_tokens > MAX_LOGPROB_ENTRIES:
        text = f"prompt_logprobs of {num_prompt_tokens} tokens are too many: ask for fewer, or send a shorter prompt"
        raise InvalidRequest(text, "prompt_logprobs")
    shown = request.logprobs or 0
    longest = MAX_LOGPROB_ENTRIES // ((shown + 1) * request.n)
    if shown > FREE_LOGPROBS and (most is None or most > longest):
        text = f"logprobs of {shown} tokens for each one are too many for this answer: send fewer, "
        raise InvalidRequest(text + f"or max_tokens of at most {longest}", "logprobs")


def _check_repetition(params: RepetitionDetection | None) -> None:
    """Raises InvalidRequest that names the field."""
    if params is None:
        return
    name, largest = "repetition_detection", params.max_pattern_size
    if not 0 <= largest <= MAX_PATTERN_SIZE:
        text = f"{name}.max_pattern_size must be 0 to {MAX_PATTERN_SIZE}, not {largest}"
    elif not 0 <= params.min_pattern_size <= largest:
        text = f"{name}.min_pattern_size must be 0 to max_pattern_size, not {params.min_pattern_size}"
    elif largest and not 2 <= params.min_count <= _MAX_COUNT:
        text = f"{name}.min_count must be 2 to {_MAX_COUNT}, not {params.min_count}"
    else:
        return
    raise InvalidRequest(text, name)


def as_prefill(request: GenerateRequest) -> GenerateRequest:
    """What is computed of a request that is `prefill_only`, once it has been checked."""
    until = msgspec.structs.replace(
        request.stop_conditions, max_tokens=1, min_tokens=0, thinking=None, repetition_detection=None
    )
    return msgspec.structs.replace(
        request, n=1, stop_conditions=until, logprobs=None, prompt_logprobs=None, prediction=b""
    )


def seed_of(seed: int, index: int) -> int:
    """The seed of answer `index`: that of a request of its own with `seed + index`, within int64."""
    return (seed + index + _INT64) % (2 * _INT64) - _INT64


def answer_id(request_id: str, index: int) -> RequestId:
    """What the scheduler calls answer `index` to a request."""
    return RequestId(f"{request_id}/{index}" if index else request_id)


def answers_to(spec: Spec, n: int) -> list[Spec]:
    """`spec` and n - 1 more of it, with seeds of their own. Only the first one reports on the prompt, or fetches it."""
    seed = spec.sampling.seed
    assert seed is not None
    more = [
        replace(
            spec,
            request_id=answer_id(spec.request_id, index),
            sampling=replace(spec.sampling, seed=seed_of(seed, index)),
            prompt_logprobs=None,
            role=replace(spec.role, source=None),
        )
        for index in range(1, n)
    ]
    return [spec, *more]


class SpecBuilder:
    """Knows the model's vocabulary, and draws the seeds of requests that name none from `seed`. `image_keys`: None for
    a model that reads no images."""

    def __init__(self, vocab_size: int, eos: frozenset[int], seed: int, image_keys: ImageKeys | None) -> None:
        self._vocab_size = vocab_size
        self._eos = eos
        self._seeds = np.random.default_rng(seed)
        self._image_keys = image_keys

    def build(
        self,
        request: GenerateRequest,
        role: TransferRole,
        constraint: GrammarConstraint | None,
        max_tokens_for: Callable[[int], int],
    ) -> list[Spec]:
        """A spec for each answer. `constraint`: what the first answer is held to; the others get copies of it.
        `max_tokens_for`: how many tokens the answer to so many can have. Raises InvalidRequest naming the field."""
        if role.kv_export and request.n > 1:
            raise InvalidRequest("n: one answer is all that a prompt for another server can have here", "n")
        keys, images = self._keys(request)
        if any(not 1 <= boundary.position <= len(keys) for boundary in request.boundaries):
            raise InvalidRequest(f"boundaries must lie between 1 and {len(keys)}", "boundaries")
        sampling, until = request.sampling, request.stop_conditions
        if sampling.seed is None:
            sampling = replace(sampling, seed=int(self._seeds.integers(1 << 63)))
        stops = frozenset(until.stop_token_ids)
        spec = Spec(
            request_id=RequestId(request.request_id),
            prompt=keys,
            sampling=sampling,
            max_tokens=max(1, max_tokens_for(len(keys))) if until.max_tokens is None else until.max_tokens,
            stop_token_ids=stops if until.ignore_eos else stops | self._eos,
            namespace=Namespace(cache_salt=request.cache_salt),
            boundaries=tuple(request.boundaries),
            images=images,
            prediction=predicted_tokens(request),
            role=role,
            client=request.client,
            session=request.session,
            min_tokens=until.min_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            priority=request.priority,
            constraint=constraint,
        )
        first, *others = answers_to(spec, request.n)
        return [first, *(replace(each, constraint=constraint and constraint.start()) for each in others)]

    def _keys(self, request: GenerateRequest) -> tuple[Keys, tuple[Image, ...]]:
        """The prompt's key tokens and images. Raises InvalidRequest for a token that the model does not have."""
        keys = key_tokens(request)
        check_token_ids(keys, self._vocab_size, "prompt")
        if request.prediction:
            check_token_ids(predicted_tokens(request), self._vocab_size, "prediction")
        named: Iterable[tuple[str, Iterable[int]]] = (
            ("stop_token_ids", request.stop_conditions.stop_token_ids),
            ("logit_bias", (token for token, _ in request.sampling.logit_bias)),
            ("allowed_token_ids", request.sampling.allowed_token_ids or ()),
            ("logprob_token_ids", request.sampling.logprob_token_ids),
            ("bad_words", chain.from_iterable(request.sampling.bad_words)),
        )
        for name, iterable in named:
            if tokens := [*iterable]:
                check_token_ids(np.array(tokens, np.int64), self._vocab_size, name)
        if not request.images:
            return keys, ()
        if self._image_keys is None:
            raise InvalidRequest("images: this model, or this server, reads no images", "images")
        if request.prompt_logprobs is not None:  # what stands for an image is no token of the vocabulary
            raise InvalidRequest("prompt_logprobs: the prompt has images: leave one of them out", "prompt_logprobs")
        return self._image_keys.put_in(keys, request.images)
