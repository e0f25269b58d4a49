"""The bound of an answer's thinking: where it is reached, the tokens that end the thinking are forced."""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from cairn.engine.contract import ThinkingBudget
from cairn.engine.grammars.constraint import GrammarConstraint
from cairn.keys import common_tokens
from cairn.step import TokenMask

_MAX_NEWLINES = 64
"""Newlines at most between an answer's beginning and its thinking, as the parsers of answers have it."""

_MAX_GRACE = 64
"""Tokens beyond the budget in which the head of a call may become complete."""

_MAX_BACK = 64
"""Tokens that can be taken back without following the answer from its beginning again: more than one step
drafts."""

_State: TypeAlias = Literal["start", "thinking", "done"]


@dataclass(slots=True)
class _Progress:
    """What is known of an answer after some tokens. `text`: where a mark may have begun; `head_text`: of a head that
    may have begun, without whitespace. `forced`: tokens that are to come."""

    state: _State
    num_thinking: int = 0
    text: bytes = b""
    head_text: bytes = b""
    forced: Sequence[int] = ()
    has_forced: bool = False


class ThinkingConstraint:
    """Which tokens may follow an answer whose thinking may have so many tokens. Implements
    `scheduler.request.Constraint`; a function of the answer alone.

    The thinking is what the server's parsers take for it: from `budget.start` at the answer's beginning, or from the
    beginning itself where the prompt has opened it, to the first `budget.end` or head of a call.

    No piece of a mark is left where the budget ends: of an `end` that has begun only the rest is forced, and the head
    of a call that has begun may go on for as long as it is one.
    """

    def __init__(
        self,
        budget: ThinkingBudget,
        encode: Callable[[str], Sequence[int]],
        token_bytes: Callable[[int], bytes],
        vocab_size: int,
        grammar: GrammarConstraint | None = None,
    ) -> None:
        """`encode`: tokens of a text, without special tokens around it. `grammar`: what else the answer is held to."""
        self.grammar = grammar
        self._budget = budget
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._heads = [head.encode() for head in budget.call_heads]
        self._head_begins = frozenset(head[:1] for head in self._heads)
        self._encode = encode
        self._token_bytes = token_bytes
        self._vocab_size = vocab_size
        self._restart()

    def allowed(self, output: Sequence[int]) -> TokenMask | None:
        """See `Constraint.allowed`."""
        self._go_back(output)
        for token in output[len(self._seen) :]:
            self._follow(self._token_bytes(token))
            self._seen.append(token)
            self._followed.append(copy(self._at))
        if self._at.state == "thinking" and self._at.forced:
            return self._only(self._at.forced[0])
        return None if self.grammar is None else self.grammar.allowed(output)

    def _go_back(self, output: Sequence[int]) -> None:
        """To where the answer and what has been followed part: drafts that were looked at have not all come."""
        if list(output[: len(self._seen)]) == self._seen:
            return
        num_common = common_tokens(np.array(self._seen, np.int64), np.array(output, np.int64))
        for _ in range(len(self._seen) - num_common):
            self._seen.pop()
            if self._followed:
                self._followed.pop()
        if self._followed:
            self._at = copy(self._followed[-1])
        else:
            self._restart()

    def _restart(self) -> None:
        self._seen: list[int] = []
        self._followed: deque[_Progress] = deque(maxlen=_MAX_BACK)
        self._at = _Progress("thinking" if self._budget.is_open else "start")
        self._force_end()

    def _follow(self, spelled: bytes) -> None:
        if self._at.state == "start":
            self._at.text += spelled
            bare = self._at.text.lstrip(b"\n")
            is_near = len(self._at.text) - len(bare) <= _MAX_NEWLINES
            if is_near and bare.startswith(self._start):
                self._at.state, self._at.text = "thinking", b""
                self._add(bare.removeprefix(self._start))
            elif not is_near or not self._start.startswith(bare):
                self._at.state = "done"
        elif self._at.state == "thinking":
            self._at.num_thinking += 1
            self._at.forced = self._at.forced[1:]
            self._add(spelled)
        self._force_end()

    def _add(self, spelled: bytes) -> None:
        self._at.text = self._at.text[1 - len(self._end) :] + spelled
        if self._end in self._at.text or self._finds_head(spelled):
            self._at.state = "done"

    def _finds_head(self, spelled: bytes) -> bool:
        text = self._at.head_text + b"".join(spelled.split())
        while text:
            starts = [start for begin in self._head_begins if (start := text.find(begin)) >= 0]
            text = text[min(starts, default=len(text)) :]
            if text and text.startswith(tuple(self._heads)):
                return True
            if any(head.startswith(text) for head in self._heads):
                break
            text = text[1:]
        self._at.head_text = text
        return False

    def _force_end(self) -> None:
        """What is to come, once the budget is used up."""
        grace = self._at.num_thinking - self._budget.num_tokens
        if self._at.state != "thinking" or self._at.has_forced or grace < 0:
            return
        if grace < _MAX_GRACE and self._at.head_text:
            return
        begun = _count_begun(self._at.text, self._end)
        rest = self._encode(self._end[begun:].decode(errors="replace"))
        if b"".join(map(self._token_bytes, rest)) != self._end[begun:]:
            rest = self._encode(self._end.decode())
        self._at.forced, self._at.has_forced = rest, True

    def _only(self, token: int) -> TokenMask:
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        mask.view(np.uint32)[token // 32] = 1 << token % 32
        return mask


def _count_begun(text: bytes, mark: bytes) -> int:
    """Bytes at the end of `text` that are the beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)
