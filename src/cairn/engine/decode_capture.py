"""Decode steps as CUDA graphs: of which sizes, when they are captured, and what they take of a GPU's memory."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.progress import Progress

from cairn.engine.contract import EngineConfig
from cairn.engine.gpu_memory import DeviceMemory, taken_bytes
from cairn.errors import ConfigError
from cairn.runner.decode_graphs import Graphs
from cairn.runner.runner import Runner
from cairn.types import Clock

logger = logging.getLogger(__name__)


def graph_sizes(config: EngineConfig, max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the decode steps that become CUDA graphs, ascending: as asked, or those of vLLM and the largest batch.

    Raises ConfigError for sizes that no batch has.
    """
    asked, most = config.cudagraph_capture_sizes, min(config.max_cudagraph_capture_size, max_num_seqs)
    if config.enforce_eager or not most:
        return ()
    if asked is None:
        sizes = {1, 2, 4, *range(8, 256, 8), *range(256, most, 16)}
        return (*sorted(size for size in sizes if size < most), most)
    fitting = sorted({size for size in asked if size <= most})
    if not fitting:
        raise ConfigError(
            f"--cudagraph-capture-sizes: all are above {most} rows, which is what --max-num-seqs and "
            "--max-cudagraph-capture-size allow: name smaller ones, or --enforce-eager"
        )
    return tuple(fitting)


@dataclass(frozen=True, slots=True)
class DecodeCapture:
    """Decode steps as CUDA graphs: what makes graphs in a pool of memory of their own, `sizes` in rows, ascending, and
    the tokens of the longest sequence."""

    make_graphs: Callable[[], Graphs]
    sizes: tuple[int, ...]
    max_model_len: int

    def run(self, runner: Runner, clock: Clock, memory: DeviceMemory | None = None) -> None:
        """Capture all sizes. Logged, with what they take of `memory`."""
        started, taken = clock.now(), None if memory is None else taken_bytes(memory)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("CUDA graphs", total=len(self.sizes))
            runner.capture_graphs(
                self.make_graphs(), self.sizes, self.max_model_len, lambda size: progress.advance(task)
            )
        told = f"{len(self.sizes)} sizes of decode steps, {self.sizes[0]} to {self.sizes[-1]} rows"
        grown = "" if memory is None or taken is None else f", {taken_bytes(memory) - taken} bytes"
        logger.info("CUDA graphs of %s: %.1f s%s", told, clock.now() - started, grown)

    def estimate_bytes(self, runner: Runner, memory: DeviceMemory) -> int:
        """What all sizes will take. They are captured when pool and states are there, whose addresses they hold, and
        the pool's size wants to know before. So the largest, in whose memory the others find room, and the next one,
        which stands for each of the rest, are captured over the memory of another runner."""
        taken = [taken_bytes(memory)]
        sizes = self.sizes[-2:]
        runner.capture_graphs(
            self.make_graphs(), sizes, self.max_model_len, lambda size: taken.append(taken_bytes(memory))
        )
        first, *rest = (max(0, after - before) for before, after in pairwise(taken))
        return first + sum(rest) * (len(self.sizes) - 1)
