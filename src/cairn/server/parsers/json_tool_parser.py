"""Tool calls as Hermes, Qwen3, Qwen3-Next and Granite 4 write them, one or a list of them:

<tool_call>
{"name": "f", "arguments": {"p": 1}}
</tool_call>
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from cairn.server.parsers.json_mender import JsonMender
from cairn.server.parsers.output_parser import MAX_NEWLINES, State, ToolParser, ToolSchemas, describe_call
from cairn.server.parsers.values import dump_json, parse_literal

MAX_CALL = 1 << 20
"""Characters of a call whose arguments do not follow its name; a longer one is content."""

_MAX_EXTRA = 1024
"""Characters of what may stand in a call after its arguments."""

_KEYS = frozenset(("id", "type", "name", "arguments", "parameters"))
"""Of a call; an object with others is something else."""

_HEAD = re.compile(
    r'\s{0,64}\{\s{0,64}"name"\s{0,8}:\s{0,8}("(?:[^"\\\n]|\\.){1,256}")\s{0,8},\s{0,64}'
    r'"(?:arguments|parameters)"\s{0,8}:\s{0,64}(?=\{)'
)


class JsonToolParser(ToolParser):
    """Arguments that follow the name are passed on as the model writes them, mended by `JsonMender`; a call in any
    other order is read when it is complete. `closing_tag` may be missing after a whole object."""

    opening_tags = ("<tool_call>",)
    closing_tag = "</tool_call>"

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._in_list = False
        self._closes_object = False  # whether the bracket that closes the call itself is still to come
        self._expect_call()

    @classmethod
    def describe_calls(cls, names: Sequence[str]) -> list[dict[str, Any]]:
        spelled = [json.dumps(name, ensure_ascii=False) for name in names]
        return [describe_call(cls.opening_tags[0], r'\s{0,8}\{\s{0,8}"name"\s?:\s?', spelled, cls.closing_tag)]

    @classmethod
    def list_heads(cls, names: Sequence[str]) -> list[str]:
        spelled = ["".join(json.dumps(name, ensure_ascii=False).split()) for name in names]
        return [
            f'{tag}{bracket}{{"name":{name},"{arguments}":{{'
            for name in spelled
            for tag in cls.opening_tags
            for bracket in ("", "[")
            for arguments in ("arguments", "parameters")
        ]

    def _start_call(self, tag: str) -> State:
        self._in_list = False
        self._expect_call()
        return self._parse_call

    def _expect_call(self) -> None:
        self._mender = JsonMender()
        self._mended: list[str] = []
        self._num_read = self._num_searched = 0

    def _parse_call(self, final: bool) -> bool:
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        if spaces > MAX_NEWLINES:
            return self._reject_call()
        if not bare:
            return self._must_decide(final) and self._reject_call()
        if bare[0] == "[" and not self._in_list:
            self._in_list = True
            self._opening += self._take(spaces + 1)
            return True
        if bare[0] == "]" and self._in_list and self._opening.lstrip().startswith(","):
            self._opening = ""
            self._state = self._parse_tail
            return True
        return self._parse_object(final) if bare[0] == "{" else self._parse_other_call(final)

    def _parse_other_call(self, final: bool) -> bool:
        """A call that is no JSON object."""
        return self._reject_call()

    def _parse_object(self, final: bool) -> bool:
        head = _HEAD.match(self._text)
        if head is not None and (name := _read_name(head[1])):
            if not self._may_call(name):
                return self._reject_call()
            self._begin_call(name, head.end())
            self._mender, self._closes_object = JsonMender(), True
            self._state = self._parse_arguments
            return True
        return self._read_whole_call(final)

    def _read_whole_call(self, final: bool) -> bool:
        """A call whose arguments come before its name, or as text."""
        if self._mender.status != "wrong":
            piece, self._num_read = self._mender.read(self._text, self._num_read)
            self._mended.append(piece)
        end, text, is_open = self._num_read, "", self._mender.status == "open"
        if self._mender.status == "done":
            text = "".join(self._mended)
        elif self._mender.status == "wrong":
            end, text = self._find_literal()
            is_open = end == len(self._text)
        if is_open and not self._must_decide(final) and len(self._text) <= MAX_CALL:
            return False
        call = _read_call(text) if text and not is_open and end <= MAX_CALL else None
        if call is None or not self._may_call(call[0]):
            return self._reject_call()
        self._begin_call(call[0], end)
        self._write_arguments(call[1])
        self._closes_object = False
        self._end_call(self._parse_tail)
        return True

    def _find_literal(self) -> tuple[int, str]:
        """Where a call in Python's form ends, and its text; the text's end and nothing if that is open, and 0 if it is
        none."""
        if self._text[self._num_read] != "'" or self._in_list or not self.closing_tag:
            return 0, ""
        end = self._text.find(self.closing_tag, max(self._num_read, self._num_searched))
        self._num_searched = len(self._text) - len(self.closing_tag)
        return (end, self._text[:end]) if end >= 0 else (len(self._text), "")

    def _parse_arguments(self, final: bool) -> bool:
        """The object up to its last bracket, which may be missing where the call ends."""
        piece, num_read = self._mender.read(self._text, final=self._must_decide(final))
        self._take(num_read)
        self._write_arguments(piece)
        if self._mender.status == "done":
            self._end_call(self._parse_tail)
            return True
        is_end = self._must_decide(final) and self.closing_tag.startswith(self._text)
        if not is_end and not (self.closing_tag and self._text.startswith(self.closing_tag)):
            may_be_tag = not self._must_decide(final) and self.closing_tag.startswith(self._text)
            return self._mender.status == "wrong" and not may_be_tag and self._break_call()
        missing = self._mender.missing_end()
        if missing is None:
            return self._break_call()
        self._write_arguments(missing)
        self._end_call(self._parse_tail)
        return True

    def _parse_tail(self, final: bool) -> bool:
        """The bracket that closes the call; then another call of the list, or the tag that closes all."""
        bare = self._text.lstrip()
        spaces = len(self._text) - len(bare)
        if spaces <= MAX_NEWLINES:
            if bare.startswith("}") and self._closes_object:
                self._closes_object = False
                self._take(spaces + 1)
                return True
            if bare.startswith(",") and self._closes_object:
                self._expect_call()
                self._mender.read('{"name": 0 ')
                self._state = self._parse_extra
                return True
            if bare.startswith(",") and self._in_list:
                self._expect_call()
                self._opening = self._take(spaces + 1)
                self._state = self._parse_call
                return True
            if bare.startswith("]") and self._in_list:
                self._in_list = False
                self._take(spaces + 1)
                return True
        return super()._parse_tail(final)

    def _parse_extra(self, final: bool) -> bool:
        """What stands in the call after its arguments, an id for example, which says nothing to the client."""
        piece, self._num_read = self._mender.read(self._text, self._num_read)
        self._mended.append(piece)
        if self._mender.status == "open" and not self._must_decide(final) and len(self._text) <= _MAX_EXTRA:
            return False
        self._state = self._parse_content
        if self._mender.status == "done" and self._num_read <= _MAX_EXTRA:
            extra = parse_literal('{"name": 0 ' + "".join(self._mended))
            if extra.keys() <= _KEYS:
                self._take(self._num_read)
                self._closes_object = False
                self._state = self._parse_tail
        return True


def _read_name(text: str) -> str | None:
    """A tool's name from its JSON; None for what cannot be one."""
    try:
        name = json.loads(text)
        return name if isinstance(name, str) and name.encode() else None
    except ValueError:
        return None


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole call, or None."""
    try:
        call = parse_literal(text)
        is_call = isinstance(call, dict) and "name" in call and call.keys() <= _KEYS
        name = _read_name(json.dumps(call["name"])) if is_call else None
        arguments = call.get("arguments", call.get("parameters")) if name else None
        arguments = parse_literal(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None
    if not name or not isinstance(arguments, dict | None):
        return None
    return name, dump_json(arguments or {})
