"""Microseconds that the cache core takes, whatever the model: full hit, insert, decode step, and the process wire.

    python -m benchmarks.cache_core [--json FILE] [--plot FILE] [--repeats N] [--seed N]

For each prompt length (8k, 32k, 128k tokens) and number of cached paths (1k, 100k):
  full hit   look-up, lease, first page of the answer, release; keys given as an array; median over the repeats
  insert     look-up, pages, commit with a prompt-end checkpoint and the grid, release of a prompt never seen before
  decode     one token's bookkeeping: the token appended, a page when one is due; mean over 4,096 tokens
  wire       decoding a request of that many key tokens from its msgpack form
The baseline is vLLM 0.32's manager, measured on this class of machine: 4,574 µs for a full hit of 128k tokens and
9.9 µs a decode step.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console, save_figure
from rich.table import Table

from cairn.cache.eviction import ValuePerByte
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.cache.sequence_blocks import Namespace
from cairn.engine.contract import GenerateRequest

LENGTHS = (8_192, 32_768, 131_072)
PATHS = (1_000, 100_000)
BASELINE_FULL_HIT_US, BASELINE_DECODE_US = 4_574.0, 9.9
BAR_FULL_HIT_US, BAR_DECODE_US, BAR_WIRE_US = 457.0, 5.0, 200.0
PLAIN = Namespace()
BLOCK = 16
DECODE_STEPS = 4_096
FILLER_TOKENS = 256

# pages of 64 KiB and a state of 4 MiB: a checkpoint is 65 pages, as many tokens as a small hybrid's
LAYOUT = CacheLayout(
    block_size=BLOCK,
    page_bytes=65_536,
    page_units=2,
    groups=(AttentionGroup("full", BLOCK),),
    header_bytes=4_096,
    state_bytes=4 << 20,
    state_units=8,
)


def insert(cache: PrefixCache, keys: np.ndarray, name: str) -> None:
    """What the scheduler does for one prompt of one chunk."""
    placement = cache.policy.placement
    assert placement is not None
    lease = cache.lookup(PLAIN, keys, name)
    cache.begin_request(lease)
    facts = cache.prompt_facts(lease, len(keys))
    assert cache.extend(lease, len(keys)) is not None
    kept = [
        w.position
        for w in placement.in_prefill(facts, lease.hit, len(keys))
        if cache.reserve_checkpoint(lease, w) is not None
    ]
    cache.pin_until(1, lease)
    cache.commit(lease, len(keys), kept)
    cache.release_step(1)
    cache.release(lease)


def full_hit(cache: PrefixCache, keys: np.ndarray) -> None:
    """A prompt that is wholly cached, up to its first answer token's page."""
    lease = cache.lookup(PLAIN, keys, "hit")
    assert lease.hit == len(keys)
    cache.begin_request(lease)
    assert cache.extend(lease, len(keys) + 1) is not None
    cache.pin_until(1, lease)
    cache.release_step(1)
    cache.release(lease)


def median_us(action: Callable[[], None], repeats: int) -> float:
    """Median microseconds of `action`, garbage collection off."""
    times = []
    gc.disable()
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e6)
    gc.enable()
    return statistics.median(times)


def decode_us(cache: PrefixCache, keys: np.ndarray) -> float:
    """Mean microseconds of one decode step's bookkeeping after a full hit."""
    lease = cache.lookup(PLAIN, keys, "decode")
    cache.pin_until(1, lease)
    cache.release_step(1)
    start = time.perf_counter()
    for step in range(DECODE_STEPS):
        lease.append(step)
        cache.extend(lease, lease.num_tokens)
    elapsed = (time.perf_counter() - start) * 1e6 / DECODE_STEPS
    cache.release(lease)
    return elapsed


def wire_us(keys: np.ndarray, repeats: int) -> float:
    """Microseconds to decode a request from its bytes to an array of key tokens."""
    data = msgspec.msgpack.encode(GenerateRequest(request_id="wire", prompt=keys.tobytes()))
    decoder = msgspec.msgpack.Decoder(GenerateRequest)

    def decode() -> None:
        request = decoder.decode(data)
        assert len(np.frombuffer(request.prompt, np.int64)) == len(keys)

    return median_us(decode, repeats)


def measure(length: int, paths: int, repeats: int, seed: int) -> dict[str, float]:
    """All figures of one length with `paths` other prompts cached."""
    rng = np.random.default_rng(seed)
    filler_pages = paths * (FILLER_TOKENS // BLOCK + 5 * LAYOUT.pages_per_checkpoint)
    own_pages = 4 * (length // BLOCK + 600 * LAYOUT.pages_per_checkpoint)
    policy = CachePolicy(Auto(), ValuePerByte())
    cache = PrefixCache(LAYOUT, 2 * (filler_pages + own_pages), policy)
    for index in range(paths):
        insert(cache, rng.integers(0, 1 << 17, FILLER_TOKENS), f"filler {index}")
    keys = rng.integers(0, 1 << 17, length)
    fresh = iter([rng.integers(0, 1 << 17, length) for _ in range(3)])
    insert_us = median_us(lambda: insert(cache, next(fresh), "fresh"), 3)
    insert(cache, keys, "first")
    full_hit(cache, keys)
    return {
        "tokens": length,
        "paths": paths,
        "full_hit_us": median_us(lambda: full_hit(cache, keys), repeats),
        "insert_us": insert_us,
        "decode_us": decode_us(cache, keys),
        "wire_us": wire_us(keys, repeats),
    }


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Microseconds of a full hit over the prompt's length, one line for each number of cached paths."""
    with save_figure(path) as figure:
        axes = figure.subplots()
        for paths in PATHS:
            points = [(row["tokens"], row["full_hit_us"]) for row in rows if row["paths"] == paths]
            axes.plot(*zip(*points, strict=True), marker="o", label=f"cairn, {paths:,} cached paths")
        axes.plot([LENGTHS[-1]], [BASELINE_FULL_HIT_US], "x", color="black", label="vLLM 0.32's manager")
        axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="full hit, microseconds")
        axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=51)
    add_output_flags(parser)
    arguments = parser.parse_args()
    table = Table("tokens", "cached paths", "full hit µs", "insert µs", "decode µs", "wire µs", title="cache core")
    rows = []
    for paths in PATHS:
        for length in LENGTHS:
            row = measure(length, paths, arguments.repeats, arguments.seed)
            rows.append(row)
            figures = [f"{row[name]:.1f}" for name in ("full_hit_us", "insert_us", "decode_us", "wire_us")]
            table.add_row(f"{length:,}", f"{paths:,}", *figures)
    longest = [row for row in rows if row["tokens"] == LENGTHS[-1]]
    bars = {
        "full_hit": max(row["full_hit_us"] for row in longest) <= BAR_FULL_HIT_US,
        "decode": max(row["decode_us"] for row in rows) <= BAR_DECODE_US,
        "wire": max(row["wire_us"] for row in rows) <= BAR_WIRE_US,
    }
    ratio = BASELINE_FULL_HIT_US / max(row["full_hit_us"] for row in longest)
    console = make_console()
    console.print(table)
    console.print(f"full hit of 128k tokens: {ratio:.1f} times faster than vLLM 0.32's manager; bars met: {bars}")
    if arguments.json:
        result = {
            **circumstances(),
            "seed": arguments.seed,
            "baseline": {"full_hit_us": BASELINE_FULL_HIT_US, "decode_us": BASELINE_DECODE_US},
            "ratio_full_hit": ratio,
            "bars": bars,
            "rows": rows,
        }
        arguments.json.write_text(as_json(result))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
