"""`cairn bench`: a load, its table, its files; and two results compared."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cairn.bench.compare import compare
from cairn.bench.endpoint import Endpoint, first_model, until_ready
from cairn.bench.flags import add_bench_flags
from cairn.bench.load import EventLoopClock, Load, LoadResult
from cairn.bench.metrics import summary_of
from cairn.bench.options import Workload, endpoint_of, goals_of, make_workload, open_limit, pairs_of
from cairn.bench.plots import plot_cached_share, plot_first_tokens
from cairn.bench.report import RunInfo, result_json, save, table_lines
from cairn.bench.stream import HttpSender, RequestOutcome
from cairn.errors import ConfigError
from cairn.http.cookies import no_cookies

__all__ = ["add_bench_flags", "run_bench"]

_CONNECT_SECONDS = 30.0
# Servers close idle connections after some seconds; a request sent on one just then would be lost.
_KEEP_ALIVE_SECONDS = 2.0
_INTERRUPTED = 130


def run_bench(arguments: argparse.Namespace, tokenizer: Path | None = None) -> int:
    """Run `bench serve` or `bench compare`, as `add_bench_flags` has parsed; returns the exit code.

    `tokenizer`: the tokenizer.json that --tokenizer names, or its folder.

    Of a load: 0, or 1 when no request succeeded, or 130 when it was interrupted; what there is is printed in any case.
    Raises CairnError that names the flag, the file or the server.
    """
    if arguments.bench_command == "compare":
        compare(arguments.first, arguments.second, arguments.plot)
        return 0
    return _serve(arguments, tokenizer)


def _serve(asked: argparse.Namespace, tokenizer: Path | None) -> int:
    endpoint, goals, metadata = endpoint_of(asked), goals_of(asked.goodput), pairs_of(asked.metadata, "--metadata")
    limit = open_limit(asked.max_concurrency)
    material = make_workload(asked, endpoint.kind, tokenizer)
    endpoint, ran = asyncio.run(_measured(asked, replace(endpoint, ignore_eos=material.ignore_eos), material, limit))
    summary = summary_of(ran, asked.metric_percentiles, goals)
    how = _run_info(asked, endpoint, material)
    for line in table_lines(ran, summary, how):
        print(line)
    if asked.save_result or asked.append_result:
        _write(asked, metadata | result_json(ran, summary, how, with_texts=asked.save_detailed), how)
    return _INTERRUPTED if ran.stopped else 0 if summary.completed else 1


async def _measured(
    asked: argparse.Namespace, endpoint: Endpoint, material: Workload, limit: int
) -> tuple[Endpoint, LoadResult]:
    """The endpoint with its model's name, and the load's end."""
    pace = EventLoopClock()
    limits = httpx.Limits(max_connections=limit, max_keepalive_connections=limit, keepalive_expiry=_KEEP_ALIVE_SECONDS)
    timeout = httpx.Timeout(asked.request_timeout, connect=min(_CONNECT_SECONDS, asked.request_timeout))
    # trust_env off: a proxy of the environment would be measured as well
    async with httpx.AsyncClient(
        limits=limits, timeout=timeout, trust_env=False, cookies=no_cookies(), verify=not asked.insecure
    ) as http:
        if asked.ready_check_timeout_sec:
            await until_ready(http, endpoint, pace, asked.ready_check_timeout_sec)
        if not endpoint.model:
            endpoint = replace(endpoint, model=await first_model(http, endpoint))
        sender = HttpSender(http, endpoint, pace, asked.request_timeout)
        load = Load(sender, endpoint, pace, limit)
        with _until_interrupted() as stop, _progress(asked, material) as bar:
            if material.warmups:
                _tell_failures(await load.run(material.warmups, [0.0] * len(material.warmups), stop))
            return endpoint, await load.run(material.work, material.due, stop, bar.step)


def _tell_failures(ran: LoadResult) -> None:
    failures = [outcome.failure for outcome in ran.outcomes if outcome.failure is not None]
    if failures:
        print(f"{len(failures)} warm-ups failed: {failures[0].kind}: {failures[0].detail}", file=sys.stderr)


@contextlib.contextmanager
def _until_interrupted() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; the next one ends the process as usual."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@dataclass(slots=True)
class _Bar:
    """Requests that have ended, and how many of them failed."""

    progress: Progress
    task: TaskID
    failed: int = 0

    def step(self, outcome: RequestOutcome) -> None:
        self.failed += outcome.failure is not None
        words = f"requests, {self.failed} failed" if self.failed else "requests"
        self.progress.update(self.task, advance=1, description=words)


@contextlib.contextmanager
def _progress(asked: argparse.Namespace, material: Workload) -> Iterator[_Bar]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = asked.disable_tqdm or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield _Bar(progress, progress.add_task("requests", total=material.num_requests))


def _run_info(asked: argparse.Namespace, endpoint: Endpoint, material: Workload) -> RunInfo:
    return RunInfo(
        date=datetime.now().strftime("%Y%m%d-%H%M%S"),
        backend=endpoint.backend,
        label=asked.label,
        model=endpoint.model,
        tokenizer=asked.tokenizer,
        num_prompts=material.num_requests,
        request_rate=asked.request_rate,
        burstiness=asked.burstiness,
        max_concurrency=asked.max_concurrency,
        shown=asked.percentile_metrics,
        has_goals=bool(asked.goodput),
        about={
            "dataset_name": asked.dataset_name,
            "dataset": dict(material.settings),
            "seed": asked.seed,
            "num_warmups": asked.num_warmups,
        },
    )


def _write(asked: argparse.Namespace, result: dict[str, Any], how: RunInfo) -> None:
    """The JSON file, and the plots beside it."""
    name = asked.result_filename or _file_name(how)
    path = (asked.result_dir or Path()) / name
    save(result, path, append=asked.append_result)
    print(f"written: {path}")
    try:
        for plot, kind in ((plot_first_tokens, "ttft"), (plot_cached_share, "cached")):
            plot(result, path.with_suffix(f".{kind}.png"))
    except ConfigError as error:
        print(f"cairn: {error}", file=sys.stderr)


def _file_name(how: RunInfo) -> str:
    concurrency = "" if how.max_concurrency is None else f"-concurrency{how.max_concurrency}"
    model = how.model.rstrip("/").rpartition("/")[2] or "model"
    return f"{how.label or how.backend}-{how.request_rate}qps{concurrency}-{model}-{how.date}.json".replace("/", "_")
