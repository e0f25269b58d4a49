"""One token from each row of logits, all rows of a step together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from cairn.runner.bad_words import ends_of_bad_words
from cairn.runner.inverse_cdf import (
    BLOCK,
    Draws,
    draw_from_all,
    draw_from_best,
    draw_from_nucleus,
    take_largest,
)
from cairn.runner.penalties import TokenCounts, penalize
from cairn.runner.philox import uniform
from cairn.runner.slots import Sample
from cairn.runner.token_rules import add_bias, allow_masked, ban, keep_listed
from cairn.types import SamplingParams

_FEW, _MORE = 64, 128
"""How many of the best tokens are looked at where that should do."""
_SORTED = 1 << 14
"""So small a vocabulary is sorted at once for top_p."""
_LOGITS_AT_ONCE = 1 << 21
"""Of rows that are drawn together: what is made of them is to stay in the processor's cache."""

DrawRows = Callable[[Tensor, Draws], Tensor]
_FROM_FEW: DrawRows = partial(draw_from_best, count=_FEW)
_FROM_MORE: DrawRows = partial(draw_from_best, count=_MORE)
_FROM_NUCLEUS: DrawRows = partial(draw_from_nucleus, count=_MORE)
_FROM_SOME = (_FROM_FEW, _FROM_MORE, _FROM_NUCLEUS)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What n tokens are drawn by, n at least 1; `slots`: whose counts the penalties look at."""

    slots: Sequence[int]
    samples: Sequence[Sample]
    draws: Draws

    @staticmethod
    def of(slots: Sequence[int], samples: Sequence[Sample], vocab_size: int) -> "SamplingBatch":
        params = [sample.params for sample in samples]
        top_k = [one.top_k if one.top_k < vocab_size else 0 for one in params]
        columns = np.array([(one.temperature, one.top_p, one.min_p) for one in params], np.float64)
        temperature, top_p, min_p = columns.T
        numbers = np.zeros(len(params))
        if temperature.any():
            numbers = uniform([one.seed for one in params], [sample.position for sample in samples])
        return SamplingBatch(slots, samples, Draws(temperature, np.array(top_k, np.int64), top_p, min_p, numbers))

    def take(self, rows: list[int]) -> "SamplingBatch":
        slots, samples = [self.slots[row] for row in rows], [self.samples[row] for row in rows]
        return SamplingBatch(slots, samples, self.draws.take(rows))


def draw(logits: Tensor, batch: SamplingBatch, counts: TokenCounts) -> list[int]:
    """A token for each row; logits float32 [n, vocab], left alone.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the token at a uniform number in the
    cumulative distribution of what the filters leave; the number is Philox's for (seed, position), so the token is the
    same in any batch and after any preemption. Raises ValueError for a mask that does not fit.
    """
    groups: dict[tuple[bool, DrawRows], list[int]] = {}
    for row, sample in enumerate(batch.samples):
        groups.setdefault((has_rules(sample), _way(sample.params, logits.shape[1])), []).append(row)
    order, parts = list[int](), list[Tensor]()
    step = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for (ruled, draw_rows), group in groups.items():
        for start in range(0, len(group), step):
            rows = group[start : start + step]
            own, draws = _take(logits, rows, ruled), batch.draws.take(rows)
            if ruled:
                apply_rules(own, batch.take(rows), counts)
            if own.shape[1] % BLOCK:
                own = pad(own, (0, -own.shape[1] % BLOCK), value=-torch.inf)
            drawn = draw_rows(own, draws)
            if draw_rows in _FROM_SOME and (left := (drawn < 0).nonzero()[:, 0].tolist()):
                drawn[left] = draw_from_all(own[left], draws.take(left))
            order += rows
            parts.append(drawn)
    # What is no number may lead behind the last token.
    found = torch.cat(parts).clamp_(max=logits.shape[1] - 1).tolist()
    return [token for _, token in sorted(zip(order, found, strict=True))]


def _take(logits: Tensor, rows: list[int], copied: bool) -> Tensor:
    """Some rows, rising; a view where that can be had and will do."""
    if copied or rows[-1] - rows[0] >= len(rows):
        return logits.index_select(0, torch.tensor(rows, device=logits.device))
    return logits[rows[0] : rows[-1] + 1].contiguous()


def has_rules(sample: Sample) -> bool:
    """Whether something is done to the logits whatever the temperature."""
    params = sample.params
    lists = params.allowed_tokens or params.bad_words or sample.banned or params.logit_bias
    return sample.allowed is not None or bool(lists) or params.has_penalties


def apply_rules(logits: Tensor, batch: SamplingBatch, counts: TokenCounts) -> None:
    """In place and in vLLM's order: what is allowed at all comes first."""
    samples = batch.samples
    params = [sample.params for sample in samples]
    allow_masked(logits, [sample.allowed for sample in samples])
    keep_listed(logits, [one.allowed_tokens for one in params])
    ban(logits, [ends_of_bad_words(sample) for sample in samples])
    ban(logits, [sample.banned for sample in samples])
    add_bias(logits, [one.logit_bias for one in params])
    rows = [row for row, one in enumerate(params) if one.has_penalties]
    if rows:
        penalize(logits, rows, [params[row] for row in rows], [batch.slots[row] for row in rows], counts)


def _way(params: SamplingParams, vocab_size: int) -> DrawRows:
    """How a row is drawn, by its own parameters alone: each way has an order of the tokens of its own."""
    if params.temperature == 0:
        return take_largest
    if params.top_k < _MORE and (params.top_k or params.min_p):
        return _FROM_FEW if 0 < params.top_k < _FEW else _FROM_MORE
    if params.top_p < 1 and vocab_size > _SORTED and (params.top_k == 0 or params.top_k >= vocab_size):
        return _FROM_NUCLEUS
    return draw_from_all
