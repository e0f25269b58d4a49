"""Tokens that have been used already are made less likely, or more."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cairn.types import Keys

_LEAST = 1e-30
"""The least penalty that is reckoned with: in float32 a smaller one makes infinity, or no number, of a logit."""


@dataclass(frozen=True, slots=True, eq=False)
class RepetitionPenalty:
    """Tokens of `used`, each however often: a positive logit is divided by `penalty`, a negative one multiplied
    (Keskar et al. 2019, CTRL). `used`: prompt and answer; ids below 0 have no logit and are passed over."""

    used: Keys
    penalty: float

    def __call__(self, logits: Tensor) -> Tensor:
        tokens = torch.from_numpy(np.unique(self.used[self.used >= 0]))
        old, penalty = logits[tokens], max(self.penalty, _LEAST)
        return logits.index_copy(0, tokens, torch.where(old > 0, old / penalty, old * penalty))


@dataclass(frozen=True, slots=True, eq=False)
class FrequencyPenalty:
    """What OpenAI defines: a logit loses `frequency` for each time that its token is in `answer`, and `presence` once
    if it is there at all."""

    answer: Keys
    frequency: float
    presence: float

    def __call__(self, logits: Tensor) -> Tensor:
        tokens, counts = np.unique(self.answer, return_counts=True)
        loss = self.frequency * torch.from_numpy(counts).to(logits.dtype) + self.presence
        return logits.index_add(0, torch.from_numpy(tokens), -loss)
