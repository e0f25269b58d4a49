"""What both demos have to do with the terminal they run in, and with who stops them."""

import sys
from typing import NoReturn

from rich.console import Console

__all__ = ["leave", "make_console"]

WIDTH = 116


def make_console() -> Console:
    """As wide as the terminal; 116 characters where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def leave(number: int, frame: object) -> NoReturn:
    """A signal's handler: ends the program as an exception, so that servers are stopped on the way out."""
    sys.exit(128 + number)
