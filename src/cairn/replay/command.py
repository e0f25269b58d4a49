"""`cairn replay`: a trace through the cache under several policies and budgets, as a table and as JSON."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cairn.cache.eviction import eviction_for
from cairn.cache.layout import CacheLayout
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy
from cairn.errors import ConfigError
from cairn.replay.bounds import footprint_bytes, offline_hits, unlimited_hits
from cairn.replay.layouts import LAYOUT_NAMES, layout_for
from cairn.replay.replay import Outcome, Replay
from cairn.replay.traces import Trace, read_trace
from cairn.types import SystemClock

__all__ = ["POLICIES", "add_replay_flags", "run_replay"]

POLICIES = MappingProxyType(
    {
        "auto": ("auto", "value"),
        "align": ("align", "value"),
        "all": ("all", "value"),
        "junction": ("junction", "value"),
        "lru": ("auto", "lru"),
    }
)
"""Name to placement and eviction."""

MAX_BUDGET = 1 << 50
MAX_SWEEP = 64
FILE_WIDTH = 200
_UNITS = MappingProxyType(
    {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    | {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is replayed: each policy at each budget, in bytes. `footprint`: bytes of all that the trace could keep."""

    trace: Trace
    layout: CacheLayout
    layout_name: str
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    block_size: int
    max_num_batched_tokens: int
    footprint: int


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of `cairn replay`."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines, plain or gzip")
    parser.add_argument(
        "--layout",
        default="nemotron-3-nano",
        help=f"{', '.join(LAYOUT_NAMES)}, or the path of a config.json; default: %(default)s",
    )
    parser.add_argument("--state-dtype", help="of the recurrent state: float32, bfloat16; default: the model's")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--budget", type=_size, metavar="BYTES", help="the cache's memory: 40GiB, 50GB or plain bytes")
    budget.add_argument(
        "--budget-fraction",
        type=_share,
        metavar="SHARE",
        help="the same as a share of the trace's footprint: 0.1 or 10%%; the default is 0.1",
    )
    budget.add_argument("--sweep", type=_shares, metavar="SHARES", help="several shares: 2%%,5%%,10%%,20%%")
    parser.add_argument(
        "--policy",
        type=_policies,
        default=("auto",),
        metavar="NAMES",
        help=f"one or several of {','.join(POLICIES)}; lru is the placement of auto with LRU eviction; default: auto",
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens per page; default: %(default)s")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="tokens of a prefill chunk; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--no-bounds", action="store_true", help="leave the lines `offline` and `unlimited` out")


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay, print the table and write the JSON; returns the exit code 0.

    `arguments`: what `add_replay_flags` has parsed. Raises ConfigError naming the flag, the file or the field.
    """
    run = _asked(arguments)
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results: list[_Result] = []
    with Progress(*bars, console=Console(stderr=True), transient=True) as progress:
        for budget in run.budgets:
            results += [_replayed(run, name, budget, progress) for name in run.policies]
            results += [] if arguments.no_bounds else _reference_lines(run, budget)
    # into a file or a pipe the table is written whole
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(_table(run, results))
    if arguments.json is not None:
        try:
            arguments.json.write_text(
                json.dumps([_as_json(run, result) for result in results], indent=1) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise ConfigError(f"--json {arguments.json} cannot be written: {error}") from error
    return 0


def _asked(arguments: argparse.Namespace) -> _Run:
    if not 64 <= arguments.max_num_batched_tokens <= 1 << 24:
        raise ConfigError(
            f"--max-num-batched-tokens must be from 64 to {1 << 24}, not {arguments.max_num_batched_tokens}"
        )
    layout = layout_for(arguments.layout, arguments.block_size, arguments.state_dtype)
    trace = read_trace(arguments.trace)
    footprint = footprint_bytes(trace, layout)
    shares = arguments.sweep or (arguments.budget_fraction or 0.1,)
    budgets = (arguments.budget,) if arguments.budget is not None else tuple(int(footprint * s) for s in shares)
    for budget in budgets:
        if not 1 <= budget // layout.page_bytes < 1 << 31:
            raise ConfigError(
                f"a budget of {budget} bytes is {budget // layout.page_bytes} pages, but must be from 1 to 2**31 - 1: "
                "change --budget, --budget-fraction or --sweep"
            )
    return _Run(
        trace=trace,
        layout=layout,
        layout_name=arguments.layout,
        policies=arguments.policy,
        budgets=budgets,
        block_size=arguments.block_size,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        footprint=footprint,
    )


@dataclass(frozen=True, slots=True)
class _Result:
    """One policy or reference line at one budget; reference lines have no counts."""

    name: str
    budget: int
    prompt_tokens: int
    hit_tokens: int
    outcome: Outcome | None = None

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


def _replayed(run: _Run, name: str, budget: int, progress: Progress) -> _Result:
    mode, eviction = POLICIES[name]
    policy = CachePolicy(placement_for(mode, run.block_size, exact=False), eviction_for(eviction))
    replay = Replay(run.layout, budget, policy, SystemClock(), run.max_num_batched_tokens)
    task = progress.add_task(f"{name} {_gigabytes(budget)}", total=len(run.trace.requests))
    outcome = replay.run(run.trace, lambda done: progress.update(task, completed=done))
    progress.remove_task(task)
    return _Result(name, budget, outcome.prompt_tokens, outcome.hit_tokens, outcome)


def _reference_lines(run: _Run, budget: int) -> list[_Result]:
    prompts = sum(request.num_prompt_tokens for request in run.trace.requests)
    lines = {"offline": offline_hits(run.trace, run.layout, budget), "unlimited": unlimited_hits(run.trace)}
    return [_Result(name, budget, prompts, int(hits.sum())) for name, hits in lines.items()]


def _as_json(run: _Run, result: _Result) -> dict[str, object]:
    """Tokens, bytes and counts by their names; counts of kinds and reasons as objects."""
    told: dict[str, object] = {
        "policy": result.name,
        "trace": run.trace.name,
        "layout": run.layout_name,
        "budget_bytes": result.budget,
        "budget_fraction": result.budget / run.footprint,
        "footprint_bytes": run.footprint,
        "requests": len(run.trace.requests),
        "prompt_tokens": result.prompt_tokens,
        "hit_tokens": result.hit_tokens,
        "token_hit_rate": result.hit_rate,
        "prefill_tokens": result.prompt_tokens - result.hit_tokens,
    }
    outcome = result.outcome
    if outcome is not None:
        told |= {
            "forward_passes": outcome.forward_passes,
            "checkpoints_taken": dict(sorted(outcome.taken.items())),
            "checkpoints_hit": dict(sorted(outcome.used.items())),
            "checkpoints_evicted": dict(sorted(outcome.evicted.items())),
            "lost_tokens": dict(sorted(outcome.lost.items())),
            "refused_requests": outcome.refused,
            "peak_bytes": outcome.peak_bytes,
            "microseconds_per_request": outcome.microseconds_per_request,
        }
    return told


def _table(run: _Run, results: Sequence[_Result]) -> Table:
    sizes = f"{len(run.trace.requests)} requests, {run.layout_name}, footprint {_gigabytes(run.footprint)}"
    table = Table(title=f"{run.trace.name}: {sizes}")
    for name in ("policy", "budget", "hit rate", "prefill tokens", "passes", "taken", "hit", "evicted", "peak", "µs"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    table.add_column("tokens lost to")
    for result in results:
        table.add_row(*_cells(run, result))
    return table


def _cells(run: _Run, result: _Result) -> list[str]:
    budget = f"{_gigabytes(result.budget)} ({result.budget / run.footprint:.0%})"
    cells = [result.name, budget, f"{result.hit_rate:.4f}", f"{result.prompt_tokens - result.hit_tokens:,}"]
    outcome = result.outcome
    if outcome is None:
        return cells
    lost = (f"{reason} {number:,}" for reason, number in outcome.lost.most_common())
    return [
        *cells,
        f"{outcome.forward_passes:,}",
        f"{outcome.taken.total():,}",
        f"{outcome.used.total():,}",
        f"{outcome.evicted.total():,}",
        _gigabytes(outcome.peak_bytes),
        f"{outcome.microseconds_per_request:.0f}",
        ", ".join(lost),
    ]


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _size(text: str) -> int:
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = _UNITS.get(text.strip()[len(digits) :].lower())
    try:
        size = int(float(digits) * unit) if unit is not None else 0
    except (ValueError, OverflowError):
        size = 0
    if not 1 <= size <= MAX_BUDGET:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 40GiB, 50GB or plain bytes, up to 1024TiB")
    return size


def _share(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of the footprint: write it as 0.1 or 10%")
    return share


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(_share(part) for part in text.split(","))
    if len(shares) > MAX_SWEEP:
        raise argparse.ArgumentTypeError(f"{len(shares)} shares are more than {MAX_SWEEP}")
    return shares


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(POLICIES)}")
    return names
