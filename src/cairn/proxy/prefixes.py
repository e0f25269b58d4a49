"""Digests of prompts: what a server may have cached of them, and which second-turn hint an earlier turn has left."""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import msgspec

from cairn.http.sessions import session_name
from cairn.http.volatile_text import drop_volatile
from cairn.proxy.options import HINT_SECONDS, MAX_HINTS
from cairn.proxy.protocol import Body, text_field
from cairn.proxy.server_pool import Headers
from cairn.proxy.stream_inspector import AnswerSummary
from cairn.routing.rule import RoutedRequest
from cairn.types import Clock, SystemClock

_UNITS_PER_DIGEST = 64
_BYTES_PER_TOKEN = 4
"""Of text, about."""
_MAX_PART_BYTES = 4096
"""Parts of a message that are no text count as this much of it at most: an image has few tokens for its bytes."""
_MAX_DIGESTS = 16384


def is_batch(body: Body) -> bool:
    """Whether a completion has several prompts, which cannot be handed over. False for a prompt that cannot be read: a
    server will say what is wrong with it."""
    try:
        prompt = _decode(body.get("prompt"), Any)
    except ValueError:
        return False
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


class PrefixDigests:
    """Digests of a prompt's prefixes, which every longer prompt with the same beginning has, too: one after every
    `_UNITS_PER_DIGEST` characters or tokens of a completion, or after every message of a chat.

    `unit_bytes`: 1 for text, 8 for token ids, 0 for messages.
    """

    def __init__(self, seed: bytes, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.digests: list[bytes] = []
        self.ends: list[int] = []
        """For each digest the tokens up to there: estimated from the length, for text."""
        self._num_bytes = 0
        self._hasher = hashlib.blake2b(seed, digest_size=16)
        self._rest = b""

    def add_message(self, message: dict[str, Any]) -> None:
        data = _message_bytes(message)
        self._hasher.update(struct.pack("<Q", len(data)))
        self._num_bytes += _text_bytes(message, len(data))
        self._add_digest(data)

    def add_units(self, data: bytes) -> None:
        data = self._rest + data
        step = _UNITS_PER_DIGEST * self.unit_bytes
        whole = len(data) - len(data) % step
        for start in range(0, whole, step):
            self._num_bytes += step
            self._add_digest(data[start : start + step])
        self._rest = data[whole:]

    def routed_request(self, session: str | None) -> RoutedRequest:
        """The prompt as the routing rule knows it: a block ends at each digest, and one with what is left."""
        digests, ends = list(self.digests), list(self.ends)
        num_tokens = self._num_tokens(self._num_bytes + len(self._rest))
        if self._rest and len(digests) < _MAX_DIGESTS:
            whole = self._hasher.copy()
            whole.update(self._rest)
            digests.append(whole.digest())
            ends.append(num_tokens)
        hashes = [int.from_bytes(digest[:8], signed=True) for digest in digests]
        return RoutedRequest(hashes, ends, num_tokens, session)

    def add_answer(self, answer: AnswerSummary) -> bytes | None:
        """The last digest of prompt and answer together; nothing may be added afterwards.

        An answer that is unknown, or not in the prompt's own units, is left out: the digest is then the prompt's.
        """
        if self.unit_bytes == 0 and answer.text is not None:
            self.add_message({"role": "assistant", "content": answer.text})
        elif self.unit_bytes == 1 and answer.text is not None:
            self.add_units(answer.text.encode(errors="surrogatepass"))
        elif self.unit_bytes == 8 and answer.token_ids is not None:
            self.add_units(struct.pack(f"<{len(answer.token_ids)}q", *answer.token_ids))
        return self.digests[-1] if self.digests else None

    def _add_digest(self, data: bytes) -> None:
        if len(self.digests) < _MAX_DIGESTS:
            self._hasher.update(data)
            self.digests.append(self._hasher.digest())
            self.ends.append(self._num_tokens(self._num_bytes))

    def _num_tokens(self, num_bytes: int) -> int:
        return -(-num_bytes // (self.unit_bytes if self.unit_bytes > 1 else _BYTES_PER_TOKEN))


def prefix_digests(body: Body) -> PrefixDigests | None:
    """The digests of a request's prompt; None for a prompt that is neither text, token ids nor messages."""
    try:
        messages = _messages(body)
        kind = "text" if messages is None else "chat"
        seed = msgspec.json.encode([kind, text_field(body, "model"), text_field(body, "cache_salt")])
        if messages is not None:
            digests = PrefixDigests(seed, 0)
            for message in messages:
                digests.add_message(message)
        else:
            data, unit_bytes = _prompt_bytes(body)
            digests = PrefixDigests(seed + bytes([unit_bytes]), unit_bytes)
            digests.add_units(data)
    except ValueError:
        return None
    return digests


def routed_request(body: Body, digests: PrefixDigests | None, headers: Headers = ()) -> RoutedRequest:
    """A request as the routing rule knows it; of a prompt that cannot be read, its session alone. `headers`: the
    client's own."""
    session = session_name(body, headers)
    return RoutedRequest(session=session) if digests is None else digests.routed_request(session)


class HintCache:
    """Second-turn hints, keyed by the digest at which prompt and answer ended. Bounded in number and age; the least
    recently used goes first. A hint may be out of date: then the prefill server's claim is refused, and it computes."""

    def __init__(self, max_hints: int = MAX_HINTS, seconds: float = HINT_SECONDS, clock: Clock | None = None) -> None:
        self._max_hints = max_hints
        self._seconds = seconds
        self._clock = clock or SystemClock()
        self._hints: OrderedDict[bytes, tuple[float, msgspec.Raw]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hints)

    def store(self, digest: bytes, hint: msgspec.Raw) -> None:
        self._hints[digest] = (self._clock.now() + self._seconds, hint)
        self._hints.move_to_end(digest)
        while len(self._hints) > self._max_hints:
            self._hints.popitem(last=False)

    def store_answer(self, digests: PrefixDigests | None, answer: AnswerSummary) -> bool:
        """Store the hint of an answer to this prompt; returns whether there was one. Nothing may be added to `digests`
        afterwards."""
        if digests is None or answer.hint is None or (digest := digests.add_answer(answer)) is None:
            return False
        self.store(digest, answer.hint)
        return True

    def find(self, digests: Sequence[bytes]) -> msgspec.Raw | None:
        """The unexpired hint of the longest prefix that has one."""
        for digest in reversed(digests) if self._hints else ():
            expires, hint = self._hints.get(digest, (0.0, None))
            if hint is None:
                continue
            if expires > self._clock.now():
                self._hints.move_to_end(digest)
                return hint
            del self._hints[digest]
        return None

    def remove(self, hint: msgspec.Raw, digests: Sequence[bytes]) -> None:
        """Drop a hint that a server has refused, wherever one of these digests leads to it."""
        for digest in digests:
            if self._hints.get(digest, (0.0, None))[1] is hint:
                del self._hints[digest]


def _prompt_bytes(body: Body) -> tuple[bytes, int]:
    """A completion's prompt as bytes, and how many of them make one unit: 1 for text, 8 for token ids.

    A list with exactly one prompt is that prompt. Raises ValueError for anything else.
    """
    prompt = _decode(body.get("prompt"), Any)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass"), 1
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        try:
            return struct.pack(f"<{len(prompt)}q", *prompt), 8
        except struct.error:
            pass
    raise ValueError("neither text nor token ids")


def _messages(body: Body) -> list[dict[str, Any]] | None:
    """Those of a chat in any of the three APIs, with what Anthropic and OpenAI's responses say before them; None for a
    completion. Raises ValueError."""
    if "messages" in body:
        before, messages = "system", _decode(body["messages"], list[dict[str, Any]])
    elif "input" in body and "prompt" not in body:
        before, items = "instructions", _decode(body["input"], str | list[dict[str, Any]])
        messages = [{"role": "user", "content": items}] if isinstance(items, str) else list(map(_item_message, items))
    else:
        return None
    system = _decode(body.get(before), Any)
    messages = [{"role": "system", "content": system}, *messages] if system else list(messages)
    # servers leave it out of prompts, of the messages that a chat begins with
    leading = list(takewhile(lambda message: message.get("role") in ("system", "developer"), messages))
    dropped = [message | {"content": drop_volatile(message.get("content"))} for message in leading]
    return [*dropped, *messages[len(leading) :]]


def _item_message(item: dict[str, Any]) -> dict[str, Any]:
    """An item of a response's input as a message: an answer that is sent back as its text alone is the same."""
    if item.get("type") not in (None, "message"):
        fields = {name: value for name, value in item.items() if name not in ("id", "status")}
        return {"role": item.get("type"), "content": fields}
    content = item.get("content")
    if isinstance(content, list):
        kinds = ("input_text", "output_text")
        content = [
            {"type": "text", "text": part.get("text")} if isinstance(part, dict) and part.get("type") in kinds else part
            for part in content
        ]
    return {"role": item.get("role"), "content": content}


def _message_bytes(message: dict[str, Any]) -> bytes:
    """A message in one form, whichever way a client writes it: nulls left out, text parts joined. Raises ValueError."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    rest = {name: message[name] for name in ("name", "tool_calls", "tool_call_id") if message.get(name)}
    try:
        return msgspec.json.encode([message.get("role"), content or "", rest])
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _text_bytes(message: dict[str, Any], num_bytes: int) -> int:
    """How much text a message is, which has `num_bytes` as a whole."""
    content = message.get("content")
    if not isinstance(content, list):
        return num_bytes
    parts = (part.get("text") if isinstance(part, dict) else None for part in content)
    texts = [text for text in parts if isinstance(text, str)]
    return min(num_bytes, sum(map(len, texts)) + (len(content) - len(texts)) * _MAX_PART_BYTES)


def _decode(value: msgspec.Raw | None, form: Any) -> Any:
    """Raises ValueError, also for numbers that are too large and values that are nested too deeply."""
    try:
        return None if value is None else msgspec.json.decode(value, type=form)
    except RecursionError:
        raise ValueError("nested too deeply") from None
