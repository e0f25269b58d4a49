"""What a server computes on: the CPU, or an NVIDIA GPU through the CUDA kernels."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import Progress

from cairn.cache.layout import CacheLayout
from cairn.cache.placement import placement_for
from cairn.engine.contract import EngineConfig
from cairn.engine.contract.request import MAX_IMAGE_AREA
from cairn.engine.profile_plans import SLOTS, num_profile_pages, profile_plans
from cairn.engine.sizing import MOST_SEQS_ON_GPU
from cairn.errors import ConfigError, EngineDead
from cairn.kernels.contract import Kernels
from cairn.kernels.cuda_support import check_device
from cairn.layers.model import Model
from cairn.models.decoder_builder import Backend
from cairn.models.registry import OpenModel
from cairn.runner.decode_graphs import Graphs
from cairn.runner.runner import Runner
from cairn.runner.vision import VisionEncoder, open_vision
from cairn.types import Clock

logger = logging.getLogger(__name__)

_STEPS_IN_FLIGHT = 2

_CAPTURE_SECONDS = 300.0
"""For the recording of one graph, in which nothing is computed."""


@dataclass(frozen=True, slots=True)
class Device:
    """`backend`: the kernels, None for the CPU's. `place`: where weights, pool and states lie. `max_in_flight`: steps
    that may be out at once: where the host does not compute, it plans while the device does."""

    backend: Backend | Kernels | None = None
    place: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed
    max_in_flight: int = 1

    @property
    def is_gpu(self) -> bool:
        """Whether there is memory of its own. Not where Triton's interpreter stands in for a GPU."""
        return self.place.type == "cuda"


def choose_device(config: EngineConfig, opened: OpenModel, rank: int = 0) -> Device:
    """As --device says; `auto` is the CPU, because this engine has not been run on a GPU yet. Of several ranks each has
    the GPU of its number, which becomes the calling thread's current one. Logged.

    Raises ConfigError that names the flag which a GPU does not go together with, or what the machine lacks.
    """
    if config.device != "cuda":
        _refuse_libraries(config)
        if config.device == "auto" and torch.cuda.is_available():
            logger.info("--device cpu: unless asked; --device cuda computes on %s", torch.cuda.get_device_name())
        return Device()
    if config.quantization == "int8":
        raise ConfigError(
            "--quantization int8: not with --device cuda yet: there are no int8 products on GPUs; leave out one of them"
        )
    spec = opened.config.cache_spec().memory_spec(opened.dtype, torch.device("cpu"))
    head_dim = 0 if spec.attention is None else spec.attention.head_dim
    check_device(opened.dtype, head_dim, rank, config.tensor_parallel_size)
    from cairn.kernels.cuda.device import INTERPRETED, device

    if not INTERPRETED:
        _begin_on_gpu(rank)
    place = device()
    logger.info("--device cuda: %s", torch.cuda.get_device_name(place) if place.type == "cuda" else "interpreted")
    return Device(_kernels(config, opened, rank, place), place, _STEPS_IN_FLIGHT)


def _begin_on_gpu(number: int) -> None:
    """Make it the current one of this thread, and have CUDA begin there. Raises ConfigError where it refuses."""
    try:
        torch.cuda.set_device(number)
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--device cuda: GPU {number} takes no work ({reason}): see nvidia-smi for who has its memory, or "
            "has it in exclusive mode, or choose another one with CUDA_VISIBLE_DEVICES"
        ) from error


def _refuse_libraries(config: EngineConfig) -> None:
    """Raises ConfigError for kernels that the CPU has not."""
    asked = {"--attention-backend": config.attention_backend, "--gdn-prefill-backend": config.gdn_prefill_backend}
    for flag, name in asked.items():
        if name != "auto":
            raise ConfigError(f"{flag} {name}: there are other kernels with --device cuda only; leave it out")


