"""Tokens that may not come, and tokens that are to come more or less often.

All take logits, float32 [n, vocab], and change them in place. Lists of tokens are one a row, empty where a row has no
such rule.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from cairn.step import TokenMask

Tokens = Sequence[int]


def allow_masked(logits: Tensor, masks: Sequence[TokenMask | None]) -> None:
    """Only tokens whose bit is set may come. Raises ValueError for a mask that does not fit the vocabulary, or that
    allows nothing."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    vocab_size = logits.shape[1]
    words = [np.ascontiguousarray(mask, dtype="<i4") for mask in masks if mask is not None]
    for mask in words:
        if mask.shape != (-(-vocab_size // 32),):
            raise ValueError(f"a mask of shape {mask.shape} for {vocab_size} tokens")
        if not (mask[:-1].any() or int(mask[-1]) & ((1 << (vocab_size - 1) % 32 + 1) - 1)):
            raise ValueError("a mask that allows no token")
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bounds = torch.from_numpy(np.where(bits, np.float32(np.inf), np.float32(-np.inf))).to(logits.device)
    octets = torch.from_numpy(np.stack(words).view(np.uint8)).to(logits.device)
    # A byte's eight bounds at a time; the least of bound and logit takes no branch, as `masked_fill` does.
    most = torch.nn.functional.embedding(octets.int(), bounds).flatten(1)[:, :vocab_size]
    logits[rows] = logits[rows].minimum(most)


def keep_listed(logits: Tensor, lists: Sequence[Tokens]) -> None:
    """None but a row's tokens may come, unless none of them may: vLLM's `allowed_token_ids`."""
    concerned = [row for row, tokens in enumerate(lists) if tokens]
    if not concerned:
        return
    old = logits[concerned]
    at = _places([lists[row] for row in concerned], logits.device)
    listed = torch.full_like(old, -torch.inf).index_put_(at, old[at])
    logits[concerned] = listed.where(listed.amax(-1, keepdim=True) > -torch.inf, old)


def ban(logits: Tensor, lists: Sequence[Tokens]) -> None:
    """A row's tokens may not come, unless nothing else may."""
    if not any(lists):
        return
    at = _places(lists, logits.device)
    old, none = logits[at], logits.new_tensor(-torch.inf)
    logits.index_put_(at, none)
    left = logits.amax(-1)[at[0]] > none
    logits.index_put_(at, none.where(left, old))


def add_bias(logits: Tensor, biases: Sequence[Sequence[tuple[int, float]]]) -> None:
    """What is added to the logits of single tokens, each named once: OpenAI's `logit_bias`."""
    if not any(biases):
        return
    at = _places([[token for token, _ in bias] for bias in biases], logits.device)
    values = [value for bias in biases for _, value in bias]
    logits.index_put_(at, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)


def _places(lists: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and token of all that is listed."""
    lengths = [len(tokens) for tokens in lists]
    rows = np.repeat(np.arange(len(lists)), lengths)
    tokens = np.fromiter(chain.from_iterable(lists), np.int64, sum(lengths))
    return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
