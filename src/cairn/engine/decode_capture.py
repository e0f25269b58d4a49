"""Decode steps as CUDA graphs: of which sizes, when they are captured, and what they take of a GPU's memory."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.progress import Progress

from cairn.engine.contract import EngineConfig
from cairn.engine.gpu_memory import DeviceMemory, taken_bytes
from cairn.errors import ConfigError, EngineDead
from cairn.kernels.graphs import Graphs
from cairn.runner.runner import Runner
from cairn.types import Clock

logger = logging.getLogger(__name__)

_CAPTURE_SECONDS = 300.0
"""For the recording of one graph, in which nothing is computed."""


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


def records_decodes(config: EngineConfig) -> bool:
    """Not with flashinfer, which plans each step on the host, and with --exact, whose bits have not been compared with
    those of graphs."""
    return config.attention_backend != "flashinfer" and not config.exact


Barrier = Callable[[str], object]
"""Called by a rank when it has launched, or done, what all ranks do together; the text says what. Where it waits for
the others, it raises what one of them has been refused with, or EngineDead."""


def no_barrier(_: str) -> None:
    """The `Barrier` of the only rank."""


@dataclass(frozen=True, slots=True)
class DecodeCapture:
    """Decode steps as CUDA graphs: what makes graphs in a pool of memory of their own, `sizes` in rows, ascending, and
    the tokens of the longest sequence. All ranks capture at the same time."""

    make_graphs: Callable[[], Graphs]
    sizes: tuple[int, ...]
    max_model_len: int

    def run(
        self, runner: Runner, clock: Clock, memory: DeviceMemory | None = None, barrier: Barrier = no_barrier
    ) -> None:
        """Capture all sizes. Logged, with what they take of `memory`. Raises ConfigError where one cannot be."""
        started, taken = clock.now(), None if memory is None else taken_bytes(memory)
        console = Console(stderr=True)
        shows = console.is_terminal and runner.rank == 0
        with Progress(console=console, transient=True, disable=not shows) as progress:
            task = progress.add_task("CUDA graphs", total=len(self.sizes))
            self._capture(runner, self.sizes, barrier, lambda size: progress.advance(task))
        message = f"{len(self.sizes)} sizes of decode steps, {self.sizes[0]} to {self.sizes[-1]} rows"
        grown = "" if memory is None or taken is None else f", {taken_bytes(memory) - taken} bytes"
        logger.info("CUDA graphs of %s: %.1f s%s", message, clock.now() - started, grown)

    def estimate_bytes(self, runner: Runner, memory: DeviceMemory, barrier: Barrier = no_barrier) -> int:
        """What all sizes will take. They are captured when pool and states are there, whose addresses they hold, and
        the pool's size wants to know before. So the largest, in whose memory the others find room, and the next one,
        which stands for each of the rest, are captured over the memory of another runner."""
        taken = [taken_bytes(memory)]
        self._capture(runner, self.sizes[-2:], barrier, lambda size: taken.append(taken_bytes(memory)))
        first, *rest = (max(0, after - before) for before, after in pairwise(taken))
        return first + sum(rest) * (len(self.sizes) - 1)

    def _capture(
        self, runner: Runner, sizes: Sequence[int], barrier: Barrier, captured: Callable[[int], object]
    ) -> None:
        """The ranks meet twice a size. Whoever is missing, because it was refused something or has ended, is missed
        there and not by a device: with the passes that are not recorded out everywhere each of them ends, and with
        everybody done with a size all can begin the next one. In between there are waits that cannot be left: for the
        device, and NCCL's own, which in a recording agrees with the other ranks on buffers. They end with the
        process."""
        timers: list[threading.Timer] = []

        def begin(size: int) -> None:
            barrier(f"ready to capture a CUDA graph of {size} rows")
            timers.append(threading.Timer(_CAPTURE_SECONDS, _end_process, (size, runner.rank)))
            timers[-1].daemon = True
            timers[-1].start()

        def finish(size: int) -> None:
            timers[-1].cancel()
            barrier(f"done with the CUDA graph of {size} rows")
            captured(size)

        try:
            runner.capture_graphs(self.make_graphs(), sizes, self.max_model_len, finish, begin)
        except RuntimeError as error:
            # To end a recording that has failed is an error of its own.
            first = error.__context__ if isinstance(error.__context__, RuntimeError | EngineDead) else error
            reason = str(first).partition("\n")[0]
            raise ConfigError(
                f"--device cuda: decode steps of {sizes[0]} to {sizes[-1]} rows cannot be captured as CUDA graphs on "
                f"rank {runner.rank} ({reason}): start with --enforce-eager, or lower --max-cudagraph-capture-size"
            ) from error
        except EngineDead as error:
            raise EngineDead(f"while CUDA graphs were captured (none with --enforce-eager): {error}") from error
        finally:
            for timer in timers:
                timer.cancel()


def plan_capture(
    config: EngineConfig, make_graphs: Callable[[], Graphs] | None, max_model_len: int, max_num_seqs: int
) -> DecodeCapture | None:
    """None where decode steps are launched kernel by kernel. Raises ConfigError for sizes that no batch has."""
    if make_graphs is None or not records_decodes(config) or not (sizes := graph_sizes(config, max_num_seqs)):
        return None
    return DecodeCapture(make_graphs, sizes, max_model_len)


def _end_process(size: int, rank: int) -> None:
    logger.error(
        "rank %d has not captured the CUDA graph of %d rows within %g s, and ends: another rank may have ended; "
        "--enforce-eager starts without graphs",
        rank,
        size,
        _CAPTURE_SECONDS,
    )
    os._exit(1)
