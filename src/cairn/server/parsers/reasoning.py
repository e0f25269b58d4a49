"""Reasoning between `<think>` and `</think>`, before everything else."""

from cairn.server.parsers.output_parser import Reasoning
from cairn.server.parsers.text_parser import MAX_BREAKS, State, TextParser, first_mark, open_mark, trailing_breaks

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser(TextParser):
    """Implements `OutputParser`: reasoning up to `</think>`, then content.

    `opened`: the prompt has written `<think>` already. Otherwise an answer that does not begin with it has none. Line
    breaks next to the marks belong to them: templates write them anew.
    """

    def __init__(self, opened: bool) -> None:
        super().__init__(self._before_reasoning if opened else self._open)

    def _open(self, final: bool) -> bool:
        """Wait until the text can no longer begin with `<think>`."""
        bare = self._text.lstrip("\n")
        near = len(self._text) - len(bare) <= MAX_BREAKS
        if near and bare.startswith(OPEN):
            self._text, self._state = bare.removeprefix(OPEN), self._before_reasoning
        elif final or not near or not OPEN.startswith(bare):
            self._state = self._content
        else:
            return False
        return True

    def _before_reasoning(self, final: bool) -> bool:
        return self._skip_breaks(self._reasoning)

    def _reasoning(self, final: bool) -> bool:
        mark = first_mark(self._text, [CLOSE])
        if mark is not None:
            text = self._take(mark[0])
            text = text[: len(text) - trailing_breaks(text)]
            self._take(len(CLOSE))
            self._state = self._before_content
        elif final:
            text = self._take(len(self._text))
        else:
            kept = open_mark(self._text, [CLOSE])
            kept += trailing_breaks(self._text[: len(self._text) - kept])
            text = self._take(len(self._text) - kept)
        self._events += [Reasoning(text)] if text else []
        return mark is not None

    def _before_content(self, final: bool) -> bool:
        return self._skip_breaks(self._content)

    def _content(self, final: bool) -> bool:
        self._say(self._take(len(self._text)))
        return False

    def _skip_breaks(self, then: State) -> bool:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._state = then
        return bool(self._text)
