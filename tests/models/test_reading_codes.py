"""Matrices in codes are read in bounded memory, and become memory of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.errors import ModelError
from cairn.kernels.quantized import QuantizedWeight
from cairn.models.registry import open_model
from cairn.models.weights import transposes
from cairn.models.weights.integer_layouts import _order
from cairn.models.weights.loader import WeightReader
from cairn.models.weights.packed_layouts import Coding
from cairn.models.weights.tensor_source import MappedFiles
from cairn.models.weights.transposes import join_codes, order_codes, transpose_words, unpack_codes
from models.covered import PACKED
from models.packed_checkpoints import FORMATS, write_packed
from models.test_loading_copies import tensors_of
from tiers import more

LAYOUTS = ("W4A16", "AWQ", "GPTQ", "GPTQ desc_act")
OTHERS = ("W4A16 actorder", "W8A16", "W8A8", "GPTQ 8 bits", "compressed NVFP4", "compressed MXFP4")


class LargestMemory(TorchDispatchMode):
    """The bytes of the largest memory that any operation makes, which mapped files are not."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in tensors_of((args, kwargs))}
        for part in () if function is torch.ops.aten.from_file.default else tensors_of(result):
            if (memory := part.untyped_storage()).data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, memory.nbytes())
        return result


@pytest.fixture(params=[*LAYOUTS, *map(more, OTHERS)])
def folder(request: pytest.FixtureRequest, made_model: Any, tmp_path: Path) -> Path:
    form = FORMATS[request.param]
    write_packed(made_model(PACKED.families[form.stacks]), tmp_path / "codes", tmp_path / "same", form)
    return tmp_path / "codes"


def read_matrices(folder: Path) -> Iterator[tuple[QuantizedWeight, int]]:
    """Each in codes, and the bytes of the largest memory that an operation of reading it makes."""
    opened = open_model(folder, "bfloat16", keeps="codes")
    with WeightReader(folder, torch.bfloat16, (), opened.quantization) as reader:
        for name, shape in opened.tensors(reader.names).items():
            with LargestMemory() as largest:
                weight = reader.load_codes(name, shape)
            if weight is not None:
                yield weight, largest.num_bytes


def test_no_step_of_reading_takes_more_than_the_codes(folder: Path) -> None:
    """Neither numbers in float32 nor a byte for each code of four bits."""
    matrices = list(read_matrices(folder))
    assert len(matrices) > 8
    # An order of inputs is sorted in int64, eight bytes an input.
    assert all(largest <= max(weight.codes.nbytes, 8 * weight.shape[1]) for weight, largest in matrices)


def test_nothing_is_left_in_the_files_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    read = MappedFiles.read

    def keep(self: MappedFiles, *part: Any) -> Tensor:
        given.append(read(self, *part))
        return given[-1]

    monkeypatch.setattr(MappedFiles, "read", keep)
    parts = [part for weight, _ in read_matrices(folder) for part in weight.row_tensors().values()]
    places = {part.untyped_storage().data_ptr() for part in given}
    assert len(given) > 16 and len(parts) > 16
    assert not any(part.untyped_storage().data_ptr() in places for part in parts)
    assert all(part.is_contiguous() for part in parts)


@pytest.fixture(params=["compiled", "torch"])
def each_transpose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(transposes, "compiled_loops", lambda name: None)


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
PLACES = torch.arange(8, dtype=torch.int32) * 4
SHAPES = [(8, 1), (16, 3), (64, 40), (72, 1024), (136, 33), (8, 9000), (0, 4), (16, 0)]


