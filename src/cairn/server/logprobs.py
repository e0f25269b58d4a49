"""Log-probabilities of tokens, in the forms of OpenAI's two endpoints and of vLLM's `prompt_logprobs`."""

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from cairn.engine.contract import TokenLogprobs

_LEAST = -9999.0
"""What is written for a token that could not come: JSON has no infinity. vLLM's."""

_REMEMBERED = 1 << 16


class TextOffsetTracker:
    """Where in a text its tokens begin, in characters, when their bytes are told one after the other."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at = 0

    def next(self, spelled: bytes) -> int:
        """Where this token begins: with the character that it goes on with, or behind one that it leaves unfinished."""
        pending = self._pending
        opening = self._decoder.decode(spelled[:1])
        # one byte makes two of them, or one and another's beginning, only where it has ended what was pending
        broken = pending and len(opening) + self._pending > 1
        at = self._at + broken
        self._at += len(opening) + len(self._decoder.decode(spelled[1:]))
        return at

    @property
    def _pending(self) -> bool:
        """Whether a character has begun and not ended."""
        return bool(self._decoder.getstate()[0])


class LogprobsFormatter:
    """Writes log-probabilities out with the tokens' texts. `token_bytes`: see `TextTokenizer`."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = lru_cache(_REMEMBERED)(token_bytes)

    def chat(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        """A chat choice's `logprobs`."""
        content = []
        for _, ((token, value), *best) in logprobs:
            entry = self._entry(token, value)
            entry["top_logprobs"] = [self._entry(*pair) for pair in best]
            content.append(entry)
        return {"content": content}

    def completion(self, logprobs: TokenLogprobs, offsets: TextOffsetTracker) -> dict[str, Any]:
        """A completion choice's `logprobs`; `offsets` goes on from piece to piece."""
        part: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for _, ((token, value), *best) in logprobs:
            spelled = self._bytes(token)
            part["tokens"].append(_text(spelled))
            part["token_logprobs"].append(_number(value))
            # the token itself is told of whether it is among the best or not, and wins where texts are the same
            named = {_text(self._bytes(other)): _number(its) for other, its in best}
            part["top_logprobs"].append(named | {_text(spelled): _number(value)})
            part["text_offset"].append(offsets.next(spelled))
        return part

    def echo(self, prompt: Sequence[int], logprobs: TokenLogprobs, offsets: TextOffsetTracker) -> dict[str, Any]:
        """The same of a prompt: nothing is known of its first token."""
        first = self._bytes(prompt[0])
        opening = {"tokens": [_text(first)], "token_logprobs": [None], "top_logprobs": [None]}
        return joined(opening | {"text_offset": [offsets.next(first)]}, self.completion(logprobs, offsets))

    def prompt(self, logprobs: TokenLogprobs) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: by token id, null for the first token."""
        parts: list[dict[str, Any] | None] = [None]
        for rank, (own, *best) in logprobs:
            ranked = [*((place, pair) for place, pair in enumerate(best, 1)), (rank, own)]
            parts.append(
                {
                    str(token): {"logprob": _number(value), "rank": place, "decoded_token": _text(self._bytes(token))}
                    for place, (token, value) in ranked
                }
            )
        return parts

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        spelled = self._bytes(token)
        return {"token": _text(spelled), "logprob": _number(value), "bytes": list(spelled)}


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two pieces of a completion's `logprobs`, one behind the other."""
    return {name: one[name] + other[name] for name in one}


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")


def _number(value: float) -> float:
    return max(value, _LEAST)
