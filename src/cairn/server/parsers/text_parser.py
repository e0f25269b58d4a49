"""What the readers of calls have in common: a text that grows, one state at a time, and content up to the next call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from cairn.server.parsers.output_parser import Content, Event, ToolCallArguments, ToolCallEnd, ToolCallStart

MAX_BREAKS = 64
"""Most line breaks in a row that are taken for a part of the markup they stand next to."""

State = Callable[[bool], bool]
"""Takes what it can from the front of the text, told whether that is all; False when it needs more."""


def first_mark(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """The place of the first mark at or behind `start`, and which it is; the longest of those that begin there."""
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark, start)) >= 0]
    if not found:
        return None
    place, _, mark = min(found)
    return place, mark


def open_mark(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def trailing_breaks(text: str) -> int:
    """How many line breaks `text` ends with, at most `MAX_BREAKS`."""
    return min(len(text) - len(text.rstrip("\n")), MAX_BREAKS)


class TextParser:
    """Reads a text that grows, one state at a time. Implements `OutputParser`, where a subclass has the states."""

    def __init__(self, state: State) -> None:
        self._text = ""
        self._state = state
        self._events: list[Event] = []
        self._cut_off = False

    @property
    def held(self) -> int:
        return len(self._text)

    def push(self, text: str) -> list[Event]:
        self._text += text
        return self._run(final=False)

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        self._cut_off = cut_off
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Event]:
        while self._state(final):
            pass
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken


class ToolParser(TextParser, ABC):
    """The part of an `OutputParser` that looks for the marks `beginnings`. A subclass says in `_begun` how to go on
    behind one; line breaks before a call and behind it belong to it."""

    def __init__(self, beginnings: Sequence[str]) -> None:
        super().__init__(self._content)
        self._beginnings = beginnings
        self._calls = 0
        self._opening = ""  # what has been read of a call that is not certain yet
        self._behind_call = False

    @property
    def held(self) -> int:
        return len(self._text) + len(self._opening)

    @abstractmethod
    def _begun(self, beginning: str) -> State:
        """How to go on behind the mark `beginning`."""

    def _content(self, final: bool) -> bool:
        if self._behind_call:
            self._text = self._text.lstrip("\n")
            self._behind_call = not self._text
        mark = first_mark(self._text, self._beginnings)
        if mark is None:
            kept = 0 if final else open_mark(self._text, self._beginnings)
            kept += 0 if final else trailing_breaks(self._text[: len(self._text) - kept])
            self._say(self._take(len(self._text) - kept))
            return False
        place, beginning = mark
        breaks = trailing_breaks(self._text[:place])
        self._say(self._take(place - breaks))
        self._opening = self._take(breaks + len(beginning))
        self._state = self._begun(beginning)
        return True

    def _no_call(self) -> bool:
        """What has been taken for a call is content."""
        self._say(self._opening)
        self._opening = ""
        self._state = self._content
        return True

    def _settles(self, final: bool) -> bool:
        """Whether markup that has begun must be something now. In an answer that is cut off it stays open, and is
        nothing: a client that shows content would show half a call."""
        return final and not self._cut_off

    def _begin_call(self, name: str) -> None:
        self._opening = ""
        self._events.append(ToolCallStart(self._calls, name))

    def _end_call(self, then: State) -> None:
        self._events.append(ToolCallEnd(self._calls))
        self._calls += 1
        self._behind_call = True
        self._state = then

    def _write(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self._calls, text))
