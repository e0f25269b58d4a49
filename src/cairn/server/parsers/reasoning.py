"""Reasoning between `<think>` and `</think>`, before everything else."""

from cairn.server.parsers.call_reader import MAX_BREAKS, first_mark, open_mark, trailing_breaks
from cairn.server.parsers.contract import Content, Event, Reasoning

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Implements `AnswerParser`: reasoning up to `</think>`, then content.

    `opened`: the prompt has written `<think>` already. Otherwise an answer that does not begin with it has none. Line
    breaks next to the marks belong to them: templates write them anew.
    """

    def __init__(self, opened: bool) -> None:
        self._where = "opening" if not opened else "start"
        self._text = ""

    @property
    def held(self) -> int:
        return len(self._text)

    def push(self, text: str) -> list[Event]:
        self._text += text
        return list(self._events(final=False))

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        return list(self._events(final=True))

    def _events(self, *, final: bool) -> list[Event]:
        events: list[Event] = []
        if self._where == "opening":
            self._open(final=final)
        if self._where == "start":
            self._skip_breaks("reasoning")
        if self._where == "reasoning":
            events += self._reason(final=final)
        if self._where == "closed":
            self._skip_breaks("content")
        if self._where == "content" and self._text:
            events.append(Content(self._take(len(self._text))))
        return events

    def _open(self, *, final: bool) -> None:
        """Wait until the text can no longer begin with `<think>`."""
        bare = self._text.lstrip("\n")
        near = len(self._text) - len(bare) <= MAX_BREAKS
        if near and bare.startswith(OPEN):
            self._text, self._where = bare.removeprefix(OPEN), "start"
        elif final or not near or not OPEN.startswith(bare):
            self._where = "content"

    def _skip_breaks(self, then: str) -> None:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._where = then

    def _reason(self, *, final: bool) -> list[Event]:
        mark = first_mark(self._text, [CLOSE])
        if mark is not None:
            text = self._take(mark[0])
            text = text[: len(text) - trailing_breaks(text)]
            self._take(len(CLOSE))
            self._where = "closed"
        elif final:
            text = self._take(len(self._text))
        else:
            kept = open_mark(self._text, [CLOSE])
            kept += trailing_breaks(self._text[: len(self._text) - kept])
            text = self._take(len(self._text) - kept)
        return [Reasoning(text)] if text else []

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken
