"""A tokenizer in memory: one token per UTF-8 byte, and three special ones."""

import codecs
from collections.abc import Sequence
from typing import Any

from cairn.engine.contract import RenderedPrompt, TextStream
from cairn.errors import InvalidRequest

__all__ = ["END_OF_SEQUENCE", "FAKE_VOCAB_SIZE", "FakeTokenizer", "load_fake_tokenizer"]

END_OF_SEQUENCE = 256
_MESSAGE_START = 257
_MESSAGE_END = 258
FAKE_VOCAB_SIZE = 259


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeTokenizer:
    """Bytes as tokens; a chat is `<start>role newline content<end>` per message."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        if tools:
            raise InvalidRequest("this chat template has no place for tools", "tools")
        token_ids: list[int] = []
        boundaries: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] not in ("system", "user", "assistant"):
                raise InvalidRequest(f"this chat template does not know the role {message['role']!r}", "messages")
            text = f"{message['role']}\n{message['content']}"
            token_ids += [_MESSAGE_START, *text.encode(), _MESSAGE_END]
            if i == len(messages) - 1 or (i == 0 and message["role"] == "system"):
                boundaries.append(len(token_ids))
        if add_generation_prompt:
            token_ids += [_MESSAGE_START, *b"assistant\n"]
        return RenderedPrompt(token_ids=token_ids, boundaries=boundaries)

    def stream(self) -> TextStream:
        return _ByteStream()


def load_fake_tokenizer(folder: str) -> FakeTokenizer:
    """A FakeTokenizer, whatever the folder."""
    return FakeTokenizer()
