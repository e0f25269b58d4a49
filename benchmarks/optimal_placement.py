"""What the greedy choice of checkpoints expects to save, over what the best choice of as many would.

    python -m benchmarks.optimal_placement FOLDER [--traces NAMES] [--budget BYTES] [--every 20] [--json FILE]
                                           [--plot FILE]

Every trace in FOLDER goes through the shipped cache. At every 20th request that chooses positions in a full pool, the
exact optimum is computed for what the policy has learned of where prompts diverge: the dynamic programme of "Sparse
prefix caching" (arXiv 2605.05219), with the positions that are kept anyway for nothing. It is a bound on what a better
choice could save, not on what better learning could.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from benchmarks.replay_policies import add_trace_flags, trace_files
from benchmarks.reporting import make_console, save_figure
from numpy.typing import NDArray
from rich.progress import track
from rich.table import Table

from cairn.cache.checkpoint import Lineage
from cairn.cache.divergence import DivergenceStats
from cairn.cache.eviction import ValuePerByte
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import CachePolicy
from cairn.replay.layouts import layout_for
from cairn.replay.replay import Replay
from cairn.replay.traces import read_trace
from cairn.types import SystemClock

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def expected_saving(positions: Ints, shares: Floats, hit: int) -> float:
    """Tokens per visit that checkpoints at `positions`, ascending, save: who leaves the path at or behind one of them,
    which `shares` tells, goes on from there and not from the one before."""
    return float((np.diff(np.append(hit, positions)) * shares).sum())


def best_saving(positions: Ints, shares: Floats, is_fixed: NDArray[np.bool_], hit: int, number: int) -> float:
    """The most that `number` of `positions`, with all of those that are fixed, can save.

    best[j, k]: with the last one at j and k of them chosen. The positions between two neighbours are none that are
    fixed, so from j back to the fixed one before it: O(N^2 M) at worst.
    """
    places, best = np.append(hit, positions), np.full((len(positions) + 1, number + 1), -np.inf)
    best[0, 0], first = 0.0, 0
    for j, (share, fixed) in enumerate(zip(shares, is_fixed, strict=True), 1):
        saved = best[first:j] + ((places[j] - places[first:j]) * share)[:, None]
        if fixed:
            best[j], first = saved.max(axis=0), j
        else:
            best[j, 1:] = saved[:, :-1].max(axis=0)
    return float(best[first:].max())


@dataclass(eq=False)
class MeasuredChoice(DivergenceStats):
    """`DivergenceStats` that measures every so-manieth choice."""

    every: int
    ratios: list[float] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    _seen: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def choose(
        self, path: Lineage, hit: int, fixed: Ints, candidates: Ints, pays: Callable[[int, float], bool]
    ) -> dict[int, float]:
        gains = super().choose(path, hit, fixed, candidates, pays)
        self._seen += 0 < len(gains) < len(candidates)
        if 0 < len(gains) < len(candidates) and self._seen % self.every == 0:
            positions = np.sort(np.append(fixed, candidates))
            shares, is_fixed = self.shares_from(path, positions), np.isin(positions, fixed)
            kept = is_fixed | np.isin(positions, np.array([*gains], np.int64))
            without = expected_saving(positions[is_fixed], shares[is_fixed], hit)
            most = best_saving(positions, shares, is_fixed, hit, len(gains)) - without
            self.ratios.append((expected_saving(positions[kept], shares[kept], hit) - without) / most if most else 1.0)
            self.chosen.append(len(gains))
        return gains


def measure(path: Path, budget: int, every: int) -> dict[str, object]:
    """One trace."""
    trace, policy = read_trace(path), CachePolicy(Auto(), ValuePerByte())
    replay = Replay(layout_for("nemotron-3-nano"), budget, policy, 8192, SystemClock(), trace.header)
    checkpoints, stats = replay.cache.checkpoints, MeasuredChoice(every)
    checkpoints.divergences = checkpoints.eviction._divergences = stats  # type: ignore[attr-defined]
    replay.run(trace)
    return {
        "trace": path.name.partition(".")[0],
        "choices": len(stats.ratios),
        "chosen": float(np.mean(stats.chosen)) if stats.chosen else 0.0,
        "greedy_over_best": float(np.mean(stats.ratios)) if stats.ratios else None,
        "least": min(stats.ratios, default=None),
    }


def plot(rows: list[dict], path: Path) -> None:
    measured = [row for row in rows if row["greedy_over_best"]]
    with save_figure(path, 7, 3.5) as figure:
        axes = figure.subplots()
        bars = axes.barh([row["trace"] for row in measured], [row["greedy_over_best"] for row in measured])
        axes.bar_label(bars, fmt="%.3f", fontsize=8)
        axes.set_xlabel("expected saving of the greedy choice / of the best one")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trace_flags(parser)
    parser.add_argument("--budget", type=int, default=6_000_000_000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    paths = trace_files(arguments.folder, arguments.traces)
    rows = [measure(path, arguments.budget, arguments.every) for path in track(paths, "traces")]
    table = Table("trace", "choices measured", "positions chosen, mean", "greedy / best, mean", "least")
    for row in rows:
        found = ("-", "-") if row["least"] is None else (f"{row['greedy_over_best']:.4f}", f"{row['least']:.4f}")
        table.add_row(str(row["trace"]), str(row["choices"]), f"{row['chosen']:.1f}", *found)
    make_console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
