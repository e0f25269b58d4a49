"""Which device the engine takes, and what a GPU has left for the pool. Nothing here has a GPU."""

import gc
import re
import sys
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from cairn.check.report import CheckSettings, check
from cairn.engine import decode_capture, devices, kernel_check
from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.contract.request import MAX_IMAGE_AREA
from cairn.engine.decode_capture import DecodeCapture, graph_sizes
from cairn.engine.devices import Device, choose_device, explain_out_of_memory, measure_memory, open_for_device
from cairn.engine.gpu_memory import CudaMemory, report_free
from cairn.engine.memory_plan import MemoryPlan, divide_memory, guess_process_bytes, least_pages, plan_memory
from cairn.engine.profile_plans import SLOTS, num_profile_pages
from cairn.errors import ConfigError, EngineDead
from cairn.kernels import cpu, staging
from cairn.kernels.cuda_support import sampling_bytes
from cairn.kernels.staging import Readback
from cairn.layers.model import Model
from cairn.machine import Machine
from cairn.models.registry import open_model
from cairn.runner.decode_graphs import DecodeGraphs, PassShape
from cairn.runner.runner import Runner, slot_bytes
from cairn.runner.vision import open_vision
from cairn.step import DecodeRows, StepPlan
from cairn.types import ManualClock
from engine.test_sizing import GIB, LAYOUT
from models.test_served_int8 import parts_of
from runner.harness import tiny

OPEN = EngineConfig(model="m", kv_cache_memory_bytes=None, max_num_seqs=None, device="cuda")


GPU = Device("cuda", torch.device("cuda"))

SLOT = LAYOUT.checkpoint_bytes


class FakeMemory:
    """A GPU of which `taken` is taken, and on which the largest step takes `step` more."""

    def __init__(self, taken: int, total: int, step: int) -> None:
        self.taken, self.total, self.step = taken, total, step
        self.calls: list[str] = []

    def free_and_total(self):
        self.calls.append("free")
        return self.total - self.taken, self.total

    def start_peak(self):
        self.calls.append("start")

    def peak_growth(self):
        self.calls.append("peak")
        return self.step


def profiled(model, layout, num_tokens) -> int:
    """What the profile run's own pages and slots take, which are counted elsewhere."""
    num_pages = num_profile_pages(layout, num_tokens)
    return num_pages * layout.page_bytes + (SLOTS + 1) * slot_bytes(model.spec, layout, num_pages)


@pytest.fixture
def gpus(monkeypatch):
    """Three H100 of 80 GB, and all that is needed to compute on them; the name of the one that has been chosen."""
    current: list[int] = []
    triton, package, module = ModuleType("triton"), ModuleType("cuda"), ModuleType("device")
    triton.__dict__.update(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)), __version__="3.6.0")
    module.__dict__.update(INTERPRETED=False, device=lambda: torch.device("cuda", current[-1]))
    for name, fake in {"triton": triton, "cairn.kernels.cuda": package, "cairn.kernels.cuda.device": module}.items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_capability": lambda _: (9, 0),
        "get_device_name": lambda _: "NVIDIA H100",
        "get_device_properties": lambda _: SimpleNamespace(total_memory=80 << 30),
        "set_device": current.append,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return current


class Opener:
    """`open_model` that writes down whether FP8 was to stay; changes what it opens, if asked to."""

    def __init__(self, **changes) -> None:
        self.kept: list[bool] = []
        self._changes = changes

    def __call__(self, folder, dtype, quantization, keeps):
        self.kept.append(keeps)
        opened = open_model(folder, dtype, quantization, keeps)
        return replace(opened, config=replace(opened.config, **self._changes)) if self._changes else opened


def machine(folder, num_gpus=0) -> Machine:
    """One whose driver lists so many GPUs."""
    for number in range(num_gpus):
        (folder / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True, exist_ok=True)
    return Machine(folder)


