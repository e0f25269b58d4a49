"""Incremental parsing of a model's output: text in pieces of any size in; content, reasoning and tool calls out."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from cairn.server.parsers.values import dump_json


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the client's user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text between `<think>` and `</think>`."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The answer's tool call number `index`, from 0, calls the tool `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of that call's arguments. All pieces together are a JSON object if the call ends."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """That call is complete, and its arguments are a JSON object. A call without an end was truncated, or is broken."""

    index: int


@dataclass(frozen=True, slots=True)
class ToolCallBroken:
    """That call can no longer become a complete one. `text`: all of it so far as the model wrote it, which is content
    where the call's beginning has not been sent yet."""

    index: int
    text: str


OutputEvent: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallBroken

ToolSchemas: TypeAlias = dict[str, dict[str, Any]]
"""A tool's name -> the JSON schema of its parameters, empty if it has none."""

State: TypeAlias = Callable[[bool], bool]
"""One state of a parser. Takes what it can from the front of the pending text; the argument says whether that text is
all that comes. Returns False if it needs more text."""

_MAX_PIECE = 4096
"""Characters of text that are parsed at once."""

MAX_NEWLINES = 64
"""Newlines in a row that are treated as part of the tag next to them, at most."""

_FENCE, _CODE_ENDS = "```", ("`", "\n\n")


