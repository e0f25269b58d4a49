"""The disk tier under all that happens to disks and processes: never a wrong byte, and nothing unreadable is left."""

import errno
import itertools
import logging
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from faulty_files import FaultyFiles, Killed
from tier_entries import (
    IDENTITY,
    check_never_wrong,
    chunk,
    disk_store,
    keys_of,
    later,
    path_entries,
    read_back,
    usable,
)

from cairn.tiers.disk import DiskFolder, DiskStore
from cairn.tiers.files import Files
from cairn.tiers.index import PathShape
from cairn.tiers.store import EntryRead


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


class TestRestart:
    def test_all_of_it_is_there_again(self, tmp_path):
        paths = [path_entries(number, 3) for number in range(5)]
        store = disk_store(tmp_path)
        for entries in paths:
            store.write(entries, later())
        again = disk_store(tmp_path)
        for entries in paths:
            assert usable(again, entries)
            assert [again.facts(entry.facts.key) for entry in entries] == [entry.facts for entry in entries]
        assert again.counters.num_bytes == store.counters.num_bytes
        assert again.tails([paths[0][2].facts.key]) == [[5]]

    def test_it_goes_on_under_new_names(self, tmp_path):
        disk_store(tmp_path).write(path_entries("a", 2), later())
        disk_store(tmp_path).write(path_entries("b", 2), later())
        assert len(segments(tmp_path)) == 2
        assert usable(disk_store(tmp_path), path_entries("a", 2) + path_entries("b", 2))

    def test_a_smaller_bound_holds_from_the_start(self, tmp_path):
        store = disk_store(tmp_path)
        for number in range(20):
            store.write(path_entries(number, 4), later())
        again = disk_store(tmp_path, 100_000)
        assert 0 < again.counters.num_bytes <= 100_000
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) == again.counters.num_bytes

    def test_another_identity_or_page_size_is_not_read(self, tmp_path, caplog):
        disk_store(tmp_path).write(path_entries("a", 2), later())
        for identity, page_bytes in ((bytes(32), 512), (IDENTITY, 256)):
            folder = DiskFolder(str(tmp_path), identity, page_bytes, 1 << 20, writable=False)
            other = DiskStore(folder, PathShape(), Files())
            assert other.counters.num_entries == 0 and "another model" in caplog.text
            caplog.clear()

    def test_many_small_segments_are_joined(self, tmp_path, monkeypatch):
        monkeypatch.setattr("cairn.tiers.disk.MAX_SEGMENTS", 8)
        store = disk_store(tmp_path, 4 << 20)
        paths = [path_entries(number, 2) for number in range(30)]
        for entries in paths:
            assert store.write(entries, later()) == 3
            assert len(segments(tmp_path)) <= 9
        assert all(usable(store, entries) for entries in paths)
        assert all(usable(disk_store(tmp_path, 4 << 20), entries) for entries in paths)

    def test_files_are_for_their_owner_alone(self, tmp_path):
        disk_store(tmp_path).write(path_entries("a", 2), later())
        assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]


class TestDamage:
    def test_a_flipped_bit_anywhere_is_never_served(self, tmp_path, caplog):
        entries = path_entries("a", 1)
        disk_store(tmp_path).write(entries, later())
        (file,) = segments(tmp_path)
        whole = file.read_bytes()
        header = 64 + 2 * 90 + 10 * 4 + 4
        draw = random.Random(7)
        places = [*range(header), *(draw.randrange(4096, len(whole)) for _ in range(40))]
        for place in places:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            store = disk_store(tmp_path, writable=place >= header)
            found = check_never_wrong(store, entries)
            if place < header:
                assert found == 0 and store.counters.drops["damaged"] == 1
            else:
                assert found == 1 and store.counters.drops["damaged"] == 1
                assert store.contains(keys_of(entries)).count(False) >= 1, "it is not offered again"
            assert caplog.records and caplog.records[-1].levelno == logging.WARNING
            caplog.clear()

    def test_a_segment_that_cannot_be_read_is_removed(self, tmp_path):
        disk_store(tmp_path).write(path_entries("a", 2), later())
        (file,) = segments(tmp_path)
        file.write_bytes(file.read_bytes()[:-1])
        (tmp_path / "0000000000000009.seg").write_bytes(b"")
        (tmp_path / "0000000000000010.seg").write_bytes(random.Random(1).randbytes(5000))
        (tmp_path / "0000000000000011.tmp").write_bytes(b"half")
        store = disk_store(tmp_path)
        assert store.counters.num_entries == 0 and store.counters.drops["damaged"] == 3
        assert list(tmp_path.iterdir()) == []

    def test_a_damaged_entry_is_written_again_and_what_follows_it_comes_back(self, tmp_path):
        entries = path_entries("a", 3)
        store = disk_store(tmp_path)
        store.write(entries, later())
        (file,) = segments(tmp_path)
        damaged = bytearray(file.read_bytes())
        damaged[-(6 + 4 + 4) * 512 + 9] ^= 4  # in the second chunk
        file.write_bytes(damaged)
        assert read_back(store, entries[1]) is None
        assert store.contains(keys_of(entries)) == [True, False, True, True]
        assert store.write(entries, later()) == 4
        assert usable(store, entries) and usable(disk_store(tmp_path), entries)

    def test_pages_cannot_be_mixed_up(self, tmp_path):
        entries = [chunk("a", 1), chunk("b", 1)]
        store = disk_store(tmp_path)
        store.write(entries, later())
        (file,) = segments(tmp_path)
        whole = file.read_bytes()
        file.write_bytes(whole[:-4096] + whole[-2048:] + whole[-4096:-2048])
        assert check_never_wrong(store, entries) == 0


