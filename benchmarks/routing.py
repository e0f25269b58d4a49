"""The routing rule before a simulated fleet, on request traces: the figures of docs/benchmarks.md.

    python -m benchmarks.routing FOLDER [--traces NAMES] [--replicas COUNTS] [--rules NAMES] [--sessions N]
                                 [--requests N] [--memory SHARE] [--utilization SHARE] [--seed N] [--json FILE]
                                 [--plot FILE] ...

Every trace in FOLDER (`*.jsonl`, `*.jsonl.gz`; as `cairn replay` reads them, with sessions) is repeated until each
replica has `--sessions` sessions and `--requests` requests at least (`benchmarks.routing_trace` says what a copy keeps;
of long sessions `--session-seconds` takes the beginnings alone), and goes through a fleet of simulated servers
(`benchmarks.routing_fleet`) once with each rule: `cairn`, the shipped one, and those of `benchmarks.routing_baselines`.
`shared cache` is no rule, but what none can do better than: servers with one cache for all, and each request where
least work waits. A replica's memory is a share of its sessions' footprint.

The reference is `one cache`: the same requests in the order of the trace through one cache with the memory of all
replicas. What that would compute, over what the fleet could, is `--utilization`: the trace comes so much faster that
it is so in the measured time, from when a quarter of the requests have come until the last session starts. Load is
told of windows of 60 s in that time, one every 10 s: the prompt tokens that the busiest replica computes over the mean
of all.

Runs are deterministic but for the processor time of decisions. Rows that are in the JSON file already are not computed
again, so that a long study can be run part by part, also by processes that each have a file of their own.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.replay_policies import add_trace_flags, trace_files, words
from benchmarks.reporting import add_output_flags, circumstances, make_console, save_figure
from benchmarks.routing_baselines import BASELINES, SHARED_CACHE, SHIPPED, make_router
from benchmarks.routing_fleet import Fleet, FleetOptions, FleetOutcome, ReplayCache, ServerModel
from benchmarks.routing_trace import RepeatedTrace, num_copies
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cairn.cache.layout import CacheLayout
from cairn.replay.layouts import layout_for
from cairn.replay.trace import Trace
from cairn.replay.traces import read_trace
from cairn.routing.index import PrefixIndex
from cairn.routing.rule import RoutingOptions

__all__ = ["imbalance", "main", "simulate", "single_cache"]

ONE_CACHE = "one cache"
RULES = (SHIPPED, *BASELINES, SHARED_CACHE)
WINDOW_SECONDS, WINDOW_STEP = 60.0, 10.0
MIN_SESSIONS = 30
"""A replica has the memory of so many sessions even where fewer are simulated."""

Row = dict[str, Any]
Floats = NDArray[np.float64]


def cut_sessions(trace: Trace, seconds: float) -> Trace:
    """The requests of each session's first `seconds` seconds of the trace's time."""
    starts: dict[int | None, float] = {}
    kept = [
        request
        for request in trace.requests
        if request.arrived - starts.setdefault(request.session, request.arrived) <= seconds
    ]
    return Trace(trace.name, trace.unit, tuple(kept))


def replica_bytes(repeated: RepeatedTrace, layout: CacheLayout, memory: float, replicas: int) -> int:
    """Each replica's share of `memory` times the footprint."""
    sessions = repeated.num_sessions / replicas
    return int(memory * repeated.footprint_bytes(layout) / replicas * max(1.0, MIN_SESSIONS / sessions))


