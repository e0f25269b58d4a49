"""What a server computes on: the CPU, or an NVIDIA GPU through the CUDA kernels."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cairn.cache.layout import CacheLayout
from cairn.cache.placement import PlacementPolicy, placement_for
from cairn.engine.contract import EngineConfig
from cairn.engine.contract.request import MAX_IMAGE_AREA
from cairn.engine.decode_capture import Barrier, DecodeCapture, no_barrier, plan_capture
from cairn.engine.gpu_memory import CudaMemory, DeviceMemory, report_free
from cairn.engine.kernel_check import KernelCheck
from cairn.engine.memory_plan import MOST_SEQS_ON_GPU, STEPS_IN_FLIGHT, MemoryPlan, choose_max_model_len
from cairn.engine.profile_plans import SLOTS, num_profile_pages, profile_plans, warm_up_plans
from cairn.errors import ConfigError
from cairn.kernels.contract import Kernels
from cairn.kernels.cuda_support import check_device, check_vocabulary, is_interpreted
from cairn.kernels.graphs import Graphs
from cairn.layers.memory import AttentionSpec, MemorySpec
from cairn.layers.model import Model
from cairn.machine import Machine
from cairn.models.decoder_builder import Backend
from cairn.models.decoder_config import AskedQuantization
from cairn.models.registry import Kept, OpenModel
from cairn.models.weights.loader import DType
from cairn.runner.runner import Observe, Runner, slot_bytes
from cairn.runner.vision import VisionEncoder, open_vision
from cairn.scheduler.verify import MAX_STEP_DRAFTS
from cairn.step import StepPlan, TokenMasks
from cairn.types import Clock

logger = logging.getLogger(__name__)


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


OpenFolder = Callable[[Path, DType, AskedQuantization | None, Kept | None], OpenModel]
"""As `open_model`."""


def open_for_device(config: EngineConfig, open_folder: OpenFolder, machine: Machine) -> tuple[EngineConfig, OpenModel]:
    """The settings with --device auto decided, and the checkpoint as it is served there.

    `auto` is the GPU where this machine has one that can compute this model, and else the CPU: machine and model alone
    decide, and no other flag but --tensor-parallel-size, which says how many GPUs there have to be, and
    --gpu-memory-utilization. One line of the log says which and why, a warning where a GPU is left unused. Raises what
    `open_folder` does.
    """

    def opened_on(device: str) -> tuple[EngineConfig, OpenModel]:
        on_device = config.model_copy(update={"device": device})
        opened = open_folder(Path(config.model), config.dtype, config.quantization, kept_weights(on_device))
        return on_device, as_served(on_device, opened)

    if config.device != "auto":
        return opened_on(config.device)
    if not _sees_gpu(machine):
        logger.info("--device cpu: auto, and there is no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides it")
        return opened_on("cpu")
    on_gpu, opened = opened_on("cuda")
    reason = why_not_gpu(on_gpu, opened)
    if reason is not None:
        logger.warning("--device cpu: auto, and there is an NVIDIA GPU that cannot be used: %s", reason)
        return opened_on("cpu")
    logger.info("--device cuda: auto, and there is an NVIDIA GPU that can be used: %s", torch.cuda.get_device_name(0))
    return on_gpu, opened


def as_served(config: EngineConfig, opened: OpenModel) -> OpenModel:
    """The checkpoint with what this server keeps of a sequence. Raises ConfigError as `with_states_in`."""
    return opened.with_states_in(config.mamba_ssm_cache_dtype, config.exact)


def open_head(config: EngineConfig, opened: OpenModel) -> OpenModel:
    """The checkpoint with the head that drafts, if it is to be served: where --speculative-config says mtp, and with
    auto where there is one that takes little of each step, on the CPU. Raises ConfigError where there has to be one and
    is none."""
    method = config.speculative.method
    if method not in ("auto", "mtp"):
        return opened
    if method == "auto" and (config.device == "cuda" or not opened.has_small_head):
        return opened
    why = opened.why_no_head(opened.stored_tensors(), config.tensor_parallel_size)
    if why is None:
        logger.info("--speculative-config: the checkpoint's head of multi-token prediction is served, and drafts")
        return opened.with_head()
    if method == "auto":
        return opened
    raise ConfigError(
        f"--speculative-config: method: 'mtp' drafts with a checkpoint's own head: {why}; use suffix or ngram, or "
        "leave it out"
    )


def most_step_drafts(config: EngineConfig, on_cpu: bool) -> int:
    """Draft tokens that a step may have, 0 where nothing is drafted. What `auto` would bring on a GPU has not been
    measured: it drafts on the CPU alone."""
    method = config.speculative.method
    return 0 if method == "none" or (method == "auto" and not on_cpu) else MAX_STEP_DRAFTS


def why_not_gpu(config: EngineConfig, opened: OpenModel) -> str | None:
    """Why the model cannot be served on this machine's GPUs, by what is installed, GPUs, kernels and memory; None where
    it can. What only a start on the GPU finds out, as others that fill it, is not in it. Raises ModelError for weights
    that cannot be read."""
    num_ranks = config.tensor_parallel_size
    try:
        for rank in range(num_ranks):
            _check_gpu(config, opened, rank)
        if is_interpreted():
            return "TRITON_INTERPRET has its kernels interpreted"
        usable = int(config.gpu_memory_utilization * _least_memory(num_ranks))
        num_bytes = opened.weight_bytes(opened.stored_tensors(), num_ranks)
    except ConfigError as error:
        return str(error)
    except RuntimeError as error:  # the driver's or CUDA's, whose other lines are for developers
        return f"CUDA fails: {str(error).partition(chr(10))[0]}"
    if num_bytes >= usable:
        share = "" if num_ranks == 1 else f" of each of {num_ranks} ranks"
        return f"{num_bytes} bytes of weights{share} do not fit into the {usable} that --gpu-memory-utilization gives"
    return None


def _sees_gpu(machine: Machine) -> bool:
    """Whether torch sees a GPU, or NVIDIA's driver does and nobody hides it: a user would want to know what is missing
    then."""
    if torch.cuda.is_available():
        return True
    return machine.has_nvidia_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def _least_memory(num_ranks: int) -> int:
    return min(int(torch.cuda.get_device_properties(rank).total_memory) for rank in range(num_ranks))


def _check_gpu(config: EngineConfig, opened: OpenModel, rank: int) -> None:
    """Raises ConfigError for what the machine lacks, and for models that the kernels do not take."""
    spec = opened.config.cache_spec().memory_spec(opened.dtype, torch.device("cpu"))
    head_dim = max((group.head_dim for group in spec.attention), default=0)
    check_device(opened.dtype, head_dim, rank, config.tensor_parallel_size)
    check_vocabulary(opened.config.vocab_size)


def choose_device(config: EngineConfig, opened: OpenModel, rank: int = 0) -> Device:
    """As --device says; `open_for_device` has decided what `auto` is, which without it is the CPU. Of several ranks
    each has the GPU of its number, which becomes the calling thread's current one. Logged.

    Raises ConfigError that names the flag which a GPU does not go together with, or what the machine lacks.
    """
    if config.device != "cuda":
        _refuse_libraries(config)
        return Device()
    if config.quantization == "int8":
        raise ConfigError(
            "--quantization int8: not with --device cuda yet, which auto is where there is a GPU: there are no int8 "
            "products on GPUs; take int4, leave it out, or serve with --device cpu"
        )
    _check_gpu(config, opened, rank)
    from cairn.kernels.cuda.device import INTERPRETED, device

    if not INTERPRETED:
        _begin_on_gpu(rank)
    place = device()
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "the CPU, with kernels interpreted"
    logger.info("rank %d of %d computes on %s", rank, config.tensor_parallel_size, name)
    # What is drafted begins with the newest token: the step before has to be over.
    in_flight = 1 if most_step_drafts(config, on_cpu=False) else STEPS_IN_FLIGHT
    return Device(_kernels(config, opened, rank, place), place, in_flight)


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


def plain_attention(config: EngineConfig, opened: OpenModel, spec: MemorySpec) -> tuple[AttentionSpec, int]:
    """The attention that flashinfer is asked for, and the tokens of its pages: layers of a limited reach have cairn's
    own kernels. Raises ConfigError where there are no others."""
    if not spec.attention:
        raise ConfigError("--attention-backend flashinfer: the model has no attention: leave it out")
    layout = opened.config.layout(config.block_size, opened.dtype.itemsize, config.tensor_parallel_size)
    for attention, group in zip(spec.attention, layout.groups, strict=True):
        if attention.reach is None:
            return attention, group.tokens_per_page
    raise ConfigError("--attention-backend flashinfer: no layer of the model sees all tokens: leave it out")


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
        plain, page_size = plain_attention(config, opened, spec)
        num_heads = opened.config.num_attention_heads // config.tensor_parallel_size
        shape = AttentionShape(num_heads, plain.num_kv_heads, plain.head_dim, page_size, opened.dtype)
        attention = load_flashinfer(shape, place, STEPS_IN_FLIGHT)
    if wants_fla:
        if spec.recurrent is None or "gated delta net" not in opened.config.layer_counts():
            raise ConfigError("--gdn-prefill-backend fla: the model has no gated delta rule: leave it out")
        state_dtype = spec.recurrent.state_dtype
        if state_dtype != "float32":
            raise ConfigError(
                f"--gdn-prefill-backend fla: rounds no states within a prompt, and they are {state_dtype} here: ask "
                "for --mamba-ssm-cache-dtype float32, or leave it out"
            )
        value_heads, key_dim, value_dim = spec.recurrent.state
        key_heads = spec.recurrent.parts[0].channels // key_dim
        delta_rule = load_fla(DeltaRuleShape(key_heads, value_heads, key_dim, value_dim, opened.dtype), place)
    logger.info("kernels: attention %s, gated delta rule %s", config.attention_backend, config.gdn_prefill_backend)
    return with_libraries(attention, delta_rule)


def kept_weights(config: EngineConfig) -> Kept | None:
    """Which weights of a quantized checkpoint stay as they are stored."""
    return None if config.exact else "gpu_codes" if config.device == "cuda" else "codes"


def layout_of(config: EngineConfig, opened: OpenModel) -> CacheLayout:
    """Pages and checkpoints of each rank. Raises ConfigError as `OpenModel.layout`."""
    return opened.layout(config.block_size, config.tensor_parallel_size, config.checkpoint_dtype, config.exact)


def placement_of(config: EngineConfig) -> PlacementPolicy | None:
    """Where checkpoints are kept; None without a cache."""
    if not config.enable_prefix_caching or config.mamba_cache_mode == "none":
        return None
    return placement_for(config.mamba_cache_mode, config.block_size, config.exact)


def open_encoder(config: EngineConfig, opened: OpenModel, device: Device, rank: int = 0) -> VisionEncoder | None:
    """The vision encoder of one rank; None where the model, or this server, reads no images. Raises ModelError."""
    if config.language_model_only:
        return None
    return open_vision(opened.folder, opened.dtype, int(config.mm_encoder_cache_bytes), rank, device.place)


def measure_memory(
    config: EngineConfig,
    model: Model,
    layout: CacheLayout,
    memory: DeviceMemory,
    vision: VisionEncoder | None = None,
    barrier: Barrier = no_barrier,
    capture: DecodeCapture | None = None,
) -> MemoryPlan:
    """What a GPU has to hold besides pool and slots: what is loaded, model and `vision`, other processes, encoded
    images that are kept, CUDA graphs, and the largest step, which is carried out once to see what it takes, as the
    largest image is encoded: by all ranks at the same time. They meet at `barrier` while it is out, as they do where
    graphs are captured. Where the pool's size was asked for, all of the GPU may be taken. Logged. Raises ConfigError
    where nothing is left."""
    step_bytes, graph_bytes = _step_bytes(config, model, layout, memory, vision, barrier, capture)
    free, total = memory.free_and_total()
    asked = config.kv_cache_memory_bytes
    plan = MemoryPlan(
        on_gpu=True,
        usable=total if asked is not None else int(config.gpu_memory_utilization * total),
        process=total - free,
        step=step_bytes,
        logits=model.logits_room((config.max_num_seqs or MOST_SEQS_ON_GPU) + most_step_drafts(config, on_cpu=False)),
        images=0 if vision is None else vision.cache_bytes,
        graphs=graph_bytes,
    )
    usable = (
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g} of {total} bytes is {plan.usable}"
        if asked is None
        else f"--kv-cache-memory-bytes {asked} is given, of {total} bytes in all"
    )
    message = (
        f"{usable}; {plan.process} are taken, a step of {config.max_num_batched_tokens} tokens takes {step_bytes}, "
        f"logits take {plan.logits}, and CUDA graphs some {graph_bytes}"
    )
    if vision is not None:
        message += f", encoded images {plan.images}"
    if plan.left <= 0:
        raise ConfigError(
            f"{message}: nothing is left for the pool: {'raise it, ' if asked is None else ''}lower "
            "--max-num-batched-tokens, free the GPU, or serve with --device cpu"
        )
    logger.info("%s: %d are left", message, plan.left)
    return plan


def _step_bytes(
    config: EngineConfig,
    model: Model,
    layout: CacheLayout,
    memory: DeviceMemory,
    vision: VisionEncoder | None,
    barrier: Barrier,
    capture: DecodeCapture | None,
) -> tuple[int, int]:
    """The most that a prefill step of --max-num-batched-tokens takes besides pool and slots, with the checkpoints that
    are taken in it and all that a runner keeps, or that encoding the largest image takes, which is over before the
    step's layers begin; and what graphs will take. Small steps of all kinds follow, and compile what requests would
    wait for."""
    num_tokens, placement = config.max_num_batched_tokens, placement_of(config)
    num_drafts, has_head = most_step_drafts(config, on_cpu=False), model.head is not None
    plans, num_pages = profile_plans(layout, num_tokens, placement, num_drafts), num_profile_pages(layout, num_tokens)
    memory.start_peak()
    check = KernelCheck() if _is_compiled(model) else None
    observe = check.observe if check is not None and model.communicator.rank == 0 else None
    runner = Runner(model, layout, num_pages, SLOTS, model.exact, observe)
    if vision is not None:
        vision.encode_largest(MAX_IMAGE_AREA, config.max_model_len)
    _run_plans(runner, [(plan, {}) for plan in plans], partial(barrier, "in the largest step"))
    counted_elsewhere = runner.pool.nbytes + (SLOTS + 1) * slot_bytes(model.spec, layout, num_pages)
    step_bytes = max(0, memory.peak_growth() - counted_elsewhere)
    warm_up = [*warm_up_plans(layout, num_tokens, placement, model.vocab_size, len(plans), num_drafts, has_head)]
    _run_plans(runner, warm_up, partial(barrier, "in the small steps"))
    if check is not None:
        steps = check.begin(layout, model.vocab_size, warm_up[-1][0].step + 1, num_drafts > 0)
        _run_plans(runner, steps, partial(barrier, "in the check of the kernels"))
        check.finish()
    return step_bytes, 0 if capture is None else capture.estimate_bytes(runner, memory, barrier)


def _is_compiled(model: Model) -> bool:
    """Whether kernels run as a compiler has made them for a GPU."""
    return model.spec.device.type == "cuda"


def _run_plans(runner: Runner, plans: Sequence[tuple[StepPlan, TokenMasks]], barrier: Callable[[], object]) -> None:
    """With as many steps in flight as a server has. The ranks meet before each wait for the device, where one that
    could not go on would be waited for."""
    for first in range(0, len(plans), STEPS_IN_FLIGHT):
        in_flight = plans[first : first + STEPS_IN_FLIGHT]
        for plan, masks in in_flight:
            runner.launch(plan)
            runner.sample(plan.step, masks)
        barrier()
        for plan, _ in in_flight:
            runner.collect(plan.step)


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
            "--max-num-seqs or --kv-cache-memory-bytes, or take a larger one, or serve with --device cpu; `cairn check "
            "MODEL --gpu NAME` counts"
        ) from error


class LoadedModel:
    """A model with its weights on a device, one rank's share of it, and without memory. `vision`: see `open_encoder`.
    `make_graphs`: what records decode steps, if anything does; see `plan_capture`."""

    def __init__(
        self,
        config: EngineConfig,
        opened: OpenModel,
        device: Device,
        model: Model,
        vision: VisionEncoder | None,
        make_graphs: Callable[[], Graphs] | None,
    ) -> None:
        self._config, self._device, self._model, self._vision = config, device, model, vision
        self._layout = layout_of(config, opened)
        self._max_model_len = choose_max_model_len(config.max_model_len, opened.config.max_model_len)
        self._capture_for = partial(plan_capture, config, make_graphs, self._max_model_len)
        self._memory = CudaMemory(device.place) if device.is_gpu else None
        self._step_bytes = 0

    def measure_available_memory(self, barrier: Barrier = no_barrier) -> int:
        """Bytes that the GPU has for pool and slots; see `measure_memory`. Raises ConfigError."""
        assert self._memory is not None, "the CPU's memory is divided before anything is loaded"
        capture = self._capture_for(self._config.max_num_seqs or MOST_SEQS_ON_GPU)
        with explain_out_of_memory(self._device):
            plan = measure_memory(self._config, self._model, self._layout, self._memory, self._vision, barrier, capture)
        self._step_bytes = plan.step + plan.images
        return plan.left

    def allocate(
        self,
        num_pages: int,
        num_slots: int,
        observe: Observe | None,
        clock: Clock,
        barrier: Barrier = no_barrier,
    ) -> Runner:
        """A runner with memory of these sizes and with graphs. Raises ConfigError, and EngineDead when another rank is
        lost meanwhile."""
        config = self._config
        with explain_out_of_memory(self._device):
            runner = Runner(
                self._model,
                self._layout,
                num_pages,
                num_slots,
                config.exact,
                observe,
                self._vision,
                self._max_model_len,
            )
            runner.get_ready()
        capture = self._capture_for(num_slots)
        if capture is not None:
            capture.run(runner, clock, self._memory, barrier)
        elif config.tensor_parallel_size == 1 and not config.enforce_eager:
            runner.record_decodes(min(config.max_cudagraph_capture_size, num_slots), self._max_model_len)
        if self._memory is not None:
            report_free(self._memory, self._step_bytes)
        return runner
