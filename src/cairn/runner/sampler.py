"""One token from one row of logits: a chain of small transforms, none of them by default, and the draw."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cairn.runner.bad_words import ends_of_bad_words
from cairn.runner.filters import MinP, TopK, TopP
from cairn.runner.penalties import FrequencyPenalty, RepetitionPenalty
from cairn.runner.slots import Sample
from cairn.runner.token_rules import AllowedTokens, BannedTokens, ListedTokens, LogitBias
from cairn.types import SamplingParams

Transform = Callable[[Tensor], Tensor]
"""Logits, [vocab] -> a new tensor of the same shape; the given one is left alone."""


def draw(logits: Tensor, sample: Sample) -> int:
    """The token for `sample`; logits float32 [vocab].

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the largest of logit / temperature
    plus Gumbel noise, which is a draw from the softmax (Gumbel 1954), among the tokens that the filters leave. The
    noise comes from a generator seeded with (seed, position), so it is the same in any batch and after any preemption.
    """
    params = sample.params
    for transform in transforms_of(sample):
        logits = transform(logits)
    if params.temperature == 0:
        # numpy promises the first of equal maxima, torch does not.
        return int(np.argmax(logits.numpy()))
    scaled = logits.double().sub_(logits.max()).div_(params.temperature)
    for keep in filters_of(params):
        scaled = keep(scaled)
    return int(np.argmax((scaled + _gumbel(scaled.shape[0], params.seed, sample.position)).numpy()))


def transforms_of(sample: Sample) -> list[Transform]:
    """What is done to the logits whatever the temperature, in vLLM's order: what is allowed at all comes first."""
    params, chain = sample.params, list[Transform]()
    if sample.allowed is not None:
        chain.append(AllowedTokens(sample.allowed))
    if params.allowed_tokens:
        chain.append(ListedTokens(params.allowed_tokens))
    if ends := ends_of_bad_words(sample):
        chain.append(BannedTokens(ends))
    if sample.banned:
        chain.append(BannedTokens(sample.banned))
    if params.logit_bias:
        chain.append(LogitBias(params.logit_bias))
    if params.needs_history:
        assert sample.history is not None, f"position {sample.position}: a rule without what it looks at"
        if params.repetition_penalty != 1:
            chain.append(RepetitionPenalty(sample.history, params.repetition_penalty))
        answer = sample.history[sample.num_prompt_tokens :]
        if len(answer) and (params.frequency_penalty or params.presence_penalty):
            chain.append(FrequencyPenalty(answer, params.frequency_penalty, params.presence_penalty))
    return chain


def filters_of(params: SamplingParams) -> list[Transform]:
    """Which tokens may be drawn, given their logits at the temperature."""
    chain = list[Transform]()
    if params.min_p > 0:
        chain.append(MinP(params.min_p))
    if params.top_k > 0:
        chain.append(TopK(params.top_k))
    if params.top_p < 1:
        chain.append(TopP(params.top_p))
    return chain


def _gumbel(count: int, seed: int, position: int) -> Tensor:
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return uniform.clamp_(min=torch.finfo(torch.float64).tiny).log_().neg_().log_().neg_()