@pytest.mark.parametrize(("settings", "keeps"), [({}, "gpu_codes"), ({"exact": True}, None)])
@pytest.mark.usefixtures("gpus")
def test_auto_is_a_gpu_that_can_be_used(tiny_model, tmp_path, caplog, settings, keeps):
    caplog.set_level("INFO")
    opener, asked = Opener(), EngineConfig(model=str(tiny_model), **settings)
    config, _ = open_for_device(asked, opener, machine(tmp_path))
    assert config == asked.model_copy(update={"device": "cuda"}) and opener.kept == [keeps]
    line = "--device cuda: auto, and there is an NVIDIA GPU that can be used: NVIDIA H100"
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("INFO", line)]


@pytest.mark.parametrize(
    ("hidden", "num_gpus", "level"), [(None, 0, "INFO"), ("", 1, "INFO"), ("-1", 1, "INFO"), ("0", 1, "WARNING")]
)
def test_auto_without_a_gpu_is_the_cpu(tiny_model, tmp_path, monkeypatch, caplog, hidden, num_gpus, level):
    """Which is no news, but where the driver has one that torch does not see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    caplog.set_level("INFO")
    opener, asked = Opener(), EngineConfig(model=str(tiny_model))
    config, opened = open_for_device(asked, opener, machine(tmp_path, num_gpus))
    assert config.device == "cpu" and opener.kept[-1] == "codes" and choose_device(config, opened) == Device()
    assert [one.levelname for one in caplog.records] == [level]
    told = (
        "no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides it" if level == "INFO" else "an NVIDIA GPU that cannot be used: "
    )
    assert caplog.messages[0].startswith(f"--device cpu: auto, and there is {told}")


def fails():
    raise RuntimeError("CUDA driver initialization failed\nCompile with TORCH_USE_CUDA_DSA")


INTERPRETED = ModuleType("triton")
INTERPRETED.__dict__.update(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=True)), __version__="3.6.0")

UNUSABLE = {
    "no-triton": ([("modules", "triton", None)], {}, {}, "needs Triton"),
    "interpreted": ([("modules", "triton", INTERPRETED)], {}, {}, "TRITON_INTERPRET"),
    "no-cuda": ([("version", "cuda", None)], {}, {}, "built without CUDA"),
    "old": ([("cuda", "get_device_capability", lambda _: (7, 5))], {}, {}, r"compute capability 7\.5"),
    "one-old": ([("cuda", "get_device_capability", lambda n: (9 - n, 0))], {"tensor_parallel_size": 3}, {}, "ity 7.0"),
    "few": ([], {"tensor_parallel_size": 4}, {}, "--tensor-parallel-size 4: .* torch sees 3"),
    "broken": ([("cuda", "device_count", fails)], {}, {}, "CUDA fails: CUDA driver initialization failed$"),
    "one-small": (
        [("cuda", "get_device_properties", lambda number: SimpleNamespace(total_memory=80 << (30 - 15 * number)))],
        {"tensor_parallel_size": 2},
        {},
        r"\d+ bytes of weights of each of 2 ranks do not fit into the 2359296 ",
    ),
    "vocabulary": ([], {}, {"vocab_size": 1 << 20}, "draws from at most 524287 tokens"),
    "small": (
        [("cuda", "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 20))],
        {"gpu_memory_utilization": 0.5},
        {},
        r"^--device cpu: .* \d+ bytes of weights do not fit into the 524288 that --gpu-memory-utilization gives$",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
@pytest.mark.usefixtures("gpus")
def test_auto_is_the_cpu_where_a_gpu_cannot_be_used_and_says_why(tiny_model, tmp_path, monkeypatch, caplog, case):
    changes, settings, fields, reason = UNUSABLE[case]
    for where, name, value in changes:
        if where == "modules":
            monkeypatch.setitem(sys.modules, name, value)
        else:
            monkeypatch.setattr(getattr(torch, where), name, value)
    caplog.set_level("INFO")
    opener = Opener(**fields)
    config, opened = open_for_device(EngineConfig(model=str(tiny_model), **settings), opener, machine(tmp_path))
    assert config.device == "cpu" and opener.kept == ["gpu_codes", "codes"] and not opened.stays_as_stored
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert re.search(reason, caplog.messages[0])


def test_a_device_that_is_asked_for_is_taken(tiny_model, tmp_path, gpus, caplog):
    caplog.set_level("INFO")
    for device in ("cpu", "cuda"):
        opener, asked = Opener(), EngineConfig(model=str(tiny_model), device=device)
        assert open_for_device(asked, opener, machine(tmp_path, 1))[0] == asked
        assert opener.kept == ["gpu_codes" if device == "cuda" else "codes"] and not caplog.records


@pytest.mark.usefixtures("gpus")
def test_all_ranks_compute_on_what_auto_is(tiny_model, monkeypatch):
    told = []

    def load_ranks(config, device):
        told.append((config.engine.device, device.place))
        raise ConfigError("no GPUs today")

    monkeypatch.setattr("cairn.engine.build.load_ranks", load_ranks)
    with pytest.raises(ConfigError, match="no GPUs today"):
        build_core(EngineConfig(model=str(tiny_model), tensor_parallel_size=2))
    assert told == [("cuda", torch.device("cuda", 0))]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"quantization": "int8"}, "--quantization int8"),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_a_flag_never_moves_the_server_to_another_device(tiny_model, settings, flag):
    """It is refused by name, with both ways out."""
    with pytest.raises(ConfigError, match=f"^{flag}.*: not with --device cuda .*leave it out, or .*--device cpu$"):
        build_core(EngineConfig(model=str(tiny_model), **settings))


def test_what_nobody_has_decided_is_the_cpu(tiny_model):
    for device in ("auto", "cpu"):
        assert choose_device(EngineConfig(model=str(tiny_model), device=device), open_model(tiny_model)) == Device()


def test_what_does_not_go_together_with_a_gpu(tiny_model):
    with pytest.raises(ConfigError, match=r"^--quantization int8: not with --device cuda .* take int4"):
        build_core(EngineConfig(model=str(tiny_model), device="cuda", quantization="int8"))


def test_exact_has_kernels_of_its_own(tiny_model, monkeypatch):
    monkeypatch.setattr(devices, "check_device", lambda dtype, head_dim, rank, num_ranks: None)
    place = ModuleType("device")
    place.device, place.INTERPRETED = lambda: torch.device("cpu"), True
    monkeypatch.setitem(sys.modules, "cairn.kernels.cuda.device", place)
    monkeypatch.setitem(sys.modules, "cairn.kernels.cuda", ModuleType("cuda"))
    for settings, backend in (({}, "cuda"), ({"exact": True}, "cuda_exact"), ({"quantization": "int4"}, "cuda")):
        config = EngineConfig(model=str(tiny_model), device="cuda", **settings)
        assert choose_device(config, open_model(tiny_model)) == Device(backend, torch.device("cpu"), 2)


@pytest.mark.skipif(
    find_spec("triton") is not None or torch.cuda.is_available(), reason="there is what is missing here"
)
def test_what_the_machine_lacks_is_said_before_weights_are_read(tiny_model, tmp_path):
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    with pytest.raises(ConfigError, match="needs Triton"):
        choose_device(EngineConfig(model=str(tmp_path), device="cuda"), open_model(tmp_path))


def test_the_largest_step_is_carried_out_and_what_it_takes_is_left_out(tiny_model, monkeypatch):
    opened = open_model(tiny_model)
    model, layout = opened.build(exact=False), opened.layout(16)
    config = OPEN.model_copy(update={"max_num_batched_tokens": 100, "gpu_memory_utilization": 0.5, "max_num_seqs": 2})
    ran = []
    forward = Model.forward

    def counted(model, batch, memory):
        ran.append((batch.host.num_tokens, batch.host.snapshot_offsets.tolist()))
        return forward(model, batch, memory)

    monkeypatch.setattr(Model, "forward", counted)
    logits, own = 2 * model.vocab_size * 8, profiled(model, layout, 100)
    memory = FakeMemory(taken=20, total=2 * (1000 + logits), step=own + 7)
    when = []

    def barrier(place):
        memory.calls.append(place)
        when.append(len(ran))

    found = measure_memory(config, model, layout, memory, None, barrier)
    assert (found.left, found.step, found.process, found.logits) == (1000 - 20 - 7, 7, 20, logits)
    assert memory.calls == ["start", "in the largest step", "peak", *5 * ["in the small steps"], "free"]
    # the largest with the snapshots that such a prompt may have, and one of a decode and of the 70 tokens behind a hit,
    # which ends off the grid; both are out when other ranks are waited for, and those that only compile two at a time
    assert [num_tokens for num_tokens, _ in ran] == [100, 71, 1, 2, 4, 8, 16, 32, 64, 1, 1]
    assert when == [2, 4, 6, 8, 10, 11]
    assert ran[0][1] == [64, 100]
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization 0\.5 of \d+ bytes is \d+; 993 are taken, .* nothing is left"
    ):
        measure_memory(config, model, layout, FakeMemory(taken=993, total=2 * (1000 + logits), step=own + 7))
    # Whoever says how large the pool is may have all of the GPU, as in vLLM.
    asked = config.model_copy(update={"kv_cache_memory_bytes": 5})
    all_of_it = measure_memory(asked, model, layout, FakeMemory(taken=20, total=1000 + logits, step=own + 7))
    assert all_of_it.left == 1000 - 20 - 7


def test_what_was_compiled_is_tried_out_last(tiny_model, monkeypatch):
    opened = open_model(tiny_model)
    model, layout = opened.build(exact=False), opened.layout(16)
    config = OPEN.model_copy(update={"max_num_batched_tokens": 64})
    monkeypatch.setattr(devices, "_is_compiled", lambda model: True)
    when: list[str] = []
    measure_memory(config, model, layout, FakeMemory(taken=20, total=10**9, step=7), None, when.append)
    assert when.count("in the check of the kernels") == 36 and when[-1] == "in the check of the kernels"
    monkeypatch.setattr(kernel_check, "LEAST_CORRELATION", 2.0)
    with pytest.raises(ConfigError, match="TRITON_PTXAS_PATH"):
        measure_memory(config, model, layout, FakeMemory(taken=20, total=10**9, step=7))


def test_what_the_profile_run_took_is_free_again_when_it_is_asked_what_is(tiny_model):
    """Without waiting for a collection of cycles, which graphs and runners could be in."""
    opened = open_model(tiny_model)
    model, layout = opened.build(exact=False), opened.layout(16)
    pools: list[weakref.ref] = []
    init, gone = Runner.__init__, []

    def remembered(runner, *arguments, **named):
        init(runner, *arguments, **named)
        pools.append(weakref.ref(runner.pool))

    memory = FakeMemory(taken=20, total=10**9, step=7)
    memory.free_and_total = lambda: gone.append(pools[0]() is None) or (10**9 - 20, 10**9)
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "__init__", remembered)
            measure_memory(OPEN.model_copy(update={"max_num_batched_tokens": 64}), model, layout, memory)
    finally:
        gc.enable()
    assert gone == [True]


@pytest.fixture
def gpu_statistics(monkeypatch):
    """torch's numbers of a GPU that is not there."""
    numbers = {"memory_allocated": 100, "memory_reserved": 200, "max_memory_allocated": 0, "max_memory_reserved": 0}
    for name in numbers:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: numbers[name])
    asked: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: asked.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append("reset"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append("info") or (30, 90))
    return numbers, asked