def measured_times(repeated: RepeatedTrace) -> tuple[float, float]:
    """The measured time, in seconds of the trace."""
    return float(repeated.times[len(repeated) // 4]), repeated.last_start


def single_cache(repeated: RepeatedTrace, layout: CacheLayout, budget_bytes: int, progress: Any = None) -> Row:
    """One cache with the memory of the whole fleet: its cached share, and how many tokens it computes a second of the
    trace in the measured time."""
    cache, cached, prompt = ReplayCache(layout, budget_bytes), 0, 0
    first, last = measured_times(repeated)
    computed = 0
    for number, arrival in enumerate(repeated.arrivals(), 1):
        hit = cache.serve(arrival.request, repeated.trace.unit)
        cached += hit
        prompt += arrival.request.num_prompt_tokens
        computed += (arrival.request.num_prompt_tokens - hit) * (first <= arrival.time < last)
        if progress is not None and number % 256 == 0:
            progress(number)
    return {
        "cached_share": cached / prompt,
        "computed_rate": computed / max(last - first, 1e-9),
    }


def imbalance(tokens: NDArray[np.number[Any]]) -> float | None:
    """The 95th percentile, over windows, of the most that a replica has over the mean of all; None without a window in
    which there is anything. `tokens`: shape [replicas, windows]."""
    means = tokens.mean(axis=0)
    if not means.any():
        return None
    return float(np.percentile((tokens.max(axis=0) / np.maximum(means, 1e-9))[means > 0], 95))


def routed_tokens(outcome: FleetOutcome, begins: Floats, replicas: int) -> Floats:
    """Tokens to compute of the prompts that are routed to each replica in each window, shape [replicas, windows]."""
    firsts, lasts = np.searchsorted(outcome.arrived, [begins, begins + WINDOW_SECONDS])
    lacking = (outcome.prompt - outcome.cached).astype(np.float64)
    tokens = [
        np.bincount(outcome.replica[first:last], lacking[first:last], minlength=replicas)
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return np.array(tokens).reshape(-1, replicas).T


def simulate(
    repeated: RepeatedTrace, fleet: Fleet, single: Row, utilization: float, options: FleetOptions, progress: Any = None
) -> tuple[FleetOutcome, Row]:
    """One run and its figures."""
    first, last = measured_times(repeated)
    capacity = options.replicas * options.server.prefill_speed
    speedup = utilization * capacity / single["computed_rate"]
    outcome = fleet.run(repeated, speedup, progress)
    first, last = first / speedup, last / speedup
    begins = np.arange(first, max(first, last - WINDOW_SECONDS), WINDOW_STEP)
    measured = (outcome.arrived >= first) & (outcome.arrived < last)
    ttft = outcome.ttft[measured]
    by_time = fleet.computed_by(np.array([first, last]))
    decisions = outcome.decision_seconds * 1e6
    cached_share = outcome.cached.sum() / outcome.prompt.sum()
    return outcome, {
        "cached_share": cached_share,
        "of_one_cache": cached_share / single["cached_share"] if single["cached_share"] else 1.0,
        "ttft_mean": float(ttft.mean()),
        "ttft_median": float(np.median(ttft)),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "imbalance": imbalance(fleet.computed_by(begins + WINDOW_SECONDS) - fleet.computed_by(begins)),
        "imbalance_routed": imbalance(routed_tokens(outcome, begins, options.replicas)),
        "utilization": float((by_time[:, 1] - by_time[:, 0]).sum() / (last - first) / capacity),
        "seconds": last - first,
        "speedup": speedup,
        "index_bytes": outcome.index_bytes,
        "decision_us_mean": float(decisions.mean()),
        "decision_us_median": float(np.median(decisions)),
        "decision_us_p99": float(np.percentile(decisions, 99)),
        "record_us_mean": outcome.record_seconds * 1e6 / len(outcome.arrived),
    }


class Study:
    """The rows of a JSON file, computed as far as they are not there."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.rows: list[Row] = []
        if arguments.json is not None and arguments.json.exists():
            self.rows = json.loads(arguments.json.read_text())["rows"]
        self._options = dataclasses.replace(RoutingOptions(), **arguments.set)
        self._layout = layout_for(arguments.layout)
        bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*bars, console=Console(stderr=True), transient=True)

    def run(self, paths: list[Path]) -> None:
        with self._progress:
            for path in paths:
                trace = cut_sessions(read_trace(path), self._arguments.session_seconds)
                for replicas in self._arguments.replicas:
                    self._run_fleets(trace, replicas)

    def _run_fleets(self, trace: Trace, replicas: int) -> None:
        arguments = self._arguments
        most = max(1, arguments.max_requests // len(trace.requests))
        copies = min(most, num_copies(trace, replicas, arguments.sessions, arguments.requests))
        key = {
            "trace": trace.name,
            "replicas": replicas,
            "copies": copies,
            "memory": arguments.memory,
            "layout": arguments.layout,
            "session_seconds": arguments.session_seconds,
            "seed": arguments.seed,
        }
        rules = [rule for rule in arguments.rules if not self._find(key | self._variant(rule))]
        if not rules:
            return
        repeated = RepeatedTrace(trace, copies, arguments.seed)
        budget = replica_bytes(repeated, self._layout, arguments.memory, replicas)
        single = self._find(key | {"rule": ONE_CACHE})
        if single is None:
            since = time.monotonic()
            task = self._progress.add_task(f"{trace.name} one cache for {replicas}", total=len(repeated))
            single = key | {"rule": ONE_CACHE, "sessions": repeated.num_sessions, "requests": len(repeated)}
            single |= single_cache(
                repeated, self._layout, replicas * budget, lambda done: self._progress.update(task, completed=done)
            )
            self._progress.remove_task(task)
            self._add(single | {"replica_bytes": budget, "wall_seconds": time.monotonic() - since})
        fleet_options = FleetOptions(
            replicas,
            self._layout,
            budget,
            ServerModel(arguments.prefill_speed, arguments.decode_ms / 1000, arguments.max_running),
            arguments.event_delay,
            arguments.load_period,
        )
        for rule in rules:
            options = fleet_options
            since = time.monotonic()
            if rule == SHARED_CACHE:
                options = dataclasses.replace(options, shares_cache=True, load_period=0.0)
            index = PrefixIndex(arguments.max_blocks, max_sample_every=arguments.max_sample_every)
            fleet = Fleet(options, make_router(rule, arguments.seed, self._options, index), trace.unit)
            task = self._progress.add_task(f"{trace.name} {rule}, {replicas} replicas", total=len(repeated))
            _, figures = simulate(
                repeated,
                fleet,
                single,
                arguments.utilization,
                options,
                lambda done: self._progress.update(self._progress.task_ids[-1], completed=done),
            )
            self._progress.remove_task(task)
            row = key | self._variant(rule) | {"sessions": repeated.num_sessions, "requests": len(repeated)}
            self._add(row | figures | {"wall_seconds": time.monotonic() - since})

    def _variant(self, rule: str) -> Row:
        """What else a fleet's row depends on."""
        arguments = self._arguments
        return {
            "rule": rule,
            "options": arguments.set if rule == SHIPPED else {},
            "index": [arguments.max_blocks, arguments.max_sample_every] if rule == SHIPPED else [],
            "offered": arguments.utilization,
            "server": [arguments.prefill_speed, arguments.decode_ms, arguments.max_running],
            "delays": [arguments.event_delay, arguments.load_period],
        }

    def _find(self, key: Row) -> Row | None:
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        if self._arguments.json is not None:
            text = json.dumps({"circumstances": circumstances(), "rows": self.rows}, indent=1)
            self._arguments.json.write_text(text + "\n")


def show(rows: list[Row]) -> None:
    console = make_console(180)
    table = Table("trace", "replicas", "rule", "cached", "of one cache", "TTFT mean s", "P99 s", "max/mean", "(routed)")
    for name in ("used", "index MB", "µs/decision", "P99 µs", "wall s"):
        table.add_column(name)
    for row in sorted(rows, key=lambda row: (row["trace"], row["replicas"])):
        if row["rule"] == ONE_CACHE:
            cells = [f"{row['cached_share']:.4f}", "1", "", "", "", "", "", "", "", "", f"{row['wall_seconds']:.0f}"]
        else:
            cells = [
                f"{row['cached_share']:.4f}",
                f"{row['of_one_cache']:.4f}",
                f"{row['ttft_mean']:.2f}",
                f"{row['ttft_p99']:.1f}",
                *("" if row[name] is None else f"{row[name]:.2f}" for name in ("imbalance", "imbalance_routed")),
                f"{row['utilization']:.0%}",
                f"{row['index_bytes'] / 1e6:.1f}",
                f"{row['decision_us_mean']:.0f}",
                f"{row['decision_us_p99']:.0f}",
                f"{row['wall_seconds']:.0f}",
            ]
        rule = row["rule"] + "".join(f" {name}={value}" for name, value in row.get("options", {}).items())
        table.add_row(row["trace"], str(row["replicas"]), rule, *cells)
    console.print(table)


MEASURES = {
    "of_one_cache": ("cached share\nover one cache's", "linear"),
    "imbalance": ("P95 of max/mean\ntokens in 60 s", "log"),
    "ttft_mean": ("mean TTFT, s", "log"),
    "ttft_p99": ("P99 TTFT, s", "log"),
}
OWN_MEASURES = {"decision_us_mean": "µs a decision", "index_bytes": "index bytes"}
"""Of the shipped rule alone: one line a trace."""


def plot(rows: list[Row], path: Path) -> None:
    """Each measure against the number of replicas: a row of panels a measure, a column a trace, a line a rule."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogFormatter

    rows = [row for row in rows if row["rule"] != ONE_CACHE and not row["options"]]
    traces = sorted({row["trace"] for row in rows})
    with save_figure(path, 1.0 + 3.4 * len(traces), 2.4 * (len(MEASURES) + 1)) as figure:
        grid = figure.add_gridspec(len(MEASURES) + 1, 2 * len(traces))
        for column, trace in enumerate(traces):
            for place, (measure, (label, scale)) in enumerate(MEASURES.items()):
                axes = figure.add_subplot(grid[place, 2 * column : 2 * column + 2])
                for number, rule in enumerate(RULES):
                    own = [row for row in rows if (row["trace"], row["rule"]) == (trace, rule)]
                    draw_line(axes, own, measure, rule, f"C{number}")
                axes.set(xscale="log", yscale=scale, title=trace if place == 0 else "")
                if scale == "log":  # 1.2, and not 1.2 x 10^0
                    axes.yaxis.set_major_formatter(LogFormatter())
                    axes.yaxis.set_minor_formatter(LogFormatter())
                if column == 0:
                    axes.set_ylabel(label)
        shown = [number for number, rule in enumerate(RULES) if any(row["rule"] == rule for row in rows)]
        handles = [Line2D([], [], color=f"C{number}", marker=".", label=RULES[number]) for number in shown]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)
        half = len(traces)
        for place, (measure, label) in enumerate(OWN_MEASURES.items()):
            axes = figure.add_subplot(grid[len(MEASURES), place * half : (place + 1) * half])
            for number, trace in enumerate(traces):
                own = [row for row in rows if (row["trace"], row["rule"]) == (trace, SHIPPED)]
                draw_line(axes, own, measure, trace, f"C{number}")
            axes.set(xscale="log", yscale="log", xlabel="replicas", ylabel=label)
            axes.legend(frameon=False, fontsize=6)


def draw_line(axes: Any, rows: list[Row], measure: str, label: str, color: str) -> None:
    points = sorted((row["replicas"], row[measure]) for row in rows if row[measure] is not None)
    if points:
        axes.plot(
            *zip(*points, strict=True), marker=".", linewidth=2 if label == SHIPPED else 1, label=label, color=color
        )


def option(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    defaults = dataclasses.asdict(RoutingOptions())
    names = list(defaults)
    try:
        if name not in names:
            raise ValueError(name)
        return name, type(defaults[name])(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER with a name of {', '.join(names)}") from None


def whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {value}")
    return value


def delay(text: str) -> float:
    return positive(text) if float(text) else 0.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trace_flags(parser)
    parser.add_argument("--replicas", type=lambda text: tuple(map(whole, words(text))), default=(1, 8, 64))
    parser.add_argument("--rules", type=words, default=RULES, help=f"of {', '.join(RULES)}")
    parser.add_argument("--sessions", type=whole, default=MIN_SESSIONS, help="of each replica, at least: %(default)s")
    parser.add_argument("--requests", type=whole, default=400, help="of each replica, at least: %(default)s")
    parser.add_argument("--session-seconds", type=positive, default=1e9, help="of each session, as the trace has them")
    parser.add_argument("--max-requests", type=whole, default=200_000, help="of a fleet, at most: %(default)s")
    parser.add_argument("--memory", type=positive, default=0.1, help="share of the footprint: %(default)s")
    parser.add_argument("--utilization", type=positive, default=0.75, help="by what one cache computes: %(default)s")
    parser.add_argument("--layout", default="nemotron-3-nano")
    parser.add_argument("--prefill-speed", type=positive, default=2000.0, help="tokens a second: %(default)s")
    parser.add_argument("--decode-ms", type=delay, default=10.0, help="a token: %(default)s")
    parser.add_argument("--max-running", type=whole, default=64, help="requests of a replica: %(default)s")
    parser.add_argument("--event-delay", type=delay, default=0.1, help="seconds: %(default)s")
    parser.add_argument("--max-blocks", type=whole, default=1 << 20, help="of the index: %(default)s")
    parser.add_argument("--max-sample-every", type=whole, default=8, help="of its blocks one of so many: %(default)s")
    parser.add_argument("--load-period", type=delay, default=1.0, help="seconds between reports: %(default)s")
    parser.add_argument("--set", type=option, action="append", default=[], metavar="NAME=NUMBER", help="routing option")
    add_output_flags(parser)
    return parser


def main(command: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(command)
    arguments.set = dict(arguments.set)
    for rule in arguments.rules:
        make_router(rule, arguments.seed, RoutingOptions())
    study = Study(arguments)
    study.run(trace_files(arguments.folder, arguments.traces))
    show(study.rows)
    if arguments.plot is not None:
        plot(study.rows, arguments.plot)


if __name__ == "__main__":
    sys.exit(main())
