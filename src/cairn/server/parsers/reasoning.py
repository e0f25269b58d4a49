"""Reasoning between `<think>` and `</think>`, before everything else."""

from cairn.server.parsers.output_parser import MAX_NEWLINES, OutputEvent, OutputParser, Reasoning

THINK_START, THINK_END = "<think>", "</think>"


class ReasoningParser(OutputParser):
    """Reasoning up to `</think>`, then whatever `content_parser` finds.

    `opened`: the prompt ends within the reasoning. Otherwise an answer that does not begin with `<think>` has none.
    Newlines next to the tags are dropped: chat templates write them again.
    """

    def __init__(self, content_parser: OutputParser, *, opened: bool) -> None:
        super().__init__()
        self._content_parser = content_parser
        self._state = self._parse_reasoning if opened else self._parse_start
        self._skip_newlines = opened

    @property
    def num_pending(self) -> int:
        return len(self._text) + self._content_parser.num_pending

    def finish(self, *, truncated: bool = False) -> list[OutputEvent]:
        return super().finish(truncated=truncated) + self._content_parser.finish(truncated=truncated)

    def _parse_start(self, final: bool) -> bool:
        """Wait until the text can no longer begin with `<think>`."""
        bare = self._text.lstrip("\n")
        near = len(self._text) - len(bare) <= MAX_NEWLINES
        if near and bare.startswith(THINK_START):
            self._text = bare.removeprefix(THINK_START)
            self._state, self._skip_newlines = self._parse_reasoning, True
            return True
        if final or not near or not THINK_START.startswith(bare):
            self._state = self._parse_content
            return True
        return False

    def _parse_reasoning(self, final: bool) -> bool:
        text, tag = self._take_until([THINK_END], final)
        if text:
            self._events.append(Reasoning(text))
        if tag:
            self._state, self._skip_newlines = self._parse_content, True
        return bool(tag)

    def _parse_content(self, final: bool) -> bool:
        self._events += self._content_parser.extract_streaming(self._take(len(self._text)))
        return False
