"""Results of replays: figures by the names that the JSON has, and of them a table and a plot."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from cairn.bench.plots import save_figure
from cairn.models.layer_sizes import ForwardSizes
from cairn.replay.outcome import ReplayOutcome
from cairn.replay.trace import Trace

UNLIMITED = "unlimited"

Row = Mapping[str, Any]
"""One policy or reference line at one budget: figures by their names in the JSON."""

LOST, LOST_WIDTH = "tokens lost to", 24
"""The column of reasons, and its letters in a narrow table."""


@dataclass(frozen=True, slots=True)
class Report:
    """Makes rows of one trace. `layout_name`: the value of --layout; `sizes`: of the whole model; `footprint`: bytes of
    the whole trace."""

    trace: Trace
    layout_name: str
    sizes: ForwardSizes
    footprint: int

    def row(
        self,
        name: str,
        budget: int,
        hits: Iterable[int],
        outcome: ReplayOutcome | None = None,
        per_request: bool = False,
    ) -> Row:
        """Tokens, bytes, FLOPs and counts; counts of kinds and reasons as objects. `hits`: cached tokens, by request;
        reference lines have no `outcome`. Answers to a prompt that another one counts do not count."""
        counted: list[dict[str, Any]] = [
            {"request": request.name or number, "prompt_tokens": request.num_prompt_tokens, "cached_tokens": int(hit)}
            for number, (request, hit) in enumerate(zip(self.trace.requests, hits, strict=True))
            if not request.is_parallel_sample
        ]
        lengths, cached = ([each[field] for each in counted] for field in ("prompt_tokens", "cached_tokens"))
        flops = self.sizes.forward_flops
        fields: dict[str, Any] = {
            "policy": name,
            "trace": self.trace.name,
            "layout": self.layout_name,
            "budget_bytes": budget,
            "budget_fraction": budget / self.footprint,
            "footprint_bytes": self.footprint,
            "requests": len(counted),
            "prompt_tokens": sum(lengths),
            "hit_tokens": sum(cached),
            "token_hit_rate": sum(cached) / max(1, sum(lengths)),
            "prefill_tokens": sum(lengths) - sum(cached),
            "flops_saved": sum(flops(0, hit) for hit in cached),
            "prefill_flops": sum(flops(hit, length) for hit, length in zip(cached, lengths, strict=True)),
            "active_weights": self.sizes.active_weights,
        }
        if outcome is not None:
            fields |= {
                "forward_passes": outcome.forward_passes,
                "checkpoints_taken": dict(sorted(outcome.taken.items())),
                "checkpoints_hit": dict(sorted(outcome.used.items())),
                "checkpoints_evicted": dict(sorted(outcome.evicted.items())),
                "lost_tokens": dict(sorted(outcome.lost.items())),
                "refused_requests": outcome.refused,
                "tier_tokens": outcome.tier_tokens,
                "peak_bytes": outcome.peak_bytes,
                "microseconds_per_request": outcome.microseconds_per_request,
                **outcome.tree,
            }
        return fields | ({"per_request": counted} if per_request else {})


def make_table(rows: Sequence[Row]) -> Table:
    """A row each, of one trace."""
    first, cells = rows[0], [_cells(row) for row in rows]
    sizes = f"{first['requests']} requests, {first['layout']}, footprint {decimal(first['footprint_bytes'])}"
    table = Table(title=f"{first['trace']}: {sizes}")
    for name in cells[0]:
        # however narrow the table: figures that are cut say something else
        width = max(len(name), *(len(row.get(name, "")) for row in cells)) if name != LOST else LOST_WIDTH
        table.add_column(name, justify="left" if name in ("policy", LOST) else "right", min_width=width)
    for row in cells:
        table.add_row(*row.values())
    return table


def _cells(row: Row) -> dict[str, str]:
    """By the names of the columns."""
    saved, flops = row["flops_saved"], row["flops_saved"] + row["prefill_flops"]
    cells = {
        "policy": row["policy"],
        "budget": f"{decimal(row['budget_bytes'])} ({100 * row['budget_fraction']:,.4g}%)",
        "hit rate": f"{row['token_hit_rate']:.4f}",
        "prefill tokens": f"{row['prefill_tokens']:,}",
        "FLOPs saved": f"{saved:.2e} ({saved / max(1, flops):.0%})",
    }
    if "forward_passes" not in row:
        return cells
    lost = [f"{reason} {number:,}" for reason, number in Counter[str](row["lost_tokens"]).most_common()]
    lost += [f"{row['refused_requests']:,} requests refused"] if row["refused_requests"] else []
    return cells | {
        "passes": f"{row['forward_passes']:,}",
        **{kind: f"{sum(row[f'checkpoints_{kind}'].values()):,}" for kind in ("taken", "hit", "evicted")},
        "peak": decimal(row["peak_bytes"]),
        "µs": f"{row['microseconds_per_request']:.0f}",
        LOST: ", ".join(lost),
    }


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
