"""A demo's command line, the console that it and benchmarks print to, and the handler of the signal that stops it."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import httpx
from rich.console import Console

from demo.server import DemoError

__all__ = ["leave", "make_console", "run_demo"]

WIDTH = 116


def make_console(width: int = WIDTH) -> Console:
    """As wide as the terminal; `width` characters where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def run_demo(
    run: Callable[[Path, Path, Console], int],
    name: str,
    arguments: Sequence[str] | None,
    *,
    about: str | None,
    out: str = "folder for the servers' logs and result.json",
    unanswered: str = "a server did not answer: {error!r} (logs: {out})",
) -> int:
    """Parse the command line and run the demo. Returns what `run` does for the model's folder, the one for results and
    the console: 0 where all promises were kept, 1 where one was broken. 1 as well, with a line that says why, when the
    demo could not be run.

    `about`, `out`: for the help; `unanswered`: what is said of an HTTP request that has failed.
    """
    parser = argparse.ArgumentParser(prog=name, description=about)
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint made by `cairn make-model`")
    parser.add_argument("--out", type=Path, required=True, help=out)
    parsed = parser.parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    try:
        return run(parsed.model, parsed.out, make_console())
    except DemoError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        print(f"{name}: {unanswered.format(error=error, out=parsed.out)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def leave(number: int, frame: object) -> NoReturn:
    """A signal's handler: ends the program as an exception, so that servers are stopped on the way out."""
    sys.exit(128 + number)
