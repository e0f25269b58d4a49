"""Answers without calls, and one parser behind another."""

from cairn.server.parsers.contract import AnswerParser, Content, Event


class PlainText:
    """Implements `AnswerParser`: everything is content."""

    @property
    def held(self) -> int:
        return 0

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        return []


class Chained:
    """Implements `AnswerParser`: what `first` takes for content goes on to `then`."""

    def __init__(self, first: AnswerParser, then: AnswerParser) -> None:
        self._first = first
        self._then = then

    @property
    def held(self) -> int:
        return self._first.held + self._then.held

    def push(self, text: str) -> list[Event]:
        return self._on(self._first.push(text))

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        return [*self._on(self._first.finish(cut_off=cut_off)), *self._then.finish(cut_off=cut_off)]

    def _on(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._then.push(event.text) if isinstance(event, Content) else [event]
        return found
