"""What it brings that the cache knows who waits: tokens computed and time to the first token, on request traces.

    python -m benchmarks.waiting TRACE [TRACE ...] [--budget-fraction 0.05] [--waiting 4 16 64] [--running 16]
                                 [--layout nemotron-3-nano] [--json FILE] [--plot FILE]

One simulated server (`benchmarks.queued_server`): the shipped scheduler and cache, steps of a modelled length. Requests
come in the order of the trace, with so many waiting all the time; of a session the next one comes when it has its
answer. The baseline is the same server, first come first served, whose cache does not know who waits. Everything is
simulated: the same figures come on every machine.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.queued_server import (
    QueuedServer,
    StepTimes,
    add_server_flags,
    check_server_flags,
    sessions_of,
    shipped_policies,
)
from benchmarks.reporting import as_json, check_positive, make_console, save_figure
from rich.progress import Progress, TaskID
from rich.table import Table

from cairn.replay.bounds import footprint_bytes, unlimited_hits
from cairn.replay.layouts import layout_for
from cairn.replay.trace import Trace
from cairn.replay.traces import read_trace


def serve(trace: Trace, arguments: argparse.Namespace, waiting: int, know_waiting: bool, progress: Any) -> dict:
    layout = layout_for(arguments.layout)
    budget = int(footprint_bytes(trace, layout) * arguments.budget_fraction)
    server = QueuedServer(layout, budget, *shipped_policies(layout, arguments.running), StepTimes(), know_waiting)
    outcome = server.run(sessions_of(trace), waiting, progress)
    return {
        "know_waiting": know_waiting,
        "requests": len(outcome.prompt),
        "prompt_tokens": sum(outcome.prompt),
        "computed_tokens": sum(outcome.computed),
        "mean_ttft_s": statistics.fmean(outcome.ttft),
        "p99_ttft_s": float(np.percentile(outcome.ttft, 99)),
        "most_bypassed": max(outcome.bypassed),
        "seconds": outcome.seconds,
    }


def measure(arguments: argparse.Namespace) -> list[dict]:
    rows = []
    with Progress(console=make_console(), transient=True) as progress:
        for path in arguments.traces:
            trace = read_trace(path)
            served = [index for index, request in enumerate(trace.requests) if len(request.path)]
            hits = unlimited_hits(trace)
            least = sum(trace.requests[index].num_prompt_tokens - int(hits[index]) for index in served)
            for waiting in arguments.waiting:
                for know_waiting in (False, True):
                    task = progress.add_task(f"{trace.name}, {waiting} waiting", total=len(served))
                    row = serve(trace, arguments, waiting, know_waiting, partial(_tell, progress, task))
                    progress.remove_task(task)
                    rows.append({"trace": trace.name, "waiting": waiting, "least_computed_tokens": least, **row})
    return rows


def _tell(progress: Progress, task: TaskID, completed: int) -> None:
    progress.update(task, completed=completed)


def pairs(rows: list[dict]) -> list[tuple[dict, dict]]:
    """Each case without and with the knowledge."""
    return list(zip(rows[::2], rows[1::2], strict=True))


def show(rows: list[dict]) -> None:
    table = Table("trace", "waiting", "tokens computed", "unlimited", "mean TTFT, s", "P99 TTFT, s", "bypassed by")
    for before, after in pairs(rows):
        computed, least = before["computed_tokens"], before["least_computed_tokens"]
        table.add_row(
            before["trace"],
            str(before["waiting"]),
            f"{computed:,} -> {after['computed_tokens']:,} ({after['computed_tokens'] / computed:.2f})",
            f"{least / computed:.2f}",
            f"{before['mean_ttft_s']:.1f} -> {after['mean_ttft_s']:.1f}",
            f"{before['p99_ttft_s']:.1f} -> {after['p99_ttft_s']:.1f}",
            str(after["most_bypassed"]),
        )
    make_console(160).print(table)


def plot(rows: list[dict], path: Path) -> None:
    """Tokens computed, of those of the baseline, by how many wait: a line a trace, dotted what an unlimited cache
    would."""
    with save_figure(path, 7, 4) as figure:
        axes = figure.subplots()
        for name in dict.fromkeys(row["trace"] for row in rows):
            cases = [(before, after) for before, after in pairs(rows) if before["trace"] == name]
            places = [before["waiting"] for before, _ in cases]
            computed = [after["computed_tokens"] / before["computed_tokens"] for before, after in cases]
            (line,) = axes.plot(places, computed, marker="o", label=name)
            least = [before["least_computed_tokens"] / before["computed_tokens"] for before, _ in cases]
            axes.plot(places, least, linestyle=":", color=line.get_color())
        axes.set(xscale="log", xlabel="requests that wait", ylabel="tokens computed, of first come first served")
        axes.set_xticks(
            sorted({row["waiting"] for row in rows}), sorted({str(row["waiting"]) for row in rows}, key=int)
        )
        axes.set_ylim(0)
        axes.legend(frameon=False)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--waiting", nargs="+", type=int, default=[4, 16, 64])
    add_server_flags(parser, "each trace's")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write a PNG or SVG here")
    arguments = parser.parse_args(words)
    check_positive(parser, arguments, "waiting")
    check_server_flags(parser, arguments)
    return arguments


def main() -> None:
    arguments = parse()
    rows = measure(arguments)
    show(rows)
    if arguments.json:
        sizes = {name: getattr(arguments, name) for name in ("budget_fraction", "running", "layout")}
        arguments.json.write_text(as_json({**sizes, "rows": rows}))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
