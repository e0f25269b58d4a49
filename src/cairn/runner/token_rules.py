"""Tokens that may not come, and tokens that are to come more or less often."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cairn.step import TokenMask


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """Only tokens whose bit is set in `mask` may come."""

    mask: TokenMask

    def __call__(self, logits: Tensor) -> Tensor:
        """Raises ValueError for a mask that does not fit the vocabulary, or that allows nothing."""
        words = np.ascontiguousarray(self.mask, dtype="<i4")
        if words.shape != (-(-logits.shape[0] // 32),):
            raise ValueError(f"a mask of shape {words.shape} for {logits.shape[0]} tokens")
        bits = np.unpackbits(words.view(np.uint8), count=logits.shape[0], bitorder="little")
        if not bits.any():
            raise ValueError("a mask that allows no token")
        return logits.masked_fill(torch.from_numpy(bits == 0), -torch.inf)


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """None but these tokens may come, unless none of them may: vLLM's `allowed_token_ids`."""

    tokens: tuple[int, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        listed = torch.tensor(self.tokens)
        left = torch.full_like(logits, -torch.inf).index_copy_(0, listed, logits[listed])
        return left if left.max() > -torch.inf else logits


@dataclass(frozen=True, slots=True)
class BannedTokens:
    """Tokens that may not come, unless nothing else may."""

    tokens: tuple[int, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        left = logits.index_fill(0, torch.tensor(self.tokens), -torch.inf)
        return left if left.max() > -torch.inf else logits


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What is added to the logits of single tokens: OpenAI's `logit_bias`."""

    bias: tuple[tuple[int, float], ...]

    def __call__(self, logits: Tensor) -> Tensor:
        tokens, values = zip(*self.bias, strict=True)
        return logits.index_add(0, torch.tensor(tokens), torch.tensor(values, dtype=logits.dtype))
