"""`make demo`: the main job on five servers, a table, and an exit code that says whether the promises were kept."""

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import httpx
from rich.console import Console

from demo.checks import check_default, check_exact, check_full_pool
from demo.client import Client
from demo.corpus import Corpus
from demo.job import Outcome, run_full_pool, run_job
from demo.samples import Sample, show_samples, write_samples
from demo.server import DemoError, serve_command, serving
from demo.table import EXACT_NOTE, as_json, check_lines, default_table, exact_table
from demo.terminal import leave, run_demo

__all__ = ["main"]

CACHED, OFF, ALIGN, DEFAULT, FULL = "cairn", "no-cache", "align", "default", "full-pool"
EXACT = ("--exact", "--dtype", "float32")
SERVERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        CACHED: EXACT,
        OFF: (*EXACT, "--no-enable-prefix-caching"),
        ALIGN: (*EXACT, "--mamba-cache-mode", "align"),
        DEFAULT: (),
        FULL: ("--kv-cache-memory-bytes", "24MiB"),
    }
)


Answers = TypeVar("Answers")


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all promises kept; 1: one was broken, or the demo could not be run."""
    return run_demo(_run, "demo", arguments, about=__doc__)


def _run(model: Path, out: Path, console: Console) -> int:
    corpus = Corpus()

    def job(client: Client) -> list[Outcome]:
        return run_job(client, corpus)

    def job_and_samples(client: Client) -> tuple[list[Outcome], list[Sample]]:
        return job(client), write_samples(client)

    runs = {name: _ask(name, model, out, console, job) for name in (CACHED, OFF, ALIGN)}
    runs[DEFAULT], samples = _ask(DEFAULT, model, out, console, job_and_samples)
    runs[FULL] = _ask(FULL, model, out, console, lambda client: run_full_pool(client, corpus))
    checks = check_exact(runs[CACHED], {name: runs[name] for name in (OFF, ALIGN)}) + check_default(runs[DEFAULT])
    checks += check_full_pool(runs[FULL])
    console.print(exact_table(runs[CACHED], runs[OFF], runs[ALIGN]))
    console.print(EXACT_NOTE, style="dim")
    console.print()
    console.print(default_table(runs[DEFAULT]))
    console.print(default_table(runs[FULL], "A pool that is full"))
    console.print("What the model writes")
    console.print(show_samples(samples))
    console.print(check_lines(checks))
    result = out / "result.json"
    written = [asdict(sample) for sample in samples]
    found = {**_circumstances(), **as_json(runs, checks), "samples": written}
    result.write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"\nall figures: {result}", style="dim")
    return 0 if all(check.kept for check in checks) else 1


def _ask(name: str, model: Path, out: Path, console: Console, job: Callable[[Client], Answers]) -> Answers:
    log = out / f"{name}.log"
    flags = SERVERS[name]
    console.print(f"cairn serve {' '.join((str(model), *flags))}", style="dim")
    try:
        with serving(serve_command(model, *flags), log) as url, Client(url) as client:
            return job(client)
    except httpx.HTTPError as error:
        raise DemoError(f"the server '{name}' did not answer: {error!r} (log: {log})") from error
    except DemoError as error:
        raise DemoError(f"the server '{name}': {error} (log: {log})") from error


def _circumstances() -> dict[str, object]:
    return {
        "cairn": version("cairn-serve"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "servers": {name: list(flags) for name, flags in SERVERS.items()},
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main())
