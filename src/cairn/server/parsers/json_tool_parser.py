"""Calls as Hermes, Qwen3, Qwen3-Next and Granite 4 write them:

<tool_call>
{"name": "f", "arguments": {"p": 1}}
</tool_call>
"""

import json
import re
from typing import Any

from cairn.server.parsers.text_parser import State, ToolParser

MAX_CALL = 1 << 20
"""Characters of a call whose arguments do not follow its name; a longer one is content."""

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_HEAD = re.compile(
    r'\s{0,64}\{\s{0,64}"name"\s{0,8}:\s{0,8}("(?:[^"\\\n]|\\.){1,256}")\s{0,8},\s{0,64}"arguments"\s{0,8}:\s{0,64}(?=\{)'
)
_BRACKETS = re.compile(r'[{}\[\]"\\]')
_TAIL = re.compile(r"\s*(?:\}\s*)?(?:</tool_call>)?")


class JsonToolParser(ToolParser):
    """Implements `OutputParser`. Arguments that follow the name are passed on as the model writes them; any other order
    is read when the call ends. `</tool_call>` may be missing behind a whole object."""

    def __init__(self) -> None:
        super().__init__([_CALL])
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scanned = 0

    def _begun(self, beginning: str) -> State:
        self._scanned = 0
        return self._call

    def _call(self, final: bool) -> bool:
        head = _HEAD.match(self._text)
        if head is not None and (name := _json(head[1])):
            self._begin_call(name)
            self._take(head.end())
            self._depth, self._in_string, self._escaped = 0, False, False
            self._state = self._arguments
            return True
        end = self._text.find(_END_CALL, self._scanned)
        self._scanned = max(0, len(self._text) - len(_END_CALL))
        is_open = not final or (self._cut_off and self._text.lstrip()[:1] in ("", "{"))
        if end < 0 and is_open and len(self._text) <= MAX_CALL:
            return False
        near = 0 <= end <= MAX_CALL - len(_END_CALL)
        call = _call_of(self._text[:end]) if near else None
        if call is None:
            return self._no_call()
        self._take(end + len(_END_CALL))
        self._begin_call(call[0])
        self._write(call[1])
        self._end_call(self._content)
        return True

    def _arguments(self, final: bool) -> bool:
        """The object up to its last bracket; what is within strings does not count."""
        end = self._object_end()
        self._write(self._take(len(self._text) if end is None else end))
        if end is None:
            return False
        self._state = self._tail
        return True

    def _object_end(self) -> int | None:
        place = 0
        if self._escaped and self._text:
            self._escaped, place = False, 1
        while (found := _BRACKETS.search(self._text, place)) is not None:
            place = found.end()
            match found[0]:
                case "\\":
                    if self._in_string:
                        self._escaped = place == len(self._text)
                        place += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[" if not self._in_string:
                    self._depth += 1
                case "}" | "]" if not self._in_string:
                    self._depth -= 1
                    if self._depth == 0:
                        return place
        return None

    def _tail(self, final: bool) -> bool:
        """The bracket that closes the call, and its mark."""
        tail = _TAIL.match(self._text)
        assert tail is not None
        rest = self._text[tail.end() :]
        if not final and not tail[0].endswith(_END_CALL) and _END_CALL.startswith(rest):
            self._text = tail[0].strip() + rest
            return False
        # cut off in the mark that is due: no content
        cut_off = final and _END_CALL.startswith(rest)
        self._take(len(self._text) if cut_off else tail.end())
        self._end_call(self._content)
        return True


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole call, or None."""
    call = _json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
