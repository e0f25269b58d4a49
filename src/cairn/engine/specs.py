"""From a request to what the scheduler is asked for: one spec for each of its answers."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cairn.cache.lease import Namespace
from cairn.engine.constraint import GrammarConstraint
from cairn.engine.contents import ImageKeys
from cairn.engine.contract import GenerateRequest
from cairn.engine.kv_transfer import Terms
from cairn.engine.sampling import answers_to, check_token_ids, sampling_params
from cairn.engine.wire import key_tokens
from cairn.errors import InvalidRequest
from cairn.scheduler.request import Spec
from cairn.step import Image
from cairn.types import Keys, RequestId


class SpecMaker:
    """Knows the model's vocabulary, and draws the seeds of requests that name none from `seed`. `image_keys`: None for
    a model that reads no images."""

    def __init__(self, vocab_size: int, eos: frozenset[int], seed: int, image_keys: ImageKeys | None) -> None:
        self._vocab_size = vocab_size
        self._eos = eos
        self._seeds = np.random.default_rng(seed)
        self._image_keys = image_keys

    def make(
        self,
        request: GenerateRequest,
        terms: Terms,
        constraint: GrammarConstraint | None,
        room_behind: Callable[[int], int],
    ) -> list[tuple[Spec, GrammarConstraint | None]]:
        """The first answer's, then those of the others, each with what holds it to a form. `room_behind`: how many
        tokens an answer to so many can have. Raises InvalidRequest naming the field."""
        spec = self._spec(request, terms, room_behind)
        forms = [constraint, *(None if constraint is None else constraint.start() for _ in range(1, request.n))]
        answers = answers_to(spec, request.n)
        return [(replace(own, constraint=form), form) for own, form in zip(answers, forms, strict=True)]

    def _spec(self, request: GenerateRequest, terms: Terms, room_behind: Callable[[int], int]) -> Spec:
        if terms.hand_over and request.n > 1:
            raise InvalidRequest("n: one answer is all that a prompt for another server can have here", "n")
        check_token_ids(request, self._vocab_size)
        keys, images = self._keys(request)
        if any(not 1 <= boundary.position <= len(keys) for boundary in request.boundaries):
            raise InvalidRequest(f"boundaries must lie between 1 and {len(keys)}", "boundaries")
        seed = int(self._seeds.integers(1 << 63)) if request.seed is None else request.seed
        stops = frozenset(request.stop_token_ids)
        return Spec(
            request_id=RequestId(request.request_id),
            prompt=keys,
            sampling=sampling_params(request, seed),
            max_tokens=max(1, room_behind(len(keys))) if request.max_tokens is None else request.max_tokens,
            stop_token_ids=stops if request.ignore_eos else stops | self._eos,
            namespace=Namespace(cache_salt=request.cache_salt),
            boundaries=tuple(request.boundaries),
            images=images,
            source=terms.source,
            hand_over=terms.hand_over,
            client=request.client,
            min_tokens=request.min_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            priority=request.priority,
        )

    def _keys(self, request: GenerateRequest) -> tuple[Keys, tuple[Image, ...]]:
        keys = key_tokens(request)
        wrong = np.flatnonzero((keys < 0) | (keys >= self._vocab_size))
        if wrong.size:
            place, last = int(wrong[0]), self._vocab_size - 1
            raise InvalidRequest(f"prompt[{place}] is {keys[place]}; token ids go from 0 to {last}", "prompt")
        if not request.images:
            return keys, ()
        if self._image_keys is None:
            raise InvalidRequest("images: this model, or this server, reads no images", "images")
        if request.prompt_logprobs is not None:  # what stands for an image is no token of the vocabulary
            raise InvalidRequest("prompt_logprobs: the prompt has images: leave one of them out", "prompt_logprobs")
        return self._image_keys.put_in(keys, request.images)
