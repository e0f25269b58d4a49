"""Reasoning between two marks, before everything else: `<think>` and `</think>` in most models."""

from collections.abc import Iterable

from cairn.server.parsers.output_parser import (
    MAX_NEWLINES,
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
    ToolCallStart,
)

THINK_START, THINK_END = "<think>", "</think>"

_QUOTES = ("`", "'", '"')


class StrayTagRemover(OutputParser):
    """Leaves the marks of reasoning out of a text, and the newlines next to them, except where they are quoted."""

    def __init__(self, marks: tuple[str, str] = (THINK_START, THINK_END)) -> None:
        super().__init__()
        self._marks = marks
        self._before = ""
        self._tag = ""

    @property
    def num_pending(self) -> int:
        return len(self._text) + len(self._tag)

    def _parse_content(self, final: bool) -> bool:
        text, self._tag = self._take_until(self._marks, final)
        self._before = text[-1:] or self._before
        self._emit_content(text)
        if self._tag:
            self._state = self._parse_tag
        return bool(self._tag)

    def _parse_tag(self, final: bool) -> bool:
        is_quoted = self._before in _QUOTES and self._tag.startswith("<")
        if is_quoted and not self._text and not final:
            return False
        is_quoted = is_quoted and self._text.startswith(self._before)
        self._emit_content(self._tag if is_quoted else "")
        self._before = self._tag = ""
        self._state, self._skip_newlines = self._parse_content, not is_quoted
        return True


class ReasoningParser(OutputParser):
    """Reasoning up to the second of the `marks`, then whatever `content_parser` finds.

    `opened`: the prompt ends within the reasoning. Otherwise an answer that does not begin with the first one has none.
    Newlines next to the tags are dropped: chat templates write them again. Some models call a tool without closing
    their reasoning, or close it after the call: with `calls_end_reasoning` the head of a call of a known tool ends it,
    too. Tags that open or close nothing are left out, unless they are quoted.
    """

    looks_for_reasoning = True

    def __init__(
        self,
        content_parser: OutputParser,
        *,
        opened: bool,
        calls_end_reasoning: bool = True,
        marks: tuple[str, str] = (THINK_START, THINK_END),
    ) -> None:
        super().__init__()
        self._marks = self.reasoning_start, self.reasoning_end = marks
        self._content_parser = content_parser
        self._thought_parser = content_parser if calls_end_reasoning else OutputParser()
        self._stray_tags = StrayTagRemover(marks)
        self._may_have_stray_tags = False
        self._in_reasoning = False
        if opened:
            self._begin_reasoning()
        else:
            self._state = self._parse_start

    @property
    def num_pending(self) -> int:
        return len(self._text) + self._content_parser.num_pending + self._stray_tags.num_pending

    def finish(self, *, truncated: bool = False) -> list[OutputEvent]:
        events = super().finish(truncated=truncated)
        self._pass_on(self._content_parser.finish(truncated=truncated))
        self._flush_text()
        return events + self._take_events()

    def _parse_start(self, final: bool) -> bool:
        """Wait until the text can no longer begin with the mark."""
        bare = self._text.lstrip("\n")
        near = len(self._text) - len(bare) <= MAX_NEWLINES
        if near and bare.startswith(self._marks[0]):
            self._text = bare.removeprefix(self._marks[0])
            self._begin_reasoning()
            return True
        if final or not near or not self._marks[0].startswith(bare):
            self._state = self._parse_content
            return True
        return False

    def _parse_reasoning(self, final: bool) -> bool:
        text, tag = self._take_until(self._marks[1:], final)
        self._pass_on(self._thought_parser.extract_streaming(text))
        if not self._in_reasoning:
            # A call has ended it; a tag within its arguments is theirs.
            self._pass_on(self._content_parser.extract_streaming(tag))
            self._state = self._parse_content
        elif tag:
            self._pass_on(self._thought_parser.finish())
            if self._in_reasoning:
                self._end_reasoning()
            self._state, self._skip_newlines = self._parse_content, True
        return not self._in_reasoning

    def _parse_content(self, final: bool) -> bool:
        self._pass_on(self._content_parser.extract_streaming(self._take(len(self._text))))
        return False

    def _begin_reasoning(self) -> None:
        self._in_reasoning = self._may_have_stray_tags = True
        self._content_parser.only_known_tools = True
        self._state, self._skip_newlines = self._parse_reasoning, True

    def _end_reasoning(self) -> None:
        self._flush_text()
        self._in_reasoning = self._content_parser.only_known_tools = False

    def _pass_on(self, events: Iterable[OutputEvent]) -> None:
        """Events of the other parser; content within the reasoning is reasoning."""
        for event in events:
            if isinstance(event, Content):
                self._emit_text(
                    self._stray_tags.extract_streaming(event.text) if self._may_have_stray_tags else [event]
                )
                continue
            self._flush_text()
            if isinstance(event, ToolCallStart):
                self._may_have_stray_tags = True
                if self._in_reasoning:
                    self._end_reasoning()
                    self.reasoning_end = self._content_parser.call_head.lstrip("\n")
            self._events.append(event)

    def _flush_text(self) -> None:
        self._emit_text(self._stray_tags.finish())

    def _emit_text(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, Content) and self._in_reasoning:
                self._events.append(Reasoning(event.text))
            else:
                self._events.append(event)