@pytest.mark.usefixtures("each_transpose")
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_joined_along_rows(shape: tuple[int, int]) -> None:
    """Also more of them than are worked on at a time, and columns in an order of their own."""
    words = random_words(shape)
    codes = words[:, :, None] >> PLACES & 15
    assert torch.equal(join_codes(words, range(8))[:, :, None] >> PLACES & 15, joined(codes.flatten(1)))
    ordered = torch.empty_like(codes)
    ordered[:, :, AWQ_ORDER] = codes
    assert torch.equal(join_codes(words, AWQ_ORDER)[:, :, None] >> PLACES & 15, joined(ordered.flatten(1)))
    assert join_codes(words.to("meta"), AWQ_ORDER).shape == (shape[0] // 8, 8 * shape[1])


@pytest.mark.usefixtures("each_transpose")
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 5), (8, 33)])
@pytest.mark.parametrize("added", [0, 1])
def test_codes_are_unpacked(shape: tuple[int, int], added: int) -> None:
    words = random_words((shape[0], shape[1] + 3))[:, 3:]
    codes = (words[:, :, None] >> PLACES) + added & 15
    assert torch.equal(unpack_codes(words, range(8), added), codes.flatten(1).to(torch.uint8))
    ordered = torch.empty_like(codes)
    ordered[:, :, AWQ_ORDER] = codes
    assert torch.equal(unpack_codes(words, AWQ_ORDER, added), ordered.flatten(1).to(torch.uint8))
    assert unpack_codes(words.to("meta"), AWQ_ORDER).shape == (shape[0], 8 * shape[1])


@pytest.mark.usefixtures("each_transpose")
@pytest.mark.parametrize("shape", SHAPES)
def test_words_are_transposed(shape: tuple[int, int]) -> None:
    """Also those of parts of longer rows."""
    words = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape) * 7_919
    for part in (words, words[:, 1 : shape[1] // 2]):
        assert torch.equal(transpose_words(part), part.t()) and transpose_words(part).is_contiguous()


@pytest.mark.usefixtures("each_transpose")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_put_in_order(shape: tuple[int, int], bits: int) -> None:
    """Also those of parts of longer rows."""
    words = random_words((shape[0], shape[1] + 3))[:, 3:]
    order = torch.randperm(shape[0] * 32 // bits, generator=torch.Generator().manual_seed(0)).int()
    places = torch.arange(0, 32, bits)[None, :, None]
    codes, ordered = (
        (each.long()[:, None] >> places & (1 << bits) - 1).flatten(0, 1)
        for each in (words, order_codes(words, order, bits))
    )
    assert torch.equal(ordered, codes[order.long()])


GROUPS = [
    [0, 0, 1, 1, 2, 2],
    [2, 0, 1, 1, 0, 2],
    [0, 0, 0, 1, 2, 2],
    [0, 0, -1, 1, 2, 2],
    [3, 0, 1, 1, 2, -1],
    [0, 0, 3, 1, 2, 2],
    [-2, 0, 1, 1, 2, 0],
    [1, 1, 2, 2, 0, 0],
]


@pytest.mark.parametrize("stored", GROUPS)
def test_an_order_of_groups_is_the_same_by_either_way(stored: list[int]) -> None:
    """By compiled loops, and by numpy: also where there is none, and where groups are not of one size."""
    coding = Coding((8, 6), 8, 2)
    ways: list[object] = []
    for groups in (torch.tensor(stored, dtype=torch.int32), torch.tensor(stored)):
        try:
            order = _order(groups, coding, "g_idx")
            ways.append(None if order is None else order.tolist())
        except ModelError as error:
            ways.append(str(error))
    assert ways[0] == ways[1]
    if min(stored) >= 0 and all(stored.count(group) == 2 for group in range(3)):
        in_order = sorted(range(6), key=lambda i: stored[i])
        assert ways[0] == (None if in_order == list(range(6)) else in_order)
    else:
        assert ways[0] is None if -1 in stored else "2 inputs in each of 3 groups" in str(ways[0])


def random_words(shape: tuple[int, int]) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(0)).to(torch.int32)


def joined(codes: Tensor) -> Tensor:
    """[8 n, m] -> eight of a column together: [n, m, 8]."""
    return codes.unflatten(0, (-1, 8)).transpose(1, 2)
