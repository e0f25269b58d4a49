"""What a cache hits that keeps of windows what is within reach, over one that keeps all tokens in the same bytes.

    python -m benchmarks.windows FOLDER [--traces unannounced_a,syn_chat] [--layout gpt-oss-20b]
                                 [--budgets 3000000000 12000000000] [--json FILE] [--plot FILE]

Every trace goes through the shipped cache and scheduler twice for each budget, with the layout as cairn serves it, and
as if layers of limited reach had none, which is the baseline. `unlimited` is what a cache without bounds hits.
Deterministic.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np
from benchmarks.replay_policies import add_trace_flags, trace_files
from benchmarks.reporting import make_console, save_figure
from rich.progress import track
from rich.table import Table

from cairn.cache.eviction import ValuePerByte
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import CachePolicy
from cairn.replay.bounds import unlimited_hits
from cairn.replay.layouts import layout_for
from cairn.replay.replay import Replay
from cairn.replay.traces import read_trace
from cairn.types import SystemClock

MAX_NUM_BATCHED_TOKENS = 8192


def measure(path: Path, layout_name: str, budget: int) -> dict[str, object]:
    """Hit rates of one trace, in prompt tokens."""
    trace = read_trace(path)
    num_tokens = sum(request.num_prompt_tokens for request in trace.requests)
    rates = {"unlimited": sum(unlimited_hits(trace)) / num_tokens}
    for name, keeps_all in (("windows", False), ("all_tokens", True)):
        layout, policy = layout_for(layout_name, keeps_all_tokens=keeps_all), CachePolicy(Auto(), ValuePerByte())
        replay = Replay(layout, budget, policy, MAX_NUM_BATCHED_TOKENS, SystemClock(), trace.header)
        rates[name] = sum(replay.run(trace).hits) / num_tokens
    ratio = rates["windows"] / rates["all_tokens"] if rates["all_tokens"] else float("inf")
    return {"trace": path.name.partition(".")[0], "budget": budget, **rates, "ratio": ratio}


def plot(rows: list[dict], path: Path) -> None:
    names = [f"{row['trace']}\n{row['budget'] / 1e9:g} GB" for row in rows]
    with save_figure(path, 7, 3.5) as figure:
        axes = figure.subplots()
        for place, key in enumerate(("all_tokens", "windows", "unlimited")):
            axes.bar(np.arange(len(rows)) + (place - 1) * 0.27, [row[key] for row in rows], 0.27, label=key)
        axes.set_xticks(np.arange(len(rows)), names, fontsize=8)
        axes.set_ylabel("token hit rate")
        axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trace_flags(parser)
    parser.add_argument("--layout", default="gpt-oss-20b")
    parser.add_argument("--budgets", type=int, nargs="+", default=[3_000_000_000, 12_000_000_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    cases = list(product(trace_files(arguments.folder, arguments.traces), arguments.budgets))
    rows = [measure(path, arguments.layout, budget) for path, budget in track(cases, "traces")]
    table = Table("trace", "budget", "all tokens kept", "windows", "unlimited", "windows / all tokens")
    for row in rows:
        rates = (f"{row[key]:.4f}" for key in ("all_tokens", "windows", "unlimited"))
        table.add_row(str(row["trace"]), f"{row['budget'] / 1e9:g} GB", *rates, f"{row['ratio']:.2f}")
    make_console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
