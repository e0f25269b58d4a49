"""Logits processors: allowed and banned tokens, biases and penalties, and the token counts that penalties need.

Each function stages what it needs of the host and returns a `LogitsProcessor`, which changes logits, float32 [n,
vocab], in place; it may be called once the staging has been sent. Lists of tokens are one a row, empty for a row
without.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.sampling.metadata import TokenHistory
from cairn.kernels.staging import Staging
from cairn.step import TokenMask
from cairn.types import Keys, SamplingParams

Tokens = Sequence[int]
LogitsProcessor = Callable[[Tensor], None]
MIN_PENALTY = 1e-30
"""Smaller repetition penalties are raised to this: in float32 they make infinity or NaN of a logit."""
_CAPACITY = 1024
"""Used tokens of a slot that there is room for at first."""

UsedTokens = tuple[Tensor, Tensor, Tensor]


def mask_words(mask: TokenMask, vocab_size: int) -> NDArray[np.int32]:
    """The bits of a mask, little-endian. Raises ValueError for a mask that does not fit the vocabulary, or that allows
    nothing."""
    words = np.ascontiguousarray(mask, dtype="<i4")
    if words.shape != (-(-vocab_size // 32),):
        raise ValueError(f"a mask of shape {words.shape} for {vocab_size} tokens")
    if not (words[:-1].any() or int(words[-1]) & ((1 << (vocab_size - 1) % 32 + 1) - 1)):
        raise ValueError("a mask that allows no token")
    return words


def apply_masks(masks: Sequence[TokenMask | None], vocab_size: int, staging: Staging) -> LogitsProcessor | None:
    """Allow only the tokens whose bit is set. Raises as `mask_words`."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return None
    words = [mask_words(mask, vocab_size) for mask in masks if mask is not None]
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bounds = staging.add(np.where(bits, np.float32(np.inf), np.float32(-np.inf)))
    mask_bytes, row_index = staging.add(np.stack(words).view(np.uint8).astype(np.int32)), staging.add(np.array(rows))

    def allow(logits: Tensor) -> None:
        # A byte's eight bounds at a time; the least of bound and logit takes no branch, as `masked_fill` does.
        most = torch.nn.functional.embedding(mask_bytes.tensor, bounds.tensor).flatten(1)[:, :vocab_size]
        logits[row_index.tensor] = logits[row_index.tensor].minimum(most)

    return allow


def keep_tokens(lists: Sequence[Tokens], staging: Staging) -> LogitsProcessor | None:
    """Allow only a row's tokens (vLLM's `allowed_token_ids`), unless nothing would be left."""
    rows = [row for row, tokens in enumerate(lists) if tokens]
    if not rows:
        return None
    row_index, index = staging.add(np.array(rows)), _TokenIndex([lists[row] for row in rows], staging)

    def keep(logits: Tensor) -> None:
        old, at = logits[row_index.tensor], index.pair
        listed = torch.full_like(old, -torch.inf).index_put_(at, old[at])
        logits[row_index.tensor] = listed.where(listed.amax(-1, keepdim=True) > -torch.inf, old)

    return keep


def ban_tokens(lists: Sequence[Tokens], staging: Staging) -> LogitsProcessor | None:
    """Ban a row's tokens, unless nothing would be left."""
    if not any(lists):
        return None
    index = _TokenIndex(lists, staging)

    def ban(logits: Tensor) -> None:
        at = index.pair
        old, none = logits[at], logits.new_full((), -torch.inf)
        logits.index_put_(at, none)
        left = logits.amax(-1)[at[0]] > none
        logits.index_put_(at, none.where(left, old))

    return ban


def add_bias(biases: Sequence[Sequence[tuple[int, float]]], staging: Staging) -> LogitsProcessor | None:
    """Add to the logits of single tokens, each named once: OpenAI's `logit_bias`."""
    if not any(biases):
        return None
    index = _TokenIndex([[token for token, _ in bias] for bias in biases], staging)
    values = staging.add(np.array([value for bias in biases for _, value in bias], np.float32))

    def add(logits: Tensor) -> None:
        logits.index_put_(index.pair, values.tensor, accumulate=True)

    return add


class _TokenIndex:
    """`pair`: rows and tokens of all lists, [k] each, once the staging has been sent."""

    def __init__(self, lists: Sequence[Tokens], staging: Staging) -> None:
        lengths = [len(tokens) for tokens in lists]
        self._rows = staging.add(np.repeat(np.arange(len(lists)), lengths))
        self._tokens = staging.add(np.fromiter(chain.from_iterable(lists), np.int64, sum(lengths)))

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self._rows.tensor, self._tokens.tensor


