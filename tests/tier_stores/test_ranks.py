"""The pools of several ranks as one: what comes of a rank that fails, is late or has ended."""

import socket
import threading
import time
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
from rank_servants import RankServants

from cairn.tiers.lanes import RestTurns, ThreadLane
from cairn.tiers.memory import CopyFailed, HostTierMemory
from cairn.tiers.ranks import CopyEnded, CopyOrder

PAGE_BYTES = 5000
PAGES = np.array([3, 1, 7], np.int32)


class FaultyMemory(HostTierMemory):
    """`gate`: closed, nothing is copied meanwhile. `error`: raised by each copy."""

    def __init__(self, pool) -> None:
        super().__init__(pool)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.num_copies = 0

    def pass_gate(self) -> None:
        assert self.gate.wait(30)
        self.num_copies += 1
        if self.error is not None:
            raise self.error

    def copy_out(self, pages):
        self.pass_gate()
        return super().copy_out(pages)

    def copy_in(self, pages, fill):
        self.pass_gate()
        return super().copy_in(pages, fill)


@pytest.fixture
def ranks():
    """Three of them; made by a call, and ended with the test."""
    made = []

    def make(seconds=30.0) -> RankServants:
        random = np.random.default_rng(2)
        pools = [random.integers(0, 256, (10, PAGE_BYTES), np.uint8) for _ in range(3)]
        made.append(RankServants(pools, FaultyMemory, seconds))
        return made[-1]

    yield make
    for each in made:
        for memory in each.memories:
            memory.gate.set()
        each.close()


def new_rows(seed=1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (len(PAGES), 3 * PAGE_BYTES), np.uint8)


def fill_with(new):
    def fill(rows):
        for row, content in zip(rows, new, strict=True):
            row[:] = content
        return True

    return fill


def copy_out(ranks):
    return ranks.memory.copy_out(PAGES)


def copy_in(ranks):
    return ranks.memory.copy_in(PAGES, fill_with(new_rows()))


def until(is_so) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("copy", [copy_out, copy_in])
class TestFailures:
    def test_a_rank_that_fails_says_why_and_goes_on(self, ranks, copy):
        three = ranks()
        three.memories[2].error = ValueError("no luck")
        with pytest.raises(CopyFailed, match="rank 2: ValueError: no luck") as failed:
            copy(three)
        assert failed.value.is_over and three.memories[1].num_copies == 1
        three.memories[2].error = None
        copy(three)

    @pytest.mark.parametrize("rank", [1, 2])
    def test_a_rank_that_is_silent_fails_the_copy_in_time(self, ranks, copy, rank):
        three = ranks(seconds=0.1)
        three.memories[rank].gate.clear()
        with pytest.raises(CopyFailed, match=r"1 other ranks have not copied within 0\.1 s") as failed:
            copy(three)
        assert not failed.value.is_over
        # what is asked for meanwhile would come after it
        before = [memory.num_copies for memory in three.memories]
        with pytest.raises(CopyFailed, match=f"rank {rank} has not ended an earlier copy"):
            copy(three)
        assert [memory.num_copies for memory in three.memories] == before
        three.memories[rank].gate.set()
        until(lambda: failed.value.is_over)
        copy(three)

    def test_rank_0_waits_for_the_others_when_its_copy_fails(self, ranks, copy):
        three = ranks()
        three.memories[0].error = ValueError("no luck here")
        three.memories[1].gate.clear()
        threading.Timer(0.1, three.memories[1].gate.set).start()
        with pytest.raises(ValueError, match="no luck here"):
            copy(three)
        assert three.memories[1].num_copies == three.memories[2].num_copies == 1

    def test_pages_of_a_late_rank_are_nobodys_though_rank_0_has_failed_before(self, ranks, copy):
        three = ranks(seconds=0.1)
        three.memories[0].error = ValueError("no luck here")
        three.memories[1].gate.clear()
        with pytest.raises(CopyFailed) as failed:
            copy(three)
        assert not failed.value.is_over and isinstance(failed.value.__cause__, ValueError)

    def test_a_rank_that_ends_fails_copies_at_once(self, ranks, copy):
        three = ranks()
        three.memories[1].gate.clear()
        copies: Future = Future()

        def run() -> None:
            with pytest.raises(CopyFailed) as failed:
                copy(three)
            copies.set_result(failed.value)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        until(lambda: three.memories[2].num_copies == 1)
        three.end_rank(1)
        failed = copies.result(20)
        assert str(failed) == "rank 1 has ended" and failed.is_over
        thread.join(10)
        with pytest.raises(CopyFailed, match="rank 1 has ended") as again:
            copy(three)
        assert again.value.is_over


