"""Log-probabilities of tokens, in the forms of OpenAI's two endpoints and of vLLM's `prompt_logprobs`."""

import codecs
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import msgspec

from cairn.engine.contract import TokenLogprobs

_MIN_LOGPROB = -9999.0
"""vLLM's value for a token of probability 0: JSON has no infinity."""

_CACHE_SIZE = 1 << 16


class TextOffsetTracker:
    """Positions of tokens in their text, in characters, from the tokens' bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at = 0

    def next(self, spelled: bytes) -> int:
        """The next token's position: of the character that it continues, or after one that it leaves incomplete."""
        pending = self._pending
        opening = self._decoder.decode(spelled[:1])
        # One byte decodes to two characters, or to one and the beginning of another, only if it breaks a pending one.
        broken = pending and len(opening) + self._pending > 1
        at = self._at + broken
        self._at += len(opening) + len(self._decoder.decode(spelled[1:]))
        return at

    @property
    def _pending(self) -> bool:
        """Whether a character is incomplete."""
        return bool(self._decoder.getstate()[0])


class LogprobsFormatter:
    """Log-probabilities with the tokens' texts, or with `as_token_ids` their ids as `token_id:5`. `token_bytes`: see
    `TextTokenizer`. `has_listed`: the tokens beside each one are those that the client has listed; in chats they then
    begin with the token itself."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, as_token_ids: bool = False, has_listed: bool = False
    ) -> None:
        self._bytes = lru_cache(_CACHE_SIZE)(token_bytes)
        self._as_token_ids = as_token_ids
        self._has_listed = has_listed

    def configure(self, as_token_ids: bool | None, *, has_listed: bool) -> "LogprobsFormatter":
        """The formatter of one request; `as_token_ids` None: as this one."""
        as_token_ids = self._as_token_ids if as_token_ids is None else as_token_ids
        if (as_token_ids, has_listed) == (self._as_token_ids, self._has_listed):
            return self
        formatter = copy(self)  # with the same cache of texts
        formatter._as_token_ids, formatter._has_listed = as_token_ids, has_listed
        return formatter

    def spell(self, token: int) -> bytes:
        """The token's text."""
        return self._bytes(token)

    def chat(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        """A chat choice's `logprobs`."""
        content = []
        for _, ((token, value), *best) in logprobs:
            entry = self._entry(token, value)
            # As in vLLM the token itself comes first, and counts as one of as many as were asked for.
            top = [*({token: value} | dict(best)).items()]
            entry["top_logprobs"] = [self._entry(*pair) for pair in (top if self._has_listed else top[: len(best)])]
            content.append(entry)
        return {"content": content}

    def completion(self, logprobs: TokenLogprobs, offsets: TextOffsetTracker) -> dict[str, Any]:
        """A completion choice's `logprobs`, or the next piece of them."""
        part: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for _, ((token, value), *best) in logprobs:
            spelled = self._bytes(token)
            name = self._name(token)
            part["tokens"].append(name)
            part["token_logprobs"].append(_number(value))
            # As in vLLM the token itself comes first, also if it is not among the best. It wins over others with the
            # same text.
            named = {self._name(other): _number(its) for other, its in best}
            part["top_logprobs"].append({name: 0.0} | named | {name: _number(value)})
            part["text_offset"].append(offsets.next(spelled))
        return part

    def echo(self, prompt: Sequence[int], logprobs: TokenLogprobs, offsets: TextOffsetTracker) -> dict[str, Any]:
        """The same for an echoed prompt, whose first token has no log-probability."""
        first = self._bytes(prompt[0])
        opening = {"tokens": [self._name(prompt[0])], "token_logprobs": [None], "top_logprobs": [None]}
        return concat_logprobs(opening | {"text_offset": [offsets.next(first)]}, self.completion(logprobs, offsets))

    def prompt(self, logprobs: TokenLogprobs) -> list[msgspec.Raw | None]:
        """vLLM's `prompt_logprobs`: by token id, null for the first token. As JSON: there may be a million entries."""
        parts: list[msgspec.Raw | None] = [None]
        for rank, (prompt_pair, *best) in logprobs:
            ranked = [
                (rank, prompt_pair),
                *((place, pair) for place, pair in enumerate(best, 1) if pair[0] != prompt_pair[0]),
            ]
            entry = {
                str(token): {"logprob": _number(value), "rank": place, "decoded_token": _text(self._bytes(token))}
                for place, (token, value) in ranked
            }
            parts.append(msgspec.Raw(msgspec.json.encode(entry)))
        return parts

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": _number(value), "bytes": list(self._bytes(token))}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_token_ids else _text(self._bytes(token))


def concat_logprobs(*parts: dict[str, Any]) -> dict[str, Any]:
    """Pieces of a completion's `logprobs`, one after the other."""
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")


def _number(value: float) -> float:
    return max(value, _MIN_LOGPROB)
