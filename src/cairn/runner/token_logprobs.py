"""How likely the model held tokens: the logarithms of their probabilities, and those of the best."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.staging import Staging
from cairn.step import Score

SCORED_AT_ONCE = 64
"""Rows whose log-probabilities are in memory together: with 250,000 tokens to choose from they take 64 MB."""


class LogprobTensors(NamedTuple):
    """The arrays of a `cairn.step.Logprobs`, on the device."""

    token_ids: Tensor
    values: Tensor
    ranks: Tensor


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> LogprobTensors:
    """`logits`: float32 [n, vocab], before any transform; `tokens`: int64 [n]."""
    values = logits.log_softmax(-1)
    own = values.gather(1, tokens[:, None])
    ranks = (values > own).sum(-1) + 1
    best = values.topk(min(top, values.shape[1]), dim=-1)
    token_ids = torch.cat([tokens[:, None], best.indices], dim=1)
    return LogprobTensors(token_ids.int(), torch.cat([own, best.values], dim=1), ranks.int())


class DrawnLogprobs:
    """Of the tokens that a step draws: how many of the best each of its rows asks for, None for a row that asks for
    nothing. Rows that ask for the same are done together."""

    def __init__(self, tops: Sequence[int | None], staging: Staging) -> None:
        self._groups = []
        for top in sorted({top for top in tops if top is not None}):
            wanting = [row for row, own in enumerate(tops) if own == top]
            for start in range(0, len(wanting), SCORED_AT_ONCE):
                rows = wanting[start : start + SCORED_AT_ONCE]
                self._groups.append((top, rows, staging.add(np.array(rows))))

    def find(self, logits: Tensor, drawn: Tensor) -> list[tuple[list[int], LogprobTensors]]:
        """Once the staging has been sent, from float32 [n, vocab] and int64 [n]: rows, and the logprobs of these."""
        return [
            (rows, logprobs_of(logits[index.tensor], drawn[index.tensor], top)) for top, rows, index in self._groups
        ]


class Scoring:
    """Of the tokens that are known to follow those of one row."""

    def __init__(self, wanted: Score, staging: Staging) -> None:
        self._top = wanted.top
        self._targets = staging.add(wanted.targets.astype(np.int64))

    def find(self, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Iterator[LogprobTensors]:
        """Once the staging has been sent: `hidden` is [rows, hidden], after the first of which the targets come one by
        one; a share of them at a time."""
        targets = self._targets.tensor
        for start in range(0, len(targets), SCORED_AT_ONCE):
            part = slice(start, start + SCORED_AT_ONCE)
            yield logprobs_of(logits(hidden[: len(targets)][part]), targets[part], self._top)
