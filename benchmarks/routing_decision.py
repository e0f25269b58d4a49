"""Microseconds that a routing decision takes, and bytes of the index, by the number of replicas.

    python -m benchmarks.routing_decision [--json FILE] [--repeats N] [--seed N] [--blocks N]

Prompts have 1,500 blocks of 16 tokens. Every replica has announced the 60 blocks of one system prompt and `--blocks`
blocks of its own; one in twenty has a longer part of the prompts, each another. Between two decisions one replica
reports another load.
  shared    the prompt begins with the system prompt; the replicas have it to many depths
  hot       all replicas have all of it
  cold      nobody has any of it
For each the median and the 99th percentile of `RoutingRule.rank` for the best replica, the median of the same for all
of them in order (where a refused request goes next), and of `record_routed` after it. Bytes a block are those that the
allocator has given out, beside what the index tells itself.
"""

import argparse
import gc
import random
import statistics
import time
import tracemalloc

from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console
from rich.table import Table

from cairn.cache.events import BlockStored
from cairn.routing.index import PrefixIndex
from cairn.routing.rule import ReplicaLoad, RoutedRequest, RoutingRule

NUM_REPLICAS = (1, 64, 1000)
NUM_BLOCKS, BLOCK_SIZE, SYSTEM_BLOCKS = 1500, 16, 60
BAR_US = 200.0


def random_hashes(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) - (1 << 63) for _ in range(count)]


def announce(index: PrefixIndex, replica: str, hashes: list[int]) -> None:
    index.apply(replica, BlockStored(tuple(hashes), None, (), BLOCK_SIZE, ""))


def measure(num_replicas: int, own_blocks: int, repeats: int, seed: int) -> list[dict[str, object]]:
    """A row for each kind of prompt."""
    rng = random.Random(seed)
    names = [f"replica-{number:04d}" for number in range(num_replicas)]
    shared, hot, cold = (random_hashes(rng, NUM_BLOCKS) for _ in range(3))
    tracemalloc.start()
    index = PrefixIndex(max(1 << 20, 2 * num_replicas * own_blocks))
    for number, name in enumerate(names):
        announce(index, name, random_hashes(rng, own_blocks))
        depth = rng.randrange(SYSTEM_BLOCKS, NUM_BLOCKS) if number % 20 == 0 else SYSTEM_BLOCKS
        announce(index, name, shared[:depth])
        announce(index, name, hot)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    size = {
        "replicas": num_replicas,
        "index_blocks": index.num_blocks,
        "index_bytes": index.num_bytes,
        "allocated_bytes": allocated,
    }
    rows = []
    for kind, hashes in (("shared", shared), ("hot", hot), ("cold", cold)):
        rule = RoutingRule(index=index)
        loads = {name: report(rng) for name in names}
        ranks, orders, records = [], [], []
        gc.disable()
        for step in range(repeats):
            loads[rng.choice(names)] = report(rng)
            # a prompt that was routed is not cold any more
            asked = random_hashes(rng, NUM_BLOCKS) if kind == "cold" else hashes
            request = RoutedRequest(asked, BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)
            start = time.perf_counter()
            best = rule.rank(request, loads, step / 10, limit=1)[0]
            ranked = time.perf_counter()
            rule.record_routed(request, best, step / 10)
            records.append((time.perf_counter() - ranked) * 1e6)
            ranks.append((ranked - start) * 1e6)
            # as the next request finds them: one replica has reported, and one was routed to
            loads[rng.choice(names)] = report(rng)
            start = time.perf_counter()
            rule.rank(request, loads, step / 10)
            orders.append((time.perf_counter() - start) * 1e6)
        gc.enable()
        p99 = statistics.quantiles(ranks, n=100)[98]
        figures = {
            "rank_us": statistics.median(ranks),
            "rank_p99_us": p99,
            "order_us": statistics.median(orders),
            "record_us": statistics.median(records),
        }
        rows.append({"prompt": kind, **size, **figures})
    return rows


def report(rng: random.Random) -> ReplicaLoad:
    return ReplicaLoad(num_running=rng.randrange(16), pending_tokens=rng.randrange(20_000), free_share=rng.random())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=501)
    parser.add_argument("--blocks", type=int, default=500, help="blocks that each replica alone has")
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    table = Table(
        "replicas",
        "prompt",
        "best µs",
        "99 %",
        "order µs",
        "record µs",
        "index blocks",
        "bytes a block",
        title="routing",
    )
    rows = [
        row
        for num_replicas in NUM_REPLICAS
        for row in measure(num_replicas, arguments.blocks, arguments.repeats, arguments.seed)
    ]
    for row in rows:
        per_block = row["allocated_bytes"] / row["index_blocks"]
        figures = [f"{row[name]:.0f}" for name in ("rank_us", "rank_p99_us", "order_us", "record_us")]
        table.add_row(f"{row['replicas']:,}", row["prompt"], *figures, f"{row['index_blocks']:,}", f"{per_block:.0f}")
    met = max(row["rank_us"] for row in rows) <= BAR_US
    console = make_console()
    console.print(table)
    console.print(f"a decision takes {BAR_US:.0f} µs at most at {NUM_REPLICAS[-1]:,} replicas: {met}")
    if arguments.json:
        arguments.json.write_text(as_json({**circumstances(), "seed": arguments.seed, "bar": met, "rows": rows}))


if __name__ == "__main__":
    main()
