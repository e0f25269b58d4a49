"""Both roles of an engine behind the scheduler's port, and the worker's planner."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from cairn.transfer.contract import (
    ContentName,
    LeaseEnded,
    LookupId,
    Offer,
    OfferedCheckpoint,
    PagesFree,
    Peer,
    PullEnded,
    PullId,
    ReadOrder,
    SchedulerSide,
    WorkerSide,
)
from cairn.transfer.leases import LeaseLimits
from cairn.transfer.links.contract import Descriptors, LinkError, ReadState, Region
from cairn.transfer.memory import PoolMemory
from cairn.transfer.worker import CHUNK_BYTES, LinkWorker, _chunks
from doubles.memory_link import Fault
from transfer.parts import parts, polled
from transfer.scheduler_side_contract import SchedulerSideContract
from transfer.world import GEOMETRY, PAGE_BYTES, PLAIN, World, keys, parsed, whole_pages

PROMPT = keys(160)
OFFER = Offer(
    "cmpl-1", ContentName(), PROMPT, parts(range(10, 20)), (OfferedCheckpoint(160, np.array([40, 41], np.int32)),)
)


def drive(world):
    events = []
    for _ in range(20):
        events += world.port.events()
        world.deliver()
    return events


def test_a_reference_through_a_proxy_and_back():
    world = World()
    port: SchedulerSide = world.port
    assert world.port.is_idle and port.events() == []
    reference = port.offer(OFFER)
    assert not world.port.is_idle
    ref = parsed(reference, world.p.name)
    pull = port.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    assert drive(world) == [
        PullEnded(pull, None, 160, 160),
        PagesFree(pull),
        LeaseEnded(reference, "confirmed"),
    ]
    assert world.port.is_idle


class TestTransferLoop(SchedulerSideContract):
    def side(self, max_pages):
        return World(max_pages=max_pages).port


def test_an_offer_beyond_the_cap_ends_at_once_and_alone():
    """It was counted wrong by whoever made it; the leases that others are promised go on."""
    world = World(max_pages=20)
    first = world.port.offer(OFFER)
    other = dataclasses.replace(OFFER, request_id="cmpl-2", pages=parts(range(30, 40)))
    second = world.port.offer(other)
    assert world.port.events() == [LeaseEnded(second, "released")]
    assert world.p.producer.leases.num_pages == 12
    pull = world.port.pull(world.pull_spec(parsed(second, world.p.name), PROMPT, range(10), checkpoint=(30, 31)))
    assert [event.failure is None for event in drive(world) if isinstance(event, PullEnded)] == [False]
    pull = world.port.pull(world.pull_spec(parsed(first, world.p.name), PROMPT, range(10), checkpoint=(30, 31)))
    assert PullEnded(pull, None, 160, 160) in drive(world)
    assert world.port.is_idle and world.p.producer.leases.num_pages == 0


def test_an_offer_nobody_wants_ends_by_itself():
    world = World()
    reference = world.port.offer(OFFER)
    world.clock.advance(29.9)
    assert world.port.events() == []
    world.clock.advance(0.1)
    assert world.port.events() == [LeaseEnded(reference, "expired")] and world.port.is_idle


def test_an_aborted_pull_ends_once_and_unknown_ones_are_left_alone():
    world = World()
    ref = parsed(world.port.offer(OFFER), world.p.name)
    pull = world.port.pull(world.pull_spec(ref, PROMPT, range(10)))
    world.port.abort(pull)
    world.port.abort(PullId(99))
    assert world.port.events() == [PullEnded(pull, "aborted", 160, None), PagesFree(pull)]
    world.port.abort(pull)
    assert world.port.events() == []


def test_many_pulls_share_one_connection():
    world = World()
    refs = [world.offer(keys(16, seed), [seed], request_id=f"cmpl-{seed}") for seed in range(8)]
    for seed, ref in enumerate(refs):
        world.pull(world.pull_spec(ref, keys(16, seed), [seed]))
    events = world.run()
    assert [event.failure for event in events if isinstance(event, PullEnded)] == [None] * 8
    assert np.array_equal(world.memory[:8], world.p.memory[:8]) and world.sent == 1 + 2 * 8


def order(world, remote, local, *, geometry=GEOMETRY, ranks=None, pull=1):
    ranks = (world.p.link.describe(),) if ranks is None else ranks
    pages = (parts(list(remote)), parts(list(local)))
    end = 16 * len(local)
    return ReadOrder(PullId(pull), Peer("p", geometry, ranks), end, *pages, None, None)


def test_a_read_of_many_chunks_keeps_two_handles_open():
    world = World(descriptors_per_poll=1)
    worker: WorkerSide = LinkWorker(
        world.link, whole_pages(), PoolMemory(world.memory).fence, chunk_bytes=2 * PAGE_BYTES
    )
    worker.start(order(world, range(7), range(7)))
    open_handles = []
    while polled(worker, PullId(1)) is ReadState.READING:
        open_handles.append(world.link.num_open)
    assert max(open_handles) == 2 and len(world.link.moved) == 7
    with pytest.raises(AssertionError, match="no read"):
        polled(worker, PullId(1))


@pytest.mark.parametrize("chunk_bytes", [1, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 1, 1 << 40])
def test_every_chunk_size_moves_every_page_once_and_is_kept(chunk_bytes, monkeypatch):
    world = World()
    sizes = []
    read = world.link.read

    def counted(peer, descriptors):
        sizes.append(descriptors.num_bytes.sum())
        return read(peer, descriptors)

    monkeypatch.setattr(world.link, "read", counted)
    worker = LinkWorker(world.link, whole_pages(), PoolMemory(world.memory).fence, chunk_bytes=chunk_bytes)
    worker.start(order(world, range(10), range(20, 30)))
    while polled(worker, PullId(1)) is ReadState.READING:
        pass
    assert [(move.remote_page, move.local_page) for move in world.link.moved] == list(
        zip(range(10), range(20, 30), strict=True)
    )
    # A page is never cut, so one larger than the chunk is a handle of its own.
    assert max(sizes) == min(max(chunk_bytes // PAGE_BYTES, 1), 10) * PAGE_BYTES


def test_a_handle_has_no_more_short_ranges_than_a_link_moves_in_the_time_of_a_whole_one():
    count = 40_000
    columns = [np.zeros(count, np.int64)] * 4
    chunks = _chunks(Descriptors(*columns, num_bytes=np.full(count, 256)), CHUNK_BYTES)
    assert [len(chunk) for chunk in chunks] == [16_384, 16_384, 7_232]


def test_a_peer_that_dies_between_two_chunks_fails_the_read():
    world = World(descriptors_per_poll=1)
    worker = LinkWorker(world.link, whole_pages(), PoolMemory(world.memory).fence, chunk_bytes=PAGE_BYTES)
    worker.start(order(world, range(5), range(5)))
    assert polled(worker, PullId(1)) is ReadState.READING
    world.fabric.inject(world.p.name, Fault.DEAD)
    assert polled(worker, PullId(1)) is ReadState.FAILED
    assert world.link.num_open == len(worker._reads) == 0
    with pytest.raises(LinkError, match="gone"):
        worker.start(order(world, range(5), range(5), pull=2))
    assert len(worker._reads) == 0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ranks": ()}, "0 ranks"),
        ({"geometry": dataclasses.replace(GEOMETRY, page_bytes=128)}, "128 bytes"),
        ({"remote": range(3)}, "lists 3 pages, .* take 2"),
        ({"remote": (0, 99)}, "outside its page"),
        ({"ranks": (b"nobody",)}, "no link called"),
    ],
)
def test_what_a_peer_gives_wrongly_is_refused_before_a_byte_moves(changed, why):
    world = World()
    worker = LinkWorker(world.link, whole_pages(), PoolMemory(world.memory).fence)
    with pytest.raises(LinkError, match=why):
        worker.start(order(world, **{"remote": (0, 1), "local": (0, 1)} | changed))
    assert not world.link.moved and len(worker._reads) == world.link.num_open == 0


def test_a_region_is_one_contiguous_array_of_pages():
    with pytest.raises(ValueError, match="contiguous"):
        Region.of(np.zeros((4, 8), np.uint8)[:, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        Region.of(np.zeros(4, np.uint8))


def test_descriptors_are_cut_as_views():
    descriptors = Descriptors(*np.arange(20).reshape(5, 4))
    part = descriptors.take(1, 3)
    assert len(descriptors) == 4 and part.num_bytes.tolist() == [17, 18] and part.num_bytes.base is not None


def test_a_peer_that_the_link_drops_in_mid_read_fails_it_and_can_be_read_again():
    world = World(descriptors_per_poll=1)
    worker = LinkWorker(world.link, whole_pages(), PoolMemory(world.memory).fence)
    worker.start(order(world, range(5), range(5)))
    assert polled(worker, PullId(1)) is ReadState.READING
    world.link.disconnect(world.p.name)
    assert polled(worker, PullId(1)) is ReadState.FAILED, "half of the bytes are not all of them"
    worker.start(order(world, range(5), range(5), pull=2))
    while (state := polled(worker, PullId(2))) is ReadState.READING:
        pass
    assert state is ReadState.DONE


def test_connections_to_peers_are_bounded_and_silent_ones_forgotten():
    world = World()
    world.consumer._send = lambda address, frame: None
    ref = world.offer(PROMPT, range(10, 20))
    for port in range(1, 301):
        world.pull(world.pull_spec(dataclasses.replace(ref, port=port), PROMPT, range(10)))
    refused = [event.failure for event in world.run(2) if isinstance(event, PullEnded)]
    assert len(refused) == 44 and {"256 sessions" in failure for failure in refused} == {True}
    world.clock.advance(5.0)
    assert len(world.run(2)) == 2 * 256 and world.consumer.num_open == 0
    pull = world.pull(world.pull_spec(dataclasses.replace(ref, port=999), PROMPT, range(10)))
    assert world.run(2) == [] and world.consumer.num_open == 1
    world.port.abort(pull)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_peer_whose_read_has_failed_is_forgotten_even_if_nobody_waits_any_more(cancelled, monkeypatch):
    """A link may hold it to be dead for good; forgotten, it can be connected to again."""
    world, forgotten, states = World(), [], {1: ReadState.READING, 2: ReadState.READING}
    monkeypatch.setattr(world.link, "poll", lambda handle: states[handle])
    monkeypatch.setattr(world.link, "disconnect", forgotten.append)
    worker = LinkWorker(world.link, whole_pages(), PoolMemory(world.memory).fence, chunk_bytes=PAGE_BYTES)
    worker.start(order(world, range(5), range(5)))
    assert polled(worker, PullId(1)) is ReadState.READING
    states[1] = ReadState.FAILED
    assert polled(worker, PullId(1)) is ReadState.READING and forgotten == []
    if cancelled:
        worker.cancel(PullId(1))
    states[2] = ReadState.CANCELLED
    assert polled(worker, PullId(1)) is ReadState.FAILED and forgotten == [world.p.name]


def test_a_peer_that_has_read_is_served_a_while_longer():
    """A read that was given up over TCP ends only with the help of the one that is read from."""
    world = World()
    unread = world.port.offer(OFFER)
    world.port.withdraw(unread)
    assert [event.state for event in world.port.events()] == ["released"] and not world.port.is_serving
    ref = parsed(world.port.offer(OFFER), world.p.name)
    world.port.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    drive(world)
    assert world.port.is_idle and world.port.is_serving
    world.clock.advance(LeaseLimits(max_pages=1).linger)
    assert not world.port.is_serving


def test_links_make_progress_for_as_long_as_a_peer_may_be_reading():
    world, served = World(), []
    world.port._ranks = SimpleNamespace(serve=served.append)

    def turn():
        world.port.turn()
        return served.pop()

    assert not turn()
    ref = parsed(world.port.offer(OFFER), world.p.name)
    assert turn()
    world.port.pull(world.pull_spec(ref, PROMPT, range(10), checkpoint=(30, 31)))
    drive(world)
    assert world.port.is_idle and turn(), "it may have given up, and still be reading"
    world.clock.advance(LeaseLimits(max_pages=1).linger)
    assert not turn()


def test_every_command_has_the_thread_look_again():
    """It may be asleep until something comes by a socket: it would not see a lease expire."""
    world, looks, prompt = World(), [], np.arange(40)
    world.port._changed = SimpleNamespace(set=lambda: looks.append(len(looks)))
    offer = Offer("cmpl-9", PLAIN, prompt, parts((1, 2, 3)), ())
    commands = (
        lambda: world.port.offer(offer),
        lambda: world.port.withdraw(world.leases.offer(offer).reference),
        lambda: world.port.pull(world.pull_spec(world.offer(prompt, (4, 5, 6)), prompt, (4, 5, 6))),
        lambda: world.port.abort(PullId(1)),
        lambda: world.port.answer_lookup(LookupId(1), None),
    )
    for number, command in enumerate(commands, 1):
        command()
        world.event_loop.spin()
        assert len(looks) == number


def test_the_scheduler_is_told_of_a_lease_whose_time_is_up():
    """It may be asleep, and keeps the pages until it has heard."""
    world, told = World(), []
    world.port._ranks = SimpleNamespace(serve=lambda on: None)
    reference = world.port.offer(OFFER)
    world.events.notify = lambda: told.append(world.clock.now())
    for _ in range(2):
        world.port.turn()
        assert told == []
        world.clock.advance(15.0)
    world.port.turn()
    assert told == [30.0] and world.port.events() == [LeaseEnded(reference, "expired")]
