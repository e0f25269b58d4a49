"""Answers in harmony, gpt-oss's format (openai/harmony): messages, each with a header that says what it is.

<|channel|>analysis<|message|>A question of weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
<|start|>assistant<|channel|>final<|message|>It rains.<|return|>

`analysis` is reasoning. What is addressed to a function is a call of it. All else, `final` and what `commentary` says
to the user, is content. The prompt ends with `<|start|>assistant`.
"""

import re
from collections.abc import Sequence
from typing import Any

from cairn.server.parsers.json_mender import JsonMender
from cairn.server.parsers.output_parser import (
    MAX_NEWLINES,
    Content,
    Reasoning,
    State,
    ToolParser,
    ToolSchemas,
    count_partial_tag,
    find_tag,
)

START, CHANNEL, MESSAGE, CONSTRAIN, END = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"

REASONING_START, REASONING_END = f"{CHANNEL}analysis{MESSAGE}", END
_OPENERS = (START, CHANNEL)
_ENDS = (END, "<|call|>", "<|return|>")
_TAGS = (*_ENDS, *_OPENERS)

MAX_HEADER = 1024
"""Characters of a header at most."""

_MAX_SPACES = 8
_SPACES, _NAME = rf"\s{{0,{_MAX_SPACES}}}", r"[^\s<]{1,256}"
_HEADER = re.compile(
    rf"{_SPACES}(?:<\|start\|>)?{_SPACES}(?:assistant)?{_SPACES}(?:to=({_NAME}){_SPACES})?"
    rf"<\|channel\|>{_SPACES}(analysis|commentary|final){_SPACES}(?:to=({_NAME}){_SPACES})?"
    rf"(?:<\|constrain\|>{_SPACES})?(?:[a-z_]{{1,32}}{_SPACES})?<\|message\|>"
)
_FUNCTIONS = "functions."


def call_header(name: str) -> str:
    """What a call of this tool begins with, as the model writes it."""
    return f"{CHANNEL}commentary to={_FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"


