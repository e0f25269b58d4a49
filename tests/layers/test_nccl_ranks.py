"""How ranks on GPUs are joined, and what of torch's process groups they use. There is no NCCL here: what stands in for
its group are threads, and for the GPU a device that refuses to be read by the host."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from cairn.errors import EngineDead
from cairn.layers import process_ranks
from cairn.layers.process_ranks import ProcessRank, join_ranks
from doubles.counted_device import counted_device
from doubles.device_group import DeviceGroup
from doubles.thread_ranks import Meeting

DEVICE, COPIES = counted_device()


def ranks_on_devices(size: int, in_order: bool, seconds: float = 30.0) -> list[tuple[ProcessRank, DeviceGroup]]:
    meeting = Meeting(size, seconds)
    groups = [DeviceGroup(meeting, rank, DEVICE) for rank in range(size)]
    return [(ProcessRank(group, rank, size, seconds, in_order), group) for rank, group in enumerate(groups)]


def on_all(ranks, function) -> list:
    def run(each):
        with torch.inference_mode():
            return function(each[0])

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, ranks))


def share(rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("in_order", [True, False])
def test_what_is_exchanged_never_comes_to_the_host(in_order):
    ranks = ranks_on_devices(3, in_order)
    mine = [share(rank).to(DEVICE) for rank in range(3)]
    COPIES.take()

    def exchange(rank: ProcessRank):
        own = mine[rank.rank]
        return (
            rank.all_reduce(own.clone()),
            rank.all_reduce(own.bfloat16().t()),
            rank.gather_columns(own),
            rank.broadcast(own.clone()),
        )

    found = on_all(ranks, exchange)
    assert COPIES.take() == (0, 0)
    shares = [share(rank) for rank in range(3)]
    for total, narrow, columns, first in found:
        assert torch.allclose(total.cpu(), sum(shares), atol=1e-6)
        assert torch.allclose(narrow.cpu().float(), sum(shares).t(), atol=0.1) and narrow.dtype == torch.bfloat16
        assert torch.equal(columns.cpu(), torch.cat(shares, dim=1))
        assert torch.equal(first.cpu(), shares[0])
    sums = ["allgather"] * 2 if in_order else ["allreduce"] * 2
    for _, group in ranks:
        assert [name for name, *_ in group.calls] == [*sums, "allgather", "broadcast"]
        if not in_order:
            assert [dtype for _, dtype, _ in group.calls[:2]] == [torch.float32, torch.bfloat16]


def test_the_double_refuses_tensors_of_the_host():
    ((rank, _),) = ranks_on_devices(1, False)
    for call in (rank.all_reduce, rank.gather_columns, rank.broadcast):
        with pytest.raises(AssertionError, match="a tensor on cpu"):
            call(torch.ones(3))


def test_what_a_group_raises_ends_the_engine():
    def broken(*_):
        raise dist.DistBackendError("NCCL communicator was aborted on rank 1")

    rank = ProcessRank(SimpleNamespace(allreduce=broken), 1, 2, 7.0, in_order=False)
    with pytest.raises(EngineDead, match="rank 1 of 2 has lost another rank, or waited 7 s for it: NCCL communicator"):
        rank.all_reduce(torch.ones(3))


class FakeNccl(DeviceGroup):
    """`torch.distributed.ProcessGroupNCCL`, as far as it is used."""

    class Options:
        _timeout = timedelta(0)

    made: ClassVar[list["FakeNccl"]] = []
    meeting: ClassVar[Meeting]

    def __init__(self, store, rank: int, size: int, options) -> None:
        super().__init__(self.meeting, rank, DEVICE)
        self.store, self.place, self.timeout = store, (rank, size), options._timeout
        self.made.append(self)


@pytest.fixture
def nccl(monkeypatch):
    made: list[FakeNccl] = []
    monkeypatch.setattr(FakeNccl, "made", made)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    return made


@pytest.mark.parametrize("exact", [False, True])
def test_tensors_of_a_device_are_exchanged_by_nccl(nccl, monkeypatch, tmp_path, exact):
    monkeypatch.setattr(FakeNccl, "meeting", Meeting(2, 10.0), raising=False)
    with ThreadPoolExecutor(2) as threads:
        ranks = list(
            threads.map(
                lambda rank: join_ranks(tmp_path / "meet", rank, 2, DEVICE, join_seconds=10, seconds=300, exact=exact),
                range(2),
            )
        )
    assert sorted(group.place for group in nccl) == [(0, 2), (1, 2)]
    # the step's own deadline comes first
    assert [group.timeout for group in nccl] == [timedelta(seconds=360)] * 2
    # NCCL connects at the first operation: it is made before anybody waits for a step
    assert [name for group in nccl for name, *_ in group.calls] == ["broadcast"] * 2
    on_all([(rank, None) for rank in ranks], lambda rank: rank.all_reduce(torch.ones(2, device=DEVICE)))
    assert {group.calls[-1][0] for group in nccl} == {"allgather" if exact else "allreduce"}


def test_the_thread_that_meets_the_others_has_the_ranks_gpu(monkeypatch):
    """A new thread's is the first one, whatever its process has chosen."""
    calls = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: calls.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(torch, "zeros", lambda *_, device: calls.append(device) or torch.ones(1))
    rank = SimpleNamespace(broadcast=lambda numbers: numbers)
    process_ranks._meet(rank, torch.device("cuda", 3), 10.0)
    assert calls == [("cairn-join-ranks", torch.device("cuda", 3)), torch.device("cuda", 3)]


def test_tensors_of_the_host_are_exchanged_by_gloo(nccl, tmp_path):
    rank = join_ranks(tmp_path / "meet", 0, 1, torch.device("cpu"), join_seconds=10, seconds=300, exact=False)
    assert isinstance(rank._group, dist.ProcessGroupGloo) and not nccl
    assert rank.all_reduce(torch.ones(2)).tolist() == [1, 1]


def test_a_rank_that_nccl_waits_for_ends_the_start(nccl, monkeypatch, tmp_path):
    """It has no deadline of its own there."""
    over = threading.Event()
    monkeypatch.setattr(FakeNccl, "meeting", Meeting(2, 10.0), raising=False)
    monkeypatch.setattr(FakeNccl, "broadcast", lambda *_: over.wait(60))
    began = time.monotonic()
    with pytest.raises(EngineDead, match=r"rank 0 of 2 has not found the others within 0\.2 s: NCCL still waits"):
        join_ranks(tmp_path / "meet", 0, 2, DEVICE, join_seconds=0.2, seconds=300)
    assert time.monotonic() - began < 20
    over.set()
