"""Text to token ids and back: tokenizer.json through `tokenizers`, chat templates through `transformers`. No torch."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cairn.engine.contract import RenderedPrompt
from cairn.errors import InvalidRequest, ModelError

__all__ = ["IncrementalText", "ModelTokenizer"]

Messages = Sequence[dict[str, Any]]

SYSTEM_ROLES = ("system", "developer")

# What a template can run into when messages have the wrong form; TemplateError includes its own raise_exception.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)

_REPLACEMENT = "\ufffd"
_OPEN_TOKENS = 4
"""A character has at most 4 bytes, so it stays open over at most 4 tokens."""
_WINDOW, _CONTEXT = 32, 16
"""How many tokens `IncrementalText` decodes at most, and how many it keeps when it cuts."""


class ModelTokenizer:
    """The tokenizer of one checkpoint folder; implements `TextTokenizer`. Safe to use from several threads.

    Only files of the folder are read, no code of it is run.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when tokenizer.json is missing or damaged."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: missing; slow tokenizers are not supported, save the fast form")
        # Its advice (another tokenizer class, a long text) is for people who train.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            self._chat = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exception for a damaged tokenizer.json
            raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        self._text: Tokenizer = self._chat.backend_tokenizer
        self._text.no_truncation()
        self._text.no_padding()
        self._special = frozenset(
            token_id for token_id, token in self._text.get_added_tokens_decoder().items() if token.special
        )

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included."""
        return self._text.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._chat.eos_token_id
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequest for text that has no UTF-8 form (a lone surrogate)."""
        return self._encode(text, add_special_tokens, "prompt")

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text, special tokens included; ids beyond the vocabulary give nothing."""
        return self._text.decode(list(token_ids), skip_special_tokens=False)

    def stream(self) -> "IncrementalText":
        """The text of an answer: special tokens are left out."""
        return IncrementalText(self._text, self._special)

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """The chat template applied; `boundaries` are the ends of the leading system segment (tools included) and of
        the last message, each only where its own rendering is an exact token prefix of the whole.

        Raises InvalidRequest when the template refuses the messages or a content part is not text.
        """
        plain = [_plain(index, message) for index, message in enumerate(messages)]
        if not plain:
            raise InvalidRequest("messages must not be empty", "messages")
        token_ids = self._encode(self._render(plain, tools, add_generation_prompt), False, "messages")
        # Some templates write a system segment of their own; an empty system message brings it out.
        leading = plain[: _first_turn(plain)] or [{"role": "system", "content": ""}]
        ends = {
            self._prefix_end(leading, tools, token_ids),
            self._prefix_end(plain, tools, token_ids) if add_generation_prompt else len(token_ids),
        }
        return RenderedPrompt(token_ids=token_ids, boundaries=sorted(ends - {0}))

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            token_ids: list[int] = self._text.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text has a lone surrogate, so it is no Unicode text", param) from error
        return token_ids

    def _prefix_end(self, messages: Messages, tools: Sequence[dict[str, Any]] | None, token_ids: list[int]) -> int:
        """How many tokens the first messages take, or 0 where they are no exact prefix of the whole."""
        try:
            part = self._render(messages, tools, add_generation_prompt=False)
        except InvalidRequest:
            return 0
        prefix = self._encode(part, False, "messages")
        return len(prefix) if token_ids[: len(prefix)] == prefix else 0

    def _render(self, messages: Messages, tools: Sequence[dict[str, Any]] | None, add_generation_prompt: bool) -> str:
        if not self._chat.chat_template:
            raise InvalidRequest("this model has no chat template; send a prompt to /v1/completions", "messages")
        try:
            return str(
                self._chat.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                )
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error


class IncrementalText:
    """Decodes one answer token by token; what it has given out never changes. Implements `TextStream`.

    An unfinished character decodes to U+FFFD at the end of the text, so such an end is held back until it changes, or
    until it is older than any character can be. Only the last few tokens are decoded again at each step.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        """`skip`: ids that give no text."""
        self._tokenizer = tokenizer
        self._skip = skip
        self._window: list[int] = []
        self._seen = 0  # characters of the window's text that have been given out
        self._held = 0  # tokens since anything was

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still open."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        settled = len(text.rstrip(_REPLACEMENT))
        self._held += 1
        if settled <= self._seen and self._held > _OPEN_TOKENS:
            settled = len(text) - 1
        new = text[self._seen : settled]
        if new:
            self._seen, self._held = settled, 0
        if len(self._window) > _WINDOW:
            self._cut(pending=len(text) - self._seen)
        return new

    def finish(self) -> str:
        """What is left when the answer ends, a cut character as U+FFFD."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        rest = text[self._seen :]
        self._seen = len(text)
        return rest

    def _cut(self, pending: int) -> None:
        # The start of the shorter window may decode differently, so the place is counted from the end.
        del self._window[:-_CONTEXT]
        self._seen = len(self._tokenizer.decode(self._window, skip_special_tokens=False)) - pending


def _first_turn(messages: Messages) -> int:
    """The index of the first message that is not a system message."""
    return next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))


def _plain(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: content as one string, tool call arguments as objects."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}].role must be a string", "messages")
    plain = {**message, "content": _plain_content(index, message.get("content"))}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise InvalidRequest(f"messages[{index}].tool_calls must be a list", "messages")
        plain["tool_calls"] = [_plain_call(index, call) for call in message["tool_calls"]]
    return plain


def _plain_content(index: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"messages[{index}].content must be a string or a list of text parts", "messages")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(
                f"messages[{index}].content: part {kind!r} is not text; only text is served", "messages"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _plain_call(index: int, call: object) -> dict[str, Any]:
    """OpenAI sends arguments as a string of JSON; templates write them out themselves, from an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"messages[{index}].tool_calls: each must be an object with a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"messages[{index}].tool_calls: arguments are not JSON: {error}", "messages"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}
