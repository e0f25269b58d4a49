"""What is said where the CUDA backend cannot run: every limit with its fix. Machines are pretended."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cairn.errors import ConfigError
from cairn.kernels.cuda_support import check_device

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with all that is needed."""
    triton = ModuleType("triton")
    triton.__dict__.update(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)), __version__="3.6.0")
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda rank: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank: "NVIDIA H100")


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_can_run_is_let_through(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda rank: capability)
    check_device(dtype, 512)
    check_device(dtype, 0)


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"needs Triton.*install torch for CUDA.*'triton>=3\.6,<4'"):
        check_device(BF16, 128)


@pytest.mark.parametrize("version", ["3.5.1", "2.3.1", "3.3.0+git1"])
def test_a_triton_of_before(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Which knows no `knobs`."""
    old = ModuleType("triton")
    old.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "triton", old)
    with pytest.raises(ConfigError, match=r"needs Triton 3\.6 or newer, not .*install a newer torch"):
        check_device(BF16, 128)


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="built without CUDA: install one that is"):
        check_device(BF16, 128)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"sees no NVIDIA GPU: .*nvidia-smi.*CUDA 12\.8.*CUDA_VISIBLE_DEVICES"):
        check_device(BF16, 128)


def test_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda rank: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5.* needs 8\.0 .*CUDA_VISIBLE_DEVICES"):
        check_device(BF16, 128)


def test_more_ranks_than_gpus() -> None:
    check_device(BF16, 128, rank=1, num_ranks=2)
    with pytest.raises(
        ConfigError, match=r"^--tensor-parallel-size 3: .* torch sees 2: lower it to at most 2.*VISIBLE"
    ):
        check_device(BF16, 128, num_ranks=3)


def test_each_rank_looks_at_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda rank: [(9, 0), (7, 0)][rank])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank: ["NVIDIA H100", "Tesla V100"][rank])
    check_device(BF16, 128, rank=0, num_ranks=2)
    with pytest.raises(ConfigError, match=r"Tesla V100 has compute capability 7\.0"):
        check_device(BF16, 128, rank=1, num_ranks=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_another_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"bfloat16 and float32, not in float(16|64): .*--dtype"):
        check_device(dtype, 128)


def test_wider_heads() -> None:
    with pytest.raises(ConfigError, match=r"at most 512 numbers, and the model's have 1024 \(head_dim"):
        check_device(BF16, 1024)


def test_interpreted_kernels_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.modules["triton"].knobs.runtime.interpret = True
    monkeypatch.setattr(torch.version, "cuda", None)
    check_device(BF16, 128)
    with pytest.raises(ConfigError, match="head_dim"):
        check_device(BF16, 1024)
