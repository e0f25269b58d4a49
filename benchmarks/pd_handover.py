"""Milliseconds from P's answer to D's first token, for prompts of 400 tokens that D pulls, beside D's own full hits.

    python -m benchmarks.pd_handover [--model FOLDER] [--size tiny|small] [--rounds N]
                                     [--json FILE] [--plot FILE] [--logs FOLDER] [--seed N]

Two servers, no proxy: the script is the proxy. For every round a new prompt goes
  to P     one token, `do_remote_decode`: its answer carries the reference
  to D     streamed, with the reference: the clock runs from P's answer to the first chunk with a token (hand-over)
  to D     the same prompt once more, without the reference: everything is there now (local hit)
Connections are warm, requests go one at a time. D's own account of the pull (`vllm:nixl_xfer_time_seconds`, from asking
for it to having it confirmed) stands beside it. The bar: a median of 25 ms.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from benchmarks.pd_servers import SECONDS, TRANSFER_FLAGS, Pair, metric, pair, random_prompt
from benchmarks.reporting import (
    add_model_flags,
    add_output_flags,
    as_json,
    circumstances,
    make_console,
    model_folder,
    save_figure,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cairn.http.cookies import no_cookies

BAR_MS = 25.0
TOKENS, WARM_UP = 400, 3
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
EVENT = "data: "


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds, and how many of the prompt's tokens each request had not to compute."""

    hand_over_ms: float
    pull_ms: float
    local_ms: float
    prefill_ms: float
    received: int
    cached: int


def first_token_ms(http: httpx.Client, url: str, body: dict[str, object], start: float) -> tuple[float, dict[str, int]]:
    """From `start` to the first chunk with a token, and the cache report's counts."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    first, report = None, None
    with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith(EVENT) or line == EVENT + "[DONE]":
                continue
            chunk = json.loads(line.removeprefix(EVENT))
            if first is None and any(choice.get("token_ids") for choice in chunk["choices"]):
                first = time.perf_counter()
            report = chunk.get("cairn", {}).get("cache") or report
    assert first is not None and report is not None, "the stream ended without a token, or without its usage"
    return (first - start) * 1e3, report


def one_round(http: httpx.Client, servers: Pair, prompt: list[int]) -> Round:
    ask = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    pull_seconds = "vllm:nixl_xfer_time_seconds_sum"
    before = metric(http, servers.decode, pull_seconds)
    start = time.perf_counter()
    prefilled = http.post(
        f"{servers.prefill.url}/v1/completions", json={**ask, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    )
    answered = time.perf_counter()
    reference = prefilled.raise_for_status().json()["kv_transfer_params"]
    handed = {**ask, "kv_transfer_params": reference}
    hand_over_ms, pulled = first_token_ms(http, servers.decode.url, handed, answered)
    after = metric(http, servers.decode, pull_seconds)
    local_ms, local = first_token_ms(http, servers.decode.url, ask, time.perf_counter())
    return Round(
        hand_over_ms=hand_over_ms,
        pull_ms=(after - before) * 1e3,
        local_ms=local_ms,
        prefill_ms=(answered - start) * 1e3,
        received=pulled["received_tokens"],
        cached=local["cached_tokens"],
    )


def measure(model: Path, rounds: int, seed: int, logs: Path) -> list[Round]:
    """Every prompt differs from the first token on."""
    rng = random.Random(seed)
    with (
        pair(model, TRANSFER_FLAGS, logs, with_proxy=False) as servers,
        httpx.Client(timeout=SECONDS, trust_env=False, cookies=no_cookies()) as http,
    ):
        for _ in range(WARM_UP):
            one_round(http, servers, random_prompt(rng, TOKENS))
        steps = track(range(rounds), "hand-over", disable=not Console().is_terminal)
        return [one_round(http, servers, random_prompt(rng, TOKENS)) for _ in steps]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def plot(series: dict[str, list[float]], path: Path) -> None:
    """The share of requests that had their first token within a time."""
    with save_figure(path) as figure:
        axes = figure.subplots()
        for name, values in series.items():
            axes.plot(sorted(values), [(place + 1) / len(values) for place in range(len(values))], label=name)
        axes.axvline(BAR_MS, color="black", linestyle=":", label=f"{BAR_MS:g} ms")
        axes.set(xlabel="milliseconds to D's first token", ylabel="share of requests", xlim=(0, None), ylim=(0, 1))
        axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    add_output_flags(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, model_folder(arguments, "nemotron_h") as folder:
        rounds = measure(folder, arguments.rounds, arguments.seed, arguments.logs or Path(scratch) / "logs")
    series = {
        "hand-over": [one.hand_over_ms for one in rounds],
        "of it the pull": [one.pull_ms for one in rounds],
        "local full hit": [one.local_ms for one in rounds],
        "P's prefill": [one.prefill_ms for one in rounds],
    }
    medians = {name: statistics.median(values) for name, values in series.items()}
    table = Table("", "median ms", "90 % ms", "slowest ms", title=f"{len(rounds)} prompts of {TOKENS} tokens")
    for name, values in series.items():
        table.add_row(name, *(f"{value:.1f}" for value in (medians[name], percentile(values, 0.9), max(values))))
    whole = all(one.received == TOKENS == one.cached for one in rounds)
    met = whole and medians["hand-over"] <= BAR_MS
    console = make_console()
    console.print(table)
    console.print(f"every prompt was received whole, and hit whole: {whole}; bar of {BAR_MS:g} ms met: {met}")
    if arguments.json:
        result = {
            **circumstances(),
            "size": arguments.size,
            "seed": arguments.seed,
            "bar_ms": BAR_MS,
            "met": met,
            "median_ms": medians,
            "rounds_ms": series,
        }
        arguments.json.write_text(as_json(result))
    if arguments.plot:
        plot({name: series[name] for name in ("hand-over", "local full hit")}, arguments.plot)


if __name__ == "__main__":
    main()
