"""Sampling metadata of a row, and the token history of a sequence with penalties. Numpy alone, no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from cairn.step import TokenMask
from cairn.types import Keys, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How one token is sampled: the one at absolute position `position` of a sequence.

    `allowed_mask`: bit mask of the allowed tokens, applied before all else; None: all. `banned_tokens`: tokens that
    must not be sampled at this position. `history`: the `position` tokens before it, of which the first
    `num_prompt_tokens` are the prompt's; given where `params` need it. `logprobs`: number of top tokens to report
    beside the sampled one; None: no logprobs.
    """

    params: SamplingParams
    position: int
    allowed_mask: TokenMask | None = field(default=None, compare=False)
    banned_tokens: tuple[int, ...] = ()
    history: Keys | None = field(default=None, compare=False)
    num_prompt_tokens: int = 0
    logprobs: int | None = None

    def bad_word_ends(self) -> tuple[int, ...]:
        """The tokens that would complete one of the `bad_words` here, ascending: as in vLLM, a word is matched token by
        token within the output. A word of one token needs no history; longer ones do."""
        words = self.params.bad_words
        longest = max(map(len, words), default=1) - 1
        tail: tuple[int, ...] = ()
        if longest:
            assert self.history is not None, f"position {self.position}: bad words without the tokens before it"
            tail = tuple(self.history[max(self.num_prompt_tokens, len(self.history) - longest) :].tolist())
        return tuple(sorted({word[-1] for word in words if word[:-1] == tail[len(tail) - len(word) + 1 :]}))


class TokenHistory(NamedTuple):
    """The tokens of the sequence in `slot`, as penalties count them: ids below 0 in the prompt have no logit."""

    slot: int
    prompt: Keys
    output: Keys