def _kernels(config: EngineConfig, opened: OpenModel, rank: int, place: torch.device) -> Backend | Kernels:
    """cairn's own, or some of libraries. Raises ConfigError that names the flag of a library which is not there or does
    not take the model."""
    wants_flashinfer, wants_fla = config.attention_backend == "flashinfer", config.gdn_prefill_backend == "fla"
    if not wants_flashinfer and not wants_fla:
        return "cuda_exact" if config.exact else "cuda"
    if config.exact:
        raise ConfigError("--exact: the kernels of libraries promise no fixed order of sums: leave out their flags")
    from cairn.kernels.cuda.fla_gdn import DeltaRuleShape
    from cairn.kernels.cuda.flashinfer_attention import AttentionShape
    from cairn.kernels.cuda.libraries import load_fla, load_flashinfer, with_libraries

    attention = delta_rule = None
    spec = opened.config.cache_spec(rank, config.tensor_parallel_size).memory_spec(opened.dtype, place)
    if wants_flashinfer:
        if spec.attention is None:
            raise ConfigError("--attention-backend flashinfer: the model has no attention: leave it out")
        heads = spec.attention.num_kv_heads, spec.attention.head_dim
        num_heads = opened.config.num_attention_heads // config.tensor_parallel_size
        shape = AttentionShape(num_heads, *heads, config.block_size, opened.dtype)
        attention = load_flashinfer(shape, place, _STEPS_IN_FLIGHT)
    if wants_fla:
        if spec.recurrent is None or "gated delta net" not in opened.config.layer_counts():
            raise ConfigError("--gdn-prefill-backend fla: the model has no gated delta rule: leave it out")
        value_heads, key_dim, value_dim = spec.recurrent.state
        key_heads = spec.recurrent.parts[0].channels // key_dim
        delta_rule = load_fla(DeltaRuleShape(key_heads, value_heads, key_dim, value_dim, opened.dtype), place)
    logger.info("kernels: attention %s, gated delta rule %s", config.attention_backend, config.gdn_prefill_backend)
    return with_libraries(attention, delta_rule)


def keeps_fp8(config: EngineConfig) -> bool:
    """Whether the weights of an FP8 checkpoint stay in FP8."""
    return config.device == "cuda" and not config.exact


def open_encoder(config: EngineConfig, opened: OpenModel, device: Device, rank: int = 0) -> VisionEncoder | None:
    """The vision encoder of one rank; None where the model, or this server, reads no images. Raises ModelError."""
    if config.language_model_only:
        return None
    return open_vision(opened.folder, opened.dtype, int(config.mm_encoder_cache_bytes), rank, device.place)


class DeviceMemory(Protocol):
    """The memory of one GPU, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """What nobody has taken, and all there is."""
        ...

    def start_peak(self) -> None:
        """Forget the peak so far."""
        ...

    def peak_growth(self) -> int:
        """The most that this process had allocated since `start_peak`, beyond what it had then."""
        ...


class CudaMemory:
    """As CUDA's driver and torch's allocator tell it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0

    def free_and_total(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = int(torch.cuda.memory_allocated(self._device))

    def peak_growth(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device)) - self._start


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


Meet = Callable[[str], object]
"""Called by a rank when it has launched, or done, what all ranks do together; the text says what. Where it waits for
the others, it raises what one of them has been refused with, or EngineDead."""


def meet_nobody(_: str) -> None:
    """The `Meet` of the only rank."""


@dataclass(frozen=True, slots=True)
class DecodeCapture:
    """Decode steps as CUDA graphs: what makes graphs in a pool of memory of their own, `sizes` in rows, ascending, and
    the tokens of the longest sequence. All ranks capture at the same time."""

    make_graphs: Callable[[], Graphs]
    sizes: tuple[int, ...]
    max_model_len: int

    def run(self, runner: Runner, clock: Clock, memory: DeviceMemory | None = None, meet: Meet = meet_nobody) -> None:
        """Capture all sizes. Logged, with what they take of `memory`. Raises ConfigError where one cannot be."""
        started, taken = clock.now(), None if memory is None else _taken(memory)
        console = Console(stderr=True)
        shows = console.is_terminal and runner.rank == 0
        with Progress(console=console, transient=True, disable=not shows) as progress:
            task = progress.add_task("CUDA graphs", total=len(self.sizes))
            self._capture(runner, self.sizes, meet, lambda size: progress.advance(task))
        told = f"{len(self.sizes)} sizes of decode steps, {self.sizes[0]} to {self.sizes[-1]} rows"
        grown = "" if memory is None or taken is None else f", {_taken(memory) - taken} bytes"
        logger.info("CUDA graphs of %s: %.1f s%s", told, clock.now() - started, grown)

    def estimate_bytes(self, runner: Runner, memory: DeviceMemory, meet: Meet = meet_nobody) -> int:
        """What all sizes will take. They are captured when pool and states are there, whose addresses they hold, and
        the pool's size wants to know before. So the largest, in whose memory the others find room, and the next one,
        which stands for each of the rest, are captured over the memory of another runner."""
        taken = [_taken(memory)]
        self._capture(runner, self.sizes[-2:], meet, lambda size: taken.append(_taken(memory)))
        first, *rest = (max(0, after - before) for before, after in pairwise(taken))
        return first + sum(rest) * (len(self.sizes) - 1)

    def _capture(self, runner: Runner, sizes: Sequence[int], meet: Meet, captured: Callable[[int], object]) -> None:
        """The ranks meet twice a size. Whoever is missing, because it was refused something or has ended, is missed
        there and not by a device: with the passes that are not recorded out everywhere each of them ends, and with
        everybody done with a size all can begin the next one. In between there are waits that cannot be left: for the
        device, and NCCL's own, which in a recording agrees with the other ranks on buffers. They end with the
        process."""
        timers: list[threading.Timer] = []

        def begin(size: int) -> None:
            meet(f"ready to capture a CUDA graph of {size} rows")
            timers.append(threading.Timer(_CAPTURE_SECONDS, _end_process, (size, runner.rank)))
            timers[-1].daemon = True
            timers[-1].start()

        def finish(size: int) -> None:
            timers[-1].cancel()
            meet(f"done with the CUDA graph of {size} rows")
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


