"""Results of replays: figures by the names that the JSON has, and of them a table and a plot."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.filesize import decimal
from rich.table import Table

from cairn.bench.plots import save_figure
from cairn.models.layer_sizes import ForwardSizes
from cairn.replay.outcome import ReplayOutcome
from cairn.replay.trace import Trace

UNLIMITED = "unlimited"

Row = Mapping[str, Any]
"""One policy or reference line at one budget: figures by their names in the JSON."""

_MIN_WIDTH = 24
"""Letters of the column of reasons in a narrow table."""


class Report:
    """Makes rows of one trace. `layout_name`: the value of --layout; `sizes`: of the whole model; `footprint`: bytes of
    the whole trace."""

    def __init__(self, trace: Trace, layout_name: str, sizes: ForwardSizes, footprint: int) -> None:
        self._trace = trace
        self._layout_name = layout_name
        self._sizes = sizes
        self._footprint = footprint

    def row(
        self, name: str, budget: int, hits: ArrayLike, outcome: ReplayOutcome | None = None, per_request: bool = False
    ) -> Row:
        """Tokens, bytes, FLOPs and counts; counts of kinds and reasons as objects. `hits`: cached tokens, shape
        [requests]; reference lines have no `outcome`. Answers to a prompt that another one counts do not count."""
        counted = [not request.is_parallel_sample for request in self._trace.requests]
        requests = [request for request, counts in zip(self._trace.requests, counted, strict=True) if counts]
        cached = np.asarray(hits, np.int64)[counted].tolist()
        prompt_tokens, hit_tokens = sum(request.num_prompt_tokens for request in requests), sum(cached)
        pairs = list(zip(requests, cached, strict=True))
        fields: dict[str, Any] = {
            "policy": name,
            "trace": self._trace.name,
            "layout": self._layout_name,
            "budget_bytes": budget,
            "budget_fraction": budget / self._footprint,
            "footprint_bytes": self._footprint,
            "requests": len(requests),
            "prompt_tokens": prompt_tokens,
            "hit_tokens": hit_tokens,
            "token_hit_rate": hit_tokens / max(1, prompt_tokens),
            "prefill_tokens": prompt_tokens - hit_tokens,
            "flops_saved": sum(self._sizes.forward_flops(0, hit) for hit in cached),
            "prefill_flops": sum(self._sizes.forward_flops(hit, each.num_prompt_tokens) for each, hit in pairs),
            "active_weights": self._sizes.active_weights,
        }
        if outcome is not None:
            fields |= {
                "forward_passes": outcome.forward_passes,
                "checkpoints_taken": dict(sorted(outcome.taken.items())),
                "checkpoints_hit": dict(sorted(outcome.used.items())),
                "checkpoints_evicted": dict(sorted(outcome.evicted.items())),
                "lost_tokens": dict(sorted(outcome.lost.items())),
                "refused_requests": outcome.refused,
                "peak_bytes": outcome.peak_bytes,
                "microseconds_per_request": outcome.microseconds_per_request,
                **outcome.tree,
            }
        if per_request:
            numbers = np.flatnonzero(counted).tolist()
            fields["per_request"] = [
                {"request": each.name or number, "prompt_tokens": each.num_prompt_tokens, "cached_tokens": hit}
                for number, (each, hit) in zip(numbers, pairs, strict=True)
            ]
        return fields


def make_table(rows: Sequence[Row]) -> Table:
    """A row each, of one trace."""
    first, cells = rows[0], [_cells(row) for row in rows]
    sizes = f"{first['requests']} requests, {first['layout']}, footprint {decimal(first['footprint_bytes'])}"
    table = Table(title=f"{first['trace']}: {sizes}")
    names = ("policy", "budget", "hit rate", "prefill tokens", "FLOPs saved")
    for place, name in enumerate((*names, "passes", "taken", "hit", "evicted", "peak", "µs")):
        # however narrow the table: figures that are cut say something else
        width = max(len(name), *(len(row[place]) for row in cells))
        table.add_column(name, justify="left" if name == "policy" else "right", min_width=width)
    table.add_column("tokens lost to", min_width=_MIN_WIDTH)
    for row in cells:
        table.add_row(*row)
    return table


def _cells(row: Row) -> list[str]:
    saved, flops = row["flops_saved"], row["flops_saved"] + row["prefill_flops"]
    cells = [
        row["policy"],
        f"{decimal(row['budget_bytes'])} ({100 * row['budget_fraction']:,.4g}%)",
        f"{row['token_hit_rate']:.4f}",
        f"{row['prefill_tokens']:,}",
        f"{saved:.2e} ({saved / max(1, flops):.0%})",
    ]
    if "forward_passes" not in row:
        return [*cells, *[""] * 7]
    kinds = (row[f"checkpoints_{what}"] for what in ("taken", "hit", "evicted"))
    lost = [f"{reason} {number:,}" for reason, number in Counter[str](row["lost_tokens"]).most_common()]
    lost += [f"{row['refused_requests']:,} requests refused"] if row["refused_requests"] else []
    return [
        *cells,
        f"{row['forward_passes']:,}",
        *(f"{sum(numbers.values()):,}" for numbers in kinds),
        decimal(row["peak_bytes"]),
        f"{row['microseconds_per_request']:.0f}",
        ", ".join(lost),
    ]


def draw_plot(figure: Any, path: Path, rows: Sequence[Row]) -> None:
    """Write hit rate over budget into a file, one line a policy, with the line `unlimited`. `figure`: one of
    matplotlib's with empty axes. Raises ConfigError naming --plot."""
    (axes,) = figure.axes
    for name in dict.fromkeys(row["policy"] for row in rows):
        points = sorted((row["budget_bytes"] / 1e9, row["token_hit_rate"]) for row in rows if row["policy"] == name)
        budgets, rates = zip(*points, strict=True)
        if name == UNLIMITED:
            axes.axhline(rates[0], color="grey", linestyle=":", label=name)
        else:
            axes.plot(budgets, rates, marker="o", label=name)
    axes.set(xlabel="budget, GB", ylabel="token hit rate", title=f"{rows[0]['trace']}, {rows[0]['layout']}")
    if len({row["budget_bytes"] for row in rows}) > 1:
        axes.set_xscale("log")
    axes.legend(frameon=False)
    save_figure(figure, path, "--plot")
