"""What tiers cost the steps of others while states and chunks go down to them and come up from them.

    python -m benchmarks.tier_steps MODEL [--sequences 4] [--rounds 8] [--prompt 2048] [--folder DIR]
                                      [--fresh] [--json FILE]

Two engines in one process, turned in turn, with the same requests: one with a host and a disk tier, whose pool has been
emptied when all was written, and the baseline without. In every round
  - a new prompt is computed, which is not timed: its states and chunks are written to both tiers meanwhile
  - a prompt is asked for again that lies below the pool of the first engine, and in the pool of the other one
and WINDOW steps are timed in which --sequences sequences decode, and the prompt that is asked for again takes one row
of one step. Steps in which more is computed are not counted, in either engine.

Step times by the wall, and by the processor's time of the thread that plans and runs steps; the latter stands where
the machine is busy, but has nothing of waiting for the interpreter's lock or for a core. The share of a core that the
tiers' own threads took during a step: what a step may lose to them where all cores compute. Medians and P99 over all
rounds, and how much was written and read during the windows. Threads of computation wait for each other as a server's
do. Memory is that of a server that has run for a while: all pages of the pool and of the host tier have been written to
once, because the first write to new memory takes a step's time in places. --fresh leaves that out.
"""

import argparse
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from benchmarks.hand_turned import HandTurned
from benchmarks.quantization import wait_as_a_server_does
from benchmarks.reporting import add_output_flags, as_json, check_positive, circumstances, make_console
from rich.progress import track
from rich.table import Table

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.core import Core
from cairn.engine.cpu_threads import choose_cpu_threads
from cairn.setting_types import size_flag

WINDOW = 64
SETTLE_SECONDS = 120.0


def tiers_time() -> float:
    """The processor's time of the threads of tiers."""
    threads = [each.ident for each in threading.enumerate() if each.name.startswith("tier-")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads if ident is not None)


CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "processor": time.thread_time,
    "tiers": tiers_time,
}


@dataclass
class Side:
    """One of the two engines. `times`: seconds of each timed step, by clock."""

    engine: HandTurned
    times: dict[str, list[float]] = field(default_factory=lambda: {clock: [] for clock in CLOCKS})
    moved: dict[str, int] = field(default_factory=dict)

    def turn(self) -> tuple[dict[str, float], int]:
        """As a server does. Seconds, and prompt tokens that were computed."""
        core = self.engine.core
        before = core.stats().tokens.computed_prompt
        began = {name: clock() for name, clock in CLOCKS.items()}
        core.poll()
        if core.has_work:
            self.engine.step()
        seconds = {name: clock() - began[name] for name, clock in CLOCKS.items()}
        return seconds, core.stats().tokens.computed_prompt - before

    def prefill(self, prompt: np.ndarray, max_tokens: int = 1) -> None:
        """Submit, and turn until its first token has come."""
        self.engine.submit(prompt, max_tokens)
        num_left = len(prompt)
        while num_left > 0:
            num_left -= self.turn()[1]
        self.turn()

    def time_steps(self, again: np.ndarray) -> None:
        """Time a window in which `again` is asked for."""
        before = self.traffic()
        self.engine.submit(again, 1)
        for _ in range(WINDOW):
            seconds, num_computed = self.turn()
            if num_computed <= 1:
                for name, value in seconds.items():
                    self.times[name].append(value)
        for name, value in self.traffic().items():
            self.moved[name] = self.moved.get(name, 0) + value - before[name]

    def traffic(self) -> dict[str, int]:
        tiers = self.engine.core.stats().tiers
        hits = {"hit_tokens": sum(tiers.hit_tokens.values())}
        return hits | {"written": sum(tiers.written_bytes.values()), "read": sum(tiers.read_bytes.values())}

    def settle(self) -> None:
        """Until nothing more is written."""
        until, before = time.monotonic() + SETTLE_SECONDS, -1
        while (now := self.traffic()["written"]) != before and time.monotonic() < until:
            before = now
            for _ in range(50):
                self.engine.core.poll()
                time.sleep(0.01)

    def figures(self) -> dict[str, float]:
        """Microseconds."""
        return {
            f"{clock}_p{percent}": 1e6 * float(np.percentile(self.times[clock], percent))
            for clock in ("wall", "processor")
            for percent in (50, 99)
        }

    def tiers_share(self) -> dict[str, float]:
        """Of a core, during a step."""
        shares = np.array(self.times["tiers"]) / np.array(self.times["wall"])
        return {f"p{percent}": float(np.percentile(shares, percent)) for percent in (50, 99)}


