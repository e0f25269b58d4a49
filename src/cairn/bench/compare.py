"""`cairn bench compare`: two result files side by side, of cairn's or of anybody who writes the same keys."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cairn.bench.metrics import METRICS
from cairn.bench.plots import plot_comparison
from cairn.errors import ConfigError

_MAX_BYTES = 1 << 32
_WIDTH = 100
_SAME = ("dataset_name", "dataset", "num_prompts", "seed", "request_rate", "burstiness", "max_concurrency", "model_id")
_COUNTS = (
    ("completed", "Successful requests", ""),
    ("failed", "Failed requests", ""),
    ("duration", "Benchmark duration", "s"),
    ("total_input_tokens", "Total input tokens", ""),
    ("total_output_tokens", "Total generated tokens", ""),
    ("total_cached_tokens", "Total cached tokens", ""),
    ("cached_share", "Cached share of input", ""),
    ("request_throughput", "Request throughput", "req/s"),
    ("request_goodput", "Request goodput", "req/s"),
    ("output_throughput", "Output token throughput", "tok/s"),
    ("total_token_throughput", "Total token throughput", "tok/s"),
)


def compare(first: Path, second: Path, plot: Path | None) -> None:
    """Print both with their ratios, and what they do not have in common. Raises ConfigError naming the file."""
    results = read_result(first), read_result(second)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for name, one, other in differences(*results):
        console.print(f"not the same: {name} is {one} and {other}", markup=False)
    table = Table("", first.name, second.name, "B / A")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows_of(*results):
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


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What of the workload is not the same in both: name, and both values."""
    return [
        (name, one[name], other[name]) for name in _SAME if name in one and name in other and one[name] != other[name]
    ]


def rows_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Title, both figures and their ratio, of everything that at least one of them has."""
    names = list(_COUNTS)
    for metric, (short, _) in METRICS.items():
        percentiles = sorted({key for key in (*one, *other) if key.startswith("p") and key.endswith(f"_{metric}_ms")})
        keys = (f"mean_{metric}_ms", f"median_{metric}_ms", *percentiles)
        names += [(key, f"{key.split('_')[0].capitalize()} {short}", "ms") for key in keys]
    rows = []
    for key, title, unit in names:
        values = [_number(result.get(key)) for result in (one, other)]
        if values != [None, None]:
            a, b = values
            ratio = f"{b / a:.3f}" if a and b is not None else ""
            rows.append((f"{title} ({unit})" if unit else title, _shown(a), _shown(b), ratio))
    return rows


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shown(value: float | None) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.2f}"
