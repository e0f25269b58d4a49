"""One token from one row of logits."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from cairn.types import SamplingParams

__all__ = ["draw"]


def draw(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token for absolute position `position`; logits float32 [vocab].

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the largest of logit / temperature
    plus Gumbel noise, which is a draw from the softmax (Gumbel 1954), among the tokens that top_k and top_p leave. The
    noise comes from a generator seeded with (seed, position), so it is the same in any batch and after any preemption.
    """
    if params.temperature == 0:
        # numpy promises the first of equal maxima, torch does not.
        return int(np.argmax(logits.numpy()))
    scaled = logits.double().sub_(logits.max()).div_(params.temperature)
    return int(np.argmax((_filtered(scaled, params) + _gumbel(logits.shape[0], params.seed, position)).numpy()))


def _filtered(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Tokens outside the `top_k` best, or outside the smallest set that holds `top_p` of the probability, get -inf."""
    if 0 < params.top_k < scaled.shape[0]:
        least = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if params.top_p < 1:
        ranked, order = scaled.sort(descending=True, stable=True)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # The best token always stays: nothing is before it.
        out = order[(before >= params.top_p).logical_and_(before > 0)]
        scaled = scaled.index_fill(0, out, -torch.inf)
    return scaled


def _gumbel(count: int, seed: int, position: int) -> Tensor:
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return uniform.clamp_(min=torch.finfo(torch.float64).tiny).log_().neg_().log_().neg_()
