"""Time to first token with the prefix cache, with vLLM's placement (`align`), and without a cache, in one run.

    python -m benchmarks.prefix_hits [--model FOLDER] [--size tiny|small] [--json FILE] [--plot FILE] [--seed N]

Requests go straight into the engine core, one at a time, greedy, each policy in a core of its own:
  repeat      a prompt of 2,200 tokens, sent a second time
  shared      a prompt that shares 1,500 of 2,200 tokens with an earlier one
  next turn   the earlier prompt, its answer of 64 tokens, and 100 new tokens
The first sight of each prompt warms the core and is not counted. Medians over the rounds; every round has new tokens.
The baseline is the same core with `--no-enable-prefix-caching`.
"""

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch
from benchmarks.core_requests import greedy_request, run_request
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

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core

POLICIES = {"auto": {}, "align": {"mamba_cache_mode": "align"}, "off": {"enable_prefix_caching": False}}
WORKLOADS = ("repeat", "shared", "next turn")
PROMPT, SHARED, ANSWER, NEW = 2_200, 1_500, 64, 100


class Asker:
    """One core, asked one request at a time."""

    def __init__(self, folder: Path, **policy: object) -> None:
        self.core: Core = build_core(EngineConfig(model=str(folder), kv_cache_memory_bytes=2 << 30, **policy))
        self.count = 0

    def ask(self, prompt: np.ndarray, max_tokens: int) -> tuple[float, list[int], int]:
        """Seconds to the first token, the answer's tokens, and the cached tokens."""
        self.count += 1
        return run_request(self.core, greedy_request(str(self.count), prompt, max_tokens))


def one_round(asker: Asker, rng: np.random.Generator, vocabulary: int) -> dict[str, tuple[float, int]]:
    """Seconds to the first token and cached tokens, by workload."""
    prompt = rng.integers(20, vocabulary, PROMPT)
    _, answer, _ = asker.ask(prompt, ANSWER)
    prompts = {
        "repeat": prompt,
        "shared": np.concatenate([prompt[:SHARED], rng.integers(20, vocabulary, PROMPT - SHARED)]),
        "next turn": np.concatenate([prompt, answer, rng.integers(20, vocabulary, NEW)]),
    }
    found = {}
    for name in WORKLOADS:
        seconds, _, cached = asker.ask(prompts[name], 1)
        found[name] = (seconds, cached)
    return found


def measure(folder: Path, rounds: int, seed: int) -> list[dict[str, object]]:
    """One row for each policy and workload."""
    rows: list[dict[str, object]] = []
    for policy, settings in POLICIES.items():
        asker = Asker(folder, **settings)
        rng = np.random.default_rng(seed)
        vocabulary = asker.core.info.vocab_size
        one_round(asker, rng, vocabulary)
        found = [
            one_round(asker, rng, vocabulary) for _ in track(range(rounds), policy, disable=not Console().is_terminal)
        ]
        for name in WORKLOADS:
            row = {
                "policy": policy,
                "workload": name,
                "ttft_ms": statistics.median(result[name][0] for result in found) * 1e3,
                "cached_tokens": statistics.median(result[name][1] for result in found),
            }
            rows.append(row)
    return rows


def add_ratios(rows: list[dict[str, object]]) -> None:
    """`speedup`: how many times shorter the time to first token is than without a cache."""
    without = {row["workload"]: row["ttft_ms"] for row in rows if row["policy"] == "off"}
    for row in rows:
        row["speedup"] = float(without[row["workload"]]) / float(row["ttft_ms"])  # type: ignore[arg-type]


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Bars of the time to first token, one group a workload."""
    with save_figure(path, 7, 3.5) as figure:
        axes = figure.subplots()
        for index, policy in enumerate(POLICIES):
            heights = [row["ttft_ms"] for row in rows if row["policy"] == policy]
            places = [place + (index - 1) * 0.27 for place in range(len(WORKLOADS))]
            bars = axes.bar(places, heights, width=0.25, label=policy)
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_xticks(range(len(WORKLOADS)), WORKLOADS)
        axes.set_ylabel("time to first token, ms")
        axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser)
    parser.add_argument("--rounds", type=int, default=5)
    add_output_flags(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with model_folder(arguments, "nemotron_h") as folder:
        rows = measure(folder, arguments.rounds, arguments.seed)
    add_ratios(rows)
    table = Table("workload", "policy", "cached tokens", "TTFT ms", "times faster than no cache")
    for name in WORKLOADS:
        for row in (row for row in rows if row["workload"] == name):
            figures = f"{row['cached_tokens']:,.0f}", f"{row['ttft_ms']:,.1f}", f"{row['speedup']:.1f}"
            table.add_row(name, str(row["policy"]), *figures)
    make_console().print(table)
    if arguments.json:
        how = {"torch": torch.__version__, "threads": 1, "size": arguments.size, "seed": arguments.seed}
        result = {**circumstances(), **how, "rows": rows}
        arguments.json.write_text(as_json(result))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
