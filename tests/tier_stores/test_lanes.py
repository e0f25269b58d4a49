"""Threads of tiers where no core is spare: what they do at once is little, and they rest in between."""

from collections import defaultdict
from concurrent.futures import wait
from threading import get_ident

import numpy as np
import pytest
from tier_entries import PAGE_BYTES, chunk, disk_store, host_store, later, read_back

from cairn.tiers import disk, host, lanes, memory, segments
from cairn.tiers.disk import _pieces
from cairn.tiers.files import Files
from cairn.tiers.host import _runs
from cairn.tiers.lanes import MOST_TURNS, RestTurns, ThreadLane, busy_time, rest, resting_at_most, thread_lanes
from cairn.tiers.memory import HostTierMemory


class Time:
    """Each thread's time of the processor, which goes on by `work`, and a clock that goes on with it and while somebody
    sleeps, but for what is `skipped`."""

    def __init__(self) -> None:
        self.worked = defaultdict[int, float](float)
        self.slept = list[float]()
        self.skipped = 0.0

    def work(self, seconds: float) -> None:
        self.worked[get_ident()] += seconds

    def thread_time(self) -> float:
        return self.worked[get_ident()]

    def perf_counter(self) -> float:
        return sum(self.worked.values()) + sum(self.slept) - self.skipped

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def times(monkeypatch):
    times = Time()
    monkeypatch.setattr(lanes, "time", times)
    return times


@pytest.fixture
def lane():
    lane = ThreadLane("tier-test", lambda: None, RestTurns())
    lane.pace(40.0)
    yield lane
    lane.close()


class TestRest:
    def test_a_thread_rests_so_many_times_as_long_as_it_has_worked(self, lane, times):
        def task():
            began = busy_time()
            for _ in range(3):
                times.work(0.001)
                rest()
            return busy_time() - began

        assert lane.submit(task).result() == pytest.approx(0.003), "what work takes has no rest in it"
        assert times.slept == pytest.approx([0.04] * 3)

    def test_little_work_is_added_up(self, lane, times):
        def task():
            for _ in range(8):
                times.work(lanes.LITTLE_SECONDS / 4 * 1.01)
                rest()

        lane.submit(task).result()
        assert times.slept == pytest.approx([40 * lanes.LITTLE_SECONDS * 1.01] * 2)

    def test_nobody_rests_who_is_waited_for(self, lane, times):
        def task():
            times.work(0.001)
            rest()

        task()
        lane.pace(0.0)
        lane.submit(task).result()
        assert not times.slept

    def test_nobody_rests_for_what_was_done_while_nobody_rested(self, lane, times):
        def task():
            for rests in (0.0, 40.0):
                lane.pace(rests)
                times.work(0.001)
                rest()

        lane.submit(task).result()
        assert times.slept == pytest.approx([0.04])

    def test_a_task_rests_less_where_somebody_waits_for_it(self, lane, times):
        def task():
            for most in (2.0, 50.0):
                with resting_at_most(most):
                    times.work(0.001)
                    rest()
            times.work(0.001)
            rest()

        lane.submit(task).result()
        assert times.slept == pytest.approx([0.002, 0.04, 0.04])

    def test_names_are_made_without_a_rest(self, times):
        tier = thread_lanes(lambda: None)
        try:
            assert not any(each.rests for each in (tier.names, tier.copies, tier.reads, tier.writes))
            tier.pace(40.0)
            assert [each.rests for each in (tier.names, tier.copies, tier.reads, tier.writes)] == [0, 40, 40, 40]
            tier.pace(0.0)
            assert not any(each.rests for each in (tier.copies, tier.reads, tier.writes))
            wait([each.submit(rest) for each in (tier.copies, tier.reads, tier.writes)])
            assert not times.slept
        finally:
            tier.close()


class TestTurns:
    """Rests of threads that share the cores with steps."""

    def test_nobody_rests_at_the_same_time_as_another(self, times):
        turns = RestTurns()
        assert [turns.rest_seconds(0.004, takes_turns=True) for _ in range(3)] == pytest.approx([0.004, 0.008, 0.012])
        times.sleep(0.004)
        # the first is awake and has worked: the two that still rest come first
        assert turns.rest_seconds(0.004, takes_turns=True) == pytest.approx(0.012)
        times.sleep(1.0)
        assert turns.rest_seconds(0.004, takes_turns=True) == pytest.approx(0.004), "others' rests have ended"

    def test_what_a_request_waits_for_takes_no_turn_and_others_rest_after_it(self, times):
        turns = RestTurns()
        assert turns.rest_seconds(0.004, takes_turns=True) == pytest.approx(0.004)
        assert turns.rest_seconds(0.002, takes_turns=False) == pytest.approx(0.002)
        assert turns.rest_seconds(0.004, takes_turns=True) == pytest.approx(0.010)

    def test_nobody_waits_for_ever(self, times):
        turns = RestTurns()
        for _ in range(100):
            assert turns.rest_seconds(0.3, takes_turns=False) == pytest.approx(0.3)
        assert turns.rest_seconds(0.004, takes_turns=True) == pytest.approx(MOST_TURNS * 0.004)

    def test_lanes_of_a_server_take_turns_unless_a_request_waits(self, times):
        tier = thread_lanes(lambda: None)

        def task():
            times.work(0.001)
            rest()

        try:
            tier.pace(40.0)
            for lane in (tier.copies, tier.writes, tier.reads, tier.copies):
                wait([lane.submit(task)])
                # as if all of them were asleep still
                times.skipped += times.slept[-1]
            assert times.slept == pytest.approx([0.04, 0.08 - 0.001, 0.04, 0.16 - 0.003])
        finally:
            tier.close()


