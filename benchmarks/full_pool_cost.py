"""What a cold prompt costs in a full pool, where states are written and others go for them, over no cache at all.

    python -m benchmarks.full_pool_cost [--model FOLDER] [--size tiny|small] [--tokens 4800] [--states 80] [--rounds 6]
                                        [--checkpoint-dtype auto] [--threads 1] [--clock wall|processor]
                                        [--json FILE] [--seed N]

Two engine cores in one process are asked for the first token of prompts that nobody has asked before, in turn: one with
a pool for --states state checkpoints that is full, and one with `--no-enable-prefix-caching`, which is the baseline.
The ratio is the median over rounds that are next to each other; --clock processor counts what the process computes,
for machines with other work on them. Every third prompt that fills the pool shares a half
with the one before it, so that the server has learned to take checkpoints where nobody announces them.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from benchmarks.core_requests import greedy_request, run_request
from benchmarks.made_model import PEER_SHAPES, make_peer_model
from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console
from rich.console import Console
from rich.progress import track

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core


def ask(core: Core, name: str, prompt: np.ndarray, clock: Callable[[], float]) -> tuple[float, int]:
    """Seconds until the request has ended, after one token, and cached tokens."""
    begin = clock()
    _, _, cached = run_request(core, greedy_request(name, prompt, 1))
    return clock() - begin, cached


def fillers(rng: np.random.Generator, vocabulary: int, tokens: int) -> Iterator[np.ndarray]:
    """Prompts without end."""
    prompt = rng.integers(300, vocabulary, tokens)
    while True:
        for _ in range(2):
            yield prompt
            prompt = rng.integers(300, vocabulary, tokens)
        yield np.concatenate([prompt[: tokens // 2], rng.integers(300, vocabulary, tokens - tokens // 2)])


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """The ratio, and what it is made of."""
    settings = {"model": str(folder), "max_num_seqs": 1, "checkpoint_dtype": arguments.checkpoint_dtype}
    idle = build_core(EngineConfig(**settings, kv_cache_memory_bytes=1 << 30))
    cache = idle.info.cache
    pool = arguments.states * cache.pages_per_checkpoint * cache.page_bytes
    del idle
    full = build_core(EngineConfig(**settings, kv_cache_memory_bytes=pool))
    off = build_core(EngineConfig(**settings, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False))
    clock = time.process_time if arguments.clock == "processor" else time.perf_counter
    rng, number = np.random.default_rng(arguments.seed), 0
    for prompt in fillers(rng, full.info.vocab_size, arguments.tokens):
        ask(full, f"fill-{number}", prompt, clock)
        number += 1
        evicted = sum(full.stats().prefix_cache.checkpoints_evicted.values())
        if evicted >= arguments.states // 2 and number % 3 == 0:
            break
    ask(off, "first", rng.integers(300, full.info.vocab_size, arguments.tokens), clock)
    before = sum(full.stats().prefix_cache.checkpoints_taken.values())
    rounds = []
    for index in track(range(arguments.rounds), "rounds", console=Console(stderr=True)):
        prompt = rng.integers(300, full.info.vocab_size, arguments.tokens)
        seconds = {name: ask(core, f"{name}-{index}", prompt, clock) for name, core in (("full", full), ("off", off))}
        assert not seconds["full"][1], "the prompt was not cold"
        rounds.append({name: found for name, (found, _) in seconds.items()})
    taken = sum(full.stats().prefix_cache.checkpoints_taken.values()) - before
    return {
        "ratio": statistics.median(each["full"] / each["off"] for each in rounds),
        "full_seconds": statistics.median(each["full"] for each in rounds),
        "off_seconds": statistics.median(each["off"] for each in rounds),
        "checkpoints_per_prompt": taken / arguments.rounds,
        "fillers": number,
        "pool_bytes": pool,
        "checkpoint_dtype": cache.checkpoint_dtype,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; made with --size and --seed if not given")
    parser.add_argument("--size", choices=tuple(PEER_SHAPES), default="small")
    parser.add_argument("--tokens", type=int, default=4800)
    parser.add_argument("--states", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--checkpoint-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or Path(scratch) / "model"
        if arguments.model is None:
            make_peer_model(folder, size=arguments.size, vocab_size=None, seed=arguments.seed)
        found = measure(folder, arguments)
    make_console().print(
        f"a cold prompt of {arguments.tokens:,} tokens: {found['full_seconds']:.3f} s in a full pool, "
        f"{found['off_seconds']:.3f} s without a cache: {found['ratio']:.3f} times; "
        f"{found['checkpoints_per_prompt']:.1f} checkpoints a prompt, states in {found['checkpoint_dtype']}"
    )
    if arguments.json:
        how = {"tokens": arguments.tokens, "states": arguments.states, "threads": arguments.threads}
        how |= {"clock": arguments.clock}
        arguments.json.write_text(as_json({**circumstances(), **how, "seed": arguments.seed, **found}))


if __name__ == "__main__":
    main()
