"""Where weights lie: one behind the other in regions that go when the last of their tensors goes."""

import gc
import mmap
import sys
import weakref
from pathlib import Path

import pytest
import torch

from cairn.kernels import cpu
from cairn.kernels.cpu import huge_pages
from cairn.kernels.cpu.huge_pages import PassingMemory, WeightMemory


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mmap.mmap]]:
    """Those that are mapped from now on."""
    regions: list[weakref.ref[mmap.mmap]] = []

    class Mapped(mmap.mmap):
        pass

    def mapped(*args: int, **options: int) -> Mapped:
        region = Mapped(*args, **options)
        regions.append(weakref.ref(region))
        return region

    monkeypatch.setattr(mmap, "mmap", mapped)
    return regions


def test_tensors_share_a_region_and_do_not_overlap() -> None:
    memory = WeightMemory()
    tensors = [memory.empty((i, 3), torch.bfloat16) for i in range(1, 50)] + [memory.empty((7,), torch.int32)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert tensors[-1].data_ptr() - tensors[0].data_ptr() < 64 << 10
    assert tensors[0].data_ptr() % (2 << 20) == 0


def test_what_does_not_fit_begins_another_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_REGION", 1 << 20)
    memory = WeightMemory()
    small, large = memory.empty((600_000,), torch.int8), memory.empty((3 << 20,), torch.int8)
    after = memory.empty((8,), torch.int8)
    small.fill_(1), large.fill_(2), after.fill_(3)
    assert (small == 1).all() and (large == 2).all() and large.data_ptr() % (2 << 20) == 0


def test_a_region_goes_with_its_last_tensor(regions: list[weakref.ref[mmap.mmap]]) -> None:
    memory = WeightMemory()
    first, second = memory.empty((10,), torch.int8), memory.empty((20,), torch.int8)
    del memory, first
    gc.collect()
    assert [region() is not None for region in regions] == [True]
    del second
    gc.collect()
    assert [region() is not None for region in regions] == [False]


def test_what_passes_is_lent_again_when_nothing_is_in_it() -> None:
    memory, size = PassingMemory(), 3 << 20
    first, second = memory.empty((size,), torch.int8), memory.empty((size,), torch.int8)
    first.fill_(1), second.fill_(2)
    place, part = first.data_ptr(), first[5:9]
    assert second.data_ptr() != place
    del first
    assert memory.empty((size,), torch.int8).data_ptr() not in (place, second.data_ptr())
    assert part.tolist() == [1] * 4
    del part
    assert memory.empty((size // 4,), torch.float32).data_ptr() == place
    assert (second == 2).all()


def test_what_passes_and_is_too_small_for_the_next_goes_back(
    regions: list[weakref.ref[mmap.mmap]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_LARGEST_LENT", 8 << 20)
    memory = PassingMemory()
    for size, kept in ((2, [True]), (6, [False, True]), (4, [False, True]), (20, [False, False, False])):
        memory.empty((size << 20,), torch.int8).fill_(1)
        assert [region() is not None for region in regions] == kept
    tensor = memory.empty((4 << 20,), torch.int8).fill_(3)
    memory.clear()
    assert (tensor == 3).all()
    del tensor
    assert [region() is not None for region in regions] == [False] * 4


@pytest.mark.parametrize("gone", [True, False])
def test_without_huge_pages_there_are_small_ones(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """A system that does not know them, and one that refuses."""
    if gone:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
    tensor = WeightMemory().empty((5, 5), torch.float32)
    assert torch.equal(tensor.fill_(3), torch.full((5, 5), 3.0))


def test_nothing_of_a_weight() -> None:
    assert WeightMemory().empty((0, 5), torch.int8).shape == (0, 5)


@pytest.mark.skipif(
    sys.platform != "linux"
    or "never" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1][:5],
    reason="the system gives no huge pages",
)
def test_packed_weights_have_them() -> None:
    packed = [cpu.pack_int8(torch.randn(1024, 1024)) for _ in range(8)]
    if packed[0].layout != "panels":
        pytest.skip("done by oneDNN")
    first = packed[4].matrices[0].data_ptr()
    huge, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            begin, end = (int(word, 16) for word in words[0].split("-"))
            inside = begin <= first < end
        elif inside and words[0] == "AnonHugePages:":
            huge += int(words[1])
    assert huge >= 2048
