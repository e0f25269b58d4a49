"""Drafts that are looked up: what followed the last time when a text went on as this one does now.

    own tokens   ... the quick brown fox ...............  the quick
                     ---------       ^-- draft            ---------  matched

Sources are the request's own tokens, its prediction, and recent answers of its namespace. They are scanned anew for
each proposal, by numpy: there is no index that could be out of date.
"""

from bisect import bisect_right

import numpy as np

from cairn.cache.sequence_blocks import Namespace
from cairn.keys import common_tokens
from cairn.scheduler.draft_cost import DraftCost, MeasuredCost
from cairn.scheduler.draft_depth import DraftDepth
from cairn.scheduler.request import Request
from cairn.scheduler.speculation import MAX_LOOKUP_TOKENS, SpeculativeConfig
from cairn.types import Keys

_NOTHING: Keys = np.empty(0, np.int64)
_NOTHING.flags.writeable = False

_BREAK = np.array([np.iinfo(np.int64).min])
"""Between the texts of one source: no token."""

_COUNTS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
"""Drafts are as many as this: of each number a pass is recorded, which takes longer than many that are repeated. With
the token before them they fill blocks of the products' rows; the CPU's read weights once for up to 12."""

_COMPARED = 11
"""Of what is not proposed so many tokens are compared with what is decoded: soon something is known of them."""

_MOST_TOKENS, _MOST_PLACES = 1 << 12, 64
"""Of the places where the last two tokens have come so many, the latest ones, are looked at; of them those are kept
that match for longer, token by token, until so few are left that they are compared in one go."""

_BACK = np.arange(MAX_LOOKUP_TOKENS + 1)


def longest_match(tokens: Keys, end: Keys, least: int) -> tuple[int, int] | None:
    """Where in `tokens`, shape [n], the longest end of `end`, shape [m], has come, the latest of several such places:
    the index of the token that followed there, and the length, `least` to m. None where no end of `least` tokens has.

    Places that nothing follows, or what is no token, are none.
    """
    # Between two passes, which leave nothing of this in the caches, an operation of numpy takes some 2 us.
    end = end[-len(tokens) :] if len(tokens) else end[:0]
    if len(end) < least:
        return None
    length = min(least, 2)
    matches = tokens[length - 1 : -1] == end[-1]
    if length > 1:
        matches &= tokens[:-2] == end[-2]
    followed = matches.nonzero()[0] + length
    if not len(followed):
        return None
    if len(followed) > _MOST_PLACES:
        followed = followed[tokens[followed] >= 0][-_MOST_TOKENS:]
    while len(followed) > _MOST_PLACES and length < len(end):
        longer = followed[np.searchsorted(followed, length + 1) :]
        longer = longer[tokens[longer - length - 1] == end[-1 - length]]
        if not len(longer):
            break
        followed, length = longer, length + 1
    followed = followed[-_MOST_PLACES:]
    around = tokens[followed[:, None] - _BACK[: len(end) + 1]]
    lengths = (around[:, 1:] == end[::-1]).argmin(axis=1)
    if not lengths.all():  # all is the same: the last token always is
        lengths[lengths == 0] = len(end)
    if followed[0] < len(end):
        lengths = np.minimum(lengths, followed)
    while True:
        best = len(lengths) - 1 - int(lengths[::-1].argmax())
        if lengths[best] < least:
            return None
        if around[best, 0] >= 0:
            return int(followed[best]), int(lengths[best])
        lengths[best] = 0


def usual_count(num_drafts: int) -> int:
    """So many drafts at most, of which others have been verified together before."""
    return _COUNTS[bisect_right(_COUNTS, num_drafts) - 1]


class RecentAnswers:
    """The latest answers of each namespace, each after its prompt's end. Bounds: `max_tokens` of one namespace, and
    `max_namespaces`, of which those go that were used least lately."""

    def __init__(self, max_tokens: int, max_namespaces: int) -> None:
        self._max_tokens = max_tokens
        self._max_namespaces = max_namespaces
        self._tokens: dict[Namespace, Keys] = {}

    def add(self, namespace: Namespace, tokens: Keys) -> None:
        """Keep an answer, without what is oldest where there is no room for both."""
        earlier = self._tokens.pop(namespace, _NOTHING)
        self._tokens[namespace] = np.concatenate([earlier, _BREAK, tokens])[-self._max_tokens :]
        if len(self._tokens) > self._max_namespaces:
            del self._tokens[next(iter(self._tokens))]

    def tokens(self, namespace: Namespace) -> Keys:
        """All that is kept, what is latest at the end, with breaks between the answers."""
        tokens = self._tokens.pop(namespace, None)
        if tokens is None:
            return _NOTHING
        self._tokens[namespace] = tokens
        return tokens

    @property
    def num_tokens(self) -> int:
        """Of all namespaces, breaks included."""
        return sum(map(len, self._tokens.values()))


