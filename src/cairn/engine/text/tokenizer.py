"""Text to token ids and back: tokenizer.json, or what a GGUF file has, through `tokenizers`, chat templates through
`transformers`. No torch."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from cairn.engine.contract import Breakpoint, RenderedPrompt, TemplateValue
from cairn.engine.text.chat import Chat, first_turn, pictures
from cairn.engine.text.chat_template import ChatTemplate, list_boundaries, place_boundaries
from cairn.engine.text.fitting import fit
from cairn.engine.text.gguf_tokenizer import load_gguf_tokenizer
from cairn.engine.text.images import ImagePrompts
from cairn.errors import InvalidRequest, ModelError
from cairn.models.weights.gguf.header import is_gguf

__all__ = ["MARKS", "IncrementalText", "ModelTokenizer", "marks_of"]

Messages = Sequence[dict[str, Any]]

MARKS = frozenset(
    (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>"),
        *("<|tool_call_start|>", "<|tool_call_end|>"),
        *("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    )
)
"""Part of an answer's text, also where a checkpoint calls them special: what they enclose is told by them. The last
ones are harmony's, where there is `<|channel|>`: others end answers by tokens of these names."""

_OF_HARMONY = frozenset(("<|start|>", "<|constrain|>", "<|message|>", "<|end|>"))

_REPLACEMENT = "\ufffd"
_OPEN_TOKENS = 4
"""A character has at most 4 bytes, so it stays open over at most 4 tokens."""
_USUAL_WINDOW = 8
"""Tokens behind which `IncrementalText` cuts where no character is open."""
_WINDOW, _CONTEXT = 32, 16
"""How many tokens it decodes at most, and how many it keeps when it cuts although one is open."""