def test_a_peak_is_what_the_allocator_has_taken_of_the_driver(gpu_statistics):
    numbers, asked = gpu_statistics
    memory = CudaMemory(torch.device("cuda", 0))
    memory.start_peak()
    assert asked == ["collect", "empty", "reset"]
    numbers |= {"max_memory_allocated": 150, "max_memory_reserved": 290}
    assert memory.peak_growth() == 90
    # what fits into pieces that were there before
    numbers["max_memory_reserved"] = 200
    assert memory.peak_growth() == 50
    assert memory.free_and_total() == (30, 90) and asked[-3:] == ["collect", "empty", "info"]


@pytest.mark.parametrize(("free", "level"), [(700, "INFO"), (699, "WARNING")])
def test_what_is_left_in_the_end_is_told(caplog, free, level):
    caplog.set_level("INFO")
    report_free(FakeMemory(taken=1000 - free, total=1000, step=0), 700)
    assert [record.levelname for record in caplog.records] == [level]
    assert f"{free} of the GPU's 1000 bytes are free" in caplog.text
    assert ("lower --gpu-memory-utilization" in caplog.text) == (level == "WARNING")


@pytest.mark.parametrize("rank", [0, 2])
def test_each_rank_computes_on_the_gpu_of_its_number(tiny_model, gpus, rank):
    """Kernels are launched on the current one."""
    config = EngineConfig(model=str(tiny_model), device="cuda", tensor_parallel_size=3)
    found = choose_device(config, open_model(tiny_model), rank)
    assert (found.place, found.max_in_flight, gpus) == (torch.device("cuda", rank), 2, [rank])
    with pytest.raises(ConfigError, match=r"^--tensor-parallel-size 4: .* torch sees 3"):
        choose_device(config.model_copy(update={"tensor_parallel_size": 4}), open_model(tiny_model))


