"""Which answers of a log count for nothing, because their prompt was counted with another answer to it."""

from collections.abc import Iterable
from typing import Any

__all__ = ["counted_elsewhere"]


def counted_elsewhere(ops: Iterable[tuple[Any, ...]]) -> set[int]:
    """Their numbers, from all calls of the log: those that began from the state at the prompt's end, and those that
    looked the prompt up for the first time and were not counted then."""
    branched, counted, looked_up, came_in = set[int](), set[int](), set[int](), set[int]()
    for code, number, *more in ops:
        if code == "b":
            branched.add(number)
        elif code == "l" and not more[1]:
            looked_up.add(number)
        elif code == "a":
            (came_in if more[0] else counted).add(number)
    return (branched | (looked_up & came_in)) - counted
