"""A tokenizer in memory: one token per UTF-8 byte, and three special ones."""

import codecs
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cairn.engine.contract import Breakpoint, ImageInput, Pixels, RenderedPrompt, TemplateValue, TextStream
from cairn.engine.text.chat import Chat, text_of
from cairn.engine.text.fitting import fit
from cairn.engine.text.template_traits import TemplateTraits
from cairn.errors import InvalidRequest
from cairn.types import Boundary, BoundaryKind

__all__ = ["END_OF_SEQUENCE", "VOCAB_SIZE", "ByteTokenizer", "load_byte_tokenizer"]

END_OF_SEQUENCE = 256
_MESSAGE_START = 257
_MESSAGE_END = 258
VOCAB_SIZE = 259


_SPECIAL = MappingProxyType({END_OF_SEQUENCE: b"<end>", _MESSAGE_START: b"<start>", _MESSAGE_END: b"<stop>"})


class _ByteStream:
    def __init__(self, skip_special_tokens: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._skips = skip_special_tokens

    def push(self, token_id: int) -> str:
        if token_id in _SPECIAL:
            return "" if self._skips else self._decoder.decode(b"", final=True) + _SPECIAL[token_id].decode()
        return self._decoder.decode(bytes([token_id]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteChat:
    """A chat as it is written."""

    def __init__(self, image: Callable[[int, Pixels], ImageInput], holds: dict[tuple[int | None, int | None], int]):
        self.token_ids: list[int] = []
        self.boundaries: list[Boundary] = []
        self.images: list[ImageInput] = []
        self._image = image
        self._holds = holds

    def write(self, role: str, content: Any, index: int | None, kind: BoundaryKind, calls: Any = None) -> None:
        self.token_ids += [_MESSAGE_START, *f"{role}\n".encode()]
        parts: list[dict[str, Any]] = [{"text": content}] if isinstance(content, str) else content
        for number, part in enumerate(parts):
            if "text" in part:
                self.token_ids += part["text"].encode()
            else:
                self.images.append(self._image(len(self.token_ids), part["image"]))
                self.token_ids += [0] * self.images[-1].length
            if (index, number) in self._holds:
                self.boundaries.append(Boundary(len(self.token_ids), "breakpoint", self._holds[index, number]))
        if calls:
            self.token_ids += json.dumps(calls, sort_keys=True).encode()
        self.token_ids.append(_MESSAGE_END)
        self.boundaries.append(Boundary(len(self.token_ids), kind, self._holds.get((index, None), 0)))


class ByteTokenizer:
    """Bytes as tokens; a chat is `<start>role newline content<end>` per message, tools before all of them.

    With `image_tokens` it takes images, too, each as so many tokens 0, whatever its size.
    """

    def __init__(self, image_tokens: int = 0, chat_template: str = "") -> None:
        """`chat_template`: what the chats are said to be written by."""
        self._image_tokens = image_tokens
        self._chat_template = chat_template
        self._traits = TemplateTraits(_try)

    @property
    def chat_template(self) -> str:
        return self._chat_template

    @property
    def image_markers(self) -> tuple[str, ...]:
        return ("\0",) if self._image_tokens else ()

    def describe(self) -> dict[str, Any]:
        return {"tokenizer_class": "ByteTokenizer", "chat_template": self._chat_template, "eos_token": "<end>"}

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
        template_kwargs: Mapping[str, TemplateValue] = MappingProxyType({}),
        breakpoints: Sequence[Breakpoint] = (),
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> RenderedPrompt:
        chat = _ByteChat(self._image, {(point.message, point.part): point.seconds for point in breakpoints})
        if tools:
            chat.write("tools", json.dumps(list(tools), sort_keys=True), None, "system_end")
        for name in ("documents", "reasoning_effort"):
            if name in template_kwargs:
                chat.write(name, json.dumps(template_kwargs[name]), None, "system_end")
        if chat_template is not None:
            chat.write("template", chat_template, None, "system_end")
        if any(message["role"] == "developer" for message in messages):
            messages, breakpoints = fit(messages, breakpoints, self._traits)
        for i, message in enumerate(messages):
            role = _check_role(message)
            kind: BoundaryKind = "system_end" if i == 0 and role == "system" else "message_end"
            chat.write(role, message["content"], i, kind, message.get("tool_calls"))
        if continue_final_message:
            chat.token_ids.pop()
            chat.boundaries.pop()
        elif add_generation_prompt:
            chat.token_ids += [_MESSAGE_START, *b"assistant\n"]
            if template_kwargs.get("enable_thinking"):
                chat.token_ids += b"<think>"
        return RenderedPrompt(token_ids=chat.token_ids, boundaries=chat.boundaries, images=chat.images)

    def _image(self, start: int, pixels: Pixels) -> ImageInput:
        return ImageInput(
            start=start,
            length=self._image_tokens,
            digest=hashlib.sha256(f"{pixels.width}x{pixels.height}:".encode() + pixels.rgb).digest(),
            grid=(1, 1, self._image_tokens),
            width=pixels.width,
            height=pixels.height,
            rgb=pixels.rgb,
        )

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [_SPECIAL[token].decode() if token in _SPECIAL else chr(token) for token in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        return _SPECIAL.get(token_id) or bytes([token_id])

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        return _ByteStream(skip_special_tokens)


def _check_role(message: Mapping[str, Any]) -> str:
    role: str = message["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise InvalidRequest(f"this chat template does not know the role {role!r}", "messages")
    return role


def _try(chat: Chat) -> str:
    """What `ByteTokenizer` makes of a chat of texts."""
    return "".join(f"{_check_role(message)}\n{text_of(message['content'])}" for message in chat.messages)


def load_byte_tokenizer(folder: str, tokenizer: str | None = None, chat_template: str | None = None) -> ByteTokenizer:
    """A ByteTokenizer, whatever the folders."""
    return ByteTokenizer(chat_template=chat_template or "")
