"""Calls as Qwen3.5, Qwen3-Coder and Nemotron 3 write them:

<tool_call>
<function=name>
<parameter=p>
value
</parameter>
</function>
</tool_call>
"""

import json

from cairn.server.parsers.output_parser import Tools
from cairn.server.parsers.text_parser import MAX_BREAKS, State, ToolParser, first_mark, open_mark
from cairn.server.parsers.values import convert_value, get_json_types, is_text_only

MAX_VALUE = 1 << 20
"""Characters of a value that may be anything but text; a longer one is text."""

_MAX_NAME = 256
_SHORT = 32
"""Text up to this length is looked at as a whole: it may be `null`."""

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_BEGINNINGS = (_CALL, _FUNCTION)
_INSIDE = (_PARAMETER, _END_FUNCTION, _END_CALL)
_VALUE_ENDS = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)
_HELD_ENDS = (*_VALUE_ENDS, *(f"\n{mark}" for mark in _VALUE_ENDS))


class XmlToolParser(ToolParser):
    """Implements `OutputParser`. Values get the types of the tool's schema (see `values`); text is passed on as it
    comes. As in vLLM's parser, `</parameter>`, `</function>` and `</tool_call>` may be missing, and `<tool_call>` may
    be before the name of a tool that is there.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__(_BEGINNINGS)
        self._tools = tools
        self._name = ""
        self._first = True
        self._in_junk = False
        self._kinds: frozenset[str] = frozenset()
        self._scanned = 0
        self._quoted = False

    def _begun(self, beginning: str) -> State:
        return self._before_function if beginning == _CALL else self._bare_name

    def _before_function(self, final: bool) -> bool:
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        if bare.startswith(_FUNCTION) and spaces <= MAX_BREAKS:
            self._opening += self._take(spaces + len(_FUNCTION))
            self._state = self._function_name
            return True
        if self._settles(final) or not _FUNCTION.startswith(bare) or spaces > MAX_BREAKS:
            return self._no_call()
        return False

    def _function_name(self, final: bool) -> bool:
        return self._begin_named(self._read_name(self._settles(final)))

    def _bare_name(self, final: bool) -> bool:
        known = any(tool.startswith(self._text) for tool in self._tools)
        name = self._read_name(self._settles(final) if known else final)
        return self._begin_named(name if name is None or name in self._tools else "")

    def _begin_named(self, name: str | None) -> bool:
        if name is None:
            return False
        if not name:
            return self._no_call()
        self._take(len(name) + 1)
        self._name, self._first = name, True
        self._begin_call(name)
        self._write("{")
        self._state = self._inside
        return True

    def _inside(self, final: bool) -> bool:
        if not self._in_junk:
            self._text = self._text.lstrip()
        mark = next((mark for mark in _INSIDE if self._text.startswith(mark)), None)
        if mark is not None:
            self._in_junk = False
            self._take(len(mark))
            if mark == _PARAMETER:
                self._state = self._parameter_name
            else:
                self._write("}")
                self._end_call(self._behind_function if mark == _END_FUNCTION else self._content)
            return True
        if not self._text or (not self._settles(final) and any(mark.startswith(self._text) for mark in _INSIDE)):
            return False
        self._in_junk = True
        following = self._text.find("<", 1)
        self._say(self._take(len(self._text) if following < 0 else following))
        return True

    def _parameter_name(self, final: bool) -> bool:
        name = self._read_name(self._settles(final))
        if name is None:
            return False
        if not name:
            self._say(_PARAMETER)
            self._state = self._inside
            return True
        self._take(len(name) + 1)
        self._write(("" if self._first else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._first = False
        self._kinds = get_json_types(name, self._tools.get(self._name, {}))
        self._state = self._value_start
        return True

    def _value_start(self, final: bool) -> bool:
        if not self._text and not final:
            return False
        self._text = self._text.removeprefix("\n")
        self._scanned, self._quoted = 0, False
        self._state = self._value
        return True

    def _value(self, final: bool) -> bool:
        end = first_mark(self._text, _VALUE_ENDS, self._scanned)
        if end is not None:
            self._end_value(*end)
            return True
        safe = len(self._text) - (0 if final else open_mark(self._text, _HELD_ENDS))
        if not self._quoted and (safe > self._limit or (final and is_text_only(self._kinds))):
            self._write('"')
            self._quoted = True
        if self._quoted:
            self._write(_escaped(self._take(safe)))
        elif final:
            self._write(self._take(safe))
        self._scanned = max(0, len(self._text) - len(_END_PARAMETER))
        return False

    def _end_value(self, place: int, mark: str) -> None:
        value = self._take(place).removesuffix("\n")
        if mark == _END_PARAMETER:
            self._take(len(mark))
        if self._quoted:
            self._write(_escaped(value) + '"')
        else:
            given = value if len(value) > self._limit else convert_value(value, self._kinds)
            self._write(json.dumps(given, ensure_ascii=False))
        self._state = self._inside

    def _behind_function(self, final: bool) -> bool:
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        near = spaces <= MAX_BREAKS
        if near and bare.startswith(_FUNCTION):
            self._opening = self._take(spaces + len(_FUNCTION))
            self._state = self._function_name
            return True
        if near and bare.startswith(_END_CALL):
            self._take(spaces + len(_END_CALL))
        elif near and final and _END_CALL.startswith(bare):
            # cut off in the mark that is due: no content
            self._take(len(self._text))
        elif near and not self._settles(final) and any(mark.startswith(bare) for mark in (_FUNCTION, _END_CALL)):
            return False
        self._state = self._content
        return True

    def _read_name(self, final: bool) -> str | None:
        """The name in front of a `>`, empty for what cannot be one; None as long as that is open."""
        end = self._text.find(">")
        name = self._text if end < 0 else self._text[:end]
        if len(name) > _MAX_NAME or "<" in name or "\n" in name or (end < 0 and final):
            return ""
        if end < 0:
            return None
        return name if name.strip() else ""

    @property
    def _limit(self) -> int:
        return _SHORT if is_text_only(self._kinds) else MAX_VALUE


def _escaped(text: str) -> str:
    """The inside of a JSON string: characters are escaped one by one, so pieces can be put together."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
