"""Texts to measure drafts with: Python's own sources as tokens, functions of them renamed, and what nobody predicts."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
from demo.corpus import Corpus
from tokenizers import Tokenizer

from cairn.types import Keys

__all__ = ["FIRST_TOKEN", "NUM_TOKENS", "DraftTexts"]

FIRST_TOKEN, NUM_TOKENS = 64, 4_000
"""Token ids that are drawn: of each model that is measured here."""

_NAME = re.compile(r"\bdef ([a-z_]\w{3,})")
_CHARACTERS = 20_000


class DraftTexts:
    """`tokenizer`: the file of the one whose tokens they are. `seed`: of what is drawn."""

    def __init__(self, tokenizer: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._corpus = Corpus()
        self._rng = np.random.default_rng(seed)

    def passage(self, number: int, length: int) -> Keys:
        """`length` tokens from the middle of the source file that `number` picks."""
        return self._encode(self._middle(number))[:length]

    def edit(self, number: int, length: int) -> tuple[Keys, Keys, Keys]:
        """What is asked, with a file of about `length` tokens; the file with one of its functions renamed; and the
        file."""
        lines, count = self._middle(number).splitlines(keepends=True), 0
        while len(self._encode("".join(lines[:count]))) < length:
            count += 8
        file = "".join(lines[:count])
        names = _NAME.findall(file) or ["self"]
        uses = Counter({name: len(re.findall(rf"\b{name}\b", file)) for name in names})
        old = uses.most_common(1)[0][0]
        new = f"{old}_anew"
        asked = f"{file}\n# The same file, with {old} renamed to {new}:\n"
        return self._encode(asked), self._encode(re.sub(rf"\b{old}\b", new, file)), self._encode(file)

    def random(self, length: int, of: int = NUM_TOKENS - FIRST_TOKEN) -> Keys:
        """Tokens drawn from `of` different ones."""
        return self._rng.integers(FIRST_TOKEN, FIRST_TOKEN + of, length)

    def _middle(self, number: int) -> str:
        text = self._corpus.passage(number, _CHARACTERS + 4_000)
        return text[text.index("\n", 3_000) + 1 :]

    def _encode(self, text: str) -> Keys:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
