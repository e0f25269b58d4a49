"""What a runner knows of the requests in its slots: what their admits said, and what it has sampled since."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cairn.step import SAMPLED, Admit, SampledToken, StepPlan, TokenMask, TokenMasks
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
    """`drawn_at`: the position of the token that was drawn last, or is going to be in a step that is out."""

    admit: Admit
    history: _History | None
    drawn_at: int | None = None


class Slots:
    """The admits of all slots, by slot; each is there until the slot's next one. `with_images`: slots whose prompts
    have images."""

    def __init__(self) -> None:
        self.with_images: set[int] = set()
        self._slots: dict[int, _Slot] = {}

    def launch(self, plan: StepPlan) -> None:
        """Take in what the plan admits and draws. Raises LookupError for a row that is to go on with a token which was
        not drawn last in its slot."""
        for admit in plan.admits:
            history = None if admit.history is None else _History(admit.history)
            self._slots[admit.slot] = _Slot(admit, history)
            (self.with_images.add if admit.images else self.with_images.discard)(admit.slot)
        for at in np.flatnonzero(plan.decodes.tokens == SAMPLED):
            slot, position = int(plan.decodes.slots[at]), int(plan.decodes.positions[at])
            if (last := self._of(slot).drawn_at) != position:
                raise LookupError(f"slot {slot} goes on at {position}, but its last token was drawn for {last}")
        for slot, position in zip(plan.samples.slots.tolist(), plan.samples.positions.tolist(), strict=True):
            self._of(slot).drawn_at = position

    def admit(self, slot: int) -> Admit:
        """Raises LookupError where nobody was admitted."""
        return self._of(slot).admit

    def samples(self, plan: StepPlan, masks: TokenMasks) -> Iterator[Sample]:
        """Each draw of the plan. Raises LookupError where tokens of a history are missing: all steps
        before the plan's are to be collected where a slot has one."""
        columns = plan.samples
        for slot, position, bans in zip(
            columns.slots.tolist(), columns.positions.tolist(), columns.bans_stop_tokens.tolist(), strict=True
        ):
            own = self._of(slot)
            admit, history = own.admit, None if own.history is None else own.history.tokens
            if history is not None and len(history) != position:
                raise LookupError(f"slot {slot}: {len(history)} tokens are known of the {position} before the draw")
            yield Sample(
                admit.sampling,
                position,
                allowed=masks.get(slot),
                banned=admit.stop_token_ids if bans else (),
                history=history,
                num_prompt_tokens=admit.num_prompt_tokens if history is not None else 0,
                logprobs=admit.logprobs,
            )

    def collect(self, sampled: Iterable[SampledToken]) -> None:
        """What a step has drawn, before the next one is collected."""
        for own in sampled:
            history = self._of(own.slot).history
            if history is not None:
                history.append(own.token)

    def _of(self, slot: int) -> _Slot:
        found = self._slots.get(slot)
        if found is None:
            raise LookupError(f"nobody was admitted to slot {slot}")
        return found
