"""Pages are copied out of a pool and into it byte by byte, on the host, on any device and on several ranks."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from rank_servants import RankServants

from cairn.engine.tier_memory import DeviceTierMemory, allocate_pinned, open_tier_memory
from cairn.tiers.memory import HostTierMemory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def pool_of(device: str, num_pages: int = 200, page_bytes: int = 70_000, seed: int = 3) -> torch.Tensor:
    pages = np.random.default_rng(seed).integers(0, 256, (num_pages, page_bytes), np.uint8)
    return torch.from_numpy(pages).to(device)


@pytest.fixture(params=["host", *DEVICES, "ranks of the host", "ranks of a device"])
def built(request):
    """A memory, and how to see all pages that it has, uint8 [200, n]."""
    if not request.param.startswith("ranks"):
        pool = pool_of("cpu" if request.param == "host" else request.param)
        memory = HostTierMemory(pool.numpy()) if request.param == "host" else DeviceTierMemory(pool)
        yield memory, lambda: pool.cpu().numpy().copy()
        return
    pools = [pool_of("cpu", page_bytes=23_000, seed=seed).numpy() for seed in range(3)]
    on_host = request.param == "ranks of the host"
    ranks = RankServants(pools, lambda pool: open_tier_memory(torch.from_numpy(pool), on_host=on_host))
    yield ranks.memory, ranks.rows
    ranks.close()


class TestMemory:
    def test_pages_come_out_as_they_are(self, built):
        memory, rows = built
        pages = np.random.default_rng(4).integers(0, 200, 300).astype(np.int32)
        copied = memory.copy_out(pages)
        assert np.array_equal(copied, rows()[pages]) and copied.flags["C_CONTIGUOUS"]
        assert len(memory.copy_out(pages[:0])) == 0

    def test_pages_go_in_and_no_others_change(self, built):
        memory, rows = built
        before = rows()
        pages = np.random.default_rng(5).permutation(200)[:150].astype(np.int32)
        new = np.random.default_rng(6).integers(0, 256, (150, before.shape[1]), np.uint8)

        def fill(rows):
            assert len(rows) == 150 and all(row.flags["C_CONTIGUOUS"] for row in rows)
            return fill_from(rows, new)

        assert memory.copy_in(pages, fill)
        before[pages] = new
        assert np.array_equal(rows(), before)

    def test_what_did_not_come_is_said(self, built):
        memory, _ = built
        assert not memory.copy_in(np.array([3, 4], np.int32), lambda rows: False)

    def test_both_directions_at_a_time(self, built):
        """As the threads of tiers do it, each with pages that are no other's."""
        memory, rows = built
        before, parts = rows(), np.random.default_rng(7).permutation(200).astype(np.int32).reshape(4, 50)

        def go_round(pages):
            for _ in range(5):
                copied = memory.copy_out(pages)
                assert memory.copy_in(pages, lambda rows, copied=copied: fill_from(rows, 255 - copied))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(go_round, parts))
        assert np.array_equal(rows(), 255 - before)


def fill_from(rows, new) -> bool:
    for row, content in zip(rows, new, strict=True):
        row[:] = content
    return True


def test_the_pool_of_the_host_is_written_to_in_place():
    pool = pool_of("cpu")
    assert isinstance(open_tier_memory(pool, on_host=True), HostTierMemory)
    assert isinstance(open_tier_memory(pool, on_host=False), DeviceTierMemory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_host_tier_of_a_gpu_is_pinned():
    arena = allocate_pinned(1 << 20, 1000)
    assert arena.shape == (1048, 1000) and torch.from_numpy(arena).is_pinned()
