"""64 MiB of pages and one checkpoint from one process to another: cairn's path beside plain NIXL and the system call.

    python -m benchmarks.pd_bandwidth [--rounds N] [--json FILE] [--plot FILE] [--seed N]

Equal sizes, warm connections; pages in order, as a fresh pool gives them, and scattered one by one, the worst that a
cache can come to. Five ways in turn within each round:
  worker             what the engine uses: an order to LinkWorker on NixlLink, polled until it is read
  raw NIXL           NIXL's own calls on the same descriptor lists, cut into the same handles
  process_vm_readv   the system call beneath, on the same iovecs, ready made
  shared memory      a copy of each page out of a segment that both processes have mapped
  whole pull         worker, and around it transfer thread, claim and confirmation over the side channel
Bars, of medians: worker at most 1.1x the time of raw NIXL, and at least 0.8x the throughput of process_vm_readv. Each
way is compared with the worker of the same round, and the median of these ratios is what counts.
Each way is checked once, byte for byte.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks import pd_ways
from benchmarks.pd_pools import LAYOUTS, PLACEMENTS, Placement, Share, filled
from benchmarks.reporting import add_output_flags, as_json, circumstances, make_console, save_figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

BAR_NIXL, BAR_READV = 1.1, 0.8
WARM_UP = 2
WORKER, RAW, READV, SHARED, PULL = "worker", "raw NIXL", "process_vm_readv", "shared memory", "whole pull"


@dataclass(frozen=True, slots=True)
class Figures:
    """One layout's: seconds of every round by way, and what each moved."""

    layout: str
    placement: str
    page_bytes: int
    descriptors: int
    num_bytes: int
    seconds: Mapping[str, list[float]]

    def median(self, way: str) -> float:
        return statistics.median(self.seconds[way])

    def rate(self, way: str) -> float:
        """GB/s."""
        return self.num_bytes / self.median(way) / 1e9

    @property
    def against_nixl(self) -> float:
        """The worker's time in raw NIXL's."""
        return self._median_ratio(WORKER, RAW)

    @property
    def against_readv(self) -> float:
        """The worker's throughput in the system call's."""
        return self._median_ratio(READV, WORKER)

    @property
    def nixl_against_readv(self) -> float:
        """Raw NIXL's throughput in the system call's: what a worker without any cost of its own would have."""
        return self._median_ratio(READV, RAW)

    def _median_ratio(self, way: str, other: str) -> float:
        """Of the rounds' own ratios: what disturbs a machine for seconds disturbs both."""
        return statistics.median(a / b for a, b in zip(self.seconds[way], self.seconds[other], strict=True))

    @property
    def met(self) -> bool:
        return self.against_nixl <= BAR_NIXL and self.against_readv >= BAR_READV


def measure(layout: str, placement: Placement, rounds: int, seed: int) -> Figures:
    """All ways, one after the other in each round, beginning with another one each time."""
    model = LAYOUTS[layout]
    share = Share.of(model, placement, seed)
    pool = np.zeros((share.num_pages, model.layout.page_bytes), np.uint8)
    expected = filled(np.zeros_like(pool))[share.remote]
    source = pd_ways.Source(layout, placement, seed)
    parts = model, share, pool, source
    pull, renew = pd_ways.pull(*parts)
    ways = {
        WORKER: pd_ways.worker(*parts),
        RAW: pd_ways.raw_nixl(*parts),
        READV: pd_ways.vm_readv(*parts),
        SHARED: pd_ways.shared_memory(*parts),
        PULL: pull,
    }
    for name, move in ways.items():
        pool[share.local] = 0
        move()
        assert np.array_equal(pool[share.local], expected), f"{name} did not bring the source's bytes"
    renew()
    seconds = _in_turn(ways, renew, rounds, f"{layout}, {placement}")
    source.close()
    size = model.layout.page_bytes
    return Figures(layout, placement, size, len(share.local), len(share.local) * size, seconds)


def _in_turn(
    ways: Mapping[str, Callable[[], None]], renew: Callable[[], None], rounds: int, title: str
) -> Mapping[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    gc.disable()
    for number in track(range(WARM_UP + rounds), title, disable=not Console().is_terminal):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            ways[name]()
            elapsed = time.perf_counter() - start
            if name == PULL:
                renew()
            if number >= WARM_UP:
                seconds[name].append(elapsed)
    gc.enable()
    return seconds


def plot(figures: list[Figures], path: Path) -> None:
    """GB/s, one group of bars a layout, lines from the 10th to the 90th percentile."""
    with save_figure(path, 8, 3.8) as figure:
        axes = figure.subplots()
        names = list(figures[0].seconds)
        for index, name in enumerate(names):
            places = [place + (index - (len(names) - 1) / 2) * 0.17 for place in range(len(figures))]
            heights = [one.rate(name) for one in figures]
            spread = [np.quantile(one.seconds[name], (0.1, 0.9)) for one in figures]
            rates = [[one.num_bytes / slow / 1e9 for slow in both] for one, both in zip(figures, spread, strict=True)]
            errors = [[h - low for h, (_, low) in zip(heights, rates, strict=True)]]
            errors.append([high - h for h, (high, _) in zip(heights, rates, strict=True)])
            axes.bar(places, heights, width=0.15, yerr=errors, capsize=2, label=name)
        labels = [f"{one.layout}\n{one.page_bytes >> 10} KiB a page\n{one.placement}" for one in figures]
        axes.set_xticks(range(len(figures)), labels)
        axes.set_ylabel("GB/s")
        axes.legend(frameon=False, ncols=3, fontsize=8)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.2)


def show(figures: list[Figures], console: Console) -> None:
    table = Table("layout", "pages", "way", "descriptors", "MiB", "median ms", "GB/s", title="from process to process")
    for one in figures:
        for name in one.seconds:
            place = (one.layout, one.placement, name, f"{one.descriptors:,}", f"{one.num_bytes / (1 << 20):.1f}")
            table.add_row(*place, f"{one.median(name) * 1e3:.2f}", f"{one.rate(name):.2f}")
    console.print(table)
    for one in figures:
        console.print(
            f"{one.layout}, {one.placement}: worker takes {one.against_nixl:.3f}x the time of raw NIXL "
            f"(bar {BAR_NIXL})\n  and has {one.against_readv:.3f}x the throughput of process_vm_readv "
            f"(bar {BAR_READV}; raw NIXL has {one.nixl_against_readv:.3f}x); met: {one.met}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    add_output_flags(parser)
    arguments = parser.parse_args()
    figures = [
        measure(layout, placement, arguments.rounds, arguments.seed) for layout in LAYOUTS for placement in PLACEMENTS
    ]
    show(figures, make_console())
    if arguments.json:
        rows = [
            {
                "layout": one.layout,
                "pages": one.placement,
                "page_bytes": one.page_bytes,
                "descriptors": one.descriptors,
                "bytes": one.num_bytes,
                "median_ms": {name: one.median(name) * 1e3 for name in one.seconds},
                "gb_per_s": {name: one.rate(name) for name in one.seconds},
                "time_against_raw_nixl": one.against_nixl,
                "throughput_against_process_vm_readv": one.against_readv,
                "raw_nixl_against_process_vm_readv": one.nixl_against_readv,
                "met": one.met,
            }
            for one in figures
        ]
        bars = {"time_against_raw_nixl": BAR_NIXL, "throughput_against_process_vm_readv": BAR_READV}
        rounds = {"rounds": arguments.rounds, "seed": arguments.seed}
        arguments.json.write_text(as_json({**circumstances(), **rounds, "bars": bars, "rows": rows}))
    if arguments.plot:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
