"""One token from each row of logits, all rows of a step together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from cairn.kernels.staging import StagedArray, Staging
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
from cairn.runner.token_rules import Rule, add_bias, allow_masked, ban, keep_listed
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


_NO_DRAWS = Draws(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0), Staging())
"""Of rows that are not drawn: the largest logit is taken."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are drawn in one way; `index`: the same numbers, int64 [n], None where they are all from the first to
    the last. `has_rules`: whatever is said with the draw."""

    draw_rows: DrawRows
    rows: list[int]
    index: StagedArray | None
    draws: Draws
    has_rules: bool


class Sampler:
    """How the n tokens of one step are drawn, n at least 1. Each depends on its own row alone, whatever the batch.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the token at a uniform number in the
    cumulative distribution of what the filters leave; the number is Philox's for (seed, position), so the token is the
    same in any batch and after any preemption. `has_rules`: whether something is done to some row's logits first.
    """

    def __init__(
        self, params: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int, staging: Staging
    ) -> None:
        """What is known before the tokens before these are: to be sent before `draw`."""
        columns = np.array([(one.temperature, one.top_p, one.min_p) for one in params], np.float64)
        top_k = np.array([one.top_k if one.top_k < vocab_size else 0 for one in params], np.int64)
        numbers = np.zeros(len(params))
        if columns[:, 0].any():
            numbers = uniform([one.seed or 0 for one in params], positions)
        groups: dict[tuple[bool, DrawRows], list[int]] = {}
        for row, one in enumerate(params):
            groups.setdefault((_has_rules(one), _way(one, vocab_size)), []).append(row)
        step = max(1, _LOGITS_AT_ONCE // vocab_size)
        self._groups = []
        for (has_rules, draw_rows), group in groups.items():
            for rows in (group[start : start + step] for start in range(0, len(group), step)):
                draws = _NO_DRAWS
                if draw_rows is not take_largest:
                    temperature, top_p, min_p = columns[rows].T
                    draws = Draws(temperature, top_k[rows], top_p, min_p, numbers[rows], staging)
                scattered = rows[-1] - rows[0] >= len(rows)
                index = staging.add(np.array(rows)) if scattered else None
                self._groups.append(_Group(draw_rows, rows, index, draws, has_rules))
        self._places: StagedArray | None = None
        if len(self._groups) > 1:
            order = np.array([row for group in self._groups for row in group.rows])
            self._places = staging.add(np.argsort(order))
        self._penalized = [row for row, one in enumerate(params) if one.has_penalties]
        self._vocab_size = vocab_size
        self.has_rules = any(group.has_rules for group in self._groups)

    def draw(self, logits: Tensor, slots: Sequence[int], samples: Sequence[Sample], counts: TokenCounts) -> Tensor:
        """int64 [n] from float32 [n, vocab], which is left alone. `samples`: none where no row has a rule. `slots`:
        whose `counts` the penalties look at; they take the new tokens in.

        Rules are sent in one copy more. Raises ValueError for a mask that does not fit.
        """
        staging, rules = Staging(), list[list[Rule]]()
        for group in self._groups:
            own = [samples[row] for row in group.rows] if samples else []
            if group.has_rules or any(sample.allowed is not None or sample.banned for sample in own):
                rules.append(rules_of(own, [slots[row] for row in group.rows], self._vocab_size, counts, staging))
            else:
                rules.append([])
        count = self._count(slots, counts, staging)
        staging.send(logits.device)
        parts = [self._draw_group(logits, group, own) for group, own in zip(self._groups, rules, strict=True)]
        tokens = parts[0] if self._places is None else torch.cat(parts)[self._places.tensor]
        count(tokens)
        return tokens

    def _count(self, slots: Sequence[int], counts: TokenCounts, staging: Staging) -> Callable[[Tensor], None]:
        if not self._penalized:
            return lambda tokens: None
        append = counts.append([slots[row] for row in self._penalized], staging)
        rows = staging.add(np.array(self._penalized))
        return lambda tokens: append(tokens[rows.tensor])

    def _draw_group(self, logits: Tensor, group: _Group, rules: list[Rule]) -> Tensor:
        own = _take(logits, group, copied=bool(rules))
        for rule in rules:
            rule(own)
        if own.shape[1] % BLOCK:
            own = pad(own, (0, -own.shape[1] % BLOCK), value=-torch.inf)
        drawn = group.draw_rows(own, group.draws)
        if group.draw_rows in _FROM_SOME:
            if logits.device.type != "cpu":
                drawn = torch.where(drawn < 0, draw_from_all(own, group.draws), drawn)
            elif left := (drawn < 0).nonzero()[:, 0].tolist():
                drawn[left] = draw_from_all(own[left], group.draws.take(left))
        # What is no number may lead behind the last token.
        return drawn.clamp_(max=self._vocab_size - 1)


def _take(logits: Tensor, group: _Group, copied: bool) -> Tensor:
    """The group's rows, which rise; a view where that can be had and will do."""
    if group.index is not None:
        return logits.index_select(0, group.index.tensor)
    rows = logits[group.rows[0] : group.rows[-1] + 1]
    return rows.clone() if copied else rows.contiguous()


def _has_rules(params: SamplingParams) -> bool:
    """Whether something is done to the logits whatever the temperature."""
    return bool(params.allowed_token_ids or params.bad_words or params.logit_bias or params.has_penalties)


def rules_of(
    samples: Sequence[Sample], slots: Sequence[int], vocab_size: int, counts: TokenCounts, staging: Staging
) -> list[Rule]:
    """In vLLM's order: what is allowed at all comes first."""
    params = [sample.params for sample in samples]
    found = [
        allow_masked([sample.allowed for sample in samples], vocab_size, staging),
        keep_listed([one.allowed_token_ids or () for one in params], staging),
        ban([ends_of_bad_words(sample) for sample in samples], staging),
        ban([sample.banned for sample in samples], staging),
        add_bias([one.logit_bias for one in params], staging),
    ]
    if rows := [row for row, one in enumerate(params) if one.has_penalties]:
        found.append(penalize(rows, [params[row] for row in rows], [slots[row] for row in rows], counts, staging))
    return [rule for rule in found if rule is not None]


def _way(params: SamplingParams, vocab_size: int) -> DrawRows:
    """How a row is drawn, by its own parameters alone: each way has an order of the tokens of its own."""
    if params.temperature == 0:
        return take_largest
    if params.top_k < _MORE and (params.top_k or params.min_p):
        return _FROM_FEW if 0 < params.top_k < _FEW else _FROM_MORE
    if params.top_p < 1 and vocab_size > _SORTED and (params.top_k == 0 or params.top_k >= vocab_size):
        return _FROM_NUCLEUS
    return draw_from_all
