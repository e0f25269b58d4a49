"""JSON as models write it: what is none is mended where it can be read in one way only."""

import json
import math
import re
from types import MappingProxyType
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["open", "done", "wrong"]
"""Whether more text is needed, the value is complete, or the text goes on with what can be no JSON."""

_MAX_DEPTH = 128
_MAX_WORD = 512
_MAX_SPACES = 256

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf'(?:\\["\\/bfnrt]|{_HIGH}{_LOW}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}})')
_HALF_PAIR = re.compile(rf"{_HIGH}|{_LOW}")
_ESCAPE_START = re.compile(rf"\\(?:u[0-9a-fA-F]{{0,3}})?|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_SPACES = re.compile(r"[ \t\r\n]*")
_COMMA = re.compile(rf",[ \t\r\n]{{0,{_MAX_SPACES}}}")
_WORD = re.compile(rf"[A-Za-z0-9+.\-]{{1,{_MAX_WORD}}}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = MappingProxyType(
    {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
)
_CLOSING = MappingProxyType({"{": "}", "[": "]"})

_Next: TypeAlias = Literal["value", "value or end", "key", "key or end", "colon", "comma or end"]


class JsonMender:
    """Reads one object or list piece by piece.

    Mended are control characters and halves of surrogate pairs within strings, backslashes that escape nothing, commas
    before a closing bracket, and Python's words for true, false and null. All else that is no JSON is wrong, as are
    numbers beyond all floats.
    """

    def __init__(self) -> None:
        self.status: Status = "open"
        self._open: list[str] = []
        self._in_string = False
        self._next: _Next = "value"

    def read(self, text: str, start: int = 0, *, final: bool = False) -> tuple[str, int]:
        """Reads `text` from `start` on; returns the JSON of what was read, and where to go on once more text has come.
        `final`: no more will come. Sets `status`; `wrong` is what stands at the returned place."""
        out: list[str] = []
        self.status = "open"
        while self.status == "open" and start < len(text):
            if self._in_string:
                piece, after = self._read_string(text, start, final)
            else:
                piece, after = self._read_between(text, start, final)
            if after == start:
                break
            out.append(piece)
            start = after
        return "".join(out), start

    def missing_end(self) -> str | None:
        """The brackets that close what has been read; None if it does not end after a value."""
        whole = self._open and not self._in_string and self._next == "comma or end"
        return "".join(_CLOSING[bracket] for bracket in reversed(self._open)) if whole else None

    def _read_string(self, text: str, start: int, final: bool) -> tuple[str, int]:
        plain = _PLAIN.match(text, start)
        if plain is not None and plain.end() > start:
            return plain[0], plain.end()
        sign = text[start]
        if sign == '"':
            self._in_string = False
            self._next = "colon" if self._next in ("key", "key or end") else "comma or end"
            return sign, start + 1
        if sign != "\\":
            return json.dumps(sign)[1:-1], start + 1
        if (escape := _ESCAPE.match(text, start)) is not None:
            return escape[0], escape.end()
        if not final and _ESCAPE_START.fullmatch(text, start):
            return "", start
        if (half := _HALF_PAIR.match(text, start)) is not None:
            return "\\ufffd", half.end()
        return "\\\\", start + 1

    def _read_between(self, text: str, start: int, final: bool) -> tuple[str, int]:
        spaces = _SPACES.match(text, start)
        if spaces is not None and spaces.end() > start:
            return spaces[0], spaces.end()
        sign = text[start]
        if sign in "}]":
            return self._close(sign, start)
        if self._next == "colon":
            return self._go_on(sign, start, "value") if sign == ":" else self._refuse(start)
        if self._next == "comma or end":
            return self._read_comma(text, start, final) if sign == "," else self._refuse(start)
        if sign == '"' and self._open:
            self._in_string = True
            return sign, start + 1
        if self._next in ("key", "key or end"):
            return self._refuse(start)
        if sign in "{[" and len(self._open) < _MAX_DEPTH:
            self._open.append(sign)
            return self._go_on(sign, start, "key or end" if sign == "{" else "value or end")
        return self._read_word(text, start, final) if self._open else self._refuse(start)

    def _read_comma(self, text: str, start: int, final: bool) -> tuple[str, int]:
        comma = _COMMA.match(text, start)
        assert comma is not None
        if comma.end() == len(text) and not final and comma.end() - start <= _MAX_SPACES:
            return "", start
        before_end = text[comma.end() : comma.end() + 1] == _CLOSING[self._open[-1]]
        following: _Next = "key" if self._open[-1] == "{" else "value"
        return ("", start + 1) if before_end else self._go_on(",", start, following)

    def _read_word(self, text: str, start: int, final: bool) -> tuple[str, int]:
        word = _WORD.match(text, start)
        if word is None:
            return self._refuse(start)
        if word.end() == len(text) and not final and word.end() - start < _MAX_WORD:
            return "", start
        is_number = _NUMBER.fullmatch(word[0]) and math.isfinite(float(word[0]))
        spelled = word[0] if is_number else _WORDS.get(word[0])
        if spelled is None or word.end() - start == _MAX_WORD:
            return self._refuse(start)
        self._next = "comma or end"
        return spelled, word.end()

    def _close(self, sign: str, start: int) -> tuple[str, int]:
        allowed = self._next in ("comma or end", "key or end", "value or end")
        if not self._open or _CLOSING[self._open[-1]] != sign or not allowed:
            return self._refuse(start)
        self._open.pop()
        self.status = "open" if self._open else "done"
        return self._go_on(sign, start, "comma or end")

    def _go_on(self, sign: str, start: int, following: _Next) -> tuple[str, int]:
        self._next = following
        return sign, start + 1

    def _refuse(self, start: int) -> tuple[str, int]:
        self.status = "wrong"
        return "", start
