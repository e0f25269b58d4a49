"""One answer kept to a grammar."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cairn.keys import common_tokens
from cairn.step import TokenMask


def limits() -> LLParserLimits:
    """What compiling a grammar and one step of it may take: some tens of milliseconds, and 40 MB of lexer states."""
    return LLParserLimits(max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False)


class GrammarConstraint:
    """Which tokens may follow an answer, and whether it is complete. Implements `scheduler.request.Constraint`.

    A function of the answer alone: it follows what it is shown, and starts over when that is another answer.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """`matcher`: at the answer's start."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._seen: list[int] = []
        self._mask = self._allowed()

    @classmethod
    def compile(cls, grammar: str, tokenizer: LLTokenizer, vocab_size: int) -> "GrammarConstraint":
        """Raises ValueError with llguidance's words for a grammar that it does not take, or with no answer at all."""
        made = cls(LLMatcher(tokenizer, grammar, log_level=0, limits=limits()), vocab_size)
        if made.failure is not None:
            raise ValueError(made.failure)
        if made.complete:
            raise ValueError("it allows nothing but an empty answer")
        return made

    def start(self) -> "GrammarConstraint":
        """Another one, for another answer."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GrammarConstraint(matcher, self._vocab_size)

    def allowed(self, output: Sequence[int]) -> TokenMask | None:
        """See `Constraint.allowed`. Not to be asked once `complete`, or after a `failure`."""
        self.follow(output)
        return self._mask

    def follow(self, output: Sequence[int]) -> None:
        """Take in the answer so far."""
        answer = list(output)
        if answer == self._seen:
            return
        self._go_back(answer)
        for token in output[len(self._seen) :]:
            self._matcher.consume_token(token)
            self._seen.append(token)
        self._mask = self._allowed()

    def _go_back(self, answer: list[int]) -> None:
        """To where the answer and what has been followed part: drafts that were looked at have not all come."""
        num_seen = len(self._seen)
        if answer[:num_seen] == self._seen:
            return
        num_common = common_tokens(np.array(self._seen, np.int64), np.array(answer, np.int64))
        if not self._matcher.rollback(num_seen - num_common):
            self._matcher.reset()
            num_common = 0
        del self._seen[num_common:]

    @property
    def complete(self) -> bool:
        """Nothing can follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str | None:
        """Why the answer can neither go on nor end here; None where it can."""
        if self._matcher.is_error():
            return self._matcher.get_error() or "the grammar has no way on"
        if not self.complete and not self._mask.any():
            return "no token can follow"
        return None

    def _allowed(self) -> TokenMask:
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        if not self._matcher.is_stopped():
            bitmask = np.frombuffer(self._matcher.compute_bitmask(), "<i4")[: len(mask)]
            mask[: len(bitmask)] = bitmask
        # a tokenizer may have tokens that the model has not: one of them alone would be no way on
        if beyond := self._vocab_size % 32:
            mask[-1] &= (1 << beyond) - 1
        return mask
