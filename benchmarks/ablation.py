"""What each part of the learned eviction policy is worth on request traces: the ablation of docs/benchmarks.md.

    python -m benchmarks.ablation FOLDER [--traces NAMES] [--shares SHARES] [--policies NAMES] [--layout NAME]
                                  [--json FILE] [--plot FILE]

Every trace in FOLDER (`*.jsonl`, `*.jsonl.gz`; of either form that `cairn replay` reads) goes through the shipped
cache at each share of its footprint: with the whole policy (`all`), with parts of it off (`-ages`, `-young-lineage`),
and with other eviction policies in its place (`lru`; `gdsf`, or `gdsf:256` with another half-life in requests).
`offline` is the schedule that knows the future, over whose hit rate the others' are told. Replays are deterministic,
so rows that are in the JSON file already are not computed again: a long ablation can be run trace by trace.
"""

import argparse
import json
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gdsf import HALF_LIFE, DecayedFrequency
from benchmarks.offline_line import OFFLINE, offline_hits
from benchmarks.replay_policies import add_trace_flags, trace_files, words
from rich.console import Console
from rich.table import Table

from cairn.cache.checkpoint import Kind, Lineage
from cairn.cache.divergence import DivergenceStats
from cairn.cache.eviction import LeastRecentlyUsed, ValuePerByte
from cairn.cache.hazard import BINS, Floats, HazardTable
from cairn.cache.placement import Auto, CheckpointPoint, PromptFacts
from cairn.cache.prefix_cache import CachePolicy
from cairn.cache.tree import Checkpoint, Node
from cairn.replay.bounds import footprint_bytes
from cairn.replay.layouts import layout_for
from cairn.replay.replay import Replay
from cairn.replay.trace import Trace
from cairn.replay.traces import read_trace


class WithoutNeighbours(HazardTable):
    """Rates from the counts at each age alone."""

    @staticmethod
    def smooth(counts: Floats) -> Floats:
        return counts


class WithoutGittins(HazardTable):
    """Ranked by the present rate, not by the best over all ages to come."""

    @staticmethod
    def rank(hazards: Floats) -> Floats:
        return hazards


class WithoutAges(WithoutNeighbours, WithoutGittins):
    """A rate by class, one for all ages."""

    prior = np.full(BINS, 1e-3)

    def hazards(self, hits: Floats, risk: Floats) -> Floats:
        return super().hazards(*(np.repeat(counts.sum(axis=1, keepdims=True), BINS, axis=1) for counts in (hits, risk)))


class WithoutGhosts(ValuePerByte):
    """Nothing is learned from dropped checkpoints."""

    def start(self, max_checkpoints: int, divergences: DivergenceStats) -> None:
        super().start(max_checkpoints, divergences)
        self.max_ghosts = 0


class WithoutInheritance(ValuePerByte):
    """The chance of a dropped checkpoint does not fall to the one above it."""

    def demote(self, last_checkpoint_node: Node) -> None:
        pass


class WithoutYoung(ValuePerByte):
    """New checkpoints are not ranked anew at age `RERANK_AGE`."""

    def refresh(self, ranked: Collection[Checkpoint]) -> list[Checkpoint]:
        self._to_rerank.clear()
        return super().refresh(ranked)


class WithoutLineage(ValuePerByte):
    """Classes without the length of the conversation and the new tokens of the prompt."""

    def add(self, checkpoint: Checkpoint, lineage: Lineage) -> None:
        super().add(checkpoint, lineage)
        record = self._records[checkpoint.node]
        record.lineage = Lineage()
        self.reclassify(checkpoint.node)


class WithoutGrid(Auto):
    """No position is kept because prompts are predicted to diverge there."""

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        return super().in_prefill(replace(facts, predicted={}), start, end)


class WithoutRecurring(Auto):
    """Where prompts have left others again and again, to the token, is no place to choose from."""

    def _places(self, facts: PromptFacts) -> dict[int, Kind]:
        return super()._places(replace(facts, recurring=()))


class WithoutAnswers(Auto):
    """No position inside an answer is kept."""

    decode_stride = 0

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        return None


ALL = "all"
TABLE_PARTS = {"ages": WithoutAges, "neighbours": WithoutNeighbours, "gittins": WithoutGittins}
EVICTION_PARTS = {
    "ghosts": WithoutGhosts,
    "inheritance": WithoutInheritance,
    "young": WithoutYoung,
    "lineage": WithoutLineage,
}
PLACEMENT_PARTS = {"grid": WithoutGrid, "recurring": WithoutRecurring, "answers": WithoutAnswers}

PARTS = (*TABLE_PARTS, *EVICTION_PARTS, *PLACEMENT_PARTS)
POLICIES = (OFFLINE, ALL, *(f"-{part}" for part in PARTS), "gdsf", "lru")
SHARES = (0.05, 0.10)
MAX_NUM_BATCHED_TOKENS = 8192

Row = dict[str, Any]
Key = tuple[str, str, float, str]


class ThreadTime:
    """The seconds that this thread has computed: whatever else the machine does is not the cache's."""

    def now(self) -> float:
        return time.thread_time()