class TorchTokenCounts:
    """The used tokens of each slot's sequence, and how often its output has each: on the device.

    A slot has counts from `admit` to the next `admit`. Memory of slots without penalties is never touched. Methods
    stage what they need of the host, and return functions to be called once the staging has been sent, in this order.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | None = None) -> None:
        self._times = torch.empty(num_slots, vocab_size, dtype=torch.int32, device=device)
        # A slot's used tokens: the prompt's, each once, then the output's in order.
        self._tokens = torch.empty(num_slots, _CAPACITY, dtype=torch.int64, device=device)
        self._output_starts = np.zeros(num_slots, np.int64)
        self._lengths = np.full(num_slots, -1, np.int64)

    def admit(self, histories: Sequence[TokenHistory], staging: Staging) -> Callable[[], None]:
        """See `TokenCounts.admit`."""
        writes = [self._admit(*history, staging) for history in histories]

        def write() -> None:
            for write_history in writes:
                write_history()

        return write

    def _admit(self, slot: int, prompt: Keys, output: Keys, staging: Staging) -> Callable[[], None]:
        used = np.unique(prompt[prompt >= 0])
        start, length = len(used), len(used) + len(output)
        self._output_starts[slot], self._lengths[slot] = start, length
        tokens = staging.add(np.concatenate([used, output]).astype(np.int64))

        def write() -> None:
            self._reserve(length)
            self._tokens[slot, :length] = tokens.tensor
            drawn = tokens.tensor[start:]
            self._times[slot] = 0
            self._times[slot].index_add_(0, drawn, drawn.new_ones(len(drawn), dtype=torch.int32))

        return write

    def append(self, slots: Sequence[int], staging: Staging) -> Callable[[Tensor], None]:
        """Append a token to each of `slots`, all different. The function takes the sampled tokens, int64 [n]."""
        slot_ids = np.array(slots)
        length = int(self._lengths[slot_ids].max()) + 1
        rows, places = staging.add(slot_ids), staging.add(self._lengths[slot_ids])
        self._lengths[slot_ids] += 1

        def write(tokens: Tensor) -> None:
            self._reserve(length)
            self._tokens[rows.tensor, places.tensor] = tokens
            self._times[rows.tensor, tokens] += 1

        return write

    def used(self, slots: Sequence[int], with_prompt: Sequence[bool], staging: Staging) -> Callable[[], UsedTokens]:
        """Used tokens of `slots`, one slot after the other, of prompt and output or of the output alone, some more than
        once: index into `slots`, token, how often the output has it; [k] each."""
        slot_ids = np.array(slots)
        assert (self._lengths[slot_ids] >= 0).all(), f"slots {slots}: one of them was never admitted"
        starts = np.where(with_prompt, 0, self._output_starts[slot_ids])
        lengths = self._lengths[slot_ids] - starts
        rows = np.repeat(np.arange(len(slots)), lengths)
        places = np.arange(len(rows)) - np.repeat(lengths.cumsum() - lengths - starts, lengths)
        owners, of_slots, at = staging.add(rows), staging.add(slot_ids[rows]), staging.add(places)

        def find() -> UsedTokens:
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
    counts: TorchTokenCounts,
    staging: Staging,
) -> LogitsProcessor:
    """Penalize used tokens in `rows` of the logits; `params` and `slots` of each of these rows.

    Repetition (Keskar et al. 2019, CTRL), for prompt and output, however often: a positive logit is divided, a negative
    one multiplied. Frequency and presence, as OpenAI defines them, for the output alone: a logit loses `frequency` for
    each time that its token was sampled, and `presence` once if it was at all.
    """
    find = counts.used(slots, [row_params.repetition_penalty != 1 for row_params in params], staging)
    numbers = [
        (max(row_params.repetition_penalty, MIN_PENALTY), row_params.frequency_penalty, row_params.presence_penalty)
        for row_params in params
    ]
    columns, row_index = staging.add(np.array(numbers, np.float32)), staging.add(np.array(rows))

    def change(logits: Tensor) -> None:
        owners, tokens, times = find()
        repetition, frequency, presence = columns.tensor[owners].unbind(1)
        at = row_index.tensor[owners], tokens
        old = logits[at]
        old = torch.where(old > 0, old / repetition, old * repetition)
        logits[at] = old - (frequency * times + presence * (times > 0))

    return change
