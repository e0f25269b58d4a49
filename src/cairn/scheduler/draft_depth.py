"""How many tokens to draft: what has been accepted lately says what to expect, the cost of a row what it has to bring.

Nothing that drafting loses on a text that cannot be predicted may add up: each request has a balance, of decode steps
that drafts have saved less what lookups and verifications have taken. It is drafted no further than the balance bears a
complete failure, and a balance that is used up grows again by a small share of the time that decoding takes. Drafts
that are not expected to pay are not verified to find out: what is decoded next says how right they would have been.
"""

from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

from cairn.scheduler.draft_cost import DraftCost
from cairn.scheduler.request import Request
from cairn.scheduler.speculation import MAX_DRAFT_TOKENS

_FIRST_GUESSES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.6)
"""By length class: the chance that a draft is accepted, before anything is known. The last one is of drafts that the
model's head makes."""

BY_HEAD = 0
"""As the length of a match: the model's head makes the draft."""
_HEAD_KIND = len(_FIRST_GUESSES) - 1

_GUESS_WEIGHT = 8.0
"""Drafts that a first guess counts as among those of all requests, and theirs among a request's own."""
_SHARED_WEIGHT = 2.0
_SHARED_DECAY = 0.98
"""Of what is known, by verification."""
_DECAY = 0.8

_START = 0.65
_START_TOKENS = 11
_MOST = 3.0
_SHARE = 0.01
_PROBE_FROM = 1.2
_PROBE_TOKENS = 2
"""Of the balance, in decode steps: what a request begins with, or what so many drafts take, if that is more; what it
can have at most, or what the deepest draft takes, what it gets for each token's time, and from where on a draft of the
head that is not expected to pay is tried, with so many tokens. What is looked up needs no trial: see
`DraftDepth.observe`."""

_MARGIN = 1.05
"""A draft has to be expected to bring so many times the tokens that the step brings without, for its time."""

_PATIENCE = 4
_LOOKUP_SHARE = 0.00125
_FIRST_SKIPPED, _MOST_SKIPPED = 8, 64
"""After so many lookups in a row that nothing came of, they are as rare as takes about this share of the time that
decoding takes, but each request has one in so many tokens: at first one in fewer, and then in twice as many each time.
It is only of a small model that a lookup takes more."""
_STRIDE_BESIDE = 4
"""Of several sequences, none of which drafts, all lookups are in one of so many steps: a step's first takes most."""

_GUESS_TOKENS = 8
"""After so many tokens it is looked again what has become of a draft that was worth it, but not affordable."""

_LEVELS = 100
_ACCEPTED = np.cumsum(np.linspace(0, 1, _LEVELS + 1)[:, None] ** np.arange(MAX_DRAFT_TOKENS + 1), axis=1) - 1
"""Drafts that are accepted, on average: by acceptance in steps of 1 / _LEVELS and by the number of drafts."""


@dataclass(slots=True)
class _Acceptance:
    """By length class: drafts that the model has looked at, of which `accepted` were right; older ones count less."""

    accepted: list[float] = field(default_factory=lambda: [0.0] * len(_FIRST_GUESSES))
    looked_at: list[float] = field(default_factory=lambda: [0.0] * len(_FIRST_GUESSES))

    def rate(self, kind: int, guess: float, weight: float) -> float:
        return (self.accepted[kind] + weight * guess) / (self.looked_at[kind] + weight)

    def add(self, kind: int, num_drafts: int, num_accepted: int, decay: float) -> None:
        # behind the first one that was wrong nothing is known
        self.accepted[kind] = decay * self.accepted[kind] + num_accepted
        self.looked_at[kind] = decay * self.looked_at[kind] + min(num_drafts, num_accepted + 1)


@dataclass(slots=True)
class _DraftHistory:
    """Of one request. `balance`: see above, as of `num_tokens` tokens; from `pays_from` tokens on nothing is owed.
    `kind`: of its last draft. `is_worth_it`: whether the last lookup was, whatever the balance bears. `num_decodes`: of
    its last lookup. `num_misses`: lookups since a draft has paid; from `look_from` tokens on there is another one."""

    num_tokens: int
    num_misses: int = 0
    look_from: int = 0
    pays_from: int = 0
    balance: float = _START
    kind: int = 0
    is_worth_it: bool = False
    num_decodes: int = 1
    acceptance: _Acceptance = field(default_factory=_Acceptance)


