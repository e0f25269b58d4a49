"""Text to tokens and back, and chats to prompts."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import msgspec

from cairn.engine.contract.request import ImageInput
from cairn.types import Boundary

SYSTEM_ROLES = ("system", "developer")
"""Roles of messages that say how to answer."""


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids, with the places at which messages end (see `GenerateRequest.boundaries`), and its images
    in order. `field`: where the client put it, `prompt[1]` for one of several; `text`: what it said there, None where
    that was no text."""

    token_ids: list[int]
    boundaries: list[Boundary]
    images: list[ImageInput] = []
    field: str = "messages"
    text: str | None = None


TemplateValue: TypeAlias = Any
"""A variable of a chat template: whatever JSON can say."""


class Breakpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a chat that its client wants held for `seconds` after each use: the end of part `part` of the content
    of message `message`, which is not its last; with part None that of the whole message, and with message None that
    of the tools."""

    message: int | None = None
    part: int | None = None
    seconds: int


class TextStream(Protocol):
    """Turns one answer's tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still open."""

    def finish(self) -> str:
        """What is left when the answer ends, a cut character as U+FFFD."""


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def image_markers(self) -> tuple[str, ...]:
        """The texts that a chat template writes for images and that nobody else may write; empty where the model reads
        text alone."""

    @property
    def chat_template(self) -> str:
        """The chat template's text, which shows how answers are written; empty where there is none."""

    def describe(self) -> dict[str, Any]:
        """`tokenizer_class`, `chat_template` where there is one, and the settings that tokenizer_config.json has."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, as UTF-8 that may begin or end within a character."""

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; an id that it does not have gives nothing."""

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
        """The chat template applied, or `chat_template` in its stead. Of `template_kwargs` those are among its
        variables that it reads. With `continue_final_message` the prompt
        ends within the last message, where its text does. Content is text, or parts `{"type": "text",
        "text": ...}` and `{"type": "image", "image": Pixels}`. Raises InvalidRequest when the template refuses the
        messages."""

    def stream(self, skip_special_tokens: bool = True) -> TextStream: ...