def test_check_counts_what_the_engine_does(tiny_vl_model):
    """Weights, vision tower, kept images, logits and running states; what is left is the pool, but for what the largest
    step's layers take, which is found out where the GPU is. Nothing of the host's is counted, and images are encoded
    in the largest step."""
    opened = open_model(tiny_vl_model, "float32")
    model, layout = opened.build(exact=False, backend="reference"), opened.layout(16)
    model = replace(model, kernels=SimpleNamespace(**vars(model.kernels) | {"sampling_bytes": sampling_bytes}))
    process = guess_process_bytes(1)
    vision = open_vision(tiny_vl_model, opened.dtype, 3 << 20)
    weights = sum(tensor.nbytes for tensor in parts_of(replace(model, rotaries=()), torch.Tensor))
    weights += sum(tensor.nbytes for tensor in vision._tower._module.state_dict().values())
    lengths: list[int] = []
    vision._tower._module.register_forward_pre_hook(lambda module, arguments: lengths.append(len(arguments[0])))
    for num_seqs, max_model_len in ((4, 20), (1, 3)):
        limits = {"max_num_seqs": num_seqs, "max_model_len": max_model_len}
        config = OPEN.model_copy(update={"max_num_batched_tokens": 64, "gpu_memory_utilization": 0.5} | limits)
        layers = 54321
        memory = FakeMemory(weights + process, 4 << 30, profiled(model, layout, 64) + layers)
        measured = measure_memory(config, model, layout, memory, vision)
        room, found = measured.left, plan_memory(measured, config, layout, model.spec, max_model_len)
        counted = CheckSettings(
            dtype="float32",
            gpu_memory_bytes=4 << 30,
            gpu_memory_utilization=0.5,
            mm_encoder_cache_bytes=3 << 20,
            **limits,
        )
        report = check(tiny_vl_model, counted)
        assert report.weight_bytes == weights
        plan = report.plan
        assert plan.slot == found.slot and plan.num_slots == found.num_slots == num_seqs
        assert (plan.logits, plan.images, plan.usable) == (found.logits, found.images, found.usable)
        assert plan.pool - layers + plan.graphs == found.pool
    assert lengths == [80, 12]  # four patches a token
    memory = FakeMemory(weights + process, 4 << 30, profiled(model, layout, 64) + layers)
    with_none = measure_memory(config, model, layout, memory).left
    assert with_none - room == 3 << 20 and len(lengths) == 2


