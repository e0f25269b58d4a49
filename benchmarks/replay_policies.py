"""Placement and eviction policies on request traces, against what can be reached: the figures of docs/benchmarks.md.

    python -m benchmarks.replay_policies FOLDER [--traces NAMES] [--policies NAMES] [--sweep SHARES] [--layouts NAMES]
                                         [--json FILE] [--plot FILE] [--processes N]

Every trace in FOLDER (`*.jsonl`, `*.jsonl.gz`; of either form that `cairn replay` reads) goes through the shipped cache
with each policy and layout at each share of its footprint. For each trace the hit rate over that of `offline`, a
feasible schedule that knows the future, and the means of the ratio over the traces; prefill tokens over those of
`offline`; and by how much `auto` falls short of the best simple policy.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.reporting import save_figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

POLICIES = ("auto", "align", "all", "junction", "lru")
SIMPLE = ("align", "all", "junction", "lru")
SHARES = (0.02, 0.05, 0.10, 0.20)
TIMEOUT_SECONDS = 4 * 3600
ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]


def replayed(trace: Path, policy: str | None, share: float, layout: str) -> list[Row]:
    """The rows of a process of its own: of `cairn replay`, for policy None of `benchmarks.offline_line`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", *(("cairn", "replay") if policy else ("benchmarks.offline_line",)), str(trace)]
        command += ["--json", str(out), "--layout", layout, "--budget-fraction", str(share)]
        command += ["--policy", policy, "--no-bounds"] if policy else []
        found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split()])}
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=found)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        rows: list[Row] = json.loads(out.read_text())
    return [{**row, "share": share, "file": trace.name} for row in rows]


def all_rows(arguments: argparse.Namespace, traces: list[Path]) -> list[Row]:
    """Of every trace, policy, share and layout."""
    runs = [
        (trace, policy, share, layout)
        for layout in arguments.layouts
        for trace in traces
        for share in arguments.sweep
        for policy in (None, *arguments.policies)
    ]
    rows: list[Row] = []
    with ThreadPoolExecutor(arguments.processes) as threads, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("replays", total=len(runs))
        for done in as_completed([threads.submit(replayed, *run) for run in runs]):
            rows += done.result()
            progress.advance(task)
    return rows


def cells(rows: list[Row]) -> Iterator[tuple[tuple[str, float, str], dict[str, Row]]]:
    """(layout, share, trace) and its rows by policy, in order."""
    keys = sorted({(row["layout"], row["share"], row["trace"]) for row in rows})
    for key in keys:
        yield key, {row["policy"]: row for row in rows if (row["layout"], row["share"], row["trace"]) == key}


def ratio(by_policy: dict[str, Row], policy: str) -> float:
    """Hit rate over that of `offline`; 1 where nothing can be hit."""
    offline = by_policy["offline"]["token_hit_rate"]
    return by_policy[policy]["token_hit_rate"] / offline if offline else 1.0


def summary(rows: list[Row], policies: tuple[str, ...]) -> list[Row]:
    """Per layout and share: of each policy the mean of hit/offline over the traces, its least, and the geometric mean
    of prefill tokens over those of `offline`; and the most that `auto` is below the best simple policy."""
    found: dict[tuple[str, float], list[dict[str, Row]]] = {}
    for (layout, share, _), by_policy in cells(rows):
        found.setdefault((layout, share), []).append(by_policy)
    summaries = []
    for (layout, share), group in found.items():
        row: Row = {"layout": layout, "share": share, "traces": len(group)}
        for policy in policies:
            ratios = [ratio(each, policy) for each in group]
            prefill = [each[policy]["prefill_tokens"] / max(1, each["offline"]["prefill_tokens"]) for each in group]
            row[policy] = {
                "mean_ratio": sum(ratios) / len(ratios),
                "least_ratio": min(ratios),
                "prefill_ratio": math.exp(sum(map(math.log, prefill)) / len(prefill)),
            }
        simple = [policy for policy in SIMPLE if policy in policies]
        if "auto" in policies and simple:
            row["auto_below_best_simple"] = max(
                max(each[policy]["token_hit_rate"] for policy in simple) - each["auto"]["token_hit_rate"]
                for each in group
            )
        summaries.append(row)
    return summaries


def show(rows: list[Row], summaries: list[Row], policies: tuple[str, ...]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table("layout", "budget", "trace", "unlimited", "offline", *policies, "auto µs", title="token hit rate")
    for (layout, share, name), by_policy in cells(rows):
        rates = [f"{by_policy[line]['token_hit_rate']:.4f}" for line in ("unlimited", "offline")]
        rates += [f"{by_policy[each]['token_hit_rate']:.4f} ({ratio(by_policy, each):.3f})" for each in policies]
        spent = f"{by_policy['auto']['microseconds_per_request']:.0f}" if "auto" in by_policy else ""
        table.add_row(layout, f"{share:.0%}", name, *rates, spent)
    console.print(table)
    means = Table("layout", "budget", "traces", *policies, "auto below best simple", title="mean of hit/offline")
    for row in summaries:
        ratios = [f"{row[each]['mean_ratio']:.3f} (prefill {row[each]['prefill_ratio']:.2f}x)" for each in policies]
        below = row.get("auto_below_best_simple")
        means.add_row(
            row["layout"], f"{row['share']:.0%}", str(row["traces"]), *ratios, (below and f"{below:+.4f}") or ""
        )
    console.print(means)


def plot(summaries: list[Row], policies: tuple[str, ...], path: Path) -> None:
    """Mean of hit/offline over the budget's share of the footprint, one line a policy; the first layout's."""
    with save_figure(path) as figure:
        axes = figure.subplots()
        first = [row for row in summaries if row["layout"] == summaries[0]["layout"]]
        for policy in policies:
            points = [(100 * row["share"], row[policy]["mean_ratio"]) for row in first]
            axes.plot(*zip(*points, strict=True), marker="o", label=policy)
        axes.axhline(1.0, color="black", linestyle="--", label="offline")
        axes.set(
            xscale="log",
            xlabel="budget, % of the footprint",
            ylabel="mean of hit / offline",
            title=summaries[0]["layout"],
        )
        axes.legend(frameon=False)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="traces, as `cairn replay` reads them")
    parser.add_argument("--traces", type=words, help="their file names without .jsonl; all of the folder unless given")


def trace_files(folder: Path, names: tuple[str, ...] | None) -> list[Path]:
    """The traces of `folder`, or those of these names. Raises SystemExit where there is none."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    found = [path for path in files if names is None or path.name.split(".jsonl")[0] in names]
    if not found:
        raise SystemExit(f"no traces in {folder}: it has to hold files that end in .jsonl or .jsonl.gz")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trace_flags(parser)
    parser.add_argument("--policies", type=words, default=POLICIES)
    parser.add_argument("--sweep", type=lambda text: tuple(map(float, words(text))), default=SHARES)
    parser.add_argument("--layouts", type=words, default=("nemotron-3-nano",))
    parser.add_argument("--processes", type=int, default=2, help="replays at a time; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write a PNG or SVG here")
    arguments = parser.parse_args()
    traces = trace_files(arguments.folder, arguments.traces)
    rows = all_rows(arguments, traces)
    summaries = summary(rows, arguments.policies)
    show(rows, summaries, arguments.policies)
    if arguments.json:
        arguments.json.write_text(json.dumps({"means": summaries, "rows": rows}, indent=1) + "\n")
    if arguments.plot:
        plot(summaries, arguments.policies, arguments.plot)


if __name__ == "__main__":
    main()
