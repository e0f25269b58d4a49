"""Tool calls of which each parameter's value is read when it is complete."""

from abc import abstractmethod
from typing import Any

from cairn.server.parsers.output_parser import ToolParser
from cairn.server.parsers.values import dump_json

MAX_VALUE = 1 << 20
"""Characters of one value; a call with a longer one is broken."""


class WholeValueParser(ToolParser):
    """Knows where a value ends, and what it is; what stands around values is a form's own."""

    _num_scanned, _quote, _depth = 0, "", 0  # of the value that is to be complete

    @abstractmethod
    def _parse_key(self, final: bool) -> bool:
        """The state before a parameter's name, or the call's end."""

    @abstractmethod
    def _find_value_end(self, final: bool) -> int | None:
        """Where the comma or the bracket after the value is; goes on where it stopped before."""

    @abstractmethod
    def _read_value(self, text: str) -> Any:
        """A whole value. Raises ValueError where it is none."""

    def _expect_value(self, name: str) -> bool:
        """The value of the parameter `name` is to follow."""
        self._write_argument_name(name)
        self._num_scanned, self._quote, self._depth = 0, "", 0
        self._state = self._parse_value
        return True

    def _parse_value(self, final: bool) -> bool:
        end = self._find_value_end(final)
        if (len(self._text) if end is None else end) > MAX_VALUE:
            return self._break_call()
        if end is None and not self._must_decide(final):
            return False
        try:
            value = self._read_value(self._text[:end])
        except (ValueError, RecursionError):
            return self._break_call()
        self._write_arguments(dump_json(value))
        self._take(len(self._text) if end is None else end)
        if end is None:
            # The answer ended after a whole value: only what closes the call is missing.
            return self._close_call()
        self._take(1 if self._text.startswith(",") else 0)
        self._state = self._parse_key
        return True

    def _close_call(self) -> bool:
        self._write_arguments("}")
        self._end_call(self._parse_tail)
        return True
