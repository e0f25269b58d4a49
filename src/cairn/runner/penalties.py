"""Tokens that have been used already are made less likely, or more."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.staging import Staging
from cairn.runner.token_rules import Rule
from cairn.types import Keys, SamplingParams

_LEAST = 1e-30
"""The least penalty that is reckoned with: in float32 a smaller one makes infinity, or no number, of a logit."""
_CAPACITY = 1024

Used = tuple[Tensor, Tensor, Tensor]


class TokenCounts:
    """Which tokens each slot's sequence has used, and how often its answer has: on the device, from token to token.

    A slot is known from `admit` to the next `admit`. Memory of slots without penalties is never touched. What the host
    knows is staged; what is given back is to be called once the staging has been sent, in this order.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | None = None) -> None:
        self._times = torch.empty(num_slots, vocab_size, dtype=torch.int32, device=device)
        # A slot's used tokens: the prompt's, each once, then the answer's as they came.
        self._tokens = torch.empty(num_slots, _CAPACITY, dtype=torch.int64, device=device)
        self._answer_starts = np.zeros(num_slots, np.int64)
        self._lengths = np.full(num_slots, -1, np.int64)

    def admit(self, slot: int, prompt: Keys, answer: Keys, staging: Staging) -> Callable[[], None]:
        """A sequence begins, or begins again, in `slot`. Ids below 0 have no logit and are passed over."""
        used = np.unique(prompt[prompt >= 0])
        start, length = len(used), len(used) + len(answer)
        self._answer_starts[slot], self._lengths[slot] = start, length
        tokens = staging.add(np.concatenate([used, answer]).astype(np.int64))

        def write() -> None:
            self._reserve(length)
            self._tokens[slot, :length] = tokens.tensor
            drawn = tokens.tensor[start:]
            self._times[slot] = 0
            self._times[slot].index_add_(0, drawn, drawn.new_ones(len(drawn), dtype=torch.int32))

        return write

    def append(self, slots: Sequence[int], staging: Staging) -> Callable[[Tensor], None]:
        """One token more in each of `slots`, all different: to be called with what was drawn, int64 [n]."""
        own = np.array(slots)
        length = int(self._lengths[own].max()) + 1
        rows, places = staging.add(own), staging.add(self._lengths[own])
        self._lengths[own] += 1

        def write(tokens: Tensor) -> None:
            self._reserve(length)
            self._tokens[rows.tensor, places.tensor] = tokens
            self._times[rows.tensor, tokens] += 1

        return write

    def used(self, slots: Sequence[int], with_prompt: Sequence[bool], staging: Staging) -> Callable[[], Used]:
        """Used tokens of `slots`, one after the other, of prompt and answer or of the answer alone, some more than
        once: row among `slots`, the token, how often the answer has it; [k] each."""
        own = np.array(slots)
        assert (self._lengths[own] >= 0).all(), f"slots {slots}: one of them was never admitted"
        starts = np.where(with_prompt, 0, self._answer_starts[own])
        lengths = self._lengths[own] - starts
        rows = np.repeat(np.arange(len(slots)), lengths)
        places = np.arange(len(rows)) - np.repeat(lengths.cumsum() - lengths - starts, lengths)
        owners, of_slots, at = staging.add(rows), staging.add(own[rows]), staging.add(places)

        def find() -> Used:
            tokens = self._tokens[of_slots.tensor, at.tensor]
            return owners.tensor, tokens, self._times[of_slots.tensor, tokens]

        return find

    def _reserve(self, length: int) -> None:
        num_slots, capacity = self._tokens.shape
        if length > capacity:
            grown = self._tokens.new_empty(num_slots, max(length, 2 * capacity))
            grown[:, :capacity] = self._tokens
            self._tokens = grown


def penalize(
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    slots: Sequence[int],
    counts: TokenCounts,
    staging: Staging,
) -> Rule:
    """The logits of used tokens in some rows of float32 [n, vocab]; parameters and slot of each.

    Repetition (Keskar et al. 2019, CTRL), for prompt and answer, however often: a positive logit is divided, a negative
    one multiplied. Frequency and presence, as OpenAI defines them, for the answer alone: a logit loses `frequency` for
    each time that its token was drawn, and `presence` once if it was at all.
    """
    find = counts.used(slots, [one.repetition_penalty != 1 for one in params], staging)
    numbers = [(max(one.repetition_penalty, _LEAST), one.frequency_penalty, one.presence_penalty) for one in params]
    columns, concerned = staging.add(np.array(numbers, np.float32)), staging.add(np.array(rows))

    def change(logits: Tensor) -> None:
        owners, tokens, times = find()
        repetition, frequency, presence = columns.tensor[owners].unbind(1)
        at = concerned.tensor[owners], tokens
        old = logits[at]
        old = torch.where(old > 0, old / repetition, old * repetition)
        logits[at] = old - (frequency * times + presence * (times > 0))

    return change