class LookupDrafter:
    """Proposes what followed the longest end of a request's tokens that has come before, see `Drafter`.

    `cost`: as steps show it unless given. `depth`: another one than its own, of the same cost, where somebody else
    drafts, too. `max_decodes`: see `DraftDepth`. `max_answer_tokens`, `max_namespaces`: see
    `RecentAnswers`.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        cost: DraftCost | None = None,
        max_decodes: int = 8,
        max_answer_tokens: int = 1 << 15,
        max_namespaces: int = 64,
        depth: DraftDepth | None = None,
    ) -> None:
        self.max_decodes = max_decodes
        self._config = config
        self._all_sources = config.method in ("auto", "suffix")
        self._cost = cost or MeasuredCost()
        self._depth = depth or DraftDepth(self._cost, max_decodes)
        self._answers = RecentAnswers(max_answer_tokens, max_namespaces)
        self._predictions: dict[Request, Keys] = {}
        # by request what its last lookup would have proposed: the length of the match, the place, and the tokens
        self._guesses: dict[Request, tuple[int, int, Keys]] = {}

    def propose(self, request: Request, most: int, num_decodes: int) -> Keys:
        """See `Drafter`."""
        if most < 1 or not self._depth.may_draft(request, num_decodes):
            return _NOTHING
        return self.look_up(request, most, num_decodes)

    def look_up(self, request: Request, most: int, num_decodes: int) -> Keys:
        """As `propose`, where `DraftDepth.may_draft` has said yes."""
        if not self._depth.may_look(request):
            return _NOTHING
        most = min(most, self._config.num_speculative_tokens)
        self._cost.record_lookup()
        self._check_guess(request)
        match, drafts = self._find(request), _NOTHING
        if match is not None:
            following, matched = match
            wrong = (following < 0).nonzero()[0]
            following = following[: wrong[0]] if len(wrong) else following
            drafts = following[: self._depth.choose(request, matched, most, num_decodes)]
            drafts = drafts[: usual_count(len(drafts))]
            if not len(drafts):
                self._guesses.setdefault(request, (matched, request.num_tokens, following[:_COMPARED]))
        if not len(drafts):
            self._depth.miss(request)
        return drafts

    def idle_tokens(self, request: Request) -> int:
        """See `Drafter`."""
        return self._depth.idle_tokens(request)

    def record(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        """See `Drafter`."""
        self._depth.record(request, num_draft_tokens, num_accepted)

    def record_step(self, num_decodes: int, num_draft_tokens: int, seconds: float, has_folds: bool = False) -> None:
        """See `Drafter`."""
        self._depth.record_step(self._cost.record_step(num_decodes, num_draft_tokens, seconds, has_folds))

    def end(self, request: Request) -> None:
        """See `Drafter`."""
        self._depth.end(request)
        self._predictions.pop(request, None)
        self._guesses.pop(request, None)
        if self._all_sources and request.output:
            answer = np.concatenate([self._prompt_end(request), np.array(request.output, np.int64)])
            self._answers.add(request.spec.namespace, answer)

    def _check_guess(self, request: Request) -> None:
        """What has been decoded since the last lookups says how right one of them would have been."""
        matched, place, guess = self._guesses.get(request, (0, 0, _NOTHING))
        if not len(guess):
            return
        assert request.sequence is not None
        decoded = request.sequence.keys[place : place + len(guess)]
        num_right = common_tokens(decoded, guess)
        if num_right < len(decoded) or len(decoded) == len(guess):
            del self._guesses[request]
            self._depth.observe(request, matched, len(guess), num_right)

    def _find(self, request: Request) -> tuple[Keys, int] | None:
        """What may follow, and the length of the match that says so."""
        assert request.sequence is not None
        keys, config = request.sequence.keys, self._config
        end = keys[-config.prompt_lookup_max :]
        sources = [keys]
        if self._all_sources:
            # a prediction is meant for this very request: it comes before what matches as well
            sources = [self._prediction(request), keys, self._answers.tokens(request.spec.namespace)]
        best, following = 0, _NOTHING
        for source in sources:
            match = longest_match(source, end, max(best + 1, config.prompt_lookup_min))
            if match is not None:
                place, best = match
                following = source[place : place + config.num_speculative_tokens]
                if source is keys and len(following) < config.num_speculative_tokens:
                    # what overlaps the end goes on with itself
                    following = np.resize(following, config.num_speculative_tokens)
            if best == len(end):
                break
        return (following, best) if best else None

    def _prediction(self, request: Request) -> Keys:
        """The prediction after the prompt's end, which it is found by when the answer begins with it."""
        if not len(request.spec.prediction):
            return _NOTHING
        known = self._predictions.get(request)
        if known is None:
            known = np.concatenate([self._prompt_end(request), request.spec.prediction])
            self._predictions[request] = known
        return known

    def _prompt_end(self, request: Request) -> Keys:
        return request.spec.prompt[-self._config.prompt_lookup_max :]
