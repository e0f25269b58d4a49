"""The bound of an answer's thinking: where it is reached, the tokens that end the thinking are forced."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from cairn.engine.contract import ThinkingBudget
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.step import TokenMask

_MAX_NEWLINES = 64
"""Newlines at most between an answer's beginning and its thinking, as the parsers of answers have it."""

_State: TypeAlias = Literal["start", "thinking", "done"]


class ThinkingConstraint:
    """Which tokens may follow an answer whose thinking may have so many tokens. Implements
    `scheduler.request.Constraint`; a function of the answer alone.

    The thinking is what the server's parsers take for it: from `budget.start` at the answer's beginning, or from the
    beginning itself where the prompt has opened it, to the first `budget.end`.
    """

    def __init__(
        self,
        budget: ThinkingBudget,
        end_token_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
        vocab_size: int,
        grammar: GrammarConstraint | None = None,
    ) -> None:
        """`end_token_ids`: those of `budget.end`. `grammar`: what else the answer is held to."""
        self.grammar = grammar
        self._budget = budget
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._end_token_ids = end_token_ids
        self._token_bytes = token_bytes
        self._vocab_size = vocab_size
        self._num_seen = 0
        self._restart()

    def allowed(self, output: Sequence[int]) -> TokenMask | None:
        """See `Constraint.allowed`."""
        if len(output) < self._num_seen:
            self._restart()
        for token in output[self._num_seen :]:
            self._follow(self._token_bytes(token))
        self._num_seen = len(output)
        num_forced = self._num_thinking - self._budget.num_tokens
        if self._state == "thinking" and 0 <= num_forced < len(self._end_token_ids):
            return self._only(self._end_token_ids[num_forced])
        return None if self.grammar is None else self.grammar.allowed(output)

    def _restart(self) -> None:
        self._num_seen = 0
        self._num_thinking = 0
        self._text = b""
        self._state: _State = "thinking" if self._budget.is_open else "start"

    def _follow(self, spelled: bytes) -> None:
        if self._state == "start":
            self._text += spelled
            bare = self._text.lstrip(b"\n")
            is_near = len(self._text) - len(bare) <= _MAX_NEWLINES
            if is_near and bare.startswith(self._start):
                self._state, self._text = "thinking", bare.removeprefix(self._start)
            elif not is_near or not self._start.startswith(bare):
                self._state = "done"
        elif self._state == "thinking":
            self._num_thinking += 1
            self._text = self._text[1 - len(self._end) :] + spelled
        if self._state == "thinking" and self._end in self._text:
            self._state = "done"

    def _only(self, token: int) -> TokenMask:
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        mask.view(np.uint32)[token // 32] = 1 << token % 32
        return mask
