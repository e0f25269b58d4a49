"""Which device the engine takes, and what a GPU has left for the pool. Nothing here has a GPU."""

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from cairn.engine import devices
from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig
from cairn.engine.contract.config import KvTransferConfig
from cairn.engine.devices import Device, choose_device, explain_out_of_memory, measure_room
from cairn.engine.sizing import choose_memory_sizes, least_pages
from cairn.errors import ConfigError
from cairn.kernels import staging
from cairn.kernels.staging import Readback
from cairn.layers.model import Model
from cairn.models.registry import open_model
from engine.test_sizing import GIB, LAYOUT

OPEN = EngineConfig(model="m", kv_cache_memory_bytes=None, max_num_seqs=None, device="cuda")


GPU = Device("cuda", torch.device("cuda"))


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


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu_unless_asked(tiny_model, device):
    config = EngineConfig(model=str(tiny_model), device=device)
    assert choose_device(config, open_model(tiny_model)) == Device()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"quantization": "int8"}, "--quantization int8"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"kv_transfer": KvTransferConfig()}, "--kv-transfer-config"),
    ],
)
def test_what_does_not_go_together_with_a_gpu(tiny_model, settings, flag):
    with pytest.raises(ConfigError, match=f"^{flag}: not with --device cuda"):
        build_core(EngineConfig(model=str(tiny_model), device="cuda", **settings))


def test_exact_has_kernels_of_its_own(tiny_model, monkeypatch):
    monkeypatch.setattr(devices, "check_device", lambda dtype, head_dim: None)
    place = ModuleType("device")
    place.device = lambda: torch.device("cpu")
    monkeypatch.setitem(sys.modules, "cairn.kernels.cuda.device", place)
    monkeypatch.setitem(sys.modules, "cairn.kernels.cuda", ModuleType("cuda"))
    for is_exact, backend in ((False, "cuda"), (True, "cuda_exact")):
        config = EngineConfig(model=str(tiny_model), device="cuda", exact=is_exact)
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
        ran.append(batch.host.num_rows)
        return forward(model, batch, memory)

    monkeypatch.setattr(Model, "forward", counted)
    logits = 2 * model.vocab_size * 8
    memory = FakeMemory(taken=20, total=2 * (1000 + logits), step=7)
    assert measure_room(config, model, layout, memory) == 1000 - 20 - 7
    assert ran == [100] and memory.calls == ["start", "peak", "free"]
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization 0\.5 of \d+ bytes is \d+; 993 are taken, .* nothing is left"
    ):
        measure_room(config, model, layout, FakeMemory(taken=993, total=2 * (1000 + logits), step=7))


def test_too_little_memory_is_said_and_not_on_the_cpu():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")
    with (
        pytest.raises(ConfigError, match=r"does not suffice \(CUDA out of memory\): free it"),
        explain_out_of_memory(GPU),
    ):
        raise error
    with pytest.raises(torch.OutOfMemoryError), explain_out_of_memory(Device()):
        raise error


def test_all_that_a_gpu_has_left_is_pool_and_states():
    found = choose_memory_sizes(OPEN, LAYOUT, 0, 40 * GIB, on_gpu=True)
    states = found.max_num_seqs * LAYOUT.checkpoint_bytes
    assert found.max_num_seqs == 256
    assert 0.85 * 40 * GIB < found.kv_cache_memory_bytes + states <= 40 * GIB
    few = OPEN.model_copy(update={"max_num_seqs": 4})
    found = choose_memory_sizes(few, LAYOUT, 0, 40 * GIB, on_gpu=True)
    assert found.kv_cache_memory_bytes == 40 * GIB - 4 * LAYOUT.checkpoint_bytes
    with pytest.raises(ConfigError, match="does not fit into memory"):
        too_small = least_pages(LAYOUT) * LAYOUT.page_bytes - 1
        choose_memory_sizes(few, LAYOUT, 0, too_small, on_gpu=True)


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
