"""Tool calls as a list of Python's form that is the whole answer, as vLLM's `pythonic` has it: [f(p="text", q=1)]"""

from collections.abc import Sequence
from typing import Any

from cairn.server.parsers.lfm2_tool_parser import Lfm2ToolParser
from cairn.server.parsers.output_parser import MAX_NEWLINES, OutputEvent, ToolSchemas


class PythonicToolParser(Lfm2ToolParser):
    """No tags say that a call is meant: only a list at the answer's beginning is one, and of known tools."""

    opening_tags = ("[",)
    closing_tag = ""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._is_start = True

    @classmethod
    def describe_calls(cls, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            tag | {"begin": f"[{name}(", "content": {"type": "any_text"}, "end": ")]"}
            for tag in super().describe_calls(names)
            for name in names
        ]

    @classmethod
    def list_heads(cls, names: Sequence[str]) -> list[str]:
        return [f"[{name}(" for name in names]

    def finish(self, *, truncated: bool = False) -> list[OutputEvent]:
        events = super().finish(truncated=truncated)
        self._is_start = True  # of what comes after reasoning
        return events

    def _may_call(self, name: str) -> bool:
        return name in self._tools

    def _parse_content(self, final: bool) -> bool:
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        if self._is_start and not bare and not final and spaces <= MAX_NEWLINES:
            return False
        is_list = self._is_start and bare.startswith("[") and spaces <= MAX_NEWLINES
        self._is_start = False
        if not is_list:
            self._emit_content(self._take(len(self._text)))
            return False
        self._opening = self._take(spaces + 1)
        self._state = self._start_call("[")
        self._in_list = True
        return True