def _end_process(size: int, rank: int) -> None:
    logger.error(
        "rank %d has not captured the CUDA graph of %d rows within %g s, and ends: another rank may have ended; "
        "--enforce-eager starts without graphs",
        rank,
        size,
        _CAPTURE_SECONDS,
    )
    os._exit(1)


def _taken(memory: DeviceMemory) -> int:
    free, total = memory.free_and_total()
    return total - free


def measure_room(
    config: EngineConfig,
    model: Model,
    layout: CacheLayout,
    memory: DeviceMemory,
    vision: VisionEncoder | None = None,
    meet: Meet = meet_nobody,
    capture: DecodeCapture | None = None,
) -> int:
    """Bytes that --gpu-memory-utilization leaves for pool and running states beside what is loaded, model and `vision`,
    other processes, encoded images that are kept, CUDA graphs, and the largest step, which is carried out once to see
    what it takes, as the largest image is encoded: by all ranks at the same time. They `meet` while it is out, and
    as they do where graphs are captured. Logged. Raises ConfigError where nothing is left."""
    step_bytes, graph_bytes = _step_bytes(config, model, layout, memory, vision, meet, capture)
    free, total = memory.free_and_total()
    usable = int(config.gpu_memory_utilization * total)
    logits_bytes = model.logits_room(config.max_num_seqs or MOST_SEQS_ON_GPU)
    image_bytes = 0 if vision is None else vision.cache_bytes
    left = usable - (total - free) - step_bytes - logits_bytes - image_bytes - graph_bytes
    told = (
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g} of {total} bytes is {usable}; {total - free} are "
        f"taken, a step of {config.max_num_batched_tokens} tokens takes {step_bytes}, logits take {logits_bytes}, and "
        f"CUDA graphs some {graph_bytes}"
    )
    if vision is not None:
        told += f", encoded images {image_bytes}"
    if left <= 0:
        raise ConfigError(
            f"{told}: nothing is left for the pool: raise it, lower --max-num-batched-tokens, or free the GPU"
        )
    logger.info("%s: %d are left", told, left)
    return left


def _step_bytes(
    config: EngineConfig,
    model: Model,
    layout: CacheLayout,
    memory: DeviceMemory,
    vision: VisionEncoder | None,
    meet: Meet,
    capture: DecodeCapture | None,
) -> tuple[int, int]:
    """The most that a prefill step of --max-num-batched-tokens takes besides the pool, with the checkpoints that are
    taken in it, or that encoding the largest image takes, which is over before the step's layers begin; and what graphs
    will take. A small step of all kinds follows, and compiles what the first requests would wait for."""
    num_tokens, exact = config.max_num_batched_tokens, model.exact
    keeps = config.enable_prefix_caching and config.mamba_cache_mode != "none"
    placement = placement_for(config.mamba_cache_mode, config.block_size, exact) if keeps else None
    plans = profile_plans(layout, num_tokens, placement)
    runner = Runner(model, layout, num_profile_pages(layout, num_tokens), SLOTS, exact)
    memory.start_peak()
    if vision is not None:
        vision.encode_largest(MAX_IMAGE_AREA, config.max_model_len)
    for plan in plans:
        runner.launch(plan)
        runner.draw(plan.step, {})
    meet("in the largest step")  # all of it is out: a rank that waited here before its last step would be waited for
    for plan in plans:
        runner.collect(plan.step)
    step_bytes = memory.peak_growth()
    return step_bytes, 0 if capture is None else capture.estimate_bytes(runner, memory, meet)


@contextmanager
def explain_out_of_memory(device: Device) -> Iterator[None]:
    """Raises ConfigError where a GPU's memory does not suffice for what is loaded or allocated inside."""
    try:
        yield
    except RuntimeError as error:  # of torch's allocator, or of CUDA or Triton themselves
        if not device.is_gpu or "out of memory" not in str(error):
            raise
        reason = str(error).partition(". ")[0]
        raise ConfigError(
            f"--device cuda: the GPU's memory does not suffice ({reason}): free it, lower --max-num-batched-tokens, "
            "--max-num-seqs or --kv-cache-memory-bytes, or take a larger one; `cairn check MODEL --gpu NAME` counts"
        ) from error
