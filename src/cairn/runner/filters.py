"""Which tokens are likely enough to be drawn at all. All take logits divided by the temperature, float64 [vocab]."""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MinP:
    """Tokens at least `share` times as likely as the most likely one (Nguyen et al. 2024)."""

    share: float

    def __call__(self, scaled: Tensor) -> Tensor:
        return scaled.masked_fill(scaled < scaled.max() + log(self.share), -torch.inf)


@dataclass(frozen=True, slots=True)
class TopK:
    """The `count` best, and those that equal the last of them."""

    count: int

    def __call__(self, scaled: Tensor) -> Tensor:
        if self.count >= scaled.shape[0]:
            return scaled
        return scaled.masked_fill(scaled < scaled.topk(self.count).values[-1], -torch.inf)


@dataclass(frozen=True, slots=True)
class TopP:
    """The smallest set of the best that holds `share` of the probability (Holtzman et al. 2020), one token at least."""

    share: float

    def __call__(self, scaled: Tensor) -> Tensor:
        ranked, order = scaled.sort(descending=True, stable=True)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # The best token always stays: nothing is before it.
        out = order[(before >= self.share).logical_and_(before > 0)]
        return scaled.index_fill(0, out, -torch.inf)