def describe_call(begin: str, head: str, names: Sequence[str], end: str) -> dict[str, Any]:
    """A structural tag's tag: what the regular expression `head` matches, one of the texts `names`, and any text."""
    opening = [{"type": "regex", "pattern": head}] if head else []
    named = {"type": "or", "elements": [{"type": "const_string", "value": name} for name in names]}
    content = {"type": "sequence", "elements": [*opening, named, {"type": "any_text"}]}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def find_tag(text: str, tags: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Position of the first tag at or after `start`, and which it is; the longest of those that begin there."""
    matches = [(position, -len(tag), tag) for tag in tags if (position := text.find(tag, start)) >= 0]
    return (min(matches)[0], min(matches)[2]) if matches else None


def count_partial_tag(text: str, tags: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may be the beginning of a tag."""
    longest = min(len(text), max(map(len, tags)) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)


def _count_trailing_newlines(text: str) -> int:
    return min(len(text) - len(text.rstrip("\n")), MAX_NEWLINES)


class OutputParser:
    """Parses one answer. This class takes everything for content; subclasses add states.

    However the text is cut into pieces, the events have the same texts. No text raises, and none is lost: what is no
    markup, or wrong markup, is content. Only newlines next to tags are dropped and, at the end, the beginning of the
    tag that closes a complete call; of a truncated answer also a call whose head is not complete. Pending text is
    bounded.
    """

    only_known_tools = False
    """Whether calls of tools that the request does not have are text."""

    looks_for_reasoning = False
    """Whether there may be some."""

    reasoning_start = reasoning_end = ""
    """Texts that the reasoning begins with, and at whose first occurrence it ends."""

    call_head = ""
    """The text that the last call began with, up to where it was certain to be one."""

    def __init__(self) -> None:
        self._text = ""
        self._state: State = self._parse_content
        self._skip_newlines = False
        self._truncated = False
        self._events: list[OutputEvent] = []

    @property
    def num_pending(self) -> int:
        """Characters that were fed and are in no event yet."""
        return len(self._text)

    def extract_streaming(self, delta_text: str) -> list[OutputEvent]:
        """The events that are certain once `delta_text` has been added."""
        events: list[OutputEvent] = []
        # Text is taken from the front of what is pending, which copies the rest.
        for start in range(0, len(delta_text), _MAX_PIECE):
            self._text += delta_text[start : start + _MAX_PIECE]
            events += self._run(final=False)
        return events

    def finish(self, *, truncated: bool = False) -> list[OutputEvent]:
        """The last events. `truncated`: the answer was stopped (by length or a stop string), it did not end by itself:
        a call without a complete name is dropped then."""
        self._truncated = truncated
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[OutputEvent]:
        running = True
        while running:
            if self._skip_newlines:
                self._text = self._text.lstrip("\n")
                self._skip_newlines = not self._text
            running = self._state(final)
        return self._take_events()

    def _take_events(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def _parse_content(self, final: bool) -> bool:
        self._emit_content(self._take(len(self._text)))
        return False

    def _emit_content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _take_until(self, tags: Sequence[str], final: bool) -> tuple[str, str]:
        """The text before the first tag, and that tag with the newlines in front of it. Without a tag: the text that
        belongs to none, and an empty string."""
        match = find_tag(self._text, tags)
        if match is None:
            safe = len(self._text)
            if not final:
                safe -= count_partial_tag(self._text, tags)
                safe -= _count_trailing_newlines(self._text[:safe])
            return self._take(safe), ""
        position, tag = match
        newlines = _count_trailing_newlines(self._text[:position])
        return self._take(position - newlines), self._take(newlines + len(tag))


class ToolParser(OutputParser, ABC):
    """Looks for tool calls, which begin with one of `opening_tags`, and end with `closing_tag` where there is one.
    `tools`: those that may be called.

    What begins a call, its head, is pending until it is certain: nothing of a call is told before. What is quoted by
    backticks within a line is no call. One that can not become complete after its head is broken: the answer ended by
    itself inside a value, or the arguments are no JSON and cannot be mended.
    """

    opening_tags: Sequence[str]
    closing_tag: ClassVar[str] = ""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__()
        self._tools = tools
        self._num_calls = self._num_arguments = 0  # the latter: of the call that has begun
        self._before = ""  # the last characters before what is pending
        self._opening = ""  # markup of a call that is not certain yet
        self._call_text: list[str] | None = None  # of the call that has begun and not ended

    @property
    def num_pending(self) -> int:
        return len(self._text) + len(self._opening)

    @classmethod
    @abstractmethod
    def describe_calls(cls, names: Sequence[str]) -> list[dict[str, Any]]:
        """Calls of the tools `names`, as tags of a structural tag: one for each opening tag."""

    @classmethod
    @abstractmethod
    def list_heads(cls, names: Sequence[str]) -> list[str]:
        """What calls of the tools `names` begin with at least, each without any whitespace."""

    @abstractmethod
    def _start_call(self, tag: str) -> State:
        """The state after the opening tag `tag`."""

    def finish(self, *, truncated: bool = False) -> list[OutputEvent]:
        events = super().finish(truncated=truncated)
        if self._call_text is not None and not truncated:
            self._break_call()
            self._emit_content(self._take(len(self._text)))
        return events + self._take_events()

    def _parse_content(self, final: bool) -> bool:
        text, tag = self._take_until(self.opening_tags, final)
        self._before = (self._before + text)[-len(_FENCE) :]
        self._emit_content(text)
        is_code = self._before.endswith("`") and self._before != _FENCE and not tag.startswith("\n")
        if tag and is_code:
            self._emit_content(tag)
            self._state = self._parse_code
        elif tag:
            self._opening = tag
            self._state = self._start_call(tag.lstrip("\n"))
        if tag:
            self._before = ""
        return bool(tag)

    def _parse_code(self, final: bool) -> bool:
        """Code within a line of text, up to its backtick; a blank line ends it as well."""
        end = find_tag(self._text, _CODE_ENDS)
        safe = len(self._text) if final else len(self._text) - count_partial_tag(self._text, _CODE_ENDS)
        self._emit_content(self._take(safe if end is None else end[0] + (end[1] == "`")))
        if final or end is not None:
            self._state = self._parse_content
        return end is not None

    def _take(self, count: int) -> str:
        taken = super()._take(count)
        if self._call_text is not None:
            self._call_text.append(taken)
        return taken

    def _reject_call(self) -> bool:
        """The markup taken for a call is content."""
        self._emit_content(self._opening)
        self._opening = ""
        self._state = self._parse_content
        return True

    def _must_decide(self, final: bool) -> bool:
        """Whether incomplete markup must be something now. In a truncated answer it is nothing: a client that shows
        content would show half a call."""
        return final and not self._truncated

    def _may_call(self, name: str) -> bool:
        """Whether a well-formed call of this tool is one. A client can say best what is wrong with an unknown name."""
        return name in self._tools or not self.only_known_tools

    def _begin_call(self, name: str, num_head: int = 0) -> None:
        """`num_head`: characters of the pending text that belong to the head, too."""
        self._call_text, self._opening = [self._opening], ""
        self._take(num_head)
        self._num_arguments = 0
        self.call_head = "".join(self._call_text)
        self._events.append(ToolCallStart(self._num_calls, name))

    def _parse_call_head(
        self, final: bool, head: re.Pattern[str], beginning: re.Pattern[str], next_state: State
    ) -> bool:
        """A call whose head is `head`, of which group 1 is the tool's name. `beginning`: what it may still become one
        from. `next_state`: writes the arguments after their bracket."""
        match = head.match(self._text)
        if match is None:
            is_open = not self._must_decide(final) and beginning.fullmatch(self._text) is not None
            return not is_open and self._reject_call()
        if not self._may_call(match[1]):
            return self._reject_call()
        self._begin_call(match[1], match.end())
        self._write_arguments("{")
        self._state = next_state
        return True

    def _end_call(self, next_state: State) -> None:
        self._events.append(ToolCallEnd(self._num_calls))
        self._leave_call(next_state)

    def _break_call(self) -> bool:
        """The call that has begun is none; what is pending is content."""
        self._events.append(ToolCallBroken(self._num_calls, "".join(self._call_text or ())))
        self._leave_call(self._parse_content)
        self._skip_newlines = False
        return True

    def _leave_call(self, next_state: State) -> None:
        self._call_text = None
        self._num_calls += 1
        self._skip_newlines = next_state == self._parse_content
        self._state = next_state

    def _parse_tail(self, final: bool) -> bool:
        """The tag that closes the call, which may be missing."""
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        if spaces <= MAX_NEWLINES:
            if self.closing_tag and bare.startswith(self.closing_tag):
                self._take(spaces + len(self.closing_tag))
            elif self.closing_tag.startswith(bare):
                if not final:
                    return False
                # A truncated closing tag is no content.
                self._take(len(self._text))
        self._state, self._skip_newlines = self._parse_content, True
        return True

    def _write_argument_name(self, name: str) -> None:
        """After the bracket that opens the object; the argument's value is to follow."""
        self._write_arguments((", " if self._num_arguments else "") + dump_json(name) + ": ")
        self._num_arguments += 1

    def _write_arguments(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self._num_calls, text))