def test_rows_that_were_copied_out_are_no_other_copys(ranks):
    three = ranks()
    before = three.rows()[PAGES]
    copied = three.memory.copy_out(PAGES)
    assert three.memory.copy_in(PAGES, fill_with(new_rows()))
    again = three.memory.copy_out(PAGES)
    assert np.array_equal(copied, before) and np.array_equal(again, new_rows())


def test_memory_of_rows_is_used_again(ranks):
    three = ranks()
    kept = [three.memory.copy_out(PAGES) for _ in range(2)]
    held = [memory.number for memory in three.memory._memories._free]
    assert held == [] and not np.shares_memory(*kept)
    first = kept[0][1:]
    del kept
    # a part of the rows is enough to keep all of them
    assert len(three.memory._memories._free) == 1 and np.array_equal(first, three.rows()[PAGES[1:]])
    for _ in range(5):
        copy_in(three)
        copy_out(three)
    assert len(three.memory._memories._free) == 1
    del first
    assert sorted(memory.number for memory in three.memory._memories._free) == [0, 1]
    larger = np.arange(10, dtype=np.int32)
    copied = three.memory.copy_out(np.tile(larger, 100))
    assert np.array_equal(copied, np.tile(three.rows(), (100, 1)))
    del copied
    # in the place of one that was too small
    assert sorted(memory.number for memory in three.memory._memories._free) in ([0, 2], [1, 2])
    for servant in three.servants:
        assert sorted(servant._memories) == [0, 1]


def test_a_rank_without_room_for_a_descriptor_says_so(ranks):
    """Then the kernel gives it none."""
    three = ranks()
    frame = msgspec.msgpack.encode(CopyOrder(1, 0, 0, 3, into_pool=False, rests=0.0, deadline=time.monotonic() + 30))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        thread = threading.Thread(target=three.servants[0].serve, args=(there,), daemon=True)
        thread.start()
        here.send(frame)
        here.settimeout(20)
        ended = msgspec.msgpack.decode(here.recv(1000), type=CopyEnded)
        assert ended == CopyEnded(1, "no memory for rows: Too many open files")
        here.shutdown(socket.SHUT_RDWR)
        thread.join(20)


def test_what_is_not_filled_is_not_copied(ranks):
    three = ranks()
    before = three.rows()
    assert three.memory.copy_in(PAGES, lambda rows: False) is False
    assert np.array_equal(three.rows(), before)
    assert [memory.num_copies for memory in three.memories] == [0, 0, 0]


def test_nothing_is_begun_after_its_time(ranks):
    three = ranks()
    follower = three.memory._followers[0]
    shared, memory = three.memory._memories.open(PAGES, 3 * PAGE_BYTES)
    order = CopyOrder(99, memory.slot, memory.number, 3, into_pool=True, rests=0.0, deadline=time.monotonic() - 1)
    assert "too late" in follower.send(order, shared, memory.descriptor).result(20)
    assert three.memories[1].num_copies == 0


def test_other_ranks_rest_as_the_thread_that_asks_for_a_copy_does(ranks):
    three = ranks()
    lane = ThreadLane("tier-test", lambda: None, RestTurns())
    try:
        lane.pace(7.0)
        lane.submit(lambda: copy_out(three)).result(20)
        lanes = [servant._lanes for servant in three.servants]
        assert [each[False].rests for each in lanes] == [7.0, 7.0]
        assert [each[True].rests for each in lanes] == [0.0, 0.0]
    finally:
        lane.close()


def test_records_come_through_whole():
    order = CopyOrder(1, 2, 3, 4, into_pool=True, rests=0.5, deadline=3.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=CopyOrder) == order
    ended = CopyEnded(4, "why")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ended), type=CopyEnded) == ended
