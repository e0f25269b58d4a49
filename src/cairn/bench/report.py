"""The results of a load: figures by the keys of `vllm bench serve` and some of ours, as a table and as JSON, and two
results side by side. Failed requests are counted; they are in no average."""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cairn.bench.client import RequestRecord
from cairn.bench.load import LoadResult
from cairn.bench.plots import plot_comparison
from cairn.errors import ConfigError
from cairn.paths import check_output_file

METRICS = MappingProxyType(
    {
        "ttft": ("TTFT", "Time to First Token"),
        "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
        "itl": ("ITL", "Inter-token Latency"),
        "e2el": ("E2EL", "End-to-end Latency"),
    }
)
"""Name to the short and the long title."""

_WIDTH = 50
_CONSOLE_WIDTH = 100
_MAX_BYTES = 1 << 32
_TITLES = MappingProxyType(
    {
        "completed": "Successful requests",
        "failed": "Failed requests",
        "interrupted": "Interrupted requests",
        "unsent": "Unsent requests",
        "max_concurrency": "Maximum request concurrency",
        "request_rate": "Request rate configured (RPS)",
        "duration": "Benchmark duration (s)",
        "total_input_tokens": "Total input tokens",
        "total_output_tokens": "Total generated tokens",
        "request_throughput": "Request throughput (req/s)",
        "request_goodput": "Request goodput (req/s)",
        "output_throughput": "Output token throughput (tok/s)",
        "max_output_tokens_per_s": "Peak output token throughput (tok/s)",
        "max_concurrent_requests": "Peak concurrent requests",
        "total_token_throughput": "Total token throughput (tok/s)",
    }
)
_CACHE_TITLES = MappingProxyType(
    {"total_cached_tokens": "Total cached tokens", "cached_share": "Cached share of input"}
)
_DRAFT_TITLES = MappingProxyType(
    {
        "spec_decode_acceptance_rate": "Acceptance rate (%)",
        "spec_decode_acceptance_length": "Acceptance length",
        "spec_decode_num_drafts": "Drafts",
        "spec_decode_draft_tokens": "Draft tokens",
        "spec_decode_accepted_tokens": "Accepted tokens",
    }
)
_COMPARED = (
    *("completed", "failed", "duration", "total_input_tokens", "total_output_tokens", *_CACHE_TITLES),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("spec_decode_acceptance_rate", "spec_decode_acceptance_length"),
)
_SAME = ("dataset_name", "dataset", "num_prompts", "seed", "request_rate", "burstiness", "max_concurrency", "model_id")


# -- figures -----------------------------------------------------------------------------------------------------------


def summarize(load: LoadResult, percentiles: Sequence[float], goals: Mapping[str, float]) -> dict[str, Any]:
    """Figures by name. Rates are per second of `duration`. Latencies are in ms, None where nothing was measured; `std`
    is the population's, percentiles are interpolated linearly. `total_cached_tokens` and `cached_share` count the
    requests whose usage says what was cached; they are None if none does.

    `percentiles`: from 0 to 100. `goals`: milliseconds by metric (ttft, tpot, e2el); `request_goodput` counts requests
    that meet all of them, and is None without goals.
    """
    good = [record for record in load.records if record.failure is None]
    kinds = Counter(record.failure.kind for record in load.records if record.failure is not None)
    cached = [(record.cached_tokens, record.prompt_tokens) for record in good if record.cached_tokens is not None]
    num_cached = sum(tokens for tokens, _ in cached)
    num_input, num_output = (
        sum(getattr(record, name) for record in good) for name in ("prompt_tokens", "output_tokens")
    )

    def rate(count: float) -> float:
        return count / load.seconds if load.seconds > 0 else 0.0

    figures: dict[str, Any] = {
        "duration": load.seconds,
        "completed": len(good),
        "failed": kinds.total(),
        "interrupted": load.num_interrupted,
        "unsent": load.num_unsent,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": num_cached if cached else None,
        "cached_share": num_cached / max(1, sum(tokens for _, tokens in cached)) if cached else None,
        "requests_without_usage": sum(not record.has_usage for record in good),
        "request_throughput": rate(len(good)),
        "request_goodput": rate(sum(_meets(record, goals) for record in good)) if goals else None,
        "output_throughput": rate(num_output),
        "total_token_throughput": rate(num_input + num_output),
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(good),
        "error_classes": dict(kinds.most_common()),
    }
    seconds: dict[str, list[float]] = {
        "ttft": [record.ttft for record in good],
        "tpot": [tpot for record in good if (tpot := record.tpot) is not None],
        "itl": [itl for record in good for itl in record.itls],
        "e2el": [record.latency for record in good],
    }
    compute: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    compute |= {f"p{p:g}": partial(np.percentile, q=p) for p in percentiles}
    for name, values in seconds.items():
        figures |= {
            f"{kind}_{name}_ms": float(of(np.array(values) * 1000)) if values else None for kind, of in compute.items()
        }
    return figures


