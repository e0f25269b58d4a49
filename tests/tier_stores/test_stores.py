"""What every store of a tier must do, in memory and on a disk."""

from dataclasses import replace

import numpy as np
import pytest
from tier_entries import chunk, content, disk_store, host_store, keys_of, later, path_entries, read_back, state

from cairn.tiers.store import EntryRead, NewEntry, TierStore


class StoreContract:
    def store(self, num_paths: int) -> TierStore:
        """One with room for so many paths of 4 chunks and a state, 22 pages each, and not for two more."""
        raise NotImplementedError

    @pytest.fixture
    def roomy(self):
        return self.store(4)

    def test_what_is_written_comes_back(self, roomy):
        entries = path_entries("a", 4)
        assert roomy.write(entries, later()) == 5
        assert roomy.contains([*keys_of(entries), b"other"]) == [True] * 5 + [False]
        for entry in entries:
            assert np.array_equal(read_back(roomy, entry), entry.pages)
            assert roomy.facts(entry.facts.key) == entry.facts
        assert roomy.facts(b"other") is None
        assert roomy.counters.num_entries == 5

    def test_a_part_of_an_entry_comes_back(self, roomy):
        (entry,) = entries = [chunk("a", 1)]
        roomy.write(entries, later())
        assert np.array_equal(read_back(roomy, entry, first=2), entry.pages[2:])
        assert roomy.read([EntryRead(entry.facts.key, 1, [])], later()), "nothing is asked for"

    def test_several_entries_come_back_in_one_read_or_none(self, roomy):
        entries = path_entries("a", 3)
        roomy.write(entries, later())
        rows = [np.zeros_like(entry.pages) for entry in entries]
        reads = [EntryRead(entry.facts.key, 0, list(own)) for entry, own in zip(entries, rows, strict=True)]
        assert roomy.read(reads, later())
        assert all(np.array_equal(own, entry.pages) for entry, own in zip(entries, rows, strict=True))
        missing = EntryRead(b"missing", 0, list(np.zeros((1, 512), np.uint8)))
        assert not roomy.read([*reads, missing], later())
        assert not roomy.read(reads, later(-1)), "too late"

    def test_a_mark_lists_its_states(self, roomy):
        entries = [*path_entries("a", 2, tail=5), state("a", 2, 0), state("a", 2, 63), state("a", 1, 7)]
        assert roomy.write(entries, later()) == len(entries)
        marks = [entries[1].facts.key, b"other", entries[0].facts.key]
        assert roomy.tails(marks) == [[63, 5, 0], [], [7]]

    def test_states_as_far_from_one_mark_are_told_apart(self, roomy):
        fork = chunk("a", 1)
        left, right = (state("a", 1, 7), state("b", 1, 7))
        right = NewEntry(replace(right.facts, parent=fork.facts.key), right.pages)
        assert roomy.write([fork, left, right], later()) == 3
        assert roomy.tails([fork.facts.key]) == [[7]]
        roomy._index.remove(left.facts.key, alone=True)
        assert roomy.tails([fork.facts.key]) == [[7]]

    def test_a_state_before_the_first_chunk_needs_none(self, roomy):
        entry = state("a", 0, 20)
        assert roomy.write([entry], later()) == 1
        assert roomy.tails([entry.facts.parent]) == [[20]]

    def test_nothing_is_kept_without_what_comes_before(self, roomy):
        entries = path_entries("a", 3)
        assert roomy.write([entries[0], *entries[2:]], later()) == 1
        assert roomy.contains(keys_of(entries)) == [True, False, False, False]
        assert roomy.counters.drops["no_parent"] == 2

    def test_what_is_there_is_not_written_again(self, roomy):
        entries = path_entries("a", 3)
        roomy.write(entries, later())
        written = roomy.counters.written_bytes
        assert roomy.write(entries, later()) == 4
        assert roomy.counters.written_bytes == written

    def test_nothing_is_written_after_the_deadline(self, roomy):
        entries = path_entries("a", 2)
        assert roomy.write(entries, later(-1)) == 0
        assert roomy.counters.drops["too_late"] == 3
        assert roomy.contains(keys_of(entries)) == [False] * 3

    def test_a_full_store_drops_whole_paths_and_never_exceeds_its_size(self):
        store = self.store(4)
        paths = [path_entries(number, 4) for number in range(20)]
        for entries in paths:
            assert store.write(entries, later()) == 5
            assert store.counters.num_bytes <= self.bound(store)
        there = [all(store.contains(keys_of(entries))) for entries in paths]
        parts = [any(store.contains(keys_of(entries))) for entries in paths]
        assert there == parts, "chunks whose state is gone are of no use"
        assert 2 <= sum(there) <= 4 and there[-1]

    def bound(self, store) -> int:
        return store.counters.num_bytes

    def test_what_is_used_stays(self):
        store = self.store(4)
        used = path_entries("used", 4)
        store.write(used, later())
        for number in range(12):
            store.touch(used[-1].facts.key)
            store.write(path_entries(number, 4), later())
        assert all(store.contains(keys_of(used)))

    def test_a_single_use_outranks_none(self):
        """A path that is written shares nothing that would let it weigh less than it does."""
        store = self.store(4)
        used = path_entries("used", 4)
        store.write(used, later())
        store.touch(used[-1].facts.key)
        for number in range(4):
            store.write(path_entries(number, 4), later())
        assert all(store.contains(keys_of(used)))

    def test_what_is_not_used_any_more_goes_too(self):
        store = self.store(4)
        used = path_entries("used", 4)
        store.write(used, later())
        store.touch(used[-1].facts.key)
        for number in range(40):
            store.write(path_entries(number, 4), later())
        assert not any(store.contains(keys_of(used)))

    def test_shared_chunks_stay_while_a_state_needs_them(self):
        store = self.store(4)
        shared = [chunk("a", 1), chunk("a", 2), state("a", 2), state("a", 1)]
        store.write(shared, later())
        for number in range(6):
            store.touch(shared[3].facts.key)
            store.write(path_entries(number, 4), later())
        assert store.contains(keys_of(shared)) == [True, False, False, True]

    def test_a_path_longer_than_the_store_leaves_no_part_that_is_of_no_use(self):
        store = self.store(2)
        entries = path_entries("long", 40)
        assert store.write(entries, later()) < len(entries)
        assert not store.contains([entries[-1].facts.key])[0]
        assert store.write(path_entries("next", 4), later()) == 5, "it has not clogged the store"

    def test_what_was_dropped_is_counted_by_reason(self):
        store = self.store(2)
        for number in range(6):
            store.write(path_entries(number, 4), later())
        assert store.counters.drops["replaced"] >= 15


class TestHost(StoreContract):
    def store(self, num_paths):
        return host_store(22 * num_paths + 21)

    def test_a_read_that_is_under_way_keeps_its_pages(self):
        store = host_store(22)
        (entry,) = entries = [state("a", 0, 20)]
        store.write(entries, later())
        kept = store._index.get(entry.facts.key)
        kept.readers += 1
        store.write(path_entries("b", 4), later())
        assert not store.contains(keys_of(entries))[0]
        assert np.array_equal(store._arena[kept.place], content(entry.facts.key, 6))
        store._end_read(kept)
        assert store.write(path_entries("b", 4), later()) == 5


class TestDisk(StoreContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = tmp_path

    def store(self, num_paths):
        # a file takes 4 KiB besides its pages, and an eighth is kept for writing anew
        return disk_store(self.path, (22 * 512 + 4096) * (num_paths + 1) * 8 // 7)

    def bound(self, store):
        assert sum(file.stat().st_size for file in self.path.iterdir()) == store.counters.num_bytes
        return store.capacity
