"""What a decode's attention takes in a layer with a window, at a long context beside a short one: the bar is 5 % more.

    python -m benchmarks.window_decode [--window 128] [--contexts 1024 32768] [--sequences 4] [--threads N]
                                       [--json FILE]

On the CPU, with gpt-oss's heads (64 query heads, 8 key heads of 64 numbers, sinks) in bfloat16, and full attention in
the same heads to compare. A time is a step's: the layer and the table of its work. Contexts take turns; medians of
many.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cairn.kernels import cpu
from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.cpu.warm_up import warm_up
from cairn.kernels.staging import Staging

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, REPEATS = 64, 8, 64, 16, 60


def batch_of(context: int, sequences: int) -> Batch:
    """Decodes, each the last of `context` tokens, in pages in random order."""
    slots = np.arange(sequences, dtype=np.int32)
    ends, edges = np.full(sequences, context, np.int32), np.arange(sequences + 1, dtype=np.int32)
    nothing = np.zeros(0, np.int32)
    host = HostBatch(sequences, edges, slots, ends - 1, ends, ends - 1, nothing, nothing)
    pages = torch.randperm(sequences * context // PAGE_SIZE).int().view(sequences, -1)
    lengths = [torch.from_numpy(part) for part in (edges, slots, slots, ends - 1, ends, ends - 1)]
    tokens = torch.zeros(sequences, dtype=torch.int64)
    metadata = cpu.build_metadata(host, Staging())
    return Batch(tokens, tokens.expand(3, -1), *lengths, [pages], host, metadata)


def step(context: int, sequences: int, rule: AttentionRule) -> Callable[[], float]:
    """What measures one, in microseconds."""
    batch = batch_of(context, sequences)
    q = torch.randn(sequences, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    keys, values = torch.randn(2, sequences * context // PAGE_SIZE, KV_HEADS, PAGE_SIZE, HEAD_DIM).bfloat16().unbind()
    sinks, metadata = torch.randn(HEADS), batch.metadata

    def measure() -> float:
        begin = time.perf_counter()
        metadata.become(cpu.build_metadata(batch.host, Staging()))
        cpu.attention(q, keys, values, 0, batch, rule, sinks)
        return 1e6 * (time.perf_counter() - begin)

    return measure


def measured(contexts: list[int], sequences: int, rule: AttentionRule) -> list[float]:
    """Medians of each context."""
    steps = [step(context, sequences, rule) for context in contexts]
    times = [[each() for each in steps] for _ in range(REPEATS + 5)][5:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main() -> None:
    """Print the times, and what the longest context takes over the shortest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32_768], help="multiples of 16 tokens")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    warm_up(torch.bfloat16, {"attention", "build_metadata"})
    result = {}
    for name, rule in ((f"window of {args.window}", AttentionRule(window=args.window)), ("all", FULL)):
        times = measured(args.contexts, args.sequences, rule)
        result[name] = dict(zip(map(str, args.contexts), times, strict=True)) | {"ratio": times[-1] / times[0]}
        shown = ", ".join(f"{context:,}: {us:,.1f} µs" for context, us in zip(args.contexts, times, strict=True))
        print(f"{name}: {shown}; the last over the first {times[-1] / times[0]:.3f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