class TestFaults:
    @pytest.fixture
    def files(self):
        return FaultyFiles()

    @pytest.mark.parametrize("call", ["create", "write_all", "sync", "rename"])
    @pytest.mark.parametrize(("number", "reason"), [(errno.EIO, "io_error"), (errno.ENOSPC, "disk_full")])
    def test_a_failed_write_costs_what_was_written_and_no_more(self, tmp_path, files, call, number, reason, caplog):
        store = disk_store(tmp_path, files=files)
        store.write(path_entries("a", 2), later())
        files.fail[call] = number
        assert store.write(path_entries("b", 2), later()) == 0
        assert store.counters.drops[reason] == 3 and "cannot be written" in caplog.text
        files.fail.clear()
        assert store.write(path_entries("c", 2), later()) == 0, "it waits for a while"
        assert store.counters.drops["paused"] == 3
        store._paused_until = 0.0
        assert store.write(path_entries("c", 2), later()) == 3
        assert usable(store, path_entries("a", 2)) and usable(store, path_entries("c", 2))
        assert len(list(tmp_path.iterdir())) == 2, "nothing unfinished is left"

    def test_a_disk_that_becomes_full_within_a_write(self, tmp_path, files):
        store = disk_store(tmp_path, files=files)
        files.budget = 20_000
        for number in range(6):
            store.write(path_entries(number, 2), later())
        assert store.counters.drops["disk_full"] == 3
        assert check_never_wrong(store, [e for number in range(6) for e in path_entries(number, 2)]) == 3
        assert not list(tmp_path.glob("*.tmp"))

    @pytest.mark.parametrize("call", ["open", "read_into"])
    def test_a_failed_read_drops_the_entry(self, tmp_path, files, call, caplog):
        entries = path_entries("a", 2)
        store = disk_store(tmp_path, files=files)
        store.write(entries, later())
        files.fail[call] = errno.EIO
        assert read_back(store, entries[0]) is None
        assert store.counters.drops["io_error"] == 1 and "cannot be read" in caplog.text
        files.fail.clear()
        assert read_back(store, entries[1]) is not None
        assert store.write(entries, later()) == 3 and usable(store, entries)

    def test_a_segment_that_cannot_be_read_at_the_start_stays(self, tmp_path, files, caplog):
        entries = path_entries("a", 2)
        disk_store(tmp_path).write(entries, later())
        files.fail["read"] = errno.EIO
        store = disk_store(tmp_path, files=files)
        assert store.counters.num_entries == 0 and "is ignored" in caplog.text
        assert usable(disk_store(tmp_path), entries), "perhaps it can be read another time"

    def test_a_slow_disk_keeps_no_deadline_waiting_long(self, tmp_path, files):
        entries = path_entries("a", 8)
        store = disk_store(tmp_path, files=files)
        store.write(entries, later())
        files.slow = 0.02
        rows = [np.zeros_like(entry.pages) for entry in entries]
        reads = [EntryRead(entry.facts.key, 0, list(own)) for entry, own in zip(entries, rows, strict=True)]
        assert not store.read(reads, time.monotonic() + 0.05)
        assert store.read(reads, later())

    def test_a_segment_that_cannot_be_removed_counts_on(self, tmp_path, files):
        store = disk_store(tmp_path, 100_000, files)
        files.fail["remove"] = errno.EIO
        for number in range(20):
            store.write(path_entries(number, 4), later())
        assert sum(file.stat().st_size for file in segments(tmp_path)) == store.counters.num_bytes <= 100_000
        files.fail.clear()
        assert store.write(path_entries("new", 4), later()) == 5


