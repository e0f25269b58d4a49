"""`cairn bench`: a load, its table, its files; and two results compared."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cairn.bench.client import Endpoint, EventLoopClock, HttpSender, RequestRecord, first_model, wait_until_ready
from cairn.bench.flags import (
    Workload,
    add_bench_flags,
    make_endpoint,
    make_workload,
    max_open_requests,
    parse_goals,
    parse_pairs,
)
from cairn.bench.load import LoadGenerator, LoadResult
from cairn.bench.plots import plot_cached_share, plot_first_tokens
from cairn.bench.report import check_result_file, compare_results, make_result, save_result, table_lines
from cairn.bench.spec_decode import read_spec_decode
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

    The code of a load is 0, 1 when no request succeeded, 130 when it was interrupted; its table is printed in any case.
    Raises CairnError that names the flag, the file or the server.
    """
    if arguments.bench_command == "compare":
        compare_results(arguments.first, arguments.second, arguments.plot)
        return 0
    return _serve(arguments, tokenizer)


def _serve(arguments: argparse.Namespace, tokenizer: Path | None) -> int:
    endpoint, goals = make_endpoint(arguments), parse_goals(arguments.goodput)
    if arguments.save_result or arguments.append_result:
        folder = arguments.result_dir or Path()
        check_result_file(folder / (arguments.result_filename or f"{arguments.label or 'result'}.json"))
    metadata, limit = parse_pairs(arguments.metadata, "--metadata"), max_open_requests(arguments.max_concurrency)
    workload = make_workload(arguments, endpoint.kind, tokenizer)
    endpoint = replace(endpoint, ignore_eos=workload.ignore_eos)
    endpoint, load, drafts = asyncio.run(_run_load(arguments, endpoint, workload, limit))
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    run = metadata | {
        "date": date,
        "endpoint_type": endpoint.backend,
        "backend": endpoint.backend,
        "label": arguments.label,
        "model_id": endpoint.model,
        "tokenizer_id": arguments.tokenizer,
        "num_prompts": workload.num_requests,
        "dataset_name": arguments.dataset_name,
        "dataset": dict(workload.settings),
        "seed": arguments.seed,
        "num_warmups": arguments.num_warmups,
        "request_rate": arguments.request_rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    result = make_result(run, load, arguments.metric_percentiles, goals, with_texts=arguments.save_detailed) | drafts
    for line in table_lines(result, arguments.percentile_metrics):
        print(line)
    if arguments.save_result or arguments.append_result:
        concurrency = "" if arguments.max_concurrency is None else f"-concurrency{arguments.max_concurrency}"
        model = endpoint.model.rstrip("/").rpartition("/")[2] or "model"
        name = f"{arguments.label or endpoint.backend}-{arguments.request_rate}qps{concurrency}-{model}-{date}.json"
        path = (arguments.result_dir or Path()) / (arguments.result_filename or name.replace("/", "_"))
        save_result(result, path, append=arguments.append_result)
        print(f"written: {path}")
        try:
            plot_first_tokens(result, path.with_suffix(".ttft.png"))
            plot_cached_share(result, path.with_suffix(".cached.png"))
        except ConfigError as error:
            print(f"cairn: {error}", file=sys.stderr)
    return _INTERRUPTED if load.stopped else 0 if result["completed"] else 1


async def _run_load(
    arguments: argparse.Namespace, endpoint: Endpoint, workload: Workload, limit: int
) -> tuple[Endpoint, LoadResult, dict[str, Any]]:
    """The endpoint with its model's name, the load's result, and what the server's drafts have brought meanwhile."""
    clock = EventLoopClock()
    limits = httpx.Limits(max_connections=limit, max_keepalive_connections=limit, keepalive_expiry=_KEEP_ALIVE_SECONDS)
    timeout = httpx.Timeout(arguments.request_timeout, connect=min(_CONNECT_SECONDS, arguments.request_timeout))
    # trust_env off: a proxy of the environment would be measured as well
    async with httpx.AsyncClient(
        limits=limits, timeout=timeout, trust_env=False, cookies=no_cookies(), verify=not arguments.insecure
    ) as http:
        if arguments.ready_check_timeout_sec:
            await wait_until_ready(http, endpoint, clock, arguments.ready_check_timeout_sec)
        if not endpoint.model:
            endpoint = replace(endpoint, model=await first_model(http, endpoint))
        generator = LoadGenerator(HttpSender(http, endpoint, clock, arguments.request_timeout), limit)
        with _stop_on_interrupt() as stop, _progress_bar(workload.num_requests, arguments.disable_tqdm) as advance:
            if workload.warmups:
                warm = await generator.run(workload.warmups, [0.0] * len(workload.warmups), stop)
                if failures := [record.failure for record in warm.records if record.failure is not None]:
                    first = failures[0]
                    print(f"{len(failures)} warm-ups failed: {first.kind}: {first.detail}", file=sys.stderr)
            before = await read_spec_decode(http, endpoint)
            load = await generator.run(workload.work, workload.due, stop, advance)
        # whoever has pressed Ctrl-C waits for nothing
        after = None if before is None or load.stopped else await read_spec_decode(http, endpoint)
        drafts = {} if before is None or after is None else after.since(before).figures()
        return endpoint, load, drafts


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[asyncio.Event]:
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


@contextlib.contextmanager
def _progress_bar(num_requests: int, disabled: bool) -> Iterator[Callable[[RequestRecord], None]]:
    """A function to call for every request that has ended."""
    console, num_failed = Console(stderr=True), 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    disabled = disabled or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as progress:
        task = progress.add_task("requests", total=num_requests)

        def advance(record: RequestRecord) -> None:
            nonlocal num_failed
            num_failed += record.failure is not None
            words = f"requests, {num_failed} failed" if num_failed else "requests"
            progress.update(task, advance=1, description=words)

        yield advance
