"""No kernel is launched at the shapes of Nemotron-3-Nano-30B-A3B and Qwen3.5-35B-A3B with constants or options that
`cuda_configurations` does not name: what is compiled without a GPU is what a GPU will be asked for."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backends import INTERPRETED

if not INTERPRETED:
    pytest.skip("kernels are not interpreted", allow_module_level=True)

from benchmarks import gpu_kernels

from cairn.kernels import cuda
from cairn.kernels.cuda import fp8
from cairn.kernels.sampling.metadata import SamplingMetadata, TokenHistory
from cairn.kernels.staging import Staging
from cairn.types import SamplingParams
from kernels.cuda_configurations import CONFIGURATIONS, configurations, module_of

Launch = tuple[str, frozenset[tuple[str, object]]]
"""A kernel's name behind its module's, its constants and options."""


class Recorder:
    """Stands where a kernel stood, and is launched like one."""

    def __init__(self, name: str, launches: set[Launch]) -> None:
        self._name = name
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*operands: object, **more: object) -> None:
            self._launches.add((self._name, frozenset(more.items())))

        return launch


def named(name: str) -> set[Launch]:
    return {
        (f"{name}.{kernel.fn.__name__}", frozenset({**constants, **options}.items()))
        for kernel, _, constants, options in configurations(name)
    }


def one_number(seed: int, *shape: int, dtype: torch.dtype = torch.float32, **_: float) -> Tensor:
    """In the place of random ones: of any shape, in no memory."""
    return torch.zeros(1, dtype=dtype).expand(shape)


def draw_every_way() -> None:
    """Of vocabularies as those two models have."""
    for vocab_size in (131_072, 248_320):
        cuda.logprobs(one_number(0, 1, vocab_size), torch.zeros(1, dtype=torch.int64), 3)
        mask = np.full(vocab_size // 32, -1, np.int32)
        for params in (SamplingParams(0.0), SamplingParams(0.8, 0, 0.9, repetition_penalty=1.2, bad_words=((5,),))):
            for allowed in (None, mask):
                staging = Staging()
                counts = cuda.token_counts(1, vocab_size)
                counts.admit([TokenHistory(0, np.arange(9), np.arange(9))], staging)()
                sampler = cuda.sampler([params], [9], vocab_size, staging)
                sampler.sample(one_number(0, 1, vocab_size), [0], [SamplingMetadata(params, 9, allowed)], counts)


def test_every_launch_at_models_shapes_is_a_named_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu_kernels, "random", one_number)
    known: set[Launch] = set()
    launches: set[Launch] = set()
    names = [name for name in CONFIGURATIONS if not name.startswith("exact_")]
    for name in names:
        module = module_of(name)
        known |= named(name)
        for key in [key for key in vars(module) if key.endswith("_kernel")]:
            monkeypatch.setattr(module, key, Recorder(f"{name}.{key}", launches))
    by_cublas = SimpleNamespace(linear=lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[0]))
    monkeypatch.setattr(fp8, "_scaled_product", by_cublas.linear)
    monkeypatch.setattr(fp8, "F", by_cublas)
    for case in gpu_kernels.cases(tuple(gpu_kernels.MODELS)):
        if case.load.num_tokens <= 8192:
            case.call(cuda, case.operands(0))()
    draw_every_way()
    # flashinfer's is launched where that is asked for, and has one variant.
    assert {name.partition(".")[0] for name, _ in launches} == {*names} - {"flashinfer_attention"}
    unknown = launches - known
    assert not unknown, unknown
