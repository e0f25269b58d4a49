"""What a runner knows of the requests in its slots: what their admits said, and what it has sampled since."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cairn.step import Admit, StepPlan, TokenMask
from cairn.types import Keys, SamplingParams


@dataclass(frozen=True, slots=True)
class Sample:
    """One draw: of the token at absolute position `position` of a sequence.

    `allowed`: the tokens that may come, before anything else is looked at; None: all. `banned`: tokens that may not
    come at this position. `history`: the `position` tokens before it, of which the first `num_prompt_tokens` are the
    prompt's; given where `params` need it. `logprobs`: how many of the best tokens to tell of beside the drawn one;
    None: of none.
    """

    params: SamplingParams
    position: int
    allowed: TokenMask | None = field(default=None, compare=False)
    banned: tuple[int, ...] = ()
    history: Keys | None = field(default=None, compare=False)
    num_prompt_tokens: int = 0
    logprobs: int | None = None


class _History:
    """Prompt and answer of one request; grows at the end, in amortised O(1)."""

    def __init__(self, tokens: Keys) -> None:
        self._tokens = tokens
        self._length = len(tokens)

    @property
    def tokens(self) -> Keys:
        """A view, shape [length]."""
        return self._tokens[: self._length]

    def append(self, token: int) -> None:
        if self._length == len(self._tokens):
            grown = np.empty(self._length * 5 // 4 + 64, np.int64)
            grown[: self._length] = self.tokens
            self._tokens = grown
        self._tokens[self._length] = token
        self._length += 1


@dataclass(slots=True, eq=False)
class _Slot:
    """`sampled`: the token that was drawn last, and its position."""

    admit: Admit
    history: _History | None
    sampled: tuple[int, int] | None = None


class Slots:
    """The admits of all slots, by slot; each is there until the slot's next one."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's admits."""
        for admit in plan.admits:
            history = None if admit.history is None else _History(admit.history)
            self._slots[admit.slot] = _Slot(admit, history)

    def admit(self, slot: int) -> Admit:
        """Raises LookupError where nobody was admitted."""
        return self._of(slot).admit

    def sampled_token(self, slot: int, position: int) -> int:
        """The token that was drawn last in `slot`, which has to stand at `position`. Raises LookupError otherwise."""
        token, drawn_at = self._of(slot).sampled or (-1, -1)
        if drawn_at != position:
            raise LookupError(f"slot {slot} goes on at {position}, but its last token was drawn for {drawn_at}")
        return token

    def samples(self, plan: StepPlan) -> Iterator[tuple[int, Sample]]:
        """Each draw of the plan, with its slot. Raises LookupError where tokens of a history are missing."""
        columns = plan.samples
        for slot, position, bans in zip(
            columns.slots.tolist(), columns.positions.tolist(), columns.bans_stop_tokens.tolist(), strict=True
        ):
            own = self._of(slot)
            admit, history = own.admit, None if own.history is None else own.history.tokens
            if history is not None and len(history) != position:
                raise LookupError(f"slot {slot}: {len(history)} tokens are known of the {position} before the draw")
            yield (
                slot,
                Sample(
                    admit.sampling,
                    position,
                    allowed=columns.masks.get(slot),
                    banned=admit.stop_token_ids if bans else (),
                    history=history,
                    num_prompt_tokens=admit.num_prompt_tokens if history is not None else 0,
                    logprobs=admit.logprobs,
                ),
            )

    def add_token(self, slot: int, position: int, token: int) -> None:
        """`token` was drawn for `position` in `slot`."""
        own = self._of(slot)
        own.sampled = token, position
        if own.history is not None:
            own.history.append(token)

    def _of(self, slot: int) -> _Slot:
        found = self._slots.get(slot)
        if found is None:
            raise LookupError(f"nobody was admitted to slot {slot}")
        return found