def test_the_largest_image_is_as_large_as_a_request_may_have_it(tiny_vl_model):
    tower = open_vision(tiny_vl_model, torch.float32, 0)._tower
    sizes: list[tuple[int, ...]] = []
    tower._forward = lambda pixels, grid: sizes.append((*pixels.shape, *grid[0].tolist()))
    for limits in ((1, None), (MAX_IMAGE_AREA, None), (MAX_IMAGE_AREA, 100), (MAX_IMAGE_AREA, 0)):
        tower.encode_largest(*limits)
    # the checkpoint allows 1,024 x 1,024 pixels, in tokens of 32 x 32
    width = 3 * 2 * 16 * 16
    assert [one[:2] for one in sizes] == [(4 * tokens, width) for tokens in (1024, 16384, 100, 1)]
    assert all(frames * rows * columns == patches for patches, _, frames, rows, columns in sizes)


class CountedGraphs:
    """Each takes memory that has been written down for its turn."""

    def __init__(self, memory: FakeMemory, *growths: int) -> None:
        self._memory, self._growths = memory, list(growths)

    def capture(self, run):
        self._memory.taken += self._growths.pop(0)
        return lambda: None


@pytest.fixture
def nothing_is_captured(monkeypatch):
    """The CPU's kernels have nothing for graphs."""
    build_metadata = cpu.build_metadata
    monkeypatch.setattr(
        cpu,
        "build_metadata",
        lambda host, staging: None if host.max_seq_len is not None else build_metadata(host, staging),
    )
    monkeypatch.setattr(DecodeGraphs, "_run", lambda *arguments: None)


