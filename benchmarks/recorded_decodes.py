"""What repeating recorded decode steps saves on the CPU: the same steps recorded, and called loop by loop from Python.

    python -m benchmarks.recorded_decodes [--model DIR] [--precisions bfloat16 int8 int4] [--sequences 1 8]
                                          [--context 64] [--windows 5] [--decode-steps 16] [--cpu-threads N]
                                          [--json FILE]

Without --model a Qwen3.5 of 333 M random parameters is made (seed 0). One process has both engines; windows of
--decode-steps steps of the one and of the other are timed in turn. Of each the median is shown, in milliseconds a
step, and how many times as fast the recorded step is; the baseline is --enforce-eager.
"""

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks.hand_turned import HandTurned
from benchmarks.made_model import given_or_made
from benchmarks.quantization import wait_as_a_server_does
from benchmarks.reporting import as_json, check_positive, circumstances, make_console
from rich.progress import track
from rich.table import Table

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.errors import CairnError

PRECISIONS = ("bfloat16", "int8", "int4")


def engine(model: Path, precision: str, sequences: int, eager: bool) -> HandTurned:
    config = EngineConfig(
        model=str(model),
        dtype="bfloat16",
        quantization=None if precision == "bfloat16" else precision,
        max_num_seqs=sequences,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=eager,
    )
    return HandTurned(build_core(config))


def begin_decodes(turned: HandTurned, count: int, context: int, steps: int) -> None:
    """`count` sequences are past their prompts, and their step is recorded where it is to be."""
    for _ in range(count):
        turned.submit(turned.draw(context), steps + 2 * count + 16)
    while turned.step() < count:
        pass
    for _ in range(4):
        turned.step()


def milliseconds(turned: HandTurned, steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        turned.step()
    return 1000 * (time.perf_counter() - begin) / steps


def measure(options: argparse.Namespace, model: Path, precision: str) -> list[dict[str, Any]]:
    most = max(options.sequences)
    with ExitStack() as stack:
        recorded, eager = (engine(model, precision, most, is_eager) for is_eager in (False, True))
        stack.callback(recorded.core.close)
        stack.callback(eager.core.close)
        found = []
        for count in options.sequences:
            for turned in (recorded, eager):
                begin_decodes(turned, count, options.context, options.windows * options.decode_steps)
            windows = [
                [milliseconds(turned, options.decode_steps) for turned in (recorded, eager)]
                for _ in range(options.windows)
            ]
            recorded_ms, eager_ms = (statistics.median(column) for column in zip(*windows, strict=True))
            ratios = sorted(eager_window / window for window, eager_window in windows)
            row = {"precision": precision, "sequences": count, "recorded_ms": recorded_ms, "eager_ms": eager_ms}
            found.append(row | {"ratio": eager_ms / recorded_ms, "ratios": ratios})
            for turned in (recorded, eager):
                turned.until_idle()
        return found


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("weights", "sequences", "recorded, ms", "eager, ms", "times as fast", "of windows")
    for row in rows:
        table.add_row(
            row["precision"],
            str(row["sequences"]),
            f"{row['recorded_ms']:.1f}",
            f"{row['eager_ms']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f}",
        )
    return table


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint with a vocabulary of at least 4,000")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=64, help="tokens of each sequence")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--decode-steps", type=int, default=16, help="of a window")
    parser.add_argument("--cpu-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args(words)
    check_positive(parser, arguments, "sequences", "context", "windows", "decode_steps", "cpu_threads")
    return arguments


def main() -> None:
    arguments = parse()
    wait_as_a_server_does(arguments.cpu_threads, "benchmarks.recorded_decodes")
    torch.set_num_threads(arguments.cpu_threads)
    console = make_console()
    with given_or_made(arguments.model) as model:
        try:
            steps = track(arguments.precisions, "precisions", console=console, transient=True)
            rows = [row for precision in steps for row in measure(arguments, model, precision)]
        except CairnError as error:
            raise SystemExit(f"recorded_decodes: {error}") from error
    console.print(table_of(rows))
    if arguments.json:
        sizes = {name: getattr(arguments, name) for name in ("context", "windows", "decode_steps", "cpu_threads")}
        arguments.json.write_text(as_json({**circumstances(), **sizes, "rows": rows}))


if __name__ == "__main__":
    main()
