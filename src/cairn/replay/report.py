"""Results of replays, as JSON, as a table and as a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal
from rich.table import Table

from cairn.errors import ConfigError
from cairn.models.layer_sizes import ForwardSizes
from cairn.replay.outcome import ReplayOutcome
from cairn.replay.trace import Trace

UNLIMITED = "unlimited"

_MIN_WIDTH = 24
"""Letters of the column of reasons in a narrow table."""


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One policy or reference line at one budget. `hits`: cached tokens, shape [requests]; reference lines have no
    `outcome`."""

    name: str
    budget: int
    hits: NDArray[np.int64]
    outcome: ReplayOutcome | None = None

    @property
    def hit_tokens(self) -> int:
        return int(self.hits.sum())


class Report:
    """Shows results of one trace. `layout_name`: the value of --layout; `sizes`: of the whole model; `footprint`: bytes
    of the whole trace."""

    def __init__(self, trace: Trace, layout_name: str, sizes: ForwardSizes, footprint: int) -> None:
        self._num_requests = sum(not request.is_parallel_sample for request in trace.requests)
        self.trace = trace
        self.layout_name = layout_name
        self.footprint = footprint
        self._sizes = sizes
        self._lengths = np.array(
            [0 if request.is_parallel_sample else request.num_prompt_tokens for request in trace.requests], np.int64
        )
        self.prompt_tokens = int(self._lengths.sum())

    def hit_rate(self, result: Result) -> float:
        return result.hit_tokens / max(1, self.prompt_tokens)

    def flops(self, result: Result) -> tuple[int, int]:
        """Forward FLOPs that the hits have saved, and those of the tokens that were computed."""
        pairs = list(zip(result.hits.tolist(), self._lengths.tolist(), strict=True))
        saved = sum(self._sizes.forward_flops(0, hit) for hit, _ in pairs)
        return saved, sum(self._sizes.forward_flops(hit, length) for hit, length in pairs)

    def to_json(self, result: Result, per_request: bool) -> dict[str, object]:
        """Tokens, bytes, FLOPs and counts by their names; counts of kinds and reasons as objects."""
        saved, computed = self.flops(result)
        fields: dict[str, object] = {
            "policy": result.name,
            "trace": self.trace.name,
            "layout": self.layout_name,
            "budget_bytes": result.budget,
            "budget_fraction": result.budget / self.footprint,
            "footprint_bytes": self.footprint,
            "requests": self._num_requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": result.hit_tokens,
            "token_hit_rate": self.hit_rate(result),
            "prefill_tokens": self.prompt_tokens - result.hit_tokens,
            "flops_saved": saved,
            "prefill_flops": computed,
            "active_weights": self._sizes.active_weights,
        }
        if (outcome := result.outcome) is not None:
            fields |= {
                "forward_passes": outcome.forward_passes,
                "checkpoints_taken": dict(sorted(outcome.taken.items())),
                "checkpoints_hit": dict(sorted(outcome.used.items())),
                "checkpoints_evicted": dict(sorted(outcome.evicted.items())),
                "lost_tokens": dict(sorted(outcome.lost.items())),
                "refused_requests": outcome.refused,
                "peak_bytes": outcome.peak_bytes,
                "microseconds_per_request": outcome.microseconds_per_request,
            }
            if outcome.tree is not None:
                fields |= {
                    "tree_bytes": outcome.tree.num_bytes,
                    "tree_nodes": outcome.tree.nodes,
                    "tree_ghosts": outcome.tree.ghosts,
                    "tree_page_runs": outcome.tree.page_runs,
                }
        if per_request:
            rows = enumerate(zip(self.trace.requests, result.hits.tolist(), strict=True))
            fields["per_request"] = [
                {"request": request.name or index, "prompt_tokens": request.num_prompt_tokens, "cached_tokens": tokens}
                for index, (request, tokens) in rows
                if not request.is_parallel_sample
            ]
        return fields

    def table(self, results: Sequence[Result]) -> Table:
        """One row a result."""
        sizes = f"{self._num_requests} requests, {self.layout_name}, footprint {decimal(self.footprint)}"
        table = Table(title=f"{self.trace.name}: {sizes}")
        rows = [self._cells(result) for result in results]
        names = ("policy", "budget", "hit rate", "prefill tokens", "FLOPs saved")
        for place, name in enumerate((*names, "passes", "taken", "hit", "evicted", "peak", "µs")):
            # however narrow the table: figures that are cut say something else
            width = max(len(name), *(len(row[place]) for row in rows))
            table.add_column(name, justify="left" if name == "policy" else "right", min_width=width)
        table.add_column("tokens lost to", min_width=_MIN_WIDTH)
        for row in rows:
            table.add_row(*row)
        return table

    def _cells(self, result: Result) -> list[str]:
        budget = f"{decimal(result.budget)} ({100 * result.budget / self.footprint:,.4g}%)"
        flops = self.flops(result)
        cells = [result.name, budget, f"{self.hit_rate(result):.4f}", f"{self.prompt_tokens - result.hit_tokens:,}"]
        cells.append(f"{flops[0]:.2e} ({flops[0] / max(1, sum(flops)):.0%})")
        outcome = result.outcome
        if outcome is None:
            return [*cells, *[""] * 7]
        lost = [f"{reason} {number:,}" for reason, number in outcome.lost.most_common()]
        lost += [f"{outcome.refused:,} requests refused"] if outcome.refused else []
        return [
            *cells,
            f"{outcome.forward_passes:,}",
            f"{outcome.taken.total():,}",
            f"{outcome.used.total():,}",
            f"{outcome.evicted.total():,}",
            decimal(outcome.peak_bytes),
            f"{outcome.microseconds_per_request:.0f}",
            ", ".join(lost),
        ]


def import_figure() -> Any:
    """matplotlib's class of figures. Raises ConfigError naming --plot if it is not installed."""
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'cairn-serve[bench]'") from error


def draw_plot(figure: Any, path: Path, report: Report, results: Sequence[Result]) -> None:
    """Write hit rate over budget into a file, one line a policy, with the line `unlimited`. `figure`: an empty one of
    matplotlib's. Raises ConfigError naming --plot."""
    axes = figure.subplots()
    for name in dict.fromkeys(result.name for result in results):
        points = sorted((result.budget / 1e9, report.hit_rate(result)) for result in results if result.name == name)
        budgets, rates = zip(*points, strict=True)
        if name == UNLIMITED:
            axes.axhline(rates[0], color="grey", linestyle=":", label=name)
        else:
            axes.plot(budgets, rates, marker="o", label=name)
    axes.set(xlabel="budget, GB", ylabel="token hit rate", title=f"{report.trace.name}, {report.layout_name}")
    if len({result.budget for result in results}) > 1:
        axes.set_xscale("log")
    axes.legend(frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
