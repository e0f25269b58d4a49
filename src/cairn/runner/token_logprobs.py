"""How likely the model held tokens: the logarithms of their probabilities, and those of the best."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cairn.step import Logprobs, Score

SCORED_AT_ONCE = 64
"""Rows whose log-probabilities are in memory together: with 250,000 tokens to choose from they take 64 MB."""


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """`logits`: float32 [n, vocab], before any transform; `tokens`: int64 [n]."""
    values = logits.log_softmax(-1)
    own = values.gather(1, tokens[:, None])
    ranks = (values > own).sum(-1) + 1
    best = values.topk(min(top, values.shape[1]), dim=-1)
    token_ids = torch.cat([tokens[:, None], best.indices], dim=1)
    return Logprobs(token_ids.int().numpy(), torch.cat([own, best.values], dim=1).numpy(), ranks.int().numpy())


def logprobs_of_drawn(logits: Tensor, tokens: Sequence[int], tops: Sequence[int | None]) -> list[Logprobs | None]:
    """Of the token that was drawn in each row: how many of the best `tops` asks for; None where it asks for none. Rows
    that ask for the same are done together."""
    told: list[Logprobs | None] = [None] * len(tops)
    for top in {top for top in tops if top is not None}:
        wanting = [row for row, own in enumerate(tops) if own == top]
        for start in range(0, len(wanting), SCORED_AT_ONCE):
            rows = wanting[start : start + SCORED_AT_ONCE]
            drawn = torch.tensor([tokens[row] for row in rows], device=logits.device)
            found = logprobs_of(logits[rows], drawn, top)
            for i, row in enumerate(rows):
                one = slice(i, i + 1)
                told[row] = Logprobs(found.token_ids[one], found.values[one], found.ranks[one])
    return told


def score(wanted: Score, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> Iterator[Logprobs]:
    """`hidden`: [rows, hidden], after the first of which the targets come one by one; a share of them at a time."""
    targets = torch.from_numpy(wanted.targets.astype("<i8"))
    hidden = hidden[: len(targets)]
    for start in range(0, len(targets), SCORED_AT_ONCE):
        part = slice(start, start + SCORED_AT_ONCE)
        yield logprobs_of(logits(hidden[part]), targets[part], wanted.top)
