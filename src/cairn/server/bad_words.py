"""`bad_words`: texts that may not come in an answer, as the tokens that they are spelled with."""

from collections.abc import Callable, Sequence

from cairn.errors import InvalidRequest
from cairn.server.messages import check_text

_FIELD = "bad_words"


def bad_word_tokens(encode: Callable[[str, bool], list[int]], words: Sequence[str]) -> list[list[int]]:
    """The tokens of each word as it begins an answer and, where they are others, as it stands behind a space.

    Raises InvalidRequest that names the word.
    """
    found = []
    for place, word in enumerate(words):
        text = check_text(word, f"{_FIELD}[{place}]", _FIELD).lstrip()
        plain, spaced = encode(text, False), encode(f" {text}", False)
        if not text or not plain:
            raise InvalidRequest(f"{_FIELD}[{place}] is blank: leave it out", _FIELD)
        found += [plain] if spaced == plain else [plain, spaced]
    return found
