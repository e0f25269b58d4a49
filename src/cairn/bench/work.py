"""Conversations of one or more turns, their arrival times, and the vocabulary that random prompts are drawn from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cairn.errors import ConfigError

Ids = NDArray[np.int64]

FIRST_TOKEN = 20
"""Ids below it are special tokens in many vocabularies, and are not drawn."""

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new "
    "sound take only little work know place year live me back give most very after thing our just name good sentence "
    "man think say great where help through much before line right too mean old any same tell boy follow came want "
    "show also around form three small set put end does another well large must big even such because turn here why "
    "ask went men read need land different home us move try kind hand picture again change off play spell air away "
    "animal house point page letter mother answer found study still learn should world"
)


MAX_PROMPTS = 1 << 20
MAX_TOKENS = 1 << 24


def flag(default: Any, least: float, most: float, about: str = "") -> Any:
    """A field of a dataset that is a flag of its own: whole numbers where `least` is one."""
    return field(default=default, metadata={"least": least, "most": most, "about": about})


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `prompt`: token ids, or text. `num_tokens`: its length, estimated where there is no tokenizer."""

    prompt: tuple[int, ...] | str
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that are sent one after the other, each with all before it and the server's own answers.

    `at`: seconds after the start, where the dataset says when. `system`: text that goes before the first turn.
    """

    turns: tuple[Turn, ...]
    at: float | None = None
    system: str = ""


class Speller(Protocol):
    """Token ids as text, and the number of tokens of a text."""

    def text(self, ids: Sequence[int]) -> str: ...

    def count(self, text: str) -> int: ...


class WordSpeller:
    """Without a tokenizer: a common English word for each id, which most vocabularies have as one token.

    Different ids may have the same word. A text is counted as four characters a token.
    """

    def __init__(self) -> None:
        self._words = _WORDS.split(" ")

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(self._words[token % len(self._words)] for token in ids)

    def count(self, text: str) -> int:
        return max(1, len(text) // 4)


class TokenizerSpeller:
    """A model's own tokenizer.json."""

    def __init__(self, path: Path) -> None:
        """`path`: the file, or the folder that has it. Raises ConfigError naming the flag."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every fault of a file
            raise ConfigError(
                f"--tokenizer {path}: {file.name} cannot be read: {error}; name a tokenizer.json"
            ) from error

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def regular_token_ids(self) -> Ids:
        """All ids that are not special tokens, ascending."""
        special = self._tokenizer.get_added_tokens_decoder()
        return np.array(sorted(set(range(self._tokenizer.get_vocab_size())) - set(special)), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The token ids that prompts are made of, shape [n], n > 0."""

    ids: Ids

    @classmethod
    def of_size(cls, size: int) -> "Vocabulary":
        """Ids FIRST_TOKEN to size - 1."""
        return cls(np.arange(FIRST_TOKEN, size, dtype=np.int64))

    def draw(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        """`count` ids, each independent of all others."""
        return tuple(self.ids[rng.integers(0, len(self.ids), size=count)].tolist())

    def map_hashes(self, hashes: NDArray[np.uint64]) -> tuple[int, ...]:
        """An id for each hash: equal for equal ones."""
        return tuple(self.ids[(hashes % np.uint64(len(self.ids))).astype(np.int64)].tolist())


def spell_prompts(conversation: Conversation, speller: Speller) -> Conversation:
    """The same with token ids written as text."""
    turns = tuple(
        turn if isinstance(turn.prompt, str) else replace(turn, prompt=speller.text(turn.prompt))
        for turn in conversation.turns
    )
    return replace(conversation, turns=turns)


def draw_arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds after the start at which each of `count` requests is due, ascending.

    `rate`: requests a second; infinite: all at once. The gaps are drawn from a gamma distribution with shape
    `burstiness`: 1 is a Poisson process, less is burstier, infinite is evenly spaced. They are scaled so that the last
    request is due at count / rate, whatever was drawn: runs with different seeds have the same mean rate.
    """
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = rng.gamma(burstiness, 1.0, size=count)
    times = np.cumsum(gaps)
    if not times[-1] > 0:
        # A shape near 0 draws gaps too small for a float: everything in one burst.
        return np.zeros(count)
    scaled: NDArray[np.float64] = times * (count / rate / times[-1])
    return scaled
