"""Flags, machine, model, JSON and plots: what the benchmarks share."""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from demo.terminal import make_console

from cairn.models.random_weights.make_model import make_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "add_model_flags",
    "add_output_flags",
    "as_json",
    "check_positive",
    "circumstances",
    "cpu_seconds",
    "make_console",
    "model_folder",
    "save_figure",
]


def add_output_flags(parser: argparse.ArgumentParser, *, with_plot: bool = True) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    if with_plot:
        parser.add_argument("--plot", type=Path, help="write a PNG or SVG here")


def check_positive(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *names: str) -> None:
    """Ends with exit code 2 and the flag's name where a number, or one of several, is below 1."""
    for name in names:
        given = getattr(arguments, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="checkpoint folder; made with --size and --seed if not given")
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")


@contextmanager
def model_folder(arguments: argparse.Namespace, family: str) -> Iterator[Path]:
    """The folder of --model, else one with a random model of `family`, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or Path(scratch) / "model"
        if arguments.model is None:
            make_model(family, folder, size=arguments.size, seed=arguments.seed)
        yield folder


def circumstances() -> dict[str, object]:
    """The machine, and how busy it is."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def as_json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


@contextmanager
def save_figure(path: Path, width: float = 6, height: float = 3.5) -> Iterator["Figure"]:
    """An empty figure of this size in inches, written to `path` afterwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    figure.savefig(path)
