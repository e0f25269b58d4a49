"""ORCA load reports: a response tells in a header how loaded the server is, for balancers that route by it."""

import json

from cairn.engine.contract import EngineStats

FORMAT_HEADER = "endpoint-load-metrics-format"
"""The request's: `TEXT` or `JSON`, in any case."""
REPORT_HEADER = "endpoint-load-metrics"


def format_load_report(stats: EngineStats, format_name: str) -> str | None:
    """The value of REPORT_HEADER with vLLM's two metrics: the share of pages that requests hold (0 to 1), and requests
    in the queue. None for a format that is not known: ORCA has more of them."""
    named = {"kv_cache_usage_perc": stats.pool.usage, "num_requests_waiting": float(stats.num_waiting)}
    match format_name.lower():
        case "text":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "json":
            return "JSON " + json.dumps({"named_metrics": named})
    return None
