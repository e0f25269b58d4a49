"""Tokens that may not come, and tokens that are to come more or less often.

What the host knows of a rule is staged; the `Rule` that comes back changes logits, float32 [n, vocab], in place once
the staging has been sent. Lists of tokens are one a row, empty where a row has no such rule.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.staging import StagedArray, Staging
from cairn.step import TokenMask

Tokens = Sequence[int]
Rule = Callable[[Tensor], None]


def allow_masked(masks: Sequence[TokenMask | None], vocab_size: int, staging: Staging) -> Rule | None:
    """Only tokens whose bit is set may come. Raises ValueError for a mask that does not fit the vocabulary, or that
    allows nothing."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return None
    words = [np.ascontiguousarray(mask, dtype="<i4") for mask in masks if mask is not None]
    for mask in words:
        if mask.shape != (-(-vocab_size // 32),):
            raise ValueError(f"a mask of shape {mask.shape} for {vocab_size} tokens")
        if not (mask[:-1].any() or int(mask[-1]) & ((1 << (vocab_size - 1) % 32 + 1) - 1)):
            raise ValueError("a mask that allows no token")
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bounds = staging.add(np.where(bits, np.float32(np.inf), np.float32(-np.inf)))
    octets, concerned = staging.add(np.stack(words).view(np.uint8).astype(np.int32)), staging.add(np.array(rows))

    def allow(logits: Tensor) -> None:
        # A byte's eight bounds at a time; the least of bound and logit takes no branch, as `masked_fill` does.
        most = torch.nn.functional.embedding(octets.tensor, bounds.tensor).flatten(1)[:, :vocab_size]
        logits[concerned.tensor] = logits[concerned.tensor].minimum(most)

    return allow


def keep_listed(lists: Sequence[Tokens], staging: Staging) -> Rule | None:
    """None but a row's tokens may come, unless none of them may: vLLM's `allowed_token_ids`."""
    rows = [row for row, tokens in enumerate(lists) if tokens]
    if not rows:
        return None
    concerned, places = staging.add(np.array(rows)), _Places([lists[row] for row in rows], staging)

    def keep(logits: Tensor) -> None:
        old, at = logits[concerned.tensor], places.index
        listed = torch.full_like(old, -torch.inf).index_put_(at, old[at])
        logits[concerned.tensor] = listed.where(listed.amax(-1, keepdim=True) > -torch.inf, old)

    return keep


def ban(lists: Sequence[Tokens], staging: Staging) -> Rule | None:
    """A row's tokens may not come, unless nothing else may."""
    if not any(lists):
        return None
    places = _Places(lists, staging)

    def take_out(logits: Tensor) -> None:
        at = places.index
        old, none = logits[at], logits.new_full((), -torch.inf)
        logits.index_put_(at, none)
        left = logits.amax(-1)[at[0]] > none
        logits.index_put_(at, none.where(left, old))

    return take_out


def add_bias(biases: Sequence[Sequence[tuple[int, float]]], staging: Staging) -> Rule | None:
    """What is added to the logits of single tokens, each named once: OpenAI's `logit_bias`."""
    if not any(biases):
        return None
    places = _Places([[token for token, _ in bias] for bias in biases], staging)
    values = staging.add(np.array([value for bias in biases for _, value in bias], np.float32))
    return lambda logits: _add(logits, places, values)


def _add(logits: Tensor, places: "_Places", values: StagedArray) -> None:
    logits.index_put_(places.index, values.tensor, accumulate=True)


class _Places:
    """Row and token of all that is listed; `index` once the staging has been sent."""

    def __init__(self, lists: Sequence[Tokens], staging: Staging) -> None:
        lengths = [len(tokens) for tokens in lists]
        self._rows = staging.add(np.repeat(np.arange(len(lists)), lengths))
        self._tokens = staging.add(np.fromiter(chain.from_iterable(lists), np.int64, sum(lengths)))

    @property
    def index(self) -> tuple[Tensor, Tensor]:
        return self._rows.tensor, self._tokens.tensor
