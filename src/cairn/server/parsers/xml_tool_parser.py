"""Tool calls as Qwen3.5, Qwen3-Coder and Nemotron 3 write them:

<tool_call>
<function=name>
<parameter=p>
value
</parameter>
</function>
</tool_call>
"""

import json
from collections.abc import Sequence
from typing import Any

from cairn.server.parsers.output_parser import (
    MAX_NEWLINES,
    State,
    ToolParser,
    ToolSchemas,
    count_partial_tag,
    describe_call,
    find_tag,
)
from cairn.server.parsers.values import convert_value, dump_json, get_json_types, is_text_only

MAX_VALUE = 1 << 20
"""Characters of a value that may be anything but text; a longer one is text."""

_MAX_NAME = 256
_SHORT = 32
"""Text of up to this length is read as a whole: it may be `null`."""

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_INNER_TAGS = (_PARAMETER, _FUNCTION_END, _CALL_END)
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
_NEWLINE_VALUE_ENDS = (*_VALUE_ENDS, *(f"\n{tag}" for tag in _VALUE_ENDS))


class XmlToolParser(ToolParser):
    """Values get the types of the tool's schema (see `values`); text is passed on as it comes. As in vLLM's parser,
    `</parameter>`, `</function>` and `</tool_call>` may be missing, and so may `<tool_call>` in front of a known tool.
    The head of a call goes up to its first parameter, or to the end of a function without any.
    """

    opening_tags = (_CALL, _FUNCTION)

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._name = ""
        self._in_junk = False
        self._types: frozenset[str] = frozenset()
        self._num_searched = 0
        self._in_quotes = False

    @classmethod
    def describe_calls(cls, names: Sequence[str]) -> list[dict[str, Any]]:
        spelled = [f"{name}>" for name in names]
        within = describe_call(_CALL, rf"\s{{0,8}}{_FUNCTION}", spelled, _CALL_END)
        return [within, describe_call(_FUNCTION, "", spelled, _FUNCTION_END)]

    @classmethod
    def list_heads(cls, names: Sequence[str]) -> list[str]:
        functions = [f"{_FUNCTION}{''.join(name.split())}>" for name in names]
        return [
            opening + function + following
            for function in functions
            for opening in ("", _CALL)
            for following in _INNER_TAGS
        ]

    def _start_call(self, tag: str) -> State:
        return self._parse_function_tag if tag == _CALL else self._parse_bare_function

    def _parse_function_tag(self, final: bool) -> bool:
        if self._take_function_tag():
            return True
        bare = self._text.lstrip()
        too_far = len(self._text) - len(bare) > MAX_NEWLINES
        return (self._must_decide(final) or too_far or not _FUNCTION.startswith(bare)) and self._reject_call()

    def _take_function_tag(self) -> bool:
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        if not bare.startswith(_FUNCTION) or spaces > MAX_NEWLINES:
            return False
        self._opening += self._take(spaces + len(_FUNCTION))
        self._state = self._parse_function_name
        return True

    def _parse_function_name(self, final: bool) -> bool:
        name = self._peek_name(self._text, self._must_decide(final))
        return self._name_function(name if not name or self._may_call(name) else "")

    def _parse_bare_function(self, final: bool) -> bool:
        may_be_known = any(tool.startswith(self._text) for tool in self._tools)
        name = self._peek_name(self._text, self._must_decide(final) if may_be_known else final)
        return self._name_function(name if name is None or name in self._tools else "")

    def _name_function(self, name: str | None) -> bool:
        if not name:
            return name is not None and self._reject_call()
        self._opening += self._take(len(name) + 1)
        self._name = name
        self._state = self._parse_head_end
        return True

    def _parse_head_end(self, final: bool) -> bool:
        """What tells a call from a text about calls: a parameter comes next, or the end of the function."""
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        follows: str | None = ""
        if spaces <= MAX_NEWLINES:
            if bare.startswith(_PARAMETER):
                follows = self._peek_name(bare.removeprefix(_PARAMETER), self._must_decide(final))
            elif bare.startswith((_FUNCTION_END, _CALL_END)):
                follows = bare
            elif not self._must_decide(final) and any(tag.startswith(bare) for tag in _INNER_TAGS):
                follows = None
        if not follows:
            return follows is not None and self._reject_call()
        self._begin_call(self._name, spaces)
        self._write_arguments("{")
        self._state = self._parse_function
        return True

    def _parse_function(self, final: bool) -> bool:
        if not self._in_junk:
            self._take(len(self._text) - len(self._text.lstrip()))
        tag = next((tag for tag in _INNER_TAGS if self._text.startswith(tag)), None)
        if tag is not None:
            self._in_junk = False
            self._take(len(tag))
            if tag == _PARAMETER:
                self._state = self._parse_parameter_name
            else:
                self._write_arguments("}")
                self._end_call(self._parse_call_end if tag == _FUNCTION_END else self._parse_content)
            return True
        if self._must_decide(final) and any(tag.startswith(self._text) for tag in (_FUNCTION_END, _CALL_END)):
            # All values are whole: only what closes the call is missing.
            self._take(len(self._text))
            self._write_arguments("}")
            self._end_call(self._parse_content)
            return True
        if any(tag.startswith(self._text) for tag in _INNER_TAGS):
            return False
        self._in_junk = True
        next_tag = self._text.find("<", 1)
        self._emit_content(self._take(len(self._text) if next_tag < 0 else next_tag))
        return True

    def _parse_parameter_name(self, final: bool) -> bool:
        name = self._peek_name(self._text, final=False)
        if name is None:
            return False
        if not name:
            self._emit_content(_PARAMETER)
            self._state = self._parse_function
            return True
        self._take(len(name) + 1)
        self._write_argument_name(name)
        self._types = get_json_types(name, self._tools.get(self._name, {}))
        self._state = self._parse_value_start
        return True

    def _parse_value_start(self, final: bool) -> bool:
        if not self._text and not final:
            return False
        self._take(self._text.startswith("\n"))
        self._num_searched, self._in_quotes = 0, False
        self._state = self._parse_value
        return True

    def _parse_value(self, final: bool) -> bool:
        limit = _SHORT if is_text_only(self._types) else MAX_VALUE
        end = find_tag(self._text, _VALUE_ENDS, self._num_searched)
        if end is not None:
            value = self._take(end[0]).removesuffix("\n")
            if end[1] == _PARAMETER_END:
                self._take(len(_PARAMETER_END))
            if self._in_quotes:
                self._write_arguments(_escape(value) + '"')
            else:
                converted = value if len(value) > limit else convert_value(value, self._types)
                self._write_arguments(dump_json(converted))
            self._state = self._parse_function
            return True
        if self._must_decide(final):
            return False  # the answer ends inside the value
        safe = len(self._text) - (0 if final else count_partial_tag(self._text, _NEWLINE_VALUE_ENDS))
        if not self._in_quotes and (safe > limit or (final and is_text_only(self._types))):
            self._write_arguments('"')
            self._in_quotes = True
        if self._in_quotes:
            self._write_arguments(_escape(self._take(safe)))
        elif final:
            self._write_arguments(self._take(safe))
        self._num_searched = max(0, len(self._text) - len(_PARAMETER_END))
        return False

    def _parse_call_end(self, final: bool) -> bool:
        """After `</function>`: another function, `</tool_call>`, or content."""
        if self._take_function_tag():
            return True
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        if spaces <= MAX_NEWLINES:
            if bare.startswith(_CALL_END):
                self._take(spaces + len(_CALL_END))
            elif final and _CALL_END.startswith(bare):
                # A truncated closing tag is no content.
                self._take(len(self._text))
            elif not self._must_decide(final) and any(tag.startswith(bare) for tag in (_FUNCTION, _CALL_END)):
                return False
        self._state, self._skip_newlines = self._parse_content, True
        return True

    def _peek_name(self, text: str, final: bool) -> str | None:
        """The name in front of the `>` in `text`, empty for what cannot be one; None as long as that is open."""
        name, closing, _ = text.partition(">")
        if len(name) > _MAX_NAME or "<" in name or "\n" in name or (not closing and final):
            return ""
        if not closing:
            return None
        return name if name.strip() else ""


def _escape(text: str) -> str:
    """The inside of a JSON string: characters are escaped one by one, so pieces can be put together."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