class DraftDepth:
    """Chooses how many tokens to draft, by request, by the length of the match that the draft comes from, and by load.

    `cost`: of a verification. `max_decodes`: with more sequences in a step nothing is drafted. `head_cost`: of drafts
    of the model's head and their verification, where there is one.
    """

    def __init__(self, cost: DraftCost, max_decodes: int, head_cost: DraftCost | None = None) -> None:
        self._cost, self._head_cost = cost, head_cost or cost
        self._max_decodes = max_decodes
        self._shared = _Acceptance()
        self._histories: dict[Request, _DraftHistory] = {}
        self._speeds: dict[tuple[int, int, bool], tuple[int, NDArray[np.float64]]] = {}
        self._num_drafting, self._num_proposed, self._is_recorded, self._times_expected = 1, 0, False, 1.0

    def may_draft(self, request: Request, num_decodes: int) -> bool:
        """Whether the load and the request's balance allow a lookup, or a draft of the head, at all."""
        if not 1 <= num_decodes <= self._max_decodes:
            return False
        if self._is_recorded:  # a step has ended
            self._num_proposed, self._is_recorded, self._times_expected = 0, False, 1.0
        history = self._histories.get(request)
        if history is None:
            start = max(_START, self._extra(self._cost, _START_TOKENS, num_decodes))
            self._histories[request] = history = _DraftHistory(request.num_tokens, balance=start)
        history.num_decodes = num_decodes
        num_new, history.num_tokens = request.num_tokens - history.num_tokens, request.num_tokens
        earned = _SHARE * self._per_token(num_decodes)
        self._credit(history, num_new * earned)
        if history.balance < 0:
            history.pays_from = request.num_tokens + ceil(-history.balance / earned)
        return history.balance >= 0

    def record_step(self, times_expected: float) -> None:
        """Learn how many times what was expected of its drafts the step has taken whose drafts are recorded next. What
        is learned of cost is a mean: of few drafts, here and there in a text, each takes longer than of many in a row,
        whose code is in the caches."""
        self._times_expected = times_expected

    def may_look(self, request: Request) -> bool:
        """Whether what came of the request's last lookups allows another one. `may_draft` has said yes."""
        history = self._histories[request]
        history.is_worth_it = False
        return request.num_tokens >= history.look_from

    def idle_tokens(self, request: Request) -> int:
        """How many tokens more it takes until there is another lookup: see `Drafter.idle_tokens`."""
        history = self._histories.get(request)
        if history is None:
            return 0
        least = 0 if history.num_decodes == 1 else _STRIDE_BESIDE
        return max(least, max(history.look_from, history.pays_from) - request.num_tokens)

    def miss(self, request: Request) -> None:
        """Learn that a lookup has led to no draft."""
        history = self._histories[request]
        if history.num_decodes == 1:  # beside others a token's time is a fraction of a lookup's, whose rarity has to do
            history.balance -= self._cost.lookup()
        self._miss(request, history)
        if history.is_worth_it:
            history.look_from = min(history.look_from, request.num_tokens + _GUESS_TOKENS)

    def observe(self, request: Request, matched: int, num_tokens: int, num_right: int) -> None:
        """Learn what would have become of a draft of `num_tokens`, after a match of `matched` tokens, that was not
        proposed: the first `num_right` are what was decoded. This takes no verification: so a text that does not pay is
        found out, and one that comes to quote. Where half of a draft of some length was right, what it would have saved
        is on the balance, as if it had."""
        history, kind = self._histories[request], _length_class(matched)
        self._learn(history, kind, num_tokens, num_right)
        saved = num_right * self._per_token(history.num_decodes)
        saved -= self._extra(self._cost, num_tokens, history.num_decodes)
        if saved > 0 and num_right >= _GUESS_TOKENS // 2 and 2 * num_right >= num_tokens:
            self._credit(history, saved)
            history.num_misses = 0

    def choose(self, request: Request, matched: int, most: int, num_decodes: int) -> int:
        """How many tokens to draft, at most `most`, after a match of `matched` tokens, or BY_HEAD. `may_draft` has said
        yes."""
        history = self._histories[request]
        history.kind = kind = _HEAD_KIND if matched == BY_HEAD else _length_class(matched)
        cost = self._cost_of(kind)
        budget = history.balance + self._borne_by_others(cost, num_decodes)
        affordable = max(0, min(most, cost.most_drafts(budget, num_decodes)))
        guess = self._shared.rate(kind, _FIRST_GUESSES[kind], _GUESS_WEIGHT)
        acceptance = history.acceptance.rate(kind, guess, _SHARED_WEIGHT)
        speeds = self._speeds_at(num_decodes, kind == _HEAD_KIND)[round(acceptance * _LEVELS), : most + 1]
        history.is_worth_it = bool(speeds.max() >= _MARGIN * speeds[0])
        num_drafts = int(speeds[: affordable + 1].argmax())
        if speeds[num_drafts] < _MARGIN * speeds[0]:
            num_drafts = 0
        if num_drafts == 0 and kind == _HEAD_KIND and history.balance >= _PROBE_FROM:
            num_drafts = min(affordable, _PROBE_TOKENS)
        self._num_proposed += num_drafts > 0
        return num_drafts

    def record(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn what became of the request's last draft."""
        self._num_drafting, self._is_recorded = max(1, self._num_proposed), True
        history = self._histories.get(request)
        if history is None or num_draft_tokens == 0:
            return
        cost = self._cost_of(history.kind)
        saved = num_accepted * self._per_token(history.num_decodes)
        spent = self._times_expected * self._extra(cost, num_draft_tokens, history.num_decodes)
        self._credit(history, saved - spent)
        self._learn(history, history.kind, num_draft_tokens, num_accepted)
        if saved > spent:
            history.num_misses = 0
        elif history.kind != _HEAD_KIND:
            self._miss(request, history)

    def end(self, request: Request) -> None:
        """Forget a request."""
        self._histories.pop(request, None)

    def _credit(self, history: _DraftHistory, steps: float) -> None:
        """A balance that could not bear the deepest draft would keep it from those texts that bear it best: where rows
        take long beside a short decode step, that is more than `_MOST`."""
        history.balance += steps
        if history.balance > _MOST:
            most = max(_MOST, self._extra(self._cost, MAX_DRAFT_TOKENS, history.num_decodes))
            history.balance = min(most, history.balance)

    def _learn(self, history: _DraftHistory, kind: int, num_tokens: int, num_right: int) -> None:
        history.acceptance.add(kind, num_tokens, num_right, _DECAY)
        self._shared.add(kind, num_tokens, num_right, _SHARED_DECAY)

    def _miss(self, request: Request, history: _DraftHistory) -> None:
        """A lookup has led to no draft, or to one that did not pay."""
        history.num_misses += 1
        failed = history.num_misses - _PATIENCE
        if failed > 0:
            stride = self._cost.lookup() / (_LOOKUP_SHARE * self._per_token(history.num_decodes))
            most = min(_MOST_SKIPPED, _FIRST_SKIPPED << min(failed - 1, 8))
            history.look_from = request.num_tokens + min(most, round(stride))

    def _cost_of(self, kind: int) -> DraftCost:
        return self._head_cost if kind == _HEAD_KIND else self._cost

    def _per_token(self, num_decodes: int) -> float:
        """What a token of one of so many sequences takes without drafts."""
        return self._cost.decode(num_decodes) / num_decodes

    def _sharing(self, num_decodes: int) -> int:
        """How many sequences of a step draft: as many as in the last step in which any did."""
        return min(self._num_drafting, num_decodes)

    def _borne_by_others(self, cost: DraftCost, num_decodes: int) -> float:
        """What a step with drafts takes however few they are, but for one sequence's share of it."""
        return cost.extra(0, num_decodes) * (1 - 1 / self._sharing(num_decodes))

    def _extra(self, cost: DraftCost, num_drafts: int, num_decodes: int) -> float:
        """One sequence's share of what a step with drafts takes."""
        return cost.extra(num_drafts, num_decodes) - self._borne_by_others(cost, num_decodes)

    def _speeds_at(self, num_decodes: int, by_head: bool) -> NDArray[np.float64]:
        """Expected tokens per time of a step in which one of `num_decodes` sequences drafts, by acceptance in steps of
        1 / _LEVELS and by the number of drafts, shape [_LEVELS + 1, MAX_DRAFT_TOKENS + 1]."""
        cost = self._head_cost if by_head else self._cost
        key = num_decodes, self._sharing(num_decodes), by_head
        version, speeds = self._speeds.get(key, (-1, None))
        if speeds is None or version != cost.version:
            extra = [0.0, *(self._extra(cost, number, num_decodes) for number in range(1, MAX_DRAFT_TOKENS + 1))]
            speeds = (num_decodes + _ACCEPTED) / (cost.decode(num_decodes) + np.array(extra))
            self._speeds[key] = cost.version, speeds
        return speeds


def _length_class(matched: int) -> int:
    """Matches of 1, 2 to 3, 4 to 7, and so on tokens."""
    return min(matched.bit_length(), _HEAD_KIND) - 1
