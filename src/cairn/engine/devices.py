"""What a server computes on: the CPU, or an NVIDIA GPU through the CUDA kernels."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from cairn.cache.layout import CacheLayout
from cairn.engine.contract import EngineConfig
from cairn.engine.sizing import MOST_SEQS_ON_GPU
from cairn.errors import ConfigError
from cairn.kernels.cuda_support import check_device
from cairn.layers.model import Model
from cairn.models.decoder_builder import Backend
from cairn.models.registry import OpenModel
from cairn.runner.runner import Runner
from cairn.step import Admit, PrefillRow, Samples, StepPlan
from cairn.types import Pages, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """`backend`: the kernels, None for the CPU's. `place`: where weights, pool and states lie. `max_in_flight`: steps
    that may be out at once: where the host does not compute, it plans while the device does."""

    backend: Backend | None = None
    place: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed
    max_in_flight: int = 1

    @property
    def is_gpu(self) -> bool:
        """Whether there is memory of its own. Not where Triton's interpreter stands in for a GPU."""
        return self.place.type == "cuda"


def choose_device(config: EngineConfig, opened: OpenModel) -> Device:
    """As --device says; `auto` is the CPU, because this engine has not been run on a GPU yet. Logged.

    Raises ConfigError that names the flag which a GPU does not go together with, or what the machine lacks.
    """
    if config.device != "cuda":
        if config.device == "auto" and torch.cuda.is_available():
            logger.info("--device cpu: unless asked; --device cuda computes on %s", torch.cuda.get_device_name())
        return Device()
    refused = [
        (config.quantization == "int8", "--quantization int8", "there are no int8 products on GPUs"),
        (config.tensor_parallel_size > 1, "--tensor-parallel-size", "there is one rank on a GPU"),
        (config.kv_transfer is not None, "--kv-transfer-config", "a GPU's memory is not transferred"),
    ]
    for is_asked, flag, reason in refused:
        if is_asked:
            raise ConfigError(f"{flag}: not with --device cuda yet: {reason}; leave out one of them")
    spec = opened.config.cache_spec().memory_spec(opened.dtype, torch.device("cpu"))
    check_device(opened.dtype, 0 if spec.attention is None else spec.attention.head_dim)
    from cairn.kernels.cuda.device import device

    place = device()
    logger.info("--device cuda: %s", torch.cuda.get_device_name(place) if place.type == "cuda" else "interpreted")
    return Device("cuda_exact" if config.exact else "cuda", place, max_in_flight=2)


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


def measure_room(config: EngineConfig, model: Model, layout: CacheLayout, memory: DeviceMemory) -> int:
    """Bytes that --gpu-memory-utilization leaves for pool and running states beside the loaded model, other processes,
    and the largest step, which is carried out once to see what it takes. Logged. Raises ConfigError where nothing is
    left."""
    step_bytes = _step_bytes(config, model, layout, memory)
    free, total = memory.free_and_total()
    usable = int(config.gpu_memory_utilization * total)
    # as float32, and once more while tokens are drawn from them; all else in drawing is done in bounded groups
    logits_bytes = (config.max_num_seqs or MOST_SEQS_ON_GPU) * model.vocab_size * 8
    left = usable - (total - free) - step_bytes - logits_bytes
    told = (
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g} of {total} bytes is {usable}; {total - free} are "
        f"taken, a step of {config.max_num_batched_tokens} tokens takes {step_bytes}, and logits take {logits_bytes}"
    )
    if left <= 0:
        raise ConfigError(
            f"{told}: nothing is left for the pool: raise it, lower --max-num-batched-tokens, or free the GPU"
        )
    logger.info("%s: %d are left", told, left)
    return left


def _step_bytes(config: EngineConfig, model: Model, layout: CacheLayout, memory: DeviceMemory) -> int:
    """The most that a prefill step of --max-num-batched-tokens takes besides the pool."""
    num_tokens = config.max_num_batched_tokens
    pages: Pages = np.arange(layout.pages_for(num_tokens), dtype=np.int32)
    plan = StepPlan(
        0,
        admits=(Admit(0, tuple(pages for _ in layout.groups), SamplingParams(temperature=1.0, top_p=0.9, seed=0)),),
        prefills=(PrefillRow(0, 0, np.zeros(num_tokens, np.int64), 0),),
        samples=Samples(np.zeros(1, np.int32), np.array([num_tokens], np.int32), np.zeros(1, np.bool_)),
    )
    runner = Runner(model, layout, len(pages), 1, exact=model.exact)
    memory.start_peak()
    runner.launch(plan)
    runner.draw(0, {})
    runner.collect(0)
    return memory.peak_growth()


@contextmanager
def explain_out_of_memory(device: Device) -> Iterator[None]:
    """Raises ConfigError where a GPU's memory does not suffice for what is loaded or allocated inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not device.is_gpu:
            raise
        reason = str(error).partition(". ")[0]
        raise ConfigError(
            f"--device cuda: the GPU's memory does not suffice ({reason}): free it, lower --max-num-batched-tokens, "
            "--max-num-seqs or --kv-cache-memory-bytes, or take a larger one; `cairn check MODEL --gpu NAME` counts"
        ) from error
