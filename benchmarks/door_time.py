"""Processor time that a request takes in the cache's door, its policies included, when the pool is full.

    python -m benchmarks.door_time TRACE [--budget SIZE] [--requests N] [--rounds N] [--json FILE]

A trace's first requests are replayed by the shipped scheduler (`cairn replay`), with each public method of
`PrefixCache` timed by the processor's clock of its thread; what the clock itself takes is measured beside it and taken
off. Garbage collections leave out what there is before the replay, as they do in a server. The baseline, in the same
round, is what no cache that compares tokens can do without: to bring each prompt's keys into the trees' form, once.
"""

import argparse
import contextlib
import gzip
import inspect
import io
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console
from rich.table import Table

from cairn.cache import lookup
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.sequence_blocks import SequenceBlocks
from cairn.engine.child_process import freeze_heap
from cairn.replay.command import add_replay_flags, run_replay

BAR_US = 1000.0


class Door:
    """Times the outermost calls of the cache's public methods while it is entered. `answers_us`: those of sequences
    that are generating an answer, which the steps of a decode pay for."""

    def __init__(self) -> None:
        self.microseconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.keys_us = self.answers_us = 0.0
        self._inside = False
        self._clock_us = min(self._pairs(1000) for _ in range(20))

    @staticmethod
    def _pairs(number: int) -> float:
        spent = 0
        for _ in range(number):
            begin = time.thread_time_ns()
            spent += time.thread_time_ns() - begin
        return spent / number / 1000

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return method(*arguments, **named)
            self._inside = True
            begin = time.thread_time_ns()
            try:
                return method(*arguments, **named)
            finally:
                spent = (time.thread_time_ns() - begin) / 1000 - self._clock_us
                self._inside = False
                self.microseconds[name] = self.microseconds.get(name, 0.0) + spent
                self.calls[name] = self.calls.get(name, 0) + 1
                sequences = [each for each in arguments if isinstance(each, SequenceBlocks)]
                self.answers_us += spent * any(each.num_tokens > each.num_prompt_tokens for each in sequences)

        return timed

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Times until the end of the block."""
        methods = {
            name: method
            for name, method in vars(PrefixCache).items()
            if not name.startswith("_") and inspect.isfunction(method)
        }
        plain_key = lookup.TokenKey

        def timed_key(keys: Any) -> Any:
            begin = time.thread_time_ns()
            key = plain_key(keys)
            self.keys_us += (time.thread_time_ns() - begin) / 1000 - self._clock_us
            return key

        for name, method in methods.items():
            setattr(PrefixCache, name, self._timed(name, method))
        lookup.TokenKey = timed_key  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            lookup.TokenKey = plain_key  # type: ignore[misc]
            for name, method in methods.items():
                setattr(PrefixCache, name, method)


def measure(trace: Path, budget: str) -> Door:
    """One replay of `trace`."""
    door, parser = Door(), argparse.ArgumentParser()
    add_replay_flags(parser)
    arguments = parser.parse_args([str(trace), "--budget", budget, "--no-bounds"])
    freeze_heap()
    with door.timing(), contextlib.redirect_stdout(io.StringIO()):
        run_replay(arguments)
    return door


def first_requests(trace: Path, number: int, folder: Path) -> Path:
    """The trace's header and its first requests, in a file of their own."""
    short = folder / trace.name.removesuffix(".gz")
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines, short.open("w") as file:
        file.writelines(line for _, line in zip(range(number + 1), lines, strict=False))
    return short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budget", default="12GB", help="of the pool, as `cairn replay --budget`")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    console = make_console()
    rounds = []
    with TemporaryDirectory() as folder:
        trace = first_requests(arguments.trace, arguments.requests, Path(folder))
        for _ in range(arguments.rounds):
            rounds.append(measure(trace, arguments.budget))
    middle = sorted(rounds, key=lambda door: sum(door.microseconds.values()))[len(rounds) // 2]
    table = Table("method", "calls a request", "µs a request", title=f"{arguments.trace.name}, {arguments.budget}")
    for name, spent in sorted(middle.microseconds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{middle.calls[name] / arguments.requests:.2f}", f"{spent / arguments.requests:.1f}")
    console.print(table)
    totals = [sum(door.microseconds.values()) / arguments.requests for door in rounds]
    keys = statistics.median(door.keys_us for door in rounds) / arguments.requests
    answers = statistics.median(door.answers_us for door in rounds) / arguments.requests
    median = statistics.median(totals)
    each = ", ".join(f"{total:.0f}" for total in totals)
    console.print(f"door: {median:.0f} µs a request (rounds: {each}; bar {BAR_US:.0f})")
    console.print(f"of that while answers are generated: {answers:.0f} µs")
    console.print(f"its keys alone: {keys:.0f} µs, {median / keys:.1f} times that")
    if arguments.json is not None:
        result = {
            "circumstances": circumstances(),
            "trace": arguments.trace.name,
            "budget": arguments.budget,
            "requests": arguments.requests,
            "door_us": totals,
            "keys_us": keys,
            "answers_us": answers,
            "methods_us": {name: spent / arguments.requests for name, spent in middle.microseconds.items()},
        }
        arguments.json.write_text(as_json(result))


if __name__ == "__main__":
    main()
