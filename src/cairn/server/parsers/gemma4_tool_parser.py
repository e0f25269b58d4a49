"""Tool calls as Gemma 4 writes them, with quotes of their own around texts, in which nothing is escaped:

<|tool_call>call:f{p:<|"|>text<|"|>,q:1,r:[{s:true}]}<tool_call|>
"""

import json
import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from cairn.server.parsers.output_parser import State, count_partial_tag, describe_call
from cairn.server.parsers.whole_values import WholeValueParser

REASONING_START, REASONING_END = "<|channel>thought", "<channel|>"

QUOTE = '<|"|>'

_MAX_DEPTH = 64

_SPACES = r"\s{0,64}"
_NAME = r"[A-Za-z_][\w.\-]{0,255}"
_HEAD = re.compile(rf"{_SPACES}call:({_NAME})\{{")
_HEAD_START = re.compile(rf"{_SPACES}(?:c|ca|cal|call|call:(?:{_NAME})?)?")

_QUOTED, _JSON_QUOTED, _BARE = (
    r'<\|"\|>((?:(?!<\|"\|>).){1,256})<\|"\|>',
    r'"((?:[^"\\]|\\.){1,256})"',
    r"[\w.\-$]{1,256}",
)
_KEY = re.compile(rf"{_SPACES}(?:{_QUOTED}|{_JSON_QUOTED}|({_BARE}))\s{{0,8}}:", re.DOTALL)
_KEY_START = re.compile(
    rf'{_SPACES}(?:<(?:\|(?:"(?:\|(?:>(?:(?!<\|"\|>).){{0,256}}(?:<\|"\|>\s{{0,8}})?)?)?)?)?'
    rf'|"(?:[^"\\]|\\.){{0,256}}(?:\\|"\s{{0,8}})?|{_BARE}\s{{0,8}})?',
    re.DOTALL,
)
_END = re.compile(rf"{_SPACES}\}}")
_SIGNS = MappingProxyType(
    {
        "": re.compile(r'<\|"\|>|<tool_call\|>|["{}\[\],]'),
        QUOTE: re.compile(r'<\|"\|>'),
        '"': re.compile(r'\\.|"', re.DOTALL),
    }
)
_SCALAR_END = re.compile(r"[,\]}]|\Z")


class Gemma4ToolParser(WholeValueParser):
    """Each value is read when it is complete: a text in the model's own quotes or in JSON's, a list, an object, or else
    what JSON makes of it, or the text itself. The bracket that closes the call may be missing before the call's end."""

    opening_tags = ("<|tool_call>",)
    closing_tag = "<tool_call|>"

    @classmethod
    def describe_calls(cls, names: Sequence[str]) -> list[dict[str, Any]]:
        return [describe_call(cls.opening_tags[0], "call:", [f"{name}{{" for name in names], cls.closing_tag)]

    @classmethod
    def list_heads(cls, names: Sequence[str]) -> list[str]:
        return [f"{cls.opening_tags[0]}call:{name}{{" for name in names]

    def _start_call(self, tag: str) -> State:
        return self._parse_head

    def _parse_head(self, final: bool) -> bool:
        return self._parse_call_head(final, _HEAD, _HEAD_START, self._parse_key)

    def _parse_key(self, final: bool) -> bool:
        """The name of a parameter, or the call's end."""
        end = _END.match(self._text)
        if end is not None or self._text.lstrip().startswith(self.closing_tag):
            self._take(0 if end is None else end.end())
            return self._close_call()
        key = _KEY.match(self._text)
        if key is None:
            may_be_end = self.closing_tag.startswith(self._text.lstrip())
            return not may_be_end and _KEY_START.fullmatch(self._text) is None and self._break_call()
        try:
            name = key[1] or key[3] or _read_json(f'"{key[2]}"')
        except ValueError:
            return self._break_call()
        self._take(key.end())
        return self._expect_value(name)

    def _read_value(self, text: str) -> Any:
        value, end = _read(text, 0, 0)
        if text[end:].strip():
            raise ValueError("text behind a value")
        return value

    def _find_value_end(self, final: bool) -> int | None:
        """Or where the call's end is."""
        text = self._text
        while (match := _SIGNS[self._quote].search(text, self._num_scanned)) is not None:
            sign = match[0]
            if not self._quote and (sign == self.closing_tag or (not self._depth and sign in ",}]")):
                return match.start()
            self._num_scanned = match.end()
            if self._quote:
                self._quote = "" if sign == self._quote else self._quote
            elif sign in (QUOTE, '"'):
                self._quote = sign
            elif sign != ",":
                self._depth += 1 if sign in "{[" else -1
        # What the text's end can be part of is looked at again.
        kept = count_partial_tag(text, (QUOTE, self.closing_tag))
        if self._quote == '"':
            kept = int(text.endswith("\\", self._num_scanned))
        self._num_scanned = max(self._num_scanned, len(text) - kept)
        return None


def _read(text: str, start: int, depth: int) -> tuple[Any, int]:
    """The value at `start`, and where it ends."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    start = _skip_spaces(text, start)
    if text.startswith(QUOTE, start):
        end = text.find(QUOTE, start + len(QUOTE))
        if end < 0:
            raise ValueError("open text")
        return text[start + len(QUOTE) : end], end + len(QUOTE)
    if text.startswith('"', start):
        value, end = _DECODER.raw_decode(text, start)
        return value, end
    if text.startswith("[", start):
        return _read_items(text, start + 1, depth)
    if text.startswith("{", start):
        return _read_fields(text, start + 1, depth)
    match = _SCALAR_END.search(text, start)
    end = len(text) if match is None else match.start()
    return _read_scalar(text[start:end].strip()), end


def _read_items(text: str, start: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while not text.startswith("]", start := _skip_spaces(text, start)):
        item, start = _read(text, start, depth + 1)
        items.append(item)
        start = _skip_comma(text, start, "]")
    return items, start + 1


def _read_fields(text: str, start: int, depth: int) -> tuple[dict[str, Any], int]:
    fields: dict[str, Any] = {}
    while not text.startswith("}", start := _skip_spaces(text, start)):
        key = _KEY.match(text, start)
        if key is None:
            raise ValueError("no key")
        name = key[1] or key[3] or _read_json(f'"{key[2]}"')
        fields[name], start = _read(text, key.end(), depth + 1)
        start = _skip_comma(text, start, "}")
    return fields, start + 1


def _skip_spaces(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _skip_comma(text: str, start: int, closing: str) -> int:
    start = _skip_spaces(text, start)
    if text.startswith(",", start):
        return start + 1
    if not text.startswith(closing, start):
        raise ValueError(f"no {closing}")
    return start


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _read_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _read_scalar(text: str) -> Any:
    if not text:
        raise ValueError("no value")
    try:
        return _read_json(text)
    except ValueError:
        return None if text == "None" else text