class HarmonyParser(ToolParser):
    """Reasoning, content and calls at once. Texts of several messages of one kind have a newline between them. A header
    that is none is content, and so is a text without any. The last message may lack its end, as the token that ends an
    answer is no text. A call's arguments are passed on as the model writes them, mended by `JsonMender`.

    `opened`: the prompt ends within the reasoning. `parses_calls`, `parses_reasoning`: otherwise these are content.
    """

    opening_tags = _OPENERS
    closing_tag = END
    reasoning_start = REASONING_START

    def __init__(
        self, tools: ToolSchemas, *, opened: bool = False, parses_calls: bool = True, parses_reasoning: bool = True
    ) -> None:
        super().__init__(tools)
        self.looks_for_reasoning = parses_reasoning
        self.reasoning_end = REASONING_END
        self._parses_calls = parses_calls
        self._in_reasoning = opened and parses_reasoning
        self._is_new = False  # whether the next text is the first one of a message
        self._kinds: set[bool] = set()  # whether texts so far are reasoning or not
        self._mender, self._has_arguments = JsonMender(), False
        self._state = self._parse_content if opened else self._parse_header

    @classmethod
    def describe_calls(cls, names: Sequence[str]) -> list[dict[str, Any]]:
        """Without an end: what ends a call ends the answer, and is no text."""
        begin, _, _ = call_header("").partition(" " + CONSTRAIN)
        named = [{"type": "const_string", "value": call_header(name).removeprefix(begin)} for name in names]
        arguments = {"type": "json_schema", "json_schema": {"type": "object"}}
        content = {"type": "sequence", "elements": [{"type": "or", "elements": named}, arguments]}
        return [{"type": "tag", "begin": begin, "content": content, "end": ""}]

    @classmethod
    def list_heads(cls, names: Sequence[str]) -> list[str]:
        return ["".join(call_header(name).split()) for name in names]

    def _start_call(self, tag: str) -> State:
        return self._parse_header

    def _parse_header(self, final: bool) -> bool:
        """At an answer's beginning, and behind a message."""
        bare = self._text.lstrip()
        is_near = len(self._text) - len(bare) <= _MAX_SPACES
        if is_near and bare.startswith(_OPENERS):
            return self._read_header(final, len(self._text) - len(bare))
        if is_near and not final and any(opener.startswith(bare) for opener in _OPENERS):
            return False
        self._begin_text(in_reasoning=False, is_new=False)
        return True

    def _read_header(self, final: bool, num_spaces: int) -> bool:
        end = self._text.find(MESSAGE, 0, MAX_HEADER)
        is_open = end < 0 and len(self._text) < MAX_HEADER and find_tag(self._text, _ENDS) is None
        if is_open and not self._must_decide(final):
            # A header that is cut off says nothing.
            self._take(len(self._text) if final else 0)
            return False
        header = _HEADER.fullmatch(self._text, 0, end + len(MESSAGE)) if end >= 0 else None
        if header is None or (header[1] and header[3]):
            self._begin_text(in_reasoning=False, is_new=False)
            opener = next(tag for tag in _OPENERS if self._text.startswith(tag, num_spaces))
            self._emit_content(self._take(num_spaces + len(opener)))
            return True
        recipient = header[1] or header[3] or ""
        name = recipient.removeprefix(_FUNCTIONS)
        if name and self._parses_calls and (name != recipient or name in self._tools):
            self._in_reasoning = False
            self._begin_call(name, header.end())
            self._mender, self._has_arguments = JsonMender(), False
            self._state = self._parse_arguments
            return True
        self._begin_text(in_reasoning=header[2] == "analysis" and self.looks_for_reasoning, is_new=True)
        text = self._take(header.end())
        # What is addressed to somebody unknown tells whom.
        self._emit_content(text if recipient else "")
        return True

    def _begin_text(self, *, in_reasoning: bool, is_new: bool) -> None:
        self._in_reasoning, self._is_new = in_reasoning, is_new
        self._state = self._parse_content

    def _parse_content(self, final: bool) -> bool:
        """A message's text, of reasoning or not."""
        match = find_tag(self._text, _TAGS)
        if match is None:
            safe = len(self._text) if final else len(self._text) - count_partial_tag(self._text, _TAGS)
            self._emit_content(self._take(safe))
            return False
        position, tag = match
        self._emit_content(self._take(position))
        self._take(len(tag) if tag in _ENDS else 0)
        self._state = self._parse_header
        return True

    def _emit_content(self, text: str) -> None:
        if not text:
            return
        gap = "\n" if self._is_new and self._in_reasoning in self._kinds else ""
        self._kinds.add(self._in_reasoning)
        self._is_new = False
        self._events.append(Reasoning(gap + text) if self._in_reasoning else Content(gap + text))

    def _parse_arguments(self, final: bool) -> bool:
        """An object up to its last bracket, which may be missing where the call ends; nothing is one without fields."""
        if not self._has_arguments:
            bare = self._text.lstrip()
            self._take(len(self._text) - len(bare))
            if not bare and not final:
                return False
            if not bare.startswith("{"):
                return self._end_without_arguments(final)
            self._has_arguments = True
        decides = self._must_decide(final)
        piece, num_read = self._mender.read(self._text, final=decides)
        self._take(num_read)
        self._write_arguments(piece)
        if self._mender.status == "done":
            self._end_call(self._parse_tail)
            return True
        if self._is_at_end(decides):
            missing = self._mender.missing_end()
            if missing is None:
                return self._break_call()
            self._write_arguments(missing)
            self._end_call(self._parse_tail)
            return True
        may_be_tag = not decides and any(tag.startswith(self._text) for tag in _TAGS)
        return self._mender.status == "wrong" and not may_be_tag and self._break_call()

    def _end_without_arguments(self, final: bool) -> bool:
        decides = self._must_decide(final)
        if self._is_at_end(decides):
            self._write_arguments("{}")
            self._end_call(self._parse_tail)
            return True
        if not decides and any(tag.startswith(self._text) for tag in _TAGS):
            return False
        return self._break_call()

    def _is_at_end(self, decides: bool) -> bool:
        """Whether the message ends here; `decides`: with the answer, if nothing follows."""
        return self._text.startswith(_TAGS) or (decides and not self._text)

    def _parse_tail(self, final: bool) -> bool:
        """Behind the object: the end of the message."""
        bare = self._text.lstrip()
        num_spaces = len(self._text) - len(bare)
        if num_spaces <= MAX_NEWLINES:
            if bare.startswith(_ENDS):
                self._take(num_spaces + len(next(tag for tag in _ENDS if bare.startswith(tag))))
                self._state = self._parse_header
                return True
            if not final and any(tag.startswith(bare) for tag in _TAGS):
                return False
            if not bare or bare.startswith(_OPENERS):
                self._take(num_spaces)
        self._state = self._parse_header
        return bool(self._text)