def cache_policy(name: str) -> CachePolicy:
    """The policy that `name` means. Raises SystemExit for an unknown one."""
    if name == "lru":
        return CachePolicy(Auto(), LeastRecentlyUsed())
    if name.partition(":")[0] == "gdsf":
        return CachePolicy(Auto(), DecayedFrequency(float(name.partition(":")[2] or HALF_LIFE)))
    off = [] if name == ALL else name.removeprefix("-").split("-")
    if unknown := [part for part in off if part not in PARTS]:
        raise SystemExit(f"--policies: {name!r} names {unknown[0]!r}, not one of {', '.join(PARTS)}")
    table: type[HazardTable] = without(HazardTable, TABLE_PARTS, off)
    eviction: type[ValuePerByte] = without(ValuePerByte, EVICTION_PARTS, off)
    placement: type[Auto] = without(Auto, PLACEMENT_PARTS, off)
    return CachePolicy(placement(), eviction(table()))


def without(base: type[Any], classes: dict[str, type[Any]], names: list[str]) -> type[Any]:
    """`base`, or a class that combines those of `names`."""
    parts = [classes[name] for name in names if name in classes]
    # a subclass goes before its bases: the order of the names does not matter
    own = [part for part in parts if not any(other is not part and issubclass(other, part) for other in parts)]
    return type("Ablated", tuple(own), {}) if own else base


def replayed(trace: Trace, share: float, layout_name: str, name: str) -> Row:
    """One trace through the cache at a budget of `share` of its footprint."""
    layout = layout_for(layout_name)
    budget = int(footprint_bytes(trace, layout) * share)
    row: Row = {"layout": layout_name, "trace": trace.name, "share": share, "policy": name}
    prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests if not request.is_parallel_sample)
    if name == OFFLINE:
        return row | {"token_hit_rate": int(offline_hits(trace, layout, budget).sum()) / prompt_tokens}
    replay = Replay(layout, budget, cache_policy(name), MAX_NUM_BATCHED_TOKENS, ThreadTime(), trace.header)
    outcome = replay.run(trace)
    return row | {
        "token_hit_rate": outcome.hit_tokens / prompt_tokens,
        "prefill_tokens": outcome.prefill_tokens,
        "microseconds_per_request": outcome.microseconds_per_request,
    }


def key_of(row: Row) -> Key:
    return row["layout"], row["trace"], row["share"], row["policy"]


def ratios(rows: list[Row]) -> dict[tuple[str, float], dict[str, float]]:
    """(policy, share) -> trace -> hit rate over that of `offline`, for the traces whose offline line is there."""
    offline = {key_of(row)[:3]: row["token_hit_rate"] for row in rows if row["policy"] == OFFLINE}
    found: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        reference = offline.get(key_of(row)[:3])
        if row["policy"] != OFFLINE and reference:
            found.setdefault((row["policy"], row["share"]), {})[row["trace"]] = row["token_hit_rate"] / reference
    return found


def show(rows: list[Row]) -> None:
    """For each share hit/offline of `all`, and what every other policy adds to that, trace by trace and as the mean."""
    found, console = ratios(rows), Console(width=220)
    for share in sorted({share for policy, share in found if policy == ALL}):
        whole = found[ALL, share]
        names = sorted(whole)
        table = Table("policy", *names, "mean", title=f"hit/offline at {share:.0%}, and the difference of the others")
        for policy in sorted({policy for policy, at in found if at == share}, key=lambda name: (name != ALL, name)):
            by_trace = found[policy, share]
            if set(names) <= set(by_trace):
                values = [by_trace[name] - (0.0 if policy == ALL else whole[name]) for name in names]
                sign = "" if policy == ALL else "+"
                table.add_row(policy, *(f"{value:{sign}.4f}" for value in [*values, sum(values) / len(values)]))
        console.print(table)


def plot(rows: list[Row], path: Path) -> None:
    """What the mean of hit/offline loses without each part, in hundredths, the worst first; a bar for each share."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = ratios(rows)
    shares = sorted({share for _, share in found})
    means = {key: sum(by_trace.values()) / len(by_trace) for key, by_trace in found.items()}
    losses = {
        policy: [100 * (means[ALL, share] - means[policy, share]) for share in shares]
        for policy in {policy for policy, _ in found} - {ALL}
        if all(found.get((policy, share), {}).keys() == found[ALL, share].keys() for share in shares)
    }
    names = sorted(losses, key=lambda name: sum(losses[name]))
    figure = Figure(figsize=(7, 0.6 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(shares)
    for place, share in enumerate(shares):
        at = [row + (place - (len(shares) - 1) / 2) * height for row in range(len(names))]
        bars = axes.barh(at, [losses[name][place] for name in names], height, label=f"budget {share:.0%}")
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="mean of hit / offline that is lost without it, in hundredths", xscale="log")
    axes.margins(x=0.1)
    axes.legend(frameon=False, loc="lower right")
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trace_flags(parser)
    parser.add_argument("--shares", type=lambda text: tuple(map(float, words(text))), default=SHARES)
    parser.add_argument(
        "--policies",
        type=words,
        default=POLICIES,
        help="as --policies=-ages,-young-lineage,lru; default: each by itself",
    )
    parser.add_argument("--layout", default="nemotron-3-nano")
    parser.add_argument("--json", type=Path, help="keep the rows here, those that are there already included")
    parser.add_argument("--plot", type=Path, help="write a PNG or SVG of all rows here")
    arguments = parser.parse_args()
    paths = trace_files(arguments.folder, arguments.traces)
    rows: list[Row] = []
    if arguments.json is not None and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())
    known = {key_of(row) for row in rows}
    for path in paths:
        trace = read_trace(path)
        for share in arguments.shares:
            for name in arguments.policies:
                if (arguments.layout, trace.name, share, name) not in known:
                    rows.append(replayed(trace, share, arguments.layout, name))
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)
    if arguments.plot is not None:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
