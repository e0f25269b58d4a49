"""Hit rate over budget, one line a policy, with the line `unlimited`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cairn.errors import ConfigError
from cairn.replay.report import UNLIMITED, Report, Result


@dataclass(frozen=True, slots=True)
class Plot:
    """A file to be, and matplotlib's class of figures."""

    path: Path
    figure_class: Any

    @classmethod
    def at(cls, path: Path) -> "Plot":
        """Raises ConfigError naming --plot if matplotlib is missing: before anything has been computed."""
        try:
            return cls(path, import_module("matplotlib.figure").Figure)
        except ImportError as error:
            raise ConfigError("--plot needs matplotlib: pip install 'cairn-serve[bench]'") from error

    def draw(self, report: Report, results: Sequence[Result]) -> None:
        """Write the file. Raises ConfigError naming --plot."""
        figure = self.figure_class(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(result.name for result in results):
            found = sorted((result.budget / 1e9, report.hit_rate(result)) for result in results if result.name == name)
            budgets, rates = zip(*found, strict=True)
            if name == UNLIMITED:
                axes.axhline(rates[0], color="grey", linestyle=":", label=name)
            else:
                axes.plot(budgets, rates, marker="o", label=name)
        axes.set(xlabel="budget, GB", ylabel="token hit rate", title=f"{report.trace.name}, {report.layout_name}")
        if len({result.budget for result in results}) > 1:
            axes.set_xscale("log")
        axes.legend(frameon=False)
        try:
            figure.savefig(self.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plot {self.path} cannot be written: {error}") from error