@pytest.mark.usefixtures("nothing_is_captured")
def test_graphs_are_estimated_from_the_two_largest_and_left_out_of_the_pool(tiny_model):
    opened = open_model(tiny_model)
    model, layout = opened.build(exact=False), opened.layout(16)
    config = OPEN.model_copy(update={"max_num_batched_tokens": 100, "max_num_seqs": 16})
    memory = FakeMemory(taken=20, total=10**9, step=7)
    plain = measure_memory(config, model, layout, FakeMemory(taken=20, total=10**9, step=7)).left
    sizes = graph_sizes(config, 16)
    assert sizes == (1, 2, 4, 8, 16)
    capture = DecodeCapture(lambda: CountedGraphs(memory, 5000, 30), sizes, 4096)
    # Of this double's graphs nothing is given back; on a GPU it is.
    found = measure_memory(config, model, layout, memory, capture=capture).left
    assert found == plain - 5030 - (5000 + 4 * 30)


@pytest.mark.usefixtures("nothing_is_captured")
def test_what_graphs_take_is_logged(tiny_model, caplog):
    opened = open_model(tiny_model)
    model, layout = opened.build(exact=False), opened.layout(16)
    memory = FakeMemory(taken=20, total=10**9, step=7)
    runner = Runner(model, layout, 20, 4, exact=False)
    with caplog.at_level("INFO"):
        DecodeCapture(lambda: CountedGraphs(memory, 500, 30), (2, 4), 64).run(runner, ManualClock(), memory)
    assert "CUDA graphs of 2 sizes of decode steps, 2 to 4 rows: 0.0 s, 530 bytes" in caplog.text


@pytest.mark.usefixtures("nothing_is_captured")
def test_ranks_meet_before_and_after_every_graph(tiny_model):
    """Before: a recording begins with a wait for the device, which waits for whoever is missing."""
    opened = open_model(tiny_model)
    runner = Runner(opened.build(exact=False), opened.layout(16), 20, 4, exact=False)
    log: list[str] = []

    class Graphs:
        def capture(self, run):
            log.append("capture")
            return run

    DecodeCapture(Graphs, (2, 4), 64).run(runner, ManualClock(), barrier=log.append)
    assert log == [
        what
        for size in (4, 2)
        for what in (
            f"ready to capture a CUDA graph of {size} rows",
            "capture",
            f"done with the CUDA graph of {size} rows",
        )
    ]
    slots = np.zeros(1, np.int32)
    plan = StepPlan(1, decodes=DecodeRows(slots, slots, np.zeros(1, np.int64), slots))
    assert runner._graphs.shape_for(plan) == PassShape(2)
    runner.close()
    assert runner._graphs.shape_for(plan) is None


@pytest.mark.parametrize(
    ("error", "wanted", "text"),
    [
        (
            RuntimeError("CUDA error: no\nFor debugging"),
            ConfigError,
            r"of 2 to 4 rows .* \(CUDA error: no\): start with",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), ConfigError, r"\(CUDA out of memory\. Tried\)"),
        (EngineDead("rank 1 has ended"), EngineDead, r"^while CUDA graphs .*--enforce-eager\): rank 1 has ended"),
        (ConfigError("rank 1 has refused"), ConfigError, "^rank 1 has refused$"),
    ],
)
def test_what_cannot_be_captured_says_how_to_do_without(error, wanted, text):
    def refuse(*_):
        raise error

    with pytest.raises(wanted, match=text):
        DecodeCapture(lambda: None, (2, 4), 64).run(SimpleNamespace(rank=1, capture_graphs=refuse), ManualClock())


