"""Pages are copied out of a pool and into it byte by byte, on the host and on any device."""

import numpy as np
import pytest
import torch

from cairn.engine.tier_memory import DeviceTierMemory, allocate_pinned, open_tier_memory
from cairn.tiers.memory import HostTierMemory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def pool_of(device: str, num_pages: int = 200, page_bytes: int = 70_000) -> torch.Tensor:
    pages = np.random.default_rng(3).integers(0, 256, (num_pages, page_bytes), np.uint8)
    return torch.from_numpy(pages).to(device)


@pytest.mark.parametrize("kind", [HostTierMemory, *DEVICES])
class TestMemory:
    def build(self, kind):
        if kind is HostTierMemory:
            pool = pool_of("cpu")
            return pool, HostTierMemory(pool.numpy())
        pool = pool_of(kind)
        return pool, DeviceTierMemory(pool)

    def test_pages_come_out_as_they_are(self, kind):
        pool, memory = self.build(kind)
        pages = np.random.default_rng(4).integers(0, 200, 300).astype(np.int32)
        copied = memory.copy_out(pages)
        assert np.array_equal(copied, pool.cpu().numpy()[pages])
        assert len(memory.copy_out(pages[:0])) == 0

    def test_pages_go_in_and_no_others_change(self, kind):
        pool, memory = self.build(kind)
        before = pool.cpu().numpy().copy()
        pages = np.random.default_rng(5).permutation(200)[:150].astype(np.int32)
        new = np.random.default_rng(6).integers(0, 256, (150, before.shape[1]), np.uint8)

        def fill(rows):
            assert len(rows) == 150 and all(row.flags["C_CONTIGUOUS"] for row in rows)
            for row, content in zip(rows, new, strict=True):
                row[:] = content
            return True

        assert memory.copy_in(pages, fill)
        before[pages] = new
        assert np.array_equal(pool.cpu().numpy(), before)

    def test_what_did_not_come_is_said(self, kind):
        _, memory = self.build(kind)
        assert not memory.copy_in(np.array([3, 4], np.int32), lambda rows: False)


def test_the_pool_of_the_host_is_written_to_in_place():
    pool = pool_of("cpu")
    assert isinstance(open_tier_memory(pool, on_host=True), HostTierMemory)
    assert isinstance(open_tier_memory(pool, on_host=False), DeviceTierMemory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_host_tier_of_a_gpu_is_pinned():
    arena = allocate_pinned(1 << 20, 1000)
    assert arena.shape == (1048, 1000) and torch.from_numpy(arena).is_pinned()
