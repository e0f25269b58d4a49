"""What a schedule that knows the future would hit: the reference line `offline` of docs/benchmarks.md.

    python -m benchmarks.offline_line TRACE [--budget-fraction SHARE] [--layout NAME] [--json FILE]

`offline` is a schedule that knows the future. Its rules, which `tests/replay/brute_force.py` states once more:

- Between request t and t + 1 a set of checkpoints is held, each with the keys and values of all tokens before it;
  tokens below several of them count once. The bytes of that set never exceed the budget.
- Request i hits one held checkpoint on its path. It computes the rest, so it passes every position from its hit on, and
  any of them may be held from then on. A position below the hit is not passed, so it is there only if it was held.
- A running request's own pages and states lie apart.

Why what comes out is feasible: a hit of request i at position p is only entered together with a start s < i whose
path has p, and with p and all tokens below it held from s to i. That s passes p, since its own hit is p or less when
the hold is entered, and as long as the hold stands s is given no deeper one. The ledger adds up all that is held at
each time and refuses what does not fit. So offline <= the optimum, and since every hit ends within what was seen
before, the optimum <= unlimited.

How it is found, in `benchmarks.offline_schedule`: hits are entered greedily, the most tokens saved per byte and
request of holding first, counting only bytes that are not held anyway. Costs fall as neighbours come in, so whatever
was refused is tried again in later rounds. Then windows of time are filled anew, some of what they hold forgotten, as
long as that is no loss; a request may have a deeper hit again once no hold that starts there is left. What a deeper
hit has made needless is taken out. Steps are bounded and drawn from a fixed seed: the line is the same each time.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmarks.offline_ledger import Hold
from benchmarks.offline_schedule import find_schedule
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.replay.bounds import footprint_bytes, unlimited_hits
from cairn.replay.layouts import layout_for, sizes_for
from cairn.replay.report import UNLIMITED, Report
from cairn.replay.trace import Trace
from cairn.replay.traces import read_trace

__all__ = ["OFFLINE", "offline_hits", "offline_schedule"]

OFFLINE = "offline"


def offline_schedule(
    trace: Trace, layout: CacheLayout, budget_bytes: int, progress: Callable[[int], None] | None = None
) -> tuple[Hold, ...]:
    """The schedule above: at most one hold that ends at each request. `progress` is told how many of `STEPS` are
    done."""
    return find_schedule(trace, layout, budget_bytes, unlimited_hits(trace) // trace.unit, progress)


def offline_hits(
    trace: Trace, layout: CacheLayout, budget_bytes: int, progress: Callable[[int], None] | None = None
) -> NDArray[np.int64]:
    """Hit tokens of each request under `offline_schedule`, shape [requests]."""
    hits = np.zeros(len(trace.requests), np.int64)
    for hold in offline_schedule(trace, layout, budget_bytes, progress):
        hits[hold.end] = hold.node.end * trace.unit
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="as `cairn replay` reads it")
    parser.add_argument("--budget-fraction", type=float, default=0.1, help="of the trace's footprint")
    parser.add_argument("--layout", default="nemotron-3-nano")
    parser.add_argument("--json", type=Path, help="write the figures here, as `cairn replay` has them")
    arguments = parser.parse_args()
    trace, layout = read_trace(arguments.trace), layout_for(arguments.layout)
    footprint = footprint_bytes(trace, layout)
    report = Report(trace, arguments.layout, sizes_for(arguments.layout), footprint)
    budget = int(footprint * arguments.budget_fraction)
    lines = ((OFFLINE, offline_hits(trace, layout, budget)), (UNLIMITED, unlimited_hits(trace)))
    rows = [report.row(name, budget, hits) for name, hits in lines]
    print(*(f"{row['policy']} {row['token_hit_rate']:.4f}" for row in rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