def test_a_rank_that_waits_for_others_in_a_recording_ends(monkeypatch, caplog):
    ended, codes = threading.Event(), []

    def end(code):
        codes.append(code)
        ended.set()

    monkeypatch.setattr(decode_capture, "_CAPTURE_SECONDS", 0.05)
    monkeypatch.setattr(devices.os, "_exit", end)

    def wait_in_the_second(_graphs, sizes, _max_model_len, captured, warmed):
        for size, seconds in zip(sizes, (0.0, 30.0), strict=True):
            warmed(size)
            ended.wait(seconds)
            captured(size)

    runner = SimpleNamespace(rank=1, capture_graphs=wait_in_the_second)
    DecodeCapture(lambda: None, (2, 4), 64).run(runner, ManualClock())
    assert codes == [1] and "rank 1 has not captured the CUDA graph of 4 rows within 0.05 s" in caplog.text


def test_a_recording_that_fails_says_why():
    """Not that it could not be ended, which comes after that."""

    @contextmanager
    def recording():
        try:
            yield
        finally:
            raise RuntimeError("the recording is invalid")

    class Graphs:
        def capture(self, run):
            with recording():
                raise RuntimeError("a synchronization")

    runner = SimpleNamespace(rank=3, capture_graphs=lambda graphs, *_: graphs.capture(None))
    with pytest.raises(ConfigError, match=r"on rank 3 \(a synchronization\): start with --enforce-eager"):
        DecodeCapture(Graphs, (2, 4), 64).run(runner, ManualClock())


