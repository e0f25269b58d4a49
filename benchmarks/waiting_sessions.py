"""Long and short sessions at one server: what `--scheduling-policy session` brings to whom.

    python -m benchmarks.waiting_sessions LONG SHORT [--sessions 24 300] [--users 20 60] [--pauses 3 10]
                                          [--budget-fraction 0.05] [--running 16] [--layout nemotron-3-nano]
                                          [--own-clients] [--json FILE] [--plot FILE]

LONG and SHORT are request traces, of agents and of chats, say. Of each so many sessions are served by so many users who
each begin the next one when the last one has ended: closed loops. A user asks again a while after an answer, for an
agent as long as its tools take, for a chat as long as somebody thinks: log-normal with a sigma of 1 around the median
`--pauses`, the same pauses whatever the policy is. Users come one after the other in the first 200 seconds.

The server is that of `benchmarks.waiting`, simulated: the same figures come on every machine. The baseline is first
come first served with a cache that does not know who waits. `--own-clients`: each session is a client of its own; else
all come from the same, as behind a gateway.
"""

import argparse
import heapq
import statistics
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.queued_server import (
    QueuedServer,
    Session,
    StepTimes,
    add_server_flags,
    check_server_flags,
    sessions_of,
    shipped_policies,
)
from benchmarks.reporting import as_json, check_positive, make_console, save_figure
from rich.progress import Progress
from rich.table import Table

from cairn.replay.bounds import footprint_bytes
from cairn.replay.layouts import layout_for
from cairn.replay.traces import read_trace
from cairn.scheduler.request import Request

RAMP_SECONDS = 200.0
CASES = ("fcfs before", "fcfs", "session")
KINDS = ("long", "short")
SHARES = np.linspace(0, 1, 201)


@dataclass(frozen=True, slots=True)
class Loop:
    """Sessions that so many users go through. `pauses`: seconds after each answer, by session."""

    sessions: list[Session]
    pauses: list[np.ndarray]
    users: int


class ClosedLoops(QueuedServer):
    """Serves loops of users, once. `ttft` and `session_seconds`, from a session's first request to its last answer:
    by the number of the loop."""

    def serve(self, loops: list[Loop], rng: np.random.Generator, progress: Any = None) -> None:
        self._sessions = [session for loop in loops for session in loop.sessions]
        self._loop_of = [number for number, loop in enumerate(loops) for _ in loop.sessions]
        self._pauses = [pauses for loop in loops for pauses in loop.pauses]
        self._next_turn = dict.fromkeys(range(len(self._sessions)), 0)
        self.ttft: list[list[float]] = [[] for _ in loops]
        self.session_seconds: list[list[float]] = [[] for _ in loops]
        self._began: dict[int, float] = {}
        self._due: list[tuple[float, int]] = []
        self._to_begin: list[deque[int]] = []
        first = 0
        for loop in loops:
            self._to_begin.append(deque(range(first, first + len(loop.sessions))))
            first += len(loop.sessions)
            for at in rng.uniform(0, RAMP_SECONDS, loop.users):
                self._begin(len(self._to_begin) - 1, float(at))
        while self._due or self.scheduler.has_work:
            while self._due and self._due[0][0] <= self._clock.now():
                number = heapq.heappop(self._due)[1]
                self._began.setdefault(number, self._clock.now())
                self._submit(number)
            if self.scheduler.has_work:
                self._step(self._due[0][0] if self._due else np.inf)
            elif self._due:
                self._clock.advance(max(1e-6, self._due[0][0] - self._clock.now()))
            if progress is not None:
                progress(len(self.outcome.prompt))
        self.outcome.seconds = self._clock.now()

    def _begin(self, loop: int, at: float) -> None:
        if self._to_begin[loop]:
            heapq.heappush(self._due, (at, self._to_begin[loop].popleft()))

    def _finish(self, request: Request) -> None:
        number, now = self._of_request[request.id][0], self._clock.now()
        super()._finish(request)
        loop, turn = self._loop_of[number], self._next_turn[number]
        self.ttft[loop].append(self.outcome.ttft[-1])
        if turn < len(self._sessions[number].requests):
            heapq.heappush(self._due, (now + self._pauses[number][turn - 1], number))
        else:
            self.session_seconds[loop].append(now - self._began[number])
            self._begin(loop, now + self._pauses[number][-1])


def make_loops(arguments: argparse.Namespace) -> tuple[list[Loop], int]:
    """Long and short sessions, and the bytes of the pool."""
    rng, loops, budget = np.random.default_rng(arguments.seed), list[Loop](), 0.0
    layout = layout_for(arguments.layout)
    shapes = zip(arguments.sessions, arguments.users, arguments.pauses, strict=True)
    for path, (most, users, pause) in zip((arguments.long, arguments.short), shapes, strict=True):
        trace = read_trace(path)
        known = sessions_of(trace)
        chosen = [known[index] for index in rng.permutation(len(known))[:most]]
        if arguments.own_clients:
            chosen = [replace(session, client=session.name) for session in chosen]
        pauses = [rng.lognormal(np.log(pause), 1.0, len(session.requests)) for session in chosen]
        loops.append(Loop(chosen, pauses, users))
        budget += footprint_bytes(trace, layout) * len(chosen) / len(known)
    return loops, int(budget * arguments.budget_fraction)


def measure(arguments: argparse.Namespace) -> list[dict]:
    rows, layout = [], layout_for(arguments.layout)
    loops, budget = make_loops(arguments)
    num_requests = sum(len(session.requests) for loop in loops for session in loop.sessions)
    with Progress(console=make_console(), transient=True) as progress:
        for case in CASES:
            policies = shipped_policies(layout, arguments.running, "session" if case == "session" else "fcfs")
            server = ClosedLoops(layout, budget, *policies, StepTimes(), know_waiting=case != "fcfs before")
            task = progress.add_task(case, total=num_requests)
            server.serve(
                loops,
                np.random.default_rng(arguments.seed),
                lambda done, task=task: progress.update(task, completed=done),
            )
            progress.remove_task(task)
            rows.append(row_of(case, server, budget))
    return rows


def row_of(case: str, server: ClosedLoops, budget: int) -> dict:
    outcome = server.outcome
    row: dict[str, Any] = {
        "case": case,
        "budget_bytes": budget,
        "requests": len(outcome.prompt),
        "prompt_tokens": sum(outcome.prompt),
        "computed_tokens": sum(outcome.computed),
        "seconds": outcome.seconds,
        "prompt_tokens_per_second": sum(outcome.prompt) / outcome.seconds,
        "most_bypassed": max(outcome.bypassed),
    }
    row |= _spread("ttft", [*server.ttft[0], *server.ttft[1]])
    for kind, ttft, seconds in zip(KINDS, server.ttft, server.session_seconds, strict=True):
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
    check_positive(parser, arguments, "sessions", "users", "pauses")
    check_server_flags(parser, arguments)
    return arguments


def main() -> None:
    arguments = parse()
    rows = measure(arguments)
    show(rows)
    if arguments.json:
        sizes = {name: getattr(arguments, name) for name in ("sessions", "users", "pauses", "running", "own_clients")}
        arguments.json.write_text(as_json({**sizes, "rows": rows}))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
