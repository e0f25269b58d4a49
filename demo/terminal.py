"""The console that demos and benchmarks print to, and the handler of the signal that stops a demo."""

import sys
from typing import NoReturn

from rich.console import Console

__all__ = ["leave", "make_console"]

WIDTH = 116


def make_console(width: int = WIDTH) -> Console:
    """As wide as the terminal; `width` characters where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def leave(number: int, frame: object) -> NoReturn:
    """A signal's handler: ends the program as an exception, so that servers are stopped on the way out."""
    sys.exit(128 + number)
