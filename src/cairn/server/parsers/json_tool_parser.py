"""Tool calls as Hermes, Qwen3, Qwen3-Next and Granite 4 write them:

<tool_call>
{"name": "f", "arguments": {"p": 1}}
</tool_call>
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from cairn.server.parsers.output_parser import State, ToolParser, describe_call

MAX_CALL = 1 << 20
"""Characters of a call whose arguments do not follow its name; a longer one is content."""

_CALL_END = "</tool_call>"
_HEAD = re.compile(
    r'\s{0,64}\{\s{0,64}"name"\s{0,8}:\s{0,8}("(?:[^"\\\n]|\\.){1,256}")\s{0,8},\s{0,64}"arguments"\s{0,8}:\s{0,64}(?=\{)'
)
_TOKENS = re.compile(r'\\.|[{}\[\]"]', re.DOTALL)
_TAIL = re.compile(r"\s*(?:\}\s*)?(?:</tool_call>)?")


class JsonToolParser(ToolParser):
    """Arguments that follow the name are passed on as the model writes them; in any other order they are read when the
    call ends. `</tool_call>` may be missing after a whole object."""

    opening_tags = ("<tool_call>",)

    @staticmethod
    def describe_calls(names: Sequence[str]) -> list[dict[str, Any]]:
        spelled = [json.dumps(name, ensure_ascii=False) for name in names]
        return [describe_call("<tool_call>", r'\s{0,8}\{\s{0,8}"name"\s?:\s?', spelled, _CALL_END)]

    def _start_call(self, tag: str) -> State:
        self._depth, self._in_string, self._num_searched = 0, False, 0
        return self._parse_call

    def _parse_call(self, final: bool) -> bool:
        head = _HEAD.match(self._text)
        if head is not None and (name := _load_json(head[1])):
            self._begin_call(name)
            self._take(head.end())
            self._state = self._parse_arguments
            return True
        end = self._text.find(_CALL_END, self._num_searched)
        self._num_searched = max(0, len(self._text) - len(_CALL_END))
        is_open = not final or (self._truncated and self._text.lstrip()[:1] in ("", "{"))
        if end < 0 and is_open and len(self._text) <= MAX_CALL:
            return False
        call = _read_call(self._text[:end]) if 0 <= end <= MAX_CALL - len(_CALL_END) else None
        if call is None:
            return self._reject_call()
        self._take(end + len(_CALL_END))
        self._begin_call(call[0])
        self._write_arguments(call[1])
        self._end_call(self._parse_content)
        return True

    def _parse_arguments(self, final: bool) -> bool:
        """The object up to its last bracket; brackets within strings do not count."""
        for token in _TOKENS.finditer(self._text):
            # Outside strings a backslash is an error, and escapes nothing.
            sign = token[0] if self._in_string else token[0][-1]
            if sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string and sign in "{}[]":
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    self._write_arguments(self._take(token.end()))
                    self._state = self._parse_tail
                    return True
        # A single backslash at the end of a string's piece escapes what comes next.
        num_backslashes = len(self._text) - len(self._text.rstrip("\\"))
        is_escape = self._in_string and not final and num_backslashes % 2 == 1
        self._write_arguments(self._take(len(self._text) - is_escape))
        return False

    def _parse_tail(self, final: bool) -> bool:
        """The bracket that closes the call, and its tag."""
        tail = _TAIL.match(self._text)
        assert tail is not None
        rest = self._text[tail.end() :]
        if not final and not tail[0].endswith(_CALL_END) and _CALL_END.startswith(rest):
            self._text = tail[0].strip() + rest
            return False
        # A truncated closing tag is no content.
        self._take(len(self._text) if final and _CALL_END.startswith(rest) else tail.end())
        self._end_call(self._parse_content)
        return True


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole call, or None."""
    call = _load_json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _load_json(arguments)
    elif arguments is None:
        arguments = {}
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
