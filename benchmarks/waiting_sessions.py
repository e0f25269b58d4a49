"""Long and short sessions at one server, or several: what `--scheduling-policy session` brings to whom.

    python -m benchmarks.waiting_sessions LONG SHORT [--sessions 24 300] [--users 20 60] [--pauses 3 10]
                                          [--budget-fraction 0.05] [--running 16] [--layout nemotron-3-nano]
                                          [--servers 8] [--own-clients] [--cases CASE ...] [--json FILE] [--plot FILE]

LONG and SHORT are request traces, of agents and of chats, say. Of each so many sessions are served by so many users who
each begin the next one when the last one has ended: closed loops. A user asks again a while after an answer, for an
agent as long as its tools take, for a chat as long as somebody thinks: log-normal with a sigma of 1 around the median
`--pauses`, the same pauses whatever the policy is. Users come one after the other in the first 200 seconds.

The server is that of `benchmarks.waiting`, simulated: the same figures come on every machine. The baseline is first
come first served with a cache that does not know who waits. `--own-clients`: each session is a client of its own; else
all come from the same, as behind a gateway.

`--servers`: each with so many sessions and users and as much memory, the traces repeated with other people in them
where they have fewer sessions (`benchmarks.routing_trace`). A request goes where the proxy's rule sends it, which hears
of the caches' blocks .1 s later, and of each server's load once a second. Cases that the JSON file has are not computed
again.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from benchmarks.closed_loops import ClosedLoops, Loop, LoopServer, ProxiedLoops
from benchmarks.queued_server import (
    Session,
    StepTimes,
    add_server_flags,
    check_server_flags,
    sessions_of,
    shipped_policies,
)
from benchmarks.reporting import as_json, check_positive, make_console, save_figure
from benchmarks.routing_trace import RepeatedTrace, num_copies
from rich.progress import Progress
from rich.table import Table

from cairn.replay.bounds import footprint_bytes
from cairn.replay.layouts import layout_for
from cairn.replay.trace import Trace, TraceRequest
from cairn.replay.traces import read_trace

CASES = ("fcfs before", "fcfs", "session")
KINDS = ("long", "short")
SIZES = ("servers", "sessions", "users", "pauses", "running", "budget_fraction", "own_clients", "layout", "seed")
SHARES = np.linspace(0, 1, 201)


def make_loops(arguments: argparse.Namespace) -> tuple[list[Loop], int]:
    """Long and short sessions, and the bytes of each server's pool."""
    rng, loops, budget = np.random.default_rng(arguments.seed), list[Loop](), 0.0
    shapes = zip(arguments.sessions, arguments.users, arguments.pauses, strict=True)
    for path, (most, users, pause) in zip((arguments.long, arguments.short), shapes, strict=True):
        known, footprint = known_sessions(read_trace(path), most, arguments)
        chosen = [known[index] for index in rng.permutation(len(known))[: most * arguments.servers]]
        if arguments.own_clients:
            chosen = [replace(session, client=session.name) for session in chosen]
        pauses = [rng.lognormal(np.log(pause), 1.0, len(session.requests)) for session in chosen]
        loops.append(Loop(chosen, pauses, users * arguments.servers))
        budget += footprint * len(chosen) / len(known) / arguments.servers
    return loops, int(budget * arguments.budget_fraction)


def known_sessions(trace: Trace, most: int, arguments: argparse.Namespace) -> tuple[list[Session], int]:
    """A trace's sessions and their footprint: of several servers in as many copies as give each server `most`."""
    known, layout = sessions_of(trace), layout_for(arguments.layout)
    if arguments.servers == 1:
        return known, footprint_bytes(trace, layout)
    repeated = RepeatedTrace(trace, num_copies(trace, arguments.servers, most, 1), arguments.seed)
    by_name: dict[str, list[TraceRequest]] = {}
    for arrival in repeated.arrivals():
        if len(arrival.request.path):
            by_name.setdefault(f"{trace.name}/{arrival.session}", []).append(arrival.request)
    known = [Session(name, trace.unit, requests) for name, requests in by_name.items()]
    return known, repeated.footprint_bytes(layout)


