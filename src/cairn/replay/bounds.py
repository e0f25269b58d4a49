"""Reference lines: what a policy's hit rate is to be measured against.

`unlimited` is the longest prefix of each prompt that an earlier prompt, or an earlier prompt and its answer, had:
no cache of whatever size has more to offer.

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

How it is found, in `cairn.replay.schedule`: hits are entered greedily, the most tokens saved per byte and request of
holding first, counting only bytes that are not held anyway. Costs fall as neighbours come in, so whatever was refused
is tried again in later rounds. Then windows of time are filled anew, some of what they hold forgotten, as long as that
is no loss; a request may have a deeper hit again once no hold that starts there is left. What a deeper hit has made
needless is taken out. Steps are bounded and drawn from a fixed seed: the line is the same each time.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.replay.ledger import Hold
from cairn.replay.paths import Paths
from cairn.replay.schedule import find_schedule
from cairn.replay.traces import Trace

__all__ = ["footprint_bytes", "offline_hits", "offline_schedule", "unlimited_hits"]


def unlimited_hits(trace: Trace) -> NDArray[np.int64]:
    """Tokens of each prompt's path that were seen before, shape [requests]."""
    paths, hits = Paths(), np.zeros(len(trace.requests), np.int64)
    for index, request in enumerate(trace.requests):
        hits[index] = 0 if request.branches else paths.shared(request.path) * trace.unit
        paths.add(request.path, request.answer)
    return hits


def footprint_bytes(trace: Trace, layout: CacheLayout) -> int:
    """Keys and values of all distinct tokens of all paths, answers included, and a checkpoint for each request."""
    paths = Paths()
    for request in trace.requests:
        paths.add(request.path, request.answer)
    return int(paths.num_units * trace.unit * layout.bytes_per_token) + len(trace.requests) * layout.checkpoint_bytes


def offline_schedule(
    trace: Trace, layout: CacheLayout, budget_bytes: int, progress: Callable[[int], None] | None = None
) -> tuple[Hold, ...]:
    """The schedule above: at most one hold that ends at each request. `progress` is told how many of
    `cairn.replay.schedule.STEPS` are done."""
    return find_schedule(trace, layout, budget_bytes, unlimited_hits(trace) // trace.unit, progress)


def offline_hits(
    trace: Trace, layout: CacheLayout, budget_bytes: int, progress: Callable[[int], None] | None = None
) -> NDArray[np.int64]:
    """Hit tokens of each request under `offline_schedule`, shape [requests]."""
    hits = np.zeros(len(trace.requests), np.int64)
    for hold in offline_schedule(trace, layout, budget_bytes, progress):
        hits[hold.end] = hold.node.end * trace.unit
    return hits
