"""What verifying drafts takes, in the time of a decode step of one sequence: as it is given, and as steps show it."""

from dataclasses import dataclass
from typing import Protocol

_DECAYS = (0.97, 0.9)
"""Of what steps have shown, by step of the same kind: of one sequence, and of several. With several a draft saves
little more than it takes, and what it takes in decode steps changes when other programs come: these wait for memory,
and verifications compute."""
_UNIT_SHARE = 0.1
"""Of a step in the mean time of decode steps, and of a lookup in that of lookups."""
_PRIOR_WEIGHTS = (1.0, 0.3)
_PRIOR_DRAFTS = (1, 16)
"""What is given counts as this many steps, of one sequence and of several, with each of these numbers of drafts."""
_LEAST_ROW = 0.005
_MOST_FACTOR, _MOST_SURPRISE, _MOST_FOLDS = 1.5, 0.2, (0.5, 1.5)
"""A step's verification counts as no longer than so many times what was expected and so many decode steps, a lookup as
no longer than the latter, and folds as no longer than so many, of one sequence and of several. Some steps are held
up."""
_MOST_SPENT = 2.0
"""So many decode steps may be on a balance for one verification whatever was expected."""
_FORGET = 0.998
"""Of what steps with drafts have shown, by decode step. Who believes that drafts do not pay has none, and would never
learn that it was the machine that had been busy."""
_FIRST_REFRESHES, _REFRESHES = ((4, 8, 12), (1, 2)), (16, 4)
"""Steps after which what has been learned is used, of one sequence and of several; sooner at first."""
_FORGOTTEN_REFRESH = 64
"""Decode steps after which what has been forgotten is."""


class DraftCost(Protocol):
    """Times in decode steps of one sequence. `version`: another number where they have changed."""

    version: int

    def decode(self, num_decodes: int) -> float:
        """Of a decode step of so many sequences."""

    def extra(self, num_drafts: int, num_decodes: int = 1) -> float:
        """What verifying so many drafts adds to it."""

    def most_drafts(self, budget: float, num_decodes: int = 1) -> int:
        """How many drafts `budget` pays for; below 1 if it pays for none."""

    def lookup(self) -> float:
        """Of a lookup for one sequence that nothing comes of, with what it makes of the caches that the step needs."""

    def record_step(self, num_decodes: int, num_draft_tokens: int, seconds: float, has_folds: bool = False) -> float:
        """Learn what a step has taken, of so many sequences that decode and with so many drafts, and perhaps the folds
        of those before. Returns how many times what was expected of its drafts it has taken for them, 1 where that is
        not known."""

    def record_lookup(self) -> None:
        """For one sequence something is looked up in the step that is recorded next."""


@dataclass(frozen=True, slots=True)
class VerifyCost:
    """As it is given: `overhead`, and `row` for each draft. A further sequence in a decode step takes a `row`, too."""

    overhead: float = 0.25
    row: float = 0.035
    version: int = 0

    def decode(self, num_decodes: int) -> float:
        """See `DraftCost`."""
        return 1 + self.row * (num_decodes - 1)

    def extra(self, num_drafts: int, num_decodes: int = 1) -> float:
        """See `DraftCost`."""
        return self.overhead + self.row * num_drafts

    def most_drafts(self, budget: float, num_decodes: int = 1) -> int:
        """See `DraftCost`."""
        # the epsilon: a budget of exactly one draft's cost pays for one
        return int((budget - self.overhead) / self.row + 1e-9) if self.row > 0 else 1 << 31

    def lookup(self) -> float:
        """See `DraftCost`. Nothing."""
        return 0.0

    def record_step(self, num_decodes: int, num_draft_tokens: int, seconds: float, has_folds: bool = False) -> float:
        """Nothing is learned. 1."""
        return 1.0

    def record_lookup(self) -> None:
        """Nothing is learned."""


class _Line:
    """A line through points, of which older ones count less: a weighted least-squares fit, and points that stay."""

    def __init__(self, prior: VerifyCost, weight: float, decay: float) -> None:
        """`weight`: of what is given. `decay`: of the points, by point."""
        self._decay = decay
        self._prior = [(drafts, prior.extra(drafts), weight) for drafts in _PRIOR_DRAFTS]
        self._sums = [0.0] * 5
        self._num_forgotten = 0
        self.num_points = 0

    def add(self, x: float, y: float) -> None:
        """A point."""
        self._forget()
        self.num_points += 1
        self._sums = [
            self._decay * total + term for total, term in zip(self._sums, (1.0, x, x * x, y, x * y), strict=True)
        ]

    def forget(self) -> None:
        """All points count a little less."""
        self._num_forgotten += 1

    def fit(self) -> tuple[float, float]:
        """Its value at 0, and its slope."""
        self._forget()
        weight, x, xx, y, xy = self._sums
        for drafts, extra, count in self._prior:
            weight, x, xx = weight + count, x + count * drafts, xx + count * drafts * drafts
            y, xy = y + count * extra, xy + count * drafts * extra
        slope = max(_LEAST_ROW, (weight * xy - x * y) / (weight * xx - x * x))
        return max(0.0, (y - slope * x) / weight), slope

    def _forget(self) -> None:
        factor, self._num_forgotten = _FORGET**self._num_forgotten, 0
        self._sums = [factor * total for total in self._sums]


