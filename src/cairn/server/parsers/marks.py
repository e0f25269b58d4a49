"""Marks in text that comes in pieces: where one stands, and where one may have begun."""

from collections.abc import Sequence

MAX_BREAKS = 64
"""Most line breaks in a row that are taken for a part of the markup they stand next to."""


def first_mark(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """The place of the first mark at or behind `start`, and which it is; the longest of those that begin there."""
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark, start)) >= 0]
    if not found:
        return None
    place, _, mark = min(found)
    return place, mark


def open_mark(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def trailing_breaks(text: str) -> int:
    """How many line breaks `text` ends with, at most `MAX_BREAKS`."""
    return min(len(text) - len(text.rstrip("\n")), MAX_BREAKS)