def measure(arguments: argparse.Namespace) -> list[dict]:
    """The rows of the cases; those that the JSON file has are not computed again."""
    known, layout = dict[str, dict](), layout_for(arguments.layout)
    sizes = {name: getattr(arguments, name) for name in SIZES}
    if arguments.json is not None and arguments.json.exists():
        text = json.loads(arguments.json.read_text())
        if all(text.get(name) == value for name, value in sizes.items()):
            known = {row["case"]: row for row in text["rows"]}
    loops, budget = make_loops(arguments)
    num_requests = sum(len(session.requests) for loop in loops for session in loop.sessions)
    with Progress(console=make_console(), transient=True) as progress:
        for case in arguments.cases:
            if case in known:
                continue
            policy: Literal["fcfs", "session"] = "session" if case == "session" else "fcfs"
            servers = [
                LoopServer(
                    layout,
                    budget,
                    *shipped_policies(layout, arguments.running, policy),
                    StepTimes(),
                    know_waiting=case != "fcfs before",
                )
                for _ in range(arguments.servers)
            ]
            served = ClosedLoops(servers, loops) if len(servers) == 1 else ProxiedLoops(servers, loops, arguments.seed)
            task = progress.add_task(case, total=num_requests)
            served.serve(
                np.random.default_rng(arguments.seed),
                lambda done, task=task: progress.update(task, completed=done),
            )
            progress.remove_task(task)
            known[case] = row_of(case, served, budget)
            if arguments.json is not None:
                arguments.json.write_text(as_json({**sizes, "rows": list(known.values())}))
    return [known[case] for case in CASES if case in known]


def row_of(case: str, served: ClosedLoops, budget: int) -> dict:
    outcomes = [server.outcome for server in served.servers]
    prompt_tokens = sum(sum(outcome.prompt) for outcome in outcomes)
    seconds = max(server.now for server in served.servers)
    row: dict[str, Any] = {
        "case": case,
        "budget_bytes": budget,
        "requests": sum(len(outcome.prompt) for outcome in outcomes),
        "prompt_tokens": prompt_tokens,
        "computed_tokens": sum(sum(outcome.computed) for outcome in outcomes),
        "seconds": seconds,
        "prompt_tokens_per_second": prompt_tokens / seconds,
        "most_bypassed": max(max(outcome.bypassed, default=0) for outcome in outcomes),
    }
    row |= _spread("ttft", [*served.ttft[0], *served.ttft[1]])
    for kind, ttft, seconds in zip(KINDS, served.ttft, served.session_seconds, strict=True):
        row |= _spread(f"{kind}_ttft", ttft) | _spread(f"{kind}_session", seconds)
        row[f"{kind}_ttft_s"] = sorted(ttft)
    return row


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {
        f"{name}_mean_s": statistics.fmean(values),
        f"{name}_p99_s": float(np.percentile(values, 99)),
        f"{name}_max_s": max(values),
    }


def show(rows: list[dict]) -> None:
    table = Table("", *(row["case"] for row in rows))
    table.add_row("tokens computed", *(_ratio(row, rows[0], "computed_tokens", "{:,.0f}") for row in rows))
    table.add_row("prompt tokens/s", *(_ratio(row, rows[0], "prompt_tokens_per_second", "{:,.0f}") for row in rows))
    for kind in ("", "short_", "long_"):
        for name in ("ttft_mean_s", "ttft_p99_s", *(("session_mean_s", "session_max_s") if kind else ())):
            table.add_row(f"{kind}{name}".replace("_", " "), *(_ratio(row, rows[0], kind + name) for row in rows))
    table.add_row("most bypassed", *(str(row["most_bypassed"]) for row in rows))
    make_console(160).print(table)


def _ratio(row: dict, baseline: dict, name: str, form: str = "{:.1f}") -> str:
    text = form.format(row[name])
    return text if row is baseline else f"{text} ({row[name] / baseline[name]:.2f})"


def plot(rows: list[dict], path: Path) -> None:
    """Of how many requests the first token came within so many seconds, a line a case."""
    with save_figure(path, 9, 4) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, kind in zip(panels, reversed(KINDS), strict=True):
            for row in rows:
                axes.plot(np.quantile(row[f"{kind}_ttft_s"], SHARES), SHARES, label=row["case"])
            axes.set(xscale="log", xlabel="time to the first token, s", title=f"{kind} sessions")
        panels[0].set_ylabel("share of requests")
        panels[0].legend(frameon=False)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("long", type=Path, metavar="LONG")
    parser.add_argument("short", type=Path, metavar="SHORT")
    parser.add_argument("--servers", type=int, default=1, help="each with as many sessions and users")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="all of these unless given")
    two = {"nargs": 2, "metavar": ("LONG", "SHORT")}
    parser.add_argument("--sessions", type=int, default=[24, 300], help="of each trace", **two)
    parser.add_argument("--users", type=int, default=[20, 60], help="who have a session at a time", **two)
    parser.add_argument("--pauses", type=float, default=[3.0, 10.0], help="median seconds after an answer", **two)
    add_server_flags(parser, "the sessions'")
    parser.add_argument("--own-clients", action="store_true", help="each session is a client of its own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write a PNG or SVG here")
    arguments = parser.parse_args(words)
    check_positive(parser, arguments, "servers", "sessions", "users", "pauses")
    check_server_flags(parser, arguments)
    return arguments


def main() -> None:
    arguments = parse()
    rows = measure(arguments)
    show(rows)
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