class TestPieces:
    """How much is done between two rests."""

    @pytest.fixture
    def rests(self, monkeypatch):
        calls = list[str]()
        for module in (disk, host, memory, segments):
            monkeypatch.setattr(module, "rest", lambda module=module: calls.append(module.__name__.split(".")[-1]))
            if hasattr(module, "PIECE_BYTES"):
                monkeypatch.setattr(module, "PIECE_BYTES", 3 * PAGE_BYTES)
        return calls

    def test_a_disk_is_written_to_in_pieces(self, tmp_path, rests):
        sizes = list[int]()

        class Seen(Files):
            def write_all(self, descriptor, parts, offset):
                assert offset == sum(sizes)
                sizes.append(sum(map(len, parts)))
                super().write_all(descriptor, parts, offset)

        store, entries = disk_store(tmp_path, files=Seen()), [chunk("a", number + 1, 5) for number in range(4)]
        assert store.write(entries, later()) == 4
        assert max(sizes) == 3 * PAGE_BYTES and rests.count("disk") == len(sizes) > 7
        assert rests.count("segments") == 20, "one for each page of which a checksum is made"
        assert all(np.array_equal(read_back(store, entry), entry.pages) for entry in entries)

    def test_a_disk_is_read_in_pieces(self, tmp_path, rests):
        store, entry = disk_store(tmp_path), chunk("a", 1, 7)
        assert store.write([entry], later()) == 1
        rests.clear()
        assert np.array_equal(read_back(store, entry), entry.pages)
        assert rests == ["disk"] * 3, "3, 3 and 1"

    def test_memory_is_read_page_by_page(self, rests):
        store, entry = host_store(), chunk("a", 1, 7)
        assert store.write([entry], later()) == 1
        rests.clear()
        assert np.array_equal(read_back(store, entry), entry.pages)
        assert rests == ["host"] * 7

    def test_memory_is_written_to_in_pieces(self, rests):
        store, entries = host_store(), [chunk("a", 1, 7), chunk("a", 2, 2)]
        assert store.write(entries, later()) == 2
        assert rests == ["host"] * 4, "3, 3 and 1, and 2"
        assert all(np.array_equal(read_back(store, entry), entry.pages) for entry in entries)

    def test_the_pool_is_copied_in_pieces(self, rests):
        pool = np.random.default_rng(0).integers(0, 256, (20, PAGE_BYTES), np.uint8)
        pages = np.array([3, 19, 3, 0, 7, 8, 9], np.int32)
        assert np.array_equal(HostTierMemory(pool).copy_out(pages), pool[pages])
        assert rests == ["memory"] * 3

    def test_pages_side_by_side_are_copied_at_once(self):
        pages = np.array([4, 5, 6, 7, 2, 3, 9], np.int32)
        assert _runs(pages, 8) == [range(4, 8), range(2, 4), range(9, 10)]
        assert _runs(pages, 3) == [range(4, 7), range(7, 8), range(2, 4), range(9, 10)]
        assert _runs(pages[:0], 3) == []

    @pytest.mark.parametrize("sizes", [[], [5, 0, 20, 1], [12, 12], [100]])
    def test_pieces_are_all_of_it(self, sizes, monkeypatch):
        monkeypatch.setattr(disk, "PIECE_BYTES", 12)
        whole = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8).tobytes()
        ends = np.cumsum(sizes).tolist()
        parts = [memoryview(whole)[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        pieces = [b"".join(piece) for piece in _pieces(parts)]
        assert b"".join(pieces) == whole
        assert [len(piece) for piece in pieces[:-1]] == [12] * (len(pieces) - 1) and all(pieces)


class TestReusedMemory:
    def test_memory_is_used_again_once_nobody_has_an_array_in_it(self):
        reused = memory.ReusedMemory(num_kept=1)
        rows = reused.rows(4, PAGE_BYTES)
        address, part = rows.ctypes.data, rows[1:2]
        del rows
        other = reused.rows(4, PAGE_BYTES)
        assert other.ctypes.data != address, "a part of it is still looked at"
        del part
        assert reused.rows(3, PAGE_BYTES).ctypes.data == address

    def test_no_more_is_kept_than_asked_for(self):
        reused = memory.ReusedMemory(num_kept=2)
        rows = [reused.rows(2, PAGE_BYTES) for _ in range(5)]
        del rows
        assert len(reused._free) == 2

    def test_what_is_too_small_is_not_used(self):
        reused = memory.ReusedMemory(num_kept=1)
        reused.rows(1, PAGE_BYTES)
        assert reused.rows(9, PAGE_BYTES).shape == (9, PAGE_BYTES) and not reused._free
