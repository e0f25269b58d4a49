"""Tokens that have been used already are made less likely, or more."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.types import Keys, SamplingParams

_LEAST = 1e-30
"""The least penalty that is reckoned with: in float32 a smaller one makes infinity, or no number, of a logit."""
_CAPACITY = 1024


class TokenCounts:
    """Which tokens each slot's sequence has used, and how often its answer has: on the device, from token to token.

    A slot is known from `admit` to the next `admit`. Memory of slots without penalties is never touched.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | None = None) -> None:
        self._times = torch.empty(num_slots, vocab_size, dtype=torch.int32, device=device)
        # A slot's used tokens: the prompt's, each once, then the answer's as they came.
        self._tokens = torch.empty(num_slots, _CAPACITY, dtype=torch.int64, device=device)
        self._answer_starts = np.zeros(num_slots, np.int64)
        self._lengths = np.full(num_slots, -1, np.int64)

    def admit(self, slot: int, prompt: Keys, answer: Keys) -> None:
        """A sequence begins, or begins again, in `slot`. Ids below 0 have no logit and are passed over."""
        used = torch.from_numpy(np.unique(prompt[prompt >= 0]).astype("<i8"))
        drawn = torch.from_numpy(answer.astype("<i8"))
        self._reserve(len(used) + len(drawn))
        self._answer_starts[slot] = len(used)
        self._lengths[slot] = len(used) + len(drawn)
        self._tokens[slot, : self._lengths[slot]] = torch.cat([used, drawn]).to(self._tokens.device)
        self._times[slot] = drawn.bincount(minlength=self._times.shape[1])

    def append(self, slots: Sequence[int], tokens: Tensor) -> None:
        """What was drawn next in `slots`, all different: `tokens`, int64 [n], on the device."""
        own = np.array(slots)
        self._reserve(int(self._lengths[own].max()) + 1)
        rows, places = torch.from_numpy(own).to(tokens.device), torch.from_numpy(self._lengths[own]).to(tokens.device)
        self._tokens[rows, places] = tokens
        self._times[rows, tokens] += 1
        self._lengths[own] += 1

    def used(self, slots: Sequence[int], with_prompt: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """Used tokens of `slots`, one after the other, of prompt and answer or of the answer alone, some more than
        once: row among `slots`, the token, how often the answer has it; [k] each."""
        own = np.array(slots)
        assert (self._lengths[own] >= 0).all(), f"slots {slots}: one of them was never admitted"
        starts = np.where(with_prompt, 0, self._answer_starts[own])
        lengths = self._lengths[own] - starts
        rows = np.repeat(np.arange(len(slots)), lengths)
        places = np.arange(len(rows)) - np.repeat(lengths.cumsum() - lengths - starts, lengths)
        device = self._tokens.device
        of_slots = torch.from_numpy(own[rows]).to(device)
        tokens = self._tokens[of_slots, torch.from_numpy(places).to(device)]
        return torch.from_numpy(rows).to(device), tokens, self._times[of_slots, tokens]

    def _reserve(self, length: int) -> None:
        num_slots, capacity = self._tokens.shape
        if length > capacity:
            grown = self._tokens.new_empty(num_slots, max(length, 2 * capacity))
            grown[:, :capacity] = self._tokens
            self._tokens = grown


def penalize(
    logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], slots: Sequence[int], counts: TokenCounts
) -> None:
    """Change the logits of used tokens in some rows of float32 [n, vocab], in place; parameters and slot of each.

    Repetition (Keskar et al. 2019, CTRL), for prompt and answer, however often: a positive logit is divided, a negative
    one multiplied. Frequency and presence, as OpenAI defines them, for the answer alone: a logit loses `frequency` for
    each time that its token was drawn, and `presence` once if it was at all.
    """
    owners, tokens, times = counts.used(slots, [one.repetition_penalty != 1 for one in params])
    numbers = [(max(one.repetition_penalty, _LEAST), one.frequency_penalty, one.presence_penalty) for one in params]
    columns = torch.tensor(numbers, dtype=logits.dtype, device=logits.device)[owners]
    repetition, frequency, presence = columns.unbind(1)
    at = torch.tensor(rows, device=logits.device)[owners], tokens
    old = logits[at]
    old = torch.where(old > 0, old / repetition, old * repetition)
    logits[at] = old - (frequency * times + presence * (times > 0))