class MeasuredCost:
    """As steps of this server show it, apart for steps of one sequence and of several. The folds of what a step has
    verified count as part of it. `prior`: before anything is known. `decodes`: says what decode steps take, where a
    row here is more than that of a further sequence. See `DraftCost`."""

    def __init__(self, prior: VerifyCost | None = None, decodes: DraftCost | None = None) -> None:
        self.version = 0
        self._decodes = decodes
        self._alone = self._beside = prior or VerifyCost()
        alone, beside = (_Line(self._alone, *each) for each in zip(_PRIOR_WEIGHTS, _DECAYS, strict=True))
        self._lines = alone, beside
        self._folds = [0.0, 0.0]
        self._num_folds = [0, 0]
        self._unit: float | None = None
        self._lookup, self._num_lookups = 0.0, 0
        self._num_forgotten = 0

    def decode(self, num_decodes: int) -> float:
        """See `DraftCost`."""
        return (self._decodes or self._of(num_decodes)).decode(num_decodes)

    def extra(self, num_drafts: int, num_decodes: int = 1) -> float:
        """See `DraftCost`."""
        return self._of(num_decodes).extra(num_drafts)

    def most_drafts(self, budget: float, num_decodes: int = 1) -> int:
        """See `DraftCost`."""
        return self._of(num_decodes).most_drafts(budget)

    def lookup(self) -> float:
        """See `DraftCost`."""
        return self._lookup

    def record_lookup(self) -> None:
        """See `DraftCost`."""
        self._num_lookups += 1

    def record_step(self, num_decodes: int, num_draft_tokens: int, seconds: float, has_folds: bool = False) -> float:
        """See `DraftCost`."""
        num_lookups, self._num_lookups = self._num_lookups, 0
        if seconds <= 0:
            return 1.0
        plain = self.decode(num_decodes)
        # of a step with drafts lookups are part of what these take
        expected = plain if num_draft_tokens else plain + num_lookups * self._lookup
        if not num_draft_tokens and not has_folds:
            unit = seconds / expected
            if self._unit is None:
                self._unit = unit
            if num_lookups:
                # where every step has some, this is as likely
                surprise = (seconds / self._unit - expected) / num_lookups
                self._lookup += _UNIT_SHARE * max(-self._lookup, min(surprise, _MOST_SURPRISE))
            self._unit += _UNIT_SHARE * (min(unit, 2 * self._unit) - self._unit)
            self._forget(num_decodes)
        elif self._unit is not None:
            beside, extra = num_decodes > 1, seconds / self._unit - expected
            fold = self._folds[beside]
            if not num_draft_tokens:
                self._num_folds[beside] += 1
                share = max(_UNIT_SHARE, 1 / self._num_folds[beside])
                self._folds[beside] += share * (min(max(0.0, extra), _MOST_FOLDS[beside]) - fold)
                self._forget(num_decodes)
                return 1.0
            # what it brings is folded by a later step: of one that folds, too, that is as much
            extra, usual = max(0.0, extra if has_folds else extra + fold), self.extra(num_draft_tokens, num_decodes)
            most, line = _MOST_FACTOR * usual + _MOST_SURPRISE, self._lines[beside]
            line.add(num_draft_tokens, min(extra, most))
            if line.num_points in _FIRST_REFRESHES[beside] or line.num_points % _REFRESHES[beside] == 0:
                self._refresh()
            return min(extra, max(most, _MOST_SPENT)) / usual
        return 1.0

    def _forget(self, num_decodes: int) -> None:
        line = self._lines[num_decodes > 1]
        if line.num_points:
            line.forget()
            self._num_forgotten += 1
            if self._num_forgotten % _FORGOTTEN_REFRESH == 0:
                self._refresh()

    def _refresh(self) -> None:
        self.version += 1
        self._alone, self._beside = (VerifyCost(*line.fit(), self.version) for line in self._lines)

    def _of(self, num_decodes: int) -> VerifyCost:
        return self._beside if num_decodes > 1 else self._alone