_HOW_LOADED = frozenset(
    (
        *("vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "name_or_path"),
        *("backend", "is_local", "local_files_only"),
    )
)
"""Where transformers has the tokenizer from, which it keeps among its settings."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class ModelTokenizer:
    """The tokenizer of one checkpoint, a folder or a GGUF file; implements `TextTokenizer`. Safe to use from several
    threads.

    Only files of the folder are read, no code of it is run.
    """

    def __init__(self, model: Path, tokenizer: Path | None = None, chat_template: str | None = None) -> None:
        """`tokenizer`: folder of another tokenizer than the `model`'s; `chat_template`: stands in for its own.

        Raises ModelError when tokenizer.json, or a GGUF file's vocabulary, is missing or damaged."""
        # Its advice (another tokenizer class, a long text) is for people who train.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._chat = _load(tokenizer or model)
        if chat_template is not None:
            self._chat.chat_template = chat_template
        self._template = ChatTemplate(self._chat.apply_chat_template, self._chat.chat_template)
        self._text: Tokenizer = self._chat.backend_tokenizer
        self._text.no_truncation()
        self._text.no_padding()
        self._is_harmony = self._text.token_to_id("<|channel|>") is not None
        marks = marks_of(self._is_harmony)
        self._special = frozenset(
            token_id
            for token_id, token in self._text.get_added_tokens_decoder().items()
            if token.special and token.content not in marks
        )
        self._spelling = TokenSpelling(self._text)
        # bytes side by side: what a character's last byte is followed by does not change it
        self._texts = TokenTexts(self._text) if isinstance(self._text.decoder, decoders.ByteLevel) else None
        self._images = ImagePrompts.read(model, self._text.id_to_token)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included."""
        return self._text.get_vocab_size(with_added_tokens=True)

    @property
    def image_markers(self) -> tuple[str, ...]:
        """See `TextTokenizer`."""
        return () if self._images is None else self._images.markers

    @property
    def image_token(self) -> int | None:
        """The id that stands for images; None where the model reads text alone."""
        return None if self._images is None else self._images.token

    @property
    def eos_token_id(self) -> int | None:
        """What tokenizer_config.json, or an older file of the folder, calls `eos_token`; None where none does."""
        token_id: int | None = self._chat.eos_token_id
        return token_id

    @property
    def harmony_ends(self) -> tuple[int, ...]:
        """The ids of `<|return|>` and `<|call|>`, either of which ends an answer in harmony; none where that is not."""
        if not self._is_harmony:
            return ()
        ids = map(self._text.token_to_id, ("<|return|>", "<|call|>"))
        return tuple(each for each in ids if each is not None)

    @property
    def chat_template(self) -> str:
        """See `TextTokenizer`."""
        template = self._chat.chat_template
        return template if isinstance(template, str) else ""

    def describe(self) -> dict[str, Any]:
        """See `TextTokenizer`."""
        settings = {name: value for name, value in self._chat.init_kwargs.items() if name not in _HOW_LOADED}
        described = {**settings, "tokenizer_class": type(self._chat).__name__}
        if self._chat.chat_template:
            described["chat_template"] = self._chat.chat_template
        plain: dict[str, Any] = json.loads(json.dumps(described, default=_token_text))
        return plain

    def to_json(self) -> str:
        """What tokenizer.json holds, with the tokens that other files of the folder have added."""
        written: str = self._text.to_str()
        return written

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequest for text that has no UTF-8 form (a lone surrogate)."""
        return self._encode(text, add_special_tokens, "prompt")

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text, special tokens included; ids beyond the vocabulary give nothing."""
        return self._text.decode(list(token_ids), skip_special_tokens=False)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """See `TextTokenizer`."""
        return [self._text.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """See `TextTokenizer`; an id beyond the vocabulary gives nothing."""
        return self._spelling.token_bytes(token_id)

    def stream(self, skip_special_tokens: bool = True) -> "IncrementalText":
        """The text of an answer; special tokens are left out unless they are asked for."""
        return IncrementalText(self._text, self._special if skip_special_tokens else frozenset(), self._texts)

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, TemplateValue] = MappingProxyType({}),
        breakpoints: Sequence[Breakpoint] = (),
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> RenderedPrompt:
        """The chat template applied; `boundaries` are the ends of the leading system segment (tools included), of each
        message and of each image, and `breakpoints`, as far as they can be found and what comes before them has the
        same tokens without what comes after.

        Raises InvalidRequest when the template refuses the messages, a content part is neither text nor an image that
        the model reads, or something other than an image takes an image's place.
        """
        images = pictures(messages)
        if images and self._images is None:
            raise InvalidRequest("this model reads text alone, no images", "messages")
        messages, breakpoints = fit(messages, breakpoints, self._template.traits(chat_template))
        chat = Chat(
            messages=self._template.plain(messages, chat_template),
            tools=tuple(tools or ()),
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
        )
        text = self._template.render(chat)
        token_ids = self._encode(text, False, "messages")
        ends = self._template.ends(chat, text, messages, breakpoints)
        boundaries = list_boundaries(ends, first_turn(chat.messages), breakpoints)
        placed = place_boundaries(boundaries, text, token_ids, lambda part: self._encode(part, False, "messages"))
        rendered = RenderedPrompt(token_ids=token_ids, boundaries=placed)
        return rendered if self._images is None else self._images.expand(rendered, images)

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            token_ids: list[int] = self._text.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text has a lone surrogate, so it is no Unicode text", param) from error
        return token_ids


def marks_of(is_harmony: bool) -> frozenset[str]:
    """`MARKS` of one tokenizer. `is_harmony`: whether it has `<|channel|>`."""
    return MARKS if is_harmony else MARKS - _OF_HARMONY


def _load(folder: Path) -> PreTrainedTokenizerFast:
    if is_gguf(folder):
        return load_gguf_tokenizer(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: missing; slow tokenizers are not supported, save the fast form")
    try:
        loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises bare Exception for a damaged tokenizer.json
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    return loaded


def _token_text(value: object) -> str:
    """What JSON has no form for: added tokens as their texts."""
    return str(getattr(value, "content", value))


class TokenTexts(dict[int, str]):
    """The texts of tokens that are whole by themselves, of a tokenizer whose decoder looks at bytes alone: so they
    are the same after any text without an open character. Empty for a token that ends within a character, or for none.
    Each is decoded when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        self[token_id] = text = "" if text.endswith(_REPLACEMENT) else text
        return text


class IncrementalText:
    """Decodes one answer token by token; what it has given out never changes. Implements `TextStream`.

    An unfinished character decodes to U+FFFD at the end of the text, so such an end is held back until it changes, or
    until it is older than any character can be. Only the last few tokens are decoded again at each step.
    """

    __slots__ = ("_held", "_place", "_seen", "_skip", "_texts", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], texts: TokenTexts | None = None) -> None:
        """`skip`: ids that give no text. `texts`: None where a token's text may depend on those before it."""
        self._tokenizer = tokenizer
        self._skip = skip
        self._texts = texts
        self._window: list[int] = []
        self._place = 0  # in the window: where no character was open before
        self._seen = 0  # characters of the window's text that have been given out
        self._held = 0  # tokens since anything was

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still open."""
        if token_id in self._skip:
            return ""
        if self._texts is not None and not self._window and (text := self._texts[token_id]):
            self._held = 0
            return text
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        settled = len(text.rstrip(_REPLACEMENT))
        self._held += 1
        if settled <= self._seen and self._held > _OPEN_TOKENS:
            settled = len(text) - 1
        new = text[self._seen : settled]
        if new:
            self._seen, self._held = settled, 0
        pending, size = len(text) - self._seen, len(self._window)
        if size > _WINDOW:
            self._cut(size - _CONTEXT, pending)
        elif not pending:
            if self._texts is not None:
                self._cut(size, pending)
            elif size > _USUAL_WINDOW:
                self._cut(self._place, pending)
            self._place = len(self._window)
        return new

    def finish(self) -> str:
        """What is left when the answer ends, a cut character as U+FFFD."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        rest = text[self._seen :]
        self._seen = len(text)
        return rest

    def _cut(self, num_tokens: int, pending: int) -> None:
        # The start of the shorter window may decode differently, so what is given out is counted from the end.
        del self._window[:num_tokens]
        self._place = 0
        self._seen = len(self._tokenizer.decode(self._window, skip_special_tokens=False)) - pending


class TokenSpelling:
    """Reads the vocabulary's own spelling: GPT-2's letters for bytes, or SentencePiece's sign for a space and names for
    single bytes (Radford et al. 2019; Kudo and Richardson 2018)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._letters = _byte_of_letter() if "ByteLevel" in json.dumps(decoder) else None

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for an id that stands for nothing."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelled: str | None = self._tokenizer.id_to_token(token_id)
        if spelled is None:
            return b""
        if self._letters is not None:
            return b"".join(self._letters.get(letter) or letter.encode() for letter in spelled)
        byte = _BYTE.fullmatch(spelled)
        return bytes.fromhex(byte[1]) if byte else spelled.replace(_SPACE, " ").encode()


def _byte_of_letter() -> dict[str, bytes]:
    """GPT-2's letters: printable Latin-1 stands for itself, all other bytes for the letters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}
