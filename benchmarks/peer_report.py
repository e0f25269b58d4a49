"""What turns of servers come to: medians, how many times better one is, a table and a plot."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer_loads import Figures
from rich.table import Table

__all__ = ["Turn", "bounds_table_of", "medians_of", "plot", "ratios_of", "shown", "table_of", "times_better"]

_HIGHER_IS_BETTER = ("_tokens_per_s", "_cached_share", "_cached_tokens")


@dataclass(frozen=True, slots=True)
class Turn:
    """One server on one checkpoint in one round. `load`: of the machine, in the minute before its end."""

    server: str
    model: str
    round: int
    load: float
    figures: Figures


def medians_of(turns: Sequence[Turn]) -> dict[str, dict[str, Figures]]:
    """Model, figure, server -> median over the rounds, in the order in which they were measured."""
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for turn in turns:
        for figure, value in turn.figures.items():
            values.setdefault(turn.model, {}).setdefault(figure, {}).setdefault(turn.server, []).append(value)
    return {
        model: {figure: {name: statistics.median(all_) for name, all_ in by.items()} for figure, by in figures.items()}
        for model, figures in values.items()
    }


def times_better(figure: str, first: float | None, other: float | None) -> float | None:
    """How many times better `first` is; None where one is missing, or 0 is among them."""
    if not first or not other:
        return None
    return first / other if figure.endswith(_HIGHER_IS_BETTER) else other / first


def ratios_of(turns: Sequence[Turn], servers: Sequence[str]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Model, figure, other server -> how many times better the first server is: by the medians, and round by round."""
    first, *others = servers
    medians = medians_of(turns)
    own = {(turn.model, turn.round, turn.server): turn.figures for turn in turns}
    rounds = sorted({turn.round for turn in turns})
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for model, figures in medians.items():
        for figure, by in figures.items():
            for other in others:
                of_rounds = [
                    times_better(figure, *(own.get((model, number, name), {}).get(figure) for name in (first, other)))
                    for number in rounds
                ]
                found.setdefault(model, {}).setdefault(figure, {})[other] = {
                    "medians": times_better(figure, by.get(first), by.get(other)),
                    "rounds": of_rounds,
                }
    return found


def shown(figure: str, value: float | None) -> str:
    """A value in its unit, which the figure's name ends with."""
    if value is None:
        return "n/a"
    if figure.endswith("_share"):
        return f"{value:.1%}"
    if figure.endswith(("_tokens", "_mib")):
        return f"{value:,.0f}"
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def table_of(turns: Sequence[Turn], servers: Sequence[str], model: str) -> Table:
    first, *others = servers
    headings = [f"{first} is better, times" if len(others) == 1 else f"better than {other}" for other in others]
    table = Table("figure", *servers, *headings, title=f"{model}, medians of {len({turn.round for turn in turns})}")
    for column in table.columns[1:]:
        column.justify = "right"
    medians, ratios = medians_of(turns)[model], ratios_of(turns, servers)[model] if others else {}
    for figure, by in medians.items():
        cells = [shown(figure, by.get(name)) for name in servers]
        better = [_ratio_shown(ratios[figure][other]) for other in others]
        table.add_row(figure, *cells, *better)
    return table


def bounds_table_of(bounds: Sequence[Mapping[str, float]], threads: int) -> Table:
    """Medians over the rounds of what the machine can do, and the least and the largest."""
    table = Table("bound", "median", "least", "largest", title=f"what the machine can do with {threads} threads")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in bounds[0]:
        values = [one[name] for one in bounds]
        table.add_row(name, *(f"{value:,.1f}" for value in (statistics.median(values), min(values), max(values))))
    return table


def _ratio_shown(ratio: dict[str, Any]) -> str:
    """The medians' ratio, and the least and the largest of the rounds' own."""
    own = [one for one in ratio["rounds"] if one is not None]
    if ratio["medians"] is None:
        return "n/a"
    spread = f" ({min(own):.2f} to {max(own):.2f})" if len(own) > 1 else ""
    return f"{ratio['medians']:.2f}{spread}"


def plot(turns: Sequence[Turn], servers: Sequence[str], path: Path) -> None:
    """How many times better the first server is, one bar a figure, one picture a model."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    first, *others = servers
    ratios = ratios_of(turns, servers)
    most = max(len(figures) for figures in ratios.values())
    figure = Figure(figsize=(7.5 * len(ratios), 0.32 * most * max(1, len(others)) + 1.2), layout="constrained")
    for axes, (model, by_figure) in zip(figure.subplots(1, len(ratios), squeeze=False)[0], ratios.items(), strict=True):
        bars = [
            (name if len(others) == 1 else f"{name}, {other}", found["medians"], f"C{others.index(other)}")
            for name, by_other in by_figure.items()
            for other, found in by_other.items()
            if found["medians"] is not None
        ][::-1]
        if not bars:
            continue
        names, values, colours = zip(*bars, strict=True)
        # From 1, where both are as good, to either side.
        drawn = axes.barh(names, [value - 1 for value in values], left=1, color=colours)
        axes.bar_label(drawn, [f"{value:,.2f}" for value in values], padding=3, fontsize=8)
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set(xscale="log", xlabel=f"times that {first} is better than {' and '.join(others)}", title=model)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", labelsize=8)
        axes.margins(x=0.15)
    figure.savefig(path)