def write_once(core: Core) -> None:
    """To all memory of the pool and of the host tier, which hold nothing yet."""
    source = core._tiers.source
    for pages in (source._context.memory._pool, source._context.stores[0]._arena):
        for first in range(0, len(pages), 256):
            pages[first : first + 256] = 0


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    sequences, rounds, length = arguments.sequences, arguments.rounds, arguments.prompt
    random = np.random.default_rng(arguments.seed)
    olds, news, own = (
        [random.integers(64, 4000, length) for _ in range(count)] for count in (rounds, rounds, sequences)
    )
    common = {"model": str(arguments.model), "max_num_seqs": sequences + 4, "kv_cache_memory_bytes": arguments.pool}
    tiers = {"host_cache_bytes": arguments.host, "disk_cache": str(folder / "cache")}
    answer = rounds * (WINDOW + length // 256 + 16) + 64 * sequences
    with (
        closing(build_core(EngineConfig(**common, **tiers))) as first,
        closing(build_core(EngineConfig(**common))) as second,
    ):
        if not arguments.fresh:
            write_once(first)
        sides = {"with": Side(HandTurned(first)), "without": Side(HandTurned(second))}
        for name, side in sides.items():
            for prompt in olds:
                side.prefill(prompt)
                side.engine.until_idle()
            side.settle()
            if name == "with":
                assert side.engine.core.reset_cache() == 0
            for prompt in own:
                side.prefill(prompt[:256], answer)
            for _ in range(WINDOW):
                side.turn()
        # as a server does when it starts
        gc.collect()
        gc.freeze()
        for number in track(range(rounds), "rounds"):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                side = sides[name]
                side.prefill(news[number])
                side.time_steps(olds[number])
                # what is left to be written is not the other engine's
                before = side.traffic()["written"]
                side.settle()
                side.moved["written_later"] = side.moved.get("written_later", 0) + side.traffic()["written"] - before
        rows = {name: side.figures() for name, side in sides.items()}
        moved, num_steps = sides["with"].moved, len(sides["with"].times["wall"])
        share = sides["with"].tiers_share()
    ratios = {name: rows["with"][name] / rows["without"][name] for name in rows["with"]}
    return {"us": rows, "ratios": ratios, "share": share, "moved": moved, "steps": num_steps, **circumstances()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompts that go down and come up")
    parser.add_argument("--pool", type=size_flag, default="1GiB", help="of both engines: more than all prompts take")
    parser.add_argument("--host", type=size_flag, default="2GiB", help="the host tier")
    parser.add_argument("--folder", type=Path, help="on the disk that is written to; a temporary one unless given")
    parser.add_argument("--fresh", action="store_true", help="memory that nobody has written to before")
    add_output_flags(parser, with_plot=False)
    arguments = parser.parse_args()
    check_positive(parser, arguments, "sequences", "rounds", "prompt")
    wait_as_a_server_does(choose_cpu_threads(None, 1, os.environ), "benchmarks.tier_steps")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(as_json(results))
    console, rows, ratios = make_console(), results["us"], results["ratios"]
    assert isinstance(rows, dict) and isinstance(ratios, dict)
    table = Table("a step, us", "with tiers", "without", "with / without")
    for name, ratio in ratios.items():
        table.add_row(name, f"{rows['with'][name]:.0f}", f"{rows['without'][name]:.0f}", f"{ratio:.3f}")
    console.print(table)
    console.print("share of a core that tiers took:", results["share"])
    console.print(results["moved"], f"in {results['steps']} steps", circumstances())


if __name__ == "__main__":
    main()