class TestKilled:
    def test_at_each_call_that_changes_something(self, tmp_path):
        number, entries = 0, [e for path in range(14) for e in path_entries(path, 1 + path % 4)]
        while True:
            folder = tmp_path / str(number)
            folder.mkdir()
            files = FaultyFiles()
            store = disk_store(folder, 60_000, files)
            files.calls_left = number
            try:
                for path in range(14):
                    store.write(path_entries(path, 1 + path % 4), later())
            except Killed:
                pass
            else:
                break
            again = disk_store(folder, 60_000)
            check_never_wrong(again, entries)
            assert not list(folder.glob("*.tmp"))
            assert sum(file.stat().st_size for file in folder.iterdir()) == again.counters.num_bytes <= 60_000
            assert again.counters.drops["damaged"] == 0, "a segment is whole or it is not there"
            assert again.write(path_entries("next", 3), later()) == 4
            number += 9
        assert number > 40, "it ends by itself at last"

    def kill_rounds(self, folder: Path, rounds: int) -> int:
        """Writers in processes of their own, killed at random moments; more of them where the machine was too busy for
        a first path. How many paths could be read again."""
        draw, found, seeds = random.Random(rounds), 0, itertools.count()
        while (seed := next(seeds)) < rounds or (not found and seed < 10 * rounds):
            command = [sys.executable, str(Path(__file__).with_name("kill_writer.py")), str(folder), str(seed)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None and process.stdout.readline() == "open\n"
                time.sleep(draw.random() * 0.3)
                process.kill()
                written = [int(line) for line in process.stdout.read().splitlines(True) if line.endswith("\n")]
            store = disk_store(folder, 300_000)
            check_never_wrong(store, [e for n in written[-20:] for e in path_entries(n, 1 + n % 5)])
            # killed between the writing anew of a segment and its removal it may have had to make room first
            if written and not store.counters.drops["replaced"]:
                assert usable(store, path_entries(written[-1], 1 + written[-1] % 5)), "what is written stays"
                found += 1
            assert store.counters.drops["damaged"] == 0
            assert not list(folder.glob("*.tmp"))
        return found

    def test_by_kill_9(self, tmp_path):
        assert self.kill_rounds(tmp_path, 4) > 0

    @pytest.mark.long
    def test_by_kill_9_a_hundred_times(self, tmp_path):
        assert self.kill_rounds(tmp_path, 100) > 50


class TestReaders:
    def test_a_reader_sees_what_the_writer_adds_and_removes(self, tmp_path):
        writer, reader = disk_store(tmp_path, 100_000), disk_store(tmp_path, 100_000, writable=False)
        assert not reader.writable and reader.write(path_entries("x", 1), later()) == 0
        first = path_entries("a", 3)
        writer.write(first, later())
        reader._refresh_at = 0.0
        reader.refresh()
        assert usable(reader, first)
        for number in range(20):
            writer.write(path_entries(number, 4), later())
        assert check_never_wrong(reader, first) == 0, "what it knew is gone"
        reader._refresh_at = 0.0
        reader.refresh()
        assert usable(reader, path_entries(19, 4))
        assert reader.counters.num_bytes == writer.counters.num_bytes

    def test_a_reader_changes_nothing(self, tmp_path):
        (tmp_path / "1.seg").write_bytes(b"rubbish")
        (tmp_path / "2.tmp").write_bytes(b"being written")
        reader = disk_store(tmp_path, writable=False)
        assert reader.counters.num_entries == 0
        assert sorted(file.name for file in tmp_path.iterdir()) == ["1.seg", "2.tmp"]

    def test_a_reader_may_be_there_before_the_folder(self, tmp_path):
        reader = disk_store(tmp_path / "later", writable=False)
        (tmp_path / "later").mkdir()
        disk_store(tmp_path / "later").write(path_entries("a", 2), later())
        reader._refresh_at = 0.0
        reader.refresh()
        assert usable(reader, path_entries("a", 2))