def _meets(record: RequestRecord, goals: Mapping[str, float]) -> bool:
    # An answer of one token has no time per token; it meets every goal for it.
    seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(seconds[name] * 1000 <= goal for name, goal in goals.items())


def _peak_tokens(good: Iterable[RequestRecord]) -> float:
    """The most output tokens of one second, counted in whole seconds from the first sending."""
    records = [record for record in good if record.token_times]
    start = min((record.sent for record in records), default=0.0)
    tokens: dict[int, float] = {}
    for record in records:
        share = record.output_tokens / len(record.token_times)
        for second, events in Counter(int(moment - start) for moment in record.token_times).items():
            tokens[second] = tokens.get(second, 0.0) + events * share
    return max(tokens.values(), default=0.0)


def _peak_requests(good: Iterable[RequestRecord]) -> int:
    """The most requests that were open at one moment; one that ends as another is sent is not open with it."""
    changes = sorted(change for record in good for change in ((record.sent, 1), (record.ended, -1)))
    return int(max(np.cumsum([change for _, change in changes]), default=0))


# -- a result ----------------------------------------------------------------------------------------------------------


def make_result(
    run: Mapping[str, Any],
    load: LoadResult,
    percentiles: Sequence[float],
    goals: Mapping[str, float],
    *,
    with_texts: bool = False,
) -> dict[str, Any]:
    """`run`, the settings of the run, with all figures by name. Lists have one entry for each request that has ended,
    in the order of the work: `errors` is empty for those that succeeded; the figures of the others end with the
    failure."""
    records = load.records
    result = {name: "inf" if value == math.inf else value for name, value in run.items()}
    result |= summarize(load, percentiles, goals) | {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [0 if record.failure is not None else record.output_tokens for record in records],
        "cached_tokens": [record.cached_tokens for record in records],
        "ttfts": [record.ttft if record.token_times else 0.0 for record in records],
        "itls": [list(record.itls) for record in records],
        "latencies": [record.latency for record in records],
        "start_times": [record.sent - load.start for record in records],
        "queue_times": [record.queue_time for record in records],
        "errors": [
            "" if (failure := record.failure) is None else f"{failure.kind}: {failure.detail}" for record in records
        ],
    }
    return result | ({"generated_texts": [record.text for record in records]} if with_texts else {})


