"""The memory link keeps the contract, and its faults are what they claim to be."""

import numpy as np
import pytest

from cairn.transfer.links.contract import LinkError, ReadState, Region
from doubles.memory_link import Fault, MemoryFabric, Move
from transfer.link_contract import PAGE_BYTES, LinkContract, pages, pool


def two_links(fabric):
    mine, theirs = pool(1), pool(2)
    reader, source = fabric.link("reader"), fabric.link("source")
    reader.register(Region.of(mine))
    source.register(Region.of(theirs))
    return reader, mine, source, theirs


class TestMemoryLink(LinkContract):
    @pytest.fixture(params=[{}, {"descriptors_per_poll": 1, "delay": 2, "late_writes": True}])
    def sides(self, request):
        return two_links(MemoryFabric(**request.param))


def test_it_tells_what_it_moved():
    reader, _, source, _ = two_links(MemoryFabric(descriptors_per_poll=1))
    handle = reader.read(reader.connect(source.describe()), pages([3, 8], [0, 1]))
    assert reader.poll(handle) is ReadState.READING
    assert reader.poll(handle) is ReadState.DONE
    assert list(reader.moved) == [
        Move("source", 3, 0, 0, 0, PAGE_BYTES, late=False),
        Move("source", 8, 0, 1, 0, PAGE_BYTES, late=False),
    ]


def test_a_late_write_lands_after_the_cancel_and_the_link_says_so():
    reader, mine, source, theirs = two_links(MemoryFabric(descriptors_per_poll=1, late_writes=True))
    handle = reader.read(reader.connect(source.describe()), pages([3, 8], [0, 1]))
    reader.cancel(handle)
    assert reader.poll(handle) is ReadState.READING
    assert reader.poll(handle) is ReadState.CANCELLED
    assert np.array_equal(mine[:2], theirs[[3, 8]]) and [move.late for move in reader.moved] == [True, True]


def test_a_cancel_without_late_writes_stops_at_once():
    reader, mine, source, _ = two_links(MemoryFabric(descriptors_per_poll=1))
    before = mine.copy()
    handle = reader.read(reader.connect(source.describe()), pages([3, 8], [0, 1]))
    reader.cancel(handle)
    assert reader.poll(handle) is ReadState.CANCELLED
    assert np.array_equal(mine, before)


def test_a_frozen_peer_neither_moves_nor_ends_until_it_goes_on():
    fabric = MemoryFabric(late_writes=True)
    reader, mine, source, theirs = two_links(fabric)
    handle = reader.read(reader.connect(source.describe()), pages([3], [0]))
    fabric.inject("source", Fault.FROZEN)
    reader.cancel(handle)
    assert {reader.poll(handle) for _ in range(100)} == {ReadState.READING}
    assert reader.close() == 1
    fabric.inject("source", Fault.NONE)
    assert reader.poll(handle) is ReadState.CANCELLED
    assert np.array_equal(mine[0], theirs[3])


def test_a_dead_peer_fails_what_is_open_and_refuses_what_starts_and_stays_dead():
    fabric = MemoryFabric(descriptors_per_poll=1)
    reader, _, source, _ = two_links(fabric)
    peer = reader.connect(source.describe())
    handle, cancelled = reader.read(peer, pages([3], [0])), reader.read(peer, pages([4], [1]))
    reader.cancel(cancelled)
    fabric.inject("source", Fault.DEAD)
    fabric.inject("source", Fault.NONE)
    assert reader.poll(handle) is ReadState.FAILED and reader.poll(cancelled) is ReadState.CANCELLED
    with pytest.raises(LinkError, match="gone"):
        reader.read(peer, pages([3], [0]))


def test_a_dropped_read_ends_only_when_it_is_cancelled():
    fabric = MemoryFabric()
    reader, mine, source, _ = two_links(fabric)
    before = mine.copy()
    fabric.inject("source", Fault.DROP)
    handle = reader.read(reader.connect(source.describe()), pages([3], [0]))
    assert {reader.poll(handle) for _ in range(100)} == {ReadState.READING}
    reader.cancel(handle)
    assert reader.poll(handle) is ReadState.CANCELLED
    assert np.array_equal(mine, before)


def test_names_are_never_used_twice():
    fabric = MemoryFabric()
    fabric.link("a")
    with pytest.raises(LinkError, match="already"):
        fabric.link("a")


def test_a_link_without_memory_cannot_be_described():
    with pytest.raises(LinkError, match="no memory"):
        MemoryFabric().link("a").describe()