@pytest.mark.parametrize(
    ("settings", "max_num_seqs", "sizes"),
    [
        ({}, 1, (1,)),
        ({}, 3, (1, 2, 3)),
        ({}, 20, (1, 2, 4, 8, 16, 20)),
        ({}, 64, (1, 2, 4, *range(8, 65, 8))),
        ({}, 2000, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        ({"max_cudagraph_capture_size": 10}, 64, (1, 2, 4, 8, 10)),
        ({"max_cudagraph_capture_size": 0}, 64, ()),
        ({"enforce_eager": True}, 64, ()),
        ({"cudagraph_capture_sizes": [7, 3, 3, 99]}, 64, (3, 7)),
    ],
)
def test_sizes_of_graphs(settings, max_num_seqs, sizes):
    assert graph_sizes(OPEN.model_copy(update=settings), max_num_seqs) == sizes


def test_sizes_that_no_batch_has_are_refused():
    config = OPEN.model_copy(update={"cudagraph_capture_sizes": [65, 99]})
    with pytest.raises(ConfigError, match=r"^--cudagraph-capture-sizes: all are above 64 rows"):
        graph_sizes(config, 64)


def test_too_little_memory_is_said_and_not_on_the_cpu():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")
    with (
        pytest.raises(ConfigError, match=r"does not suffice \(CUDA out of memory\): free it"),
        explain_out_of_memory(GPU),
    ):
        raise error
    with pytest.raises(torch.OutOfMemoryError), explain_out_of_memory(Device()):
        raise error
    with pytest.raises(ConfigError, match=r"\(Triton Error \[CUDA\]: out of memory\)"), explain_out_of_memory(GPU):
        raise RuntimeError("Triton Error [CUDA]: out of memory")
    with pytest.raises(RuntimeError, match="illegal"), explain_out_of_memory(GPU):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_gpu_that_refuses_is_named(monkeypatch):
    """One that another process has in exclusive mode, or has filled: CUDA says so when it begins, not when it looks."""

    def refuse():
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for ...")

    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(
        ConfigError, match=r"^--device cuda: GPU 3 takes no work \(CUDA error: .* unavailable\): see nv"
    ):
        devices._begin_on_gpu(3)


def divided(config, room, slot=SLOT):
    return divide_memory(MemoryPlan(on_gpu=True, usable=room, slot=slot), config, LAYOUT)


def test_all_that_a_gpu_has_left_is_pool_and_states():
    found = divided(OPEN, 40 * GIB)
    assert found.num_slots == 256
    assert 0.85 * 40 * GIB < found.pool + found.states <= 40 * GIB
    few = OPEN.model_copy(update={"max_num_seqs": 4})
    assert divided(few, 40 * GIB).pool == 40 * GIB - 5 * SLOT
    least = least_pages(LAYOUT) * LAYOUT.page_bytes + 5 * SLOT
    assert divided(few, least).num_slots == 4
    with pytest.raises(ConfigError, match="does not fit into memory"):
        divided(few, least - 1)


def test_whatever_is_fixed_is_not_divided():
    fixed = {"weights": 1, "process": 2, "step": 4, "logits": 8, "images": 16, "graphs": 32, "host_cache": 64}
    plan = MemoryPlan(on_gpu=True, usable=GIB + 127, slot=SLOT, **fixed)
    assert divide_memory(plan, OPEN, LAYOUT) == replace(divided(OPEN, GIB), usable=GIB + 127, **fixed)


@pytest.mark.parametrize("room", [2 * (1 << 20) + 2**18, 30 << 20, 100 << 20, 1 << 30, 60 * GIB])
@pytest.mark.parametrize("slot", [1, 100_000, 1 << 20])
def test_pool_and_slots_never_take_more_than_there_is(room, slot):
    """Also where the room is for few requests, of which there is at least one."""
    least = least_pages(LAYOUT) * LAYOUT.page_bytes + 2 * slot
    if room < least:
        with pytest.raises(ConfigError):
            divided(OPEN, room, slot)
        room = least
    found = divided(OPEN, room, slot)
    assert found.num_slots >= 1
    assert found.pool + found.states <= room


class Event:
    """One that is complete when it has been asked so often."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_the_host_waits_for_the_copy_and_not_forever(monkeypatch):
    event = Event(3)
    Readback._wait_event(event)
    assert event.left < 0
    monkeypatch.setattr(staging, "_DEVICE_SECONDS", 0.0)
    with pytest.raises(staging.EngineDead, match="the GPU has not finished a step"):
        Readback._wait_event(Event(10**9))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer: .* --device cuda only"),
        ({"attention_backend": "TRITON_ATTN", "device": "cpu"}, "--attention-backend triton: .* --device cuda only"),
        ({"gdn_prefill_backend": "fla"}, "--gdn-prefill-backend fla: .* --device cuda only"),
    ],
)
def test_other_kernels_are_a_gpus(tiny_model, settings, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        choose_device(EngineConfig(model=str(tiny_model), **settings), open_model(tiny_model))


def test_flashinfer_is_asked_for_the_layers_that_see_all_tokens(made_model):
    """Which have heads of another size than those with windows, and so other pages."""
    opened = open_model(made_model("gemma4"))
    spec = opened.config.cache_spec().memory_spec(opened.dtype, torch.device("cpu"))
    config = EngineConfig(model="m", block_size=16)
    attention, page_size = devices.plain_attention(config, opened, spec)
    layout = opened.config.layout(16, 4)
    windowed = next(each for each in spec.attention if each.reach is not None)
    assert attention.reach is None and attention.head_dim == 2 * windowed.head_dim
    assert page_size == next(group.tokens_per_page for group in layout.groups if group.reach is None)
    groups = tuple(group for group in layout.groups if group.reach is not None)
    for number, said in ((1, "no layer of the model sees all tokens"), (0, "the model has no attention")):
        kept = replace(layout, groups=groups[:number])
        less = SimpleNamespace(dtype=opened.dtype, config=SimpleNamespace(layout=lambda *sizes, kept=kept: kept))
        with pytest.raises(ConfigError, match=f"--attention-backend flashinfer: {said}: leave it out"):
            devices.plain_attention(config, less, replace(spec, attention=(windowed,)[:number]))


def test_a_model_without_attention_has_its_largest_step_measured():
    """Its sequences have no pages, and its checkpoints have."""
    driver = tiny("M-", exact=False)
    assert driver.layout.pages_for(100) == 0
    config = OPEN.model_copy(update={"max_num_batched_tokens": 100, "max_num_seqs": 2})
    memory = FakeMemory(taken=20, total=10**9, step=profiled(driver.model, driver.layout, 100) + 7)
    assert measure_memory(config, driver.model, driver.layout, memory).step == 7
