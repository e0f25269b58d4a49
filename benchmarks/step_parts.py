"""What each compiled loop takes of a cold prompt and of a decode step on the CPU, by one thread's processor time.

    python -m benchmarks.step_parts [--model DIR] [--precisions bfloat16 int8 int4] [--prompt 1200] [--sequences 1 8]
                                    [--context 128] [--repeats 3] [--decode-steps 24] [--json FILE]

Without --model a Qwen3.5 of 333 M random parameters is made. Of prompts the fastest one is shown, of decode steps the
one at the lower quartile; steps are not recorded, so that each loop is called by itself, and `python, torch` is what is
between them. Of a prompt's loops that only bring activations into another form a second table has the least that they
could take: see `benchmarks.loop_bounds`. CAIRN_MAX_CPU_ISA is heeded; what a machine can do at most is told by
`benchmarks.machine_bounds`.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.hand_turned import HandTurned
from benchmarks.loop_bounds import LoopBounds, bounded_loops
from benchmarks.machine_bounds import bounds as machine_bounds
from benchmarks.made_model import given_or_made
from benchmarks.recorded_decodes import PRECISIONS, begin_decodes, engine
from benchmarks.reporting import as_json, check_positive, circumstances, make_console
from rich.table import Table

from cairn.errors import CairnError
from cairn.kernels.cpu.compiled import Variant

Parts = dict[str, float]
"""Milliseconds by the loops' names, and of all together."""

REST = "python, torch"

MEMORY_SECONDS = 0.2
"""That memory is read for at a time, to find its speed."""


@contextmanager
def timed_loops(spent: Counter[str]) -> Iterator[None]:
    """Adds to `spent` the nanoseconds of every loop that is called meanwhile."""
    call = Variant.__call__

    def timed(self: Variant, count: int, cost: int, *arguments: float) -> None:
        begin = time.thread_time_ns()
        call(self, count, cost, *arguments)
        spent[self.name] += time.thread_time_ns() - begin

    Variant.__call__ = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Variant.__call__ = call  # type: ignore[method-assign]


def parts_of(do: Callable[[], object]) -> Parts:
    spent = Counter[str]()
    with timed_loops(spent):
        begin = time.thread_time_ns()
        do()
        total = time.thread_time_ns() - begin
    parts = {name: spent[name] / 1e6 for name in sorted(spent, key=spent.__getitem__, reverse=True)}
    return {"all": total / 1e6, **parts, REST: (total - spent.total()) / 1e6}


def prefill(turned: HandTurned, length: int) -> None:
    turned.submit(turned.draw(length), 1)
    turned.until_idle()


def bounds_of(turned: HandTurned, parts: Parts, length: int) -> dict[str, dict[str, float]]:
    """By the loops' names: milliseconds, the least by memory and in the core's own caches, and how often the larger of
    both is in them."""
    bounds = LoopBounds()
    with bounded_loops(bounds, length):
        prefill(turned, length)
    rate, found = machine_bounds(1, MEMORY_SECONDS)["memory_gb_per_s"], {}
    for name in (name for name in parts if name in bounds.bytes):
        memory, in_caches = bounds.bytes[name] / rate / 1e6, bounds.in_caches[name] / 1e6
        least = max(memory, in_caches)
        found[name] = {"ms": parts[name], "memory": memory, "in caches": in_caches, "times": parts[name] / least}
    return found


def measure(
    options: argparse.Namespace, model: Path, precision: str, bounds: dict[str, dict[str, float]]
) -> Iterator[tuple[str, Parts]]:
    """Cases by name. The prompt's `bounds_of` go into `bounds`."""
    turned = engine(model, precision, max(options.sequences), eager=True)
    prefill(turned, options.prompt)
    prompts = [parts_of(lambda: prefill(turned, options.prompt)) for _ in range(options.repeats)]
    fastest = min(prompts, key=lambda parts: parts["all"])
    bounds |= bounds_of(turned, fastest, options.prompt)
    yield f"{options.prompt} tokens", fastest
    for count in options.sequences:
        begin_decodes(turned, count, options.context, options.decode_steps)
        steps = sorted((parts_of(turned.step) for _ in range(options.decode_steps)), key=lambda parts: parts["all"])
        yield f"decode, sequences {count}", steps[len(steps) // 4]
        turned.until_idle()
    turned.core.close()


def table_of(precision: str, cases: dict[str, Parts]) -> Table:
    table = Table("ms", *cases, title=precision)
    for name in dict.fromkeys(name for parts in cases.values() for name in parts):
        table.add_row(name, *(f"{parts[name]:,.2f}" if name in parts else "" for parts in cases.values()))
    return table


def table_of_bounds(bounds: dict[str, dict[str, float]]) -> Table:
    table = Table("of the prompt, ms", *next(iter(bounds.values()), {}))
    for name, row in bounds.items():
        table.add_row(name, *(f"{value:,.2f}" for value in row.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint with a vocabulary of at least 4,000")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS])
    parser.add_argument("--prompt", type=int, default=1200, help="tokens")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=128, help="tokens of each sequence that decodes")
    parser.add_argument("--repeats", type=int, default=3, help="of the prompt")
    parser.add_argument("--decode-steps", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    check_positive(parser, options, "prompt", "sequences", "context", "repeats", "decode_steps")
    torch.set_num_threads(1)
    console, found, bounds_found = make_console(), dict[str, Any](), dict[str, Any]()
    with given_or_made(options.model) as model:
        try:
            for precision in options.precisions:
                bounds = dict[str, dict[str, float]]()
                found[precision] = dict(measure(options, model, precision, bounds))
                console.print(table_of(precision, found[precision]), table_of_bounds(bounds))
                bounds_found[precision] = bounds
        except CairnError as error:
            raise SystemExit(f"step_parts: {error}") from error
    if options.json:
        sizes = {name: getattr(options, name) for name in ("prompt", "context", "repeats", "decode_steps")}
        options.json.write_text(as_json({**circumstances(), **sizes, "parts": found, "bounds": bounds_found}))


if __name__ == "__main__":
    main()
