"""The table and the JSON of a run, with the words and keys that `vllm bench serve` has for the same, and ours."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.bench.load import LoadResult
from cairn.bench.metrics import METRICS, Summary
from cairn.errors import ConfigError

_WIDTH = 50
_MAX_EXAMPLES = 1


@dataclass(frozen=True, slots=True)
class RunInfo:
    """How it was measured. `about`: further keys and values for the JSON, the dataset's settings among them."""

    date: str
    backend: str
    label: str | None
    model: str
    tokenizer: str | None
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    shown: tuple[str, ...] = tuple(METRICS)
    has_goals: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


def table_lines(ran: LoadResult, summary: Summary, how: RunInfo) -> list[str]:
    """The table as lines of text."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [_line(name, value) for name, value in _counts(summary, how)]
    for name in how.shown:
        short, title = METRICS[name]
        spread = summary.spreads[name]
        lines += [f"{title:-^{_WIDTH}}", _line(f"Mean {short} (ms):", spread.mean)]
        lines.append(_line(f"Median {short} (ms):", spread.median))
        lines += [_line(f"P{_percent(p)} {short} (ms):", value) for p, value in spread.percentiles]
    lines.append(f"{'Prefix Cache':-^{_WIDTH}}")
    lines += _cache(summary)
    if summary.failures:
        lines.append(f"{'Failures':-^{_WIDTH}}")
        for kind, count in summary.failures:
            lines.append(_line(f"{kind}:", count))
            lines += [f"    {detail}" for detail in _examples(ran, kind)]
    return [*lines, "=" * _WIDTH]


def _counts(summary: Summary, how: RunInfo) -> list[tuple[str, float | int | None]]:
    rows: list[tuple[str, float | int | None]] = [
        ("Successful requests:", summary.completed),
        ("Failed requests:", summary.failed),
    ]
    if summary.interrupted or summary.unsent:
        rows += [("Interrupted requests:", summary.interrupted), ("Unsent requests:", summary.unsent)]
    if how.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", how.max_concurrency))
    if math.isfinite(how.request_rate):
        rows.append(("Request rate configured (RPS):", how.request_rate))
    rows += [
        ("Benchmark duration (s):", summary.duration),
        ("Total input tokens:", summary.input_tokens),
        ("Total generated tokens:", summary.output_tokens),
        ("Request throughput (req/s):", summary.rate(summary.completed)),
    ]
    if how.has_goals:
        rows.append(("Request goodput (req/s):", summary.rate(summary.good)))
    return [
        *rows,
        ("Output token throughput (tok/s):", summary.rate(summary.output_tokens)),
        ("Peak output token throughput (tok/s):", summary.peak_tokens),
        ("Peak concurrent requests:", summary.peak_requests),
        ("Total token throughput (tok/s):", summary.rate(summary.input_tokens + summary.output_tokens)),
    ]


def _cache(summary: Summary) -> list[str]:
    lines = [_line("Total cached tokens:", summary.cached_tokens)]
    share = summary.cached_share
    lines.append(_line("Cached share of input (%):", None if share is None else 100 * share))
    if summary.without_usage:
        lines.append(_line("Requests without usage:", summary.without_usage))
    return lines


def _line(name: str, value: float | int | None) -> str:
    shown = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value}"
    return f"{name:<40} {shown:<9}".rstrip()


def _percent(percentile: float) -> str:
    return f"{percentile:g}"


def _examples(ran: LoadResult, kind: str) -> list[str]:
    said = [one.failure.detail for one in ran.outcomes if one.failure is not None and one.failure.kind == kind]
    return list(dict.fromkeys(said))[:_MAX_EXAMPLES]


def result_json(ran: LoadResult, summary: Summary, how: RunInfo, *, with_texts: bool) -> dict[str, Any]:
    """All figures by name. Lists have one entry for each request that has ended, in the order of the work: `errors` is
    empty for those that succeeded, and figures of those that failed are what was seen until then."""
    rate = how.request_rate
    share = summary.cached_share
    result: dict[str, Any] = {
        "date": how.date,
        "endpoint_type": how.backend,
        "backend": how.backend,
        "label": how.label,
        "model_id": how.model,
        "tokenizer_id": how.tokenizer,
        "num_prompts": how.num_prompts,
        **how.about,
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": how.burstiness if math.isfinite(how.burstiness) else "inf",
        "max_concurrency": how.max_concurrency,
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "interrupted": summary.interrupted,
        "unsent": summary.unsent,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "total_cached_tokens": summary.cached_tokens,
        "cached_share": share,
        "requests_without_usage": summary.without_usage,
        "request_throughput": summary.rate(summary.completed),
        "request_goodput": summary.rate(summary.good) if how.has_goals else None,
        "output_throughput": summary.rate(summary.output_tokens),
        "total_token_throughput": summary.rate(summary.input_tokens + summary.output_tokens),
        "max_output_tokens_per_s": summary.peak_tokens,
        "max_concurrent_requests": summary.peak_requests,
        "error_classes": dict(summary.failures),
    }
    for name in METRICS:
        spread = summary.spreads[name]
        result |= {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
        result |= {f"p{_percent(p)}_{name}_ms": value for p, value in spread.percentiles}
    return result | _lists(ran, with_texts)


def _lists(ran: LoadResult, with_texts: bool) -> dict[str, list[Any]]:
    ended = ran.outcomes
    lists: dict[str, list[Any]] = {
        "input_lens": [one.prompt_tokens for one in ended],
        "output_lens": [0 if one.failure is not None else one.output_tokens for one in ended],
        "cached_tokens": [one.cached_tokens for one in ended],
        "ttfts": [one.first_token if one.token_times else 0.0 for one in ended],
        "itls": [list(one.gaps) for one in ended],
        "latencies": [one.latency for one in ended],
        "start_times": [one.sent - ran.start for one in ended],
        "queue_times": [one.waited for one in ended],
        "errors": ["" if one.failure is None else f"{one.failure.kind}: {one.failure.detail}" for one in ended],
    }
    return lists | ({"generated_texts": [one.text for one in ended]} if with_texts else {})


def save(result: Mapping[str, Any], path: Path, *, append: bool) -> None:
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
