"""Tool calls as LFM2 writes them, calls of Python's form in a list:

<|tool_call_start|>[f(p="text", q=1)]<|tool_call_end|>
"""

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from cairn.server.parsers.json_tool_parser import JsonToolParser
from cairn.server.parsers.values import dump_json, parse_literal

MAX_VALUE = 1 << 20
"""Characters of one value; a call with a longer one is broken."""

_NAME, _KEY = r"[A-Za-z_][\w.\-]{0,255}", r"[^\W\d]\w{0,255}"
_HEAD = re.compile(rf"\s{{0,64}}({_NAME})\s{{0,8}}\((?=\s{{0,64}}(?:\)|{_KEY}\s{{0,8}}=))")
_HEAD_START = re.compile(rf"\s{{0,64}}{_NAME}(?:\s{{0,8}}(?:\(\s{{0,64}}(?:{_KEY}\s{{0,8}})?)?)?")
_KEYWORD = re.compile(rf"\s{{0,64}}({_KEY})\s{{0,8}}=")
_KEYWORD_START = re.compile(rf"\s{{0,64}}(?:{_KEY}\s{{0,8}})?")
_END = re.compile(r"\s{0,64}\)")
_SIGN = re.compile(r"\"\"\"|'''|[\"'()\[\]{},]")
_STRING_SIGNS = MappingProxyType({quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ('"', "'", '"""', "'''")})

_STRING_FORM = r'"(?:[^"\\]|\\[\s\S])*"|' + r"'(?:[^'\\]|\\[\s\S])*'"
_ARGUMENTS_FORM = rf"(?:{_STRING_FORM}|[^\"'()])*"
"""Arguments within a structural tag: brackets, with which another call could begin, are in strings only."""


class Lfm2ToolParser(JsonToolParser):
    """Each value is a literal, read when it is complete. The list's brackets may be missing, and calls may be in
    JSON, as LFM2 can be told to write them. The head of a call goes up to its first parameter's name."""

    opening_tags = ("<|tool_call_start|>",)
    closing_tag = "<|tool_call_end|>"

    _num_scanned, _quote, _depth = 0, "", 0  # of the value that is to be complete

    @classmethod
    def describe_calls(cls, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "type": "tag",
                "begin": cls.opening_tags[0],
                "content": {"type": "regex", "pattern": rf"\[{cls._describe_list(names)}\]"},
                "end": cls.closing_tag,
            }
        ]

    @staticmethod
    def _describe_list(names: Sequence[str]) -> str:
        call = rf"(?:{'|'.join(map(_escape, names))})\({_ARGUMENTS_FORM}\)"
        return rf"{call}(?:\s?,\s?{call})*"

    @classmethod
    def list_heads(cls, names: Sequence[str]) -> list[str]:
        heads = [f"{tag}{bracket}{name}(" for name in names for tag in cls.opening_tags for bracket in ("[", "")]
        return heads + super().list_heads(names)

    def _parse_other_call(self, final: bool) -> bool:
        self._closes_object = False
        return self._parse_call_head(final, _HEAD, _HEAD_START, self._parse_keyword)

    def _parse_keyword(self, final: bool) -> bool:
        """The name of a parameter, or the call's end."""
        end = _END.match(self._text)
        if end is not None:
            self._take(end.end())
            self._write_arguments("}")
            self._end_call(self._parse_tail)
            return True
        keyword = _KEYWORD.match(self._text)
        if keyword is None:
            return _KEYWORD_START.fullmatch(self._text) is None and self._break_call()
        self._take(keyword.end())
        self._write_argument_name(keyword[1])
        self._expect_value()
        self._state = self._parse_value
        return True

    def _expect_value(self) -> None:
        self._num_scanned, self._quote, self._depth = 0, "", 0

    def _parse_value(self, final: bool) -> bool:
        end = self._find_value_end(final)
        if (end is None and len(self._text) > MAX_VALUE) or (end is not None and end > MAX_VALUE):
            return self._break_call()
        if end is None and not self._must_decide(final):
            return False
        try:
            value = parse_literal(self._text[:end])
        except ValueError:
            return self._break_call()
        self._write_arguments(dump_json(value))
        if end is None:
            # The answer ended after a whole value: only what closes the call is missing.
            self._take(len(self._text))
            self._write_arguments("}")
            self._end_call(self._parse_tail)
            return True
        self._take(end + (self._text[end] == ","))
        self._state = self._parse_keyword
        return True

    def _find_value_end(self, final: bool) -> int | None:
        """Where the comma or the bracket after the value is; goes on where it stopped before."""
        text = self._text
        while True:
            signs = _STRING_SIGNS[self._quote] if self._quote else _SIGN
            match = signs.search(text, self._num_scanned)
            if match is None:
                self._scan_to_end()
                return None
            sign = match[0]
            if not self._quote and sign in "\"'" and match.start() + 3 > len(text) and not final:
                self._num_scanned = match.start()  # it may be the first of three
                return None
            if not self._quote and not self._depth and sign in ",)]}":
                return match.start()
            self._num_scanned = match.end()
            if self._quote:
                self._quote = "" if sign == self._quote else self._quote
            elif sign[0] in "\"'":
                self._quote = sign
            elif sign != ",":
                self._depth += 1 if sign in "([{" else -1

    def _scan_to_end(self) -> None:
        """What the text's end can be part of is looked at again."""
        kept = len(self._quote) - 1 if self._quote else 0
        after = max(self._num_scanned, len(self._text) - kept)
        if self._quote and self._text.endswith("\\", self._num_scanned):
            after = min(after, len(self._text) - 1)
        self._num_scanned = after


def _escape(name: str) -> str:
    """For Rust's regular expressions, which know fewer escapes than Python's."""
    return "".join(sign if sign.isalnum() or sign == "_" else f"\\x{{{ord(sign):x}}}" for sign in name)
