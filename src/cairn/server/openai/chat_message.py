"""One answer of a chat as a message: content, reasoning and calls, whole and in pieces."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from cairn.engine.contract import FinishReason
from cairn.server.parsers.output_parser import (
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)

_NEVER_SENT = MappingProxyType(dict.fromkeys(("refusal", "annotations", "audio", "function_call")))
"""Fields of OpenAI's messages that no answer here has: null, as in vLLM."""


class ChatMessage:
    """Parses one answer's text into a message and its deltas. `new_id` names calls; without `parallel` only the first
    call is kept, with `hides_reasoning` no reasoning. With `joins_calls`, for answers that are not streamed, a call is
    added when it has ended, and a broken one is content; otherwise a broken call, whose beginning has been sent, stays
    without its end.

    `looks_for_reasoning`: whether answers of this model may have some; `has_reasoning`: whether this one has.
    """

    def __init__(
        self,
        parser: OutputParser,
        new_id: Callable[[], str],
        *,
        parallel: bool = True,
        hides_reasoning: bool = False,
        joins_calls: bool = False,
    ) -> None:
        self.hides_reasoning = hides_reasoning
        self.looks_for_reasoning = parser.looks_for_reasoning
        self.has_reasoning = False
        self._parser = parser
        self._new_id = new_id
        self._parallel = parallel
        self._joins_calls = joins_calls
        self._open_call: list[OutputEvent] = []
        self._takes_call = False  # whether the last call is kept
        self._complete: set[str] = set()  # ids of calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def add(self, text: str, *, last: bool, truncated: bool = False) -> dict[str, Any]:
        """The delta of this text, empty while it is not certain what it is. `last`: nothing follows; `truncated`: the
        answer did not end by itself."""
        delta: dict[str, Any] = {}
        for event in self._parse(text, last, truncated):
            self._add_event(event, delta)
        return delta

    def add_in_order(self, text: str, *, last: bool, truncated: bool = False) -> list[dict[str, Any]]:
        """As `add`, with a delta of its own for each piece of content, reasoning or a call, as they come."""
        deltas: list[dict[str, Any]] = []
        for event in self._parse(text, last, truncated):
            deltas.append({})
            self._add_event(event, deltas[-1])
        return deltas

    def _parse(self, text: str, last: bool, truncated: bool) -> list[OutputEvent]:
        events = self._parser.extract_streaming(text)
        if last:
            events += self._parser.finish(truncated=truncated)
        return self._join_calls(events, last) if self._joins_calls else events

    def _join_calls(self, events: list[OutputEvent], last: bool) -> list[OutputEvent]:
        joined: list[OutputEvent] = []
        for event in events:
            if not self._open_call and not isinstance(event, ToolCallStart):
                joined.append(event)
                continue
            self._open_call.append(event)
            if isinstance(event, ToolCallBroken):
                self._open_call = [Content(event.text)]
            if isinstance(event, ToolCallBroken | ToolCallEnd):
                joined += self._open_call
                self._open_call = []
        if last:
            joined += self._open_call
        return joined

    def message(self) -> dict[str, Any]:
        """All that has been added, as a message."""
        content: str | None = "".join(self._content)
        if not content and (self._calls or self._reasoning):
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, **_NEVER_SENT}
        message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning) or None
        if self._calls:
            message["tool_calls"] = [
                call | {"function": {"name": call["function"]["name"], "arguments": "".join(pieces)}}
                for call, pieces in zip(self._calls, self._arguments, strict=True)
            ]
        return message

    def finish_reason(self, finish: FinishReason | None) -> str | None:
        """`tool_calls` if the answer ended by itself and has a complete one."""
        return "tool_calls" if finish == "stop" and self._complete else finish

    def is_complete(self, call_id: str) -> bool:
        """Whether this call's arguments are all there, and are JSON."""
        return call_id in self._complete

    @property
    def reasoning_marks(self) -> tuple[str, str]:
        """What the reasoning begins and ends with: see `OutputParser`."""
        return self._parser.reasoning_start, self._parser.reasoning_end

    def _add_event(self, event: OutputEvent, delta: dict[str, Any]) -> None:
        match event:
            case Content(text):
                self._content.append(text)
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                self.has_reasoning = True
                if self.hides_reasoning:
                    return
                self._reasoning.append(text)
                # vLLM's newer name, and the one that most clients read
                delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
            case ToolCallStart(name=name):
                self._takes_call = self._parallel or not self._calls
                if self._takes_call:
                    self._add_call(name, delta)
            case ToolCallArguments(text=text) if self._takes_call:
                index = len(self._calls) - 1
                self._arguments[index].append(text)
                calls: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
            case ToolCallEnd() if self._takes_call:
                self._complete.add(self._calls[-1]["id"])

    def _add_call(self, name: str, delta: dict[str, Any]) -> None:
        call = {"id": f"call_{self._new_id()[:24]}", "type": "function", "function": {"name": name}}
        index = len(self._calls)
        self._calls.append(call)
        self._arguments.append([])
        function = {"name": name, "arguments": ""}
        delta.setdefault("tool_calls", []).append({"index": index, **call, "function": function})
