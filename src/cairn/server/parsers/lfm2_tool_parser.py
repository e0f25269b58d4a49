"""Tool calls as LFM2 writes them, calls of Python's form in a list:

<|tool_call_start|>[f(p="text", q=1)]<|tool_call_end|>
"""

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from cairn.server.parsers.json_tool_parser import JsonToolParser
from cairn.server.parsers.values import parse_literal
from cairn.server.parsers.whole_values import WholeValueParser

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


class Lfm2ToolParser(WholeValueParser, JsonToolParser):
    """Each value is a literal, read when it is complete. The list's brackets may be missing, and calls may be in
    JSON, as LFM2 can be told to write them. The head of a call goes up to its first parameter's name."""

    opening_tags = ("<|tool_call_start|>",)
    closing_tag = "<|tool_call_end|>"

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
        return self._parse_call_head(final, _HEAD, _HEAD_START, self._parse_key)

    def _parse_key(self, final: bool) -> bool:
        """The name of a parameter, or the call's end."""
        end = _END.match(self._text)
        if end is not None:
            self._take(end.end())
            return self._close_call()
        keyword = _KEYWORD.match(self._text)
        if keyword is None:
            return _KEYWORD_START.fullmatch(self._text) is None and self._break_call()
        self._take(keyword.end())
        return self._expect_value(keyword[1])

    def _read_value(self, text: str) -> Any:
        return parse_literal(text)

    def _find_value_end(self, final: bool) -> int | None:
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