def table_lines(result: Mapping[str, Any], shown: Sequence[str] = tuple(METRICS)) -> list[str]:
    """A result's table as lines of text. `shown`: the metrics that are in it."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    for key, title in _TITLES.items():
        is_zero = key in ("interrupted", "unsent") and not result["interrupted"] + result["unsent"]
        if result[key] is not None and result[key] != "inf" and not is_zero:
            lines.append(_line(title, result[key]))
    for name in shown:
        lines.append(f"{METRICS[name][1]:-^{_WIDTH}}")
        lines += [_line(f"{_latency_title(key)} (ms)", result[key]) for key in _latency_keys(name, result)]
    share = result["cached_share"]
    lines += [f"{'Prefix Cache':-^{_WIDTH}}", _line("Total cached tokens", result["total_cached_tokens"])]
    lines.append(_line("Cached share of input (%)", None if share is None else 100 * share))
    if "spec_decode_num_drafts" in result:
        lines.append(f"{'Speculative Decoding':-^{_WIDTH}}")
        lines += [_line(title, result[key]) for key, title in _DRAFT_TITLES.items()]
        lines.append("Per-position acceptance (%):")
        rates = result["spec_decode_per_position_acceptance_rates"]
        lines += [_line(f"  Position {position}", 100.0 * rate) for position, rate in enumerate(rates)]
    if result["requests_without_usage"]:
        lines.append(_line("Requests without usage", result["requests_without_usage"]))
    lines += [f"{'Failures':-^{_WIDTH}}"] if result["error_classes"] else []
    for kind, count in result["error_classes"].items():
        example = next(error for error in result["errors"] if error.startswith(f"{kind}: "))
        lines += [_line(kind, count), f"    {example.removeprefix(f'{kind}: ')}"]
    return [*lines, "=" * _WIDTH]


def _line(title: str, value: float | None) -> str:
    shown = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value}"
    return f"{title + ':':<40} {shown:<9}".rstrip()


def _latency_keys(metric: str, names: Iterable[str]) -> list[str]:
    percentiles = [name for name in names if name.startswith("p") and name.endswith(f"_{metric}_ms")]
    return [f"mean_{metric}_ms", f"median_{metric}_ms", *percentiles]


def _latency_title(key: str) -> str:
    parts = key.split("_")
    return f"{parts[0].capitalize()} {METRICS[parts[-2]][0]}"


def check_result_file(path: Path) -> None:
    """Makes its folder. Raises ConfigError naming the flags for a file that `save_result` could not write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result-dir {path.parent} cannot be made: {error.strerror}") from error
    check_output_file("--result-dir, --result-filename:", path)


def save_result(result: Mapping[str, Any], path: Path, *, append: bool) -> None:
    """Write one JSON object, or add it as a line of its own. Raises ConfigError naming the flags."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, allow_nan=False)
        if append and path.exists() and path.stat().st_size:
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" + text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; see --result-dir and --result-filename") from error


# -- two results -------------------------------------------------------------------------------------------------------


def compare_results(first: Path, second: Path, plot: Path | None) -> None:
    """Print two result files with the keys of `vllm bench serve`, their ratios, and the settings that differ. Raises
    ConfigError naming the file."""
    results = read_result(first), read_result(second)
    console = Console(width=None if sys.stdout.isatty() else _CONSOLE_WIDTH, highlight=False)
    for name, first_value, second_value in find_differences(*results):
        console.print(f"not the same: {name} is {first_value} and {second_value}", markup=False)
    table = Table("", first.name, second.name, "B / A")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in comparison_rows(*results):
        table.add_row(*row)
    console.print(table)
    if plot is not None:
        names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
        plot_comparison(list(zip(names, results, strict=True)), plot)


def read_result(path: Path) -> Mapping[str, Any]:
    """A result file; of one that runs were appended to, the last of them. Raises ConfigError naming the file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES >> 30} GiB; that is no result file")
        text = path.read_text(encoding="utf-8")
        try:
            result = json.loads(text)
        except ValueError:
            result = json.loads(text.strip().rpartition("\n")[2])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a result file: {error}") from error
    if not isinstance(result, dict) or "completed" not in result:
        raise ConfigError(f"{path} is no result file: it has no `completed`")
    return result


def find_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The settings of the workload that both have and that are not the same: name, and both values."""
    return [
        (name, first[name], second[name])
        for name in _SAME
        if name in first and name in second and first[name] != second[name]
    ]


def comparison_rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Title, both figures and their ratio, of everything that at least one of them has."""
    titles = {key: (_TITLES | _CACHE_TITLES | _DRAFT_TITLES)[key] for key in _COMPARED}
    for metric in METRICS:
        keys = _latency_keys(metric, sorted({*first, *second}))
        titles |= {key: f"{_latency_title(key)} (ms)" for key in keys}
    rows = []
    for key, title in titles.items():
        values = [_number(result.get(key)) for result in (first, second)]
        if values != [None, None]:
            a, b = values
            ratio = f"{b / a:.3f}" if a and b is not None else ""
            rows.append((title, _format_figure(a), _format_figure(b), ratio))
    return rows


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _format_figure(value: float | None) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.2f}"
