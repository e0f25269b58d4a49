"""What loading copies: products' weights go from files to where they stay, and nothing stays in the files' memory."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.kernels.cpu import huge_pages
from cairn.kernels.cpu.panels import has_panels
from cairn.models.registry import open_model
from cairn.models.weights.read_ahead import ReadAhead
from cairn.models.weights.tensor_source import MappedFiles
from models.packed_checkpoints import FORMATS, write_packed
from models.test_served_int8 import parts_of
from tiers import more

PLAIN = "plain"


class MadeBytes(TorchDispatchMode):
    """The bytes of all that operations make in memory of its own."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in tensors_of((args, kwargs))}
        fresh = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in tensors_of(result)}
        self.num_bytes += sum(size for place, size in fresh.items() if place not in given)
        return result


def tensors_of(value: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


Writer = Callable[[str, torch.dtype], Path]


@pytest.fixture
def write(made_model: Any, tmp_path: Path) -> Writer:
    """A checkpoint in one of the formats, or `PLAIN`; what is in none is in this dtype."""

    def write(name: str, dtype: torch.dtype) -> Path:
        codes = tmp_path / "codes"
        if name == PLAIN:
            shutil.copytree(made_model("qwen3_5"), codes)
        else:
            write_packed(made_model("qwen3_5"), codes, tmp_path / "same", FORMATS[name])
        for file in codes.glob("*.safetensors"):
            save_file({name: in_dtype(name, part, dtype) for name, part in load_file(file).items()}, file)
        return codes

    return write


def in_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if name.endswith(".weight") and tensor.dtype == torch.float32 else tensor


@pytest.mark.parametrize("name", [PLAIN, "W4A16", *map(more, ("W8A8", "AWQ", "GPTQ desc_act", "compressed NVFP4"))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_of_a_model_is_in_the_files_memory(
    name: str, dtype: torch.dtype, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensor] = []
    read = MappedFiles.read

    def keep(self: MappedFiles, *part: Any) -> Tensor:
        given.append(read(self, *part))
        return given[-1]

    monkeypatch.setattr(MappedFiles, "read", keep)
    served_in: Any = str(dtype).removeprefix("torch.")
    tensors = parts_of(open_model(write(name, dtype), served_in, keeps="codes").build(exact=False), Tensor)
    places = {part.untyped_storage().data_ptr() for part in given}
    assert len(given) > 30 and len(tensors) > 30
    assert not any(part.untyped_storage().data_ptr() in places for part in tensors)


@pytest.mark.parametrize(
    "name", [PLAIN, "W4A16", "AWQ", "GPTQ desc_act", *map(more, ("W8A8", "W4A16 actorder", "compressed NVFP4"))]
)
def test_weights_laid_out_in_the_background_are_the_same(name: str, write: Writer) -> None:
    folder = write(name, torch.bfloat16)
    made = []
    for num_threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            model = open_model(folder, "bfloat16", keeps="codes").build(exact=False)
        finally:
            torch.set_num_threads(before)
        made.append(parts_of(model, Tensor))
    alone, beside = made
    assert len(alone) == len(beside) > 30
    for ours, theirs in zip(beside, alone, strict=True):
        # The numbers of all bytes in FP8 are among them.
        assert torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (ours, theirs)))


def test_what_is_looked_at_is_waited_for_and_nothing_else(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, biases and orders of inputs; what is laid out in the background waits by itself."""
    folder, looked_at, reached = write("GPTQ desc_act", torch.bfloat16), set[str](), set[str]()
    reach = ReadAhead.reached

    def noted(ahead: ReadAhead, name: str) -> None:
        reached.add(name)
        reach(ahead, name)

    monkeypatch.setattr(ReadAhead, "wait_for", lambda _, names: looked_at.update(names))
    monkeypatch.setattr(ReadAhead, "reached", noted)
    open_model(folder, "bfloat16", keeps="codes").build(exact=False)
    endings = {name.rpartition(".")[2] for name in looked_at}
    assert endings >= {"g_idx", "A_log", "dt_bias"} and not endings & {"qweight", "qzeros", "scales"}
    assert any(name.endswith("layernorm.weight") for name in looked_at)
    assert {name.rpartition(".")[2] for name in reached - looked_at} >= {"qweight", "qzeros", "scales"}


@pytest.mark.skipif(not has_panels(torch.bfloat16), reason="this processor has no panels")
@pytest.mark.parametrize("name", [PLAIN, "W4A16", more("compressed NVFP4")])
def test_weights_of_products_are_written_once(name: str, write: Writer) -> None:
    """Beside panels, which are no operation's result, there is what stays as it is, and little else."""
    folder = write(name, torch.bfloat16)
    opened = open_model(folder, "bfloat16", keeps="codes")
    opened.build(exact=False)
    with MadeBytes() as made:
        model = opened.build(exact=False)
    kept = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts_of(model, Tensor)}
    stays = sum(size for size in kept.values() if size < huge_pages._REGION)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert made.num_bytes - stays < 0.05 * stored
