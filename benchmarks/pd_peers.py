"""Seconds until all of many decode servers have pulled the same prompt from one prefill server, all at once.

    python -m benchmarks.pd_peers [--peers 64] [--rounds N] [--json FILE] [--seed N]

The prefill server is a process of its own, without a model; the others are transfer sides in this one, each with its
thread, its TLS connection and its NIXL agent, over one pool: all read the same bytes to the same pages. In each round
all pull at once, then one after the other. Processor time is that of both processes, for one pull.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
from benchmarks import pd_ways
from benchmarks.pd_pools import LAYOUTS, Share, filled
from benchmarks.reporting import add_output_flags, as_json, circumstances, cpu_seconds, make_console
from rich.table import Table

LAYOUT, PLACEMENT = "nemotron-3-nano", "in order"
AT_ONCE, IN_TURN = "all at once", "one after the other"


def measure(num_peers: int, rounds: int, seed: int) -> dict[str, list[dict[str, float]]]:
    """By way the figures of every round: seconds of all, and of the slowest; processor seconds of one pull."""
    model = LAYOUTS[LAYOUT]
    share = Share.of(model, PLACEMENT, seed)
    pool = np.zeros((share.num_pages, model.layout.page_bytes), np.uint8)
    expected = filled(np.zeros_like(pool))[share.remote]
    source = pd_ways.Source(LAYOUT, PLACEMENT, seed)
    processes = [psutil.Process(os.getpid()), psutil.Process(source.place["pid"])]
    peers = [pd_ways.pull(model, share, pool, source) for _ in range(num_peers)]
    figures: dict[str, list[dict[str, float]]] = {AT_ONCE: [], IN_TURN: []}
    with ThreadPoolExecutor(num_peers) as threads:
        for number in range(rounds + 1):
            for way, pulled in ((AT_ONCE, threads.map), (IN_TURN, map)):
                pool[share.local] = 0
                before, start = sum(map(cpu_seconds, processes)), time.perf_counter()
                each = list(pulled(seconds_of, [move for move, _ in peers]))
                seconds, used = time.perf_counter() - start, sum(map(cpu_seconds, processes)) - before
                assert np.array_equal(pool[share.local], expected), f"{way}: not the source's bytes"
                for _, renew in peers:
                    renew()
                if number:
                    figures[way].append({"seconds": seconds, "slowest": max(each), "cpu": used / num_peers})
    source.close()
    return figures


def seconds_of(move: Callable[[], None]) -> float:
    start = time.perf_counter()
    move()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    figures = measure(arguments.peers, arguments.rounds, arguments.seed)
    title = f"{arguments.peers} peers, {arguments.rounds} rounds, medians"
    table = Table("", "all, s", "slowest pull, s", "processor time of a pull, ms", title=title)
    for way, each in figures.items():
        seconds, slowest, cpu = (statistics.median(one[name] for one in each) for name in ("seconds", "slowest", "cpu"))
        table.add_row(way, f"{seconds:.3f}", f"{slowest:.3f}", f"{cpu * 1e3:.1f}")
    make_console().print(table)
    if arguments.json:
        result = {**circumstances(), "peers": arguments.peers, "seed": arguments.seed, "rounds": figures}
        arguments.json.write_text(as_json(result))


if __name__ == "__main__":
    main()
