"""Pages in a device's memory: nobody but the device's own copies touches them, what arrives is used behind a fence, and
without one these tests fail."""

from functools import partial

import numpy as np
import pytest

from cairn.transfer.contract import PagesFree, PullEnded, PullId
from cairn.transfer.links.contract import ReadState, Region
from cairn.transfer.memory import PoolMemory
from cairn.transfer.worker import LinkWorker
from doubles.device_pool import FakeDevicePool
from doubles.memory_link import MemoryFabric
from transfer.link_contract import LinkContract, pool
from transfer.parts import polled
from transfer.ranked_world import CANARY, World, leased_spec_of, offer_of
from transfer.test_worker_contract import Reader
from transfer.world import keys

READING, DONE, CANCELLED = ReadState.READING, ReadState.DONE, ReadState.CANCELLED
SIZES = {"equal": ((1, 16), (1, 16)), "ranks": ((2, 16), (1, 16)), "blocks": ((1, 64), (1, 16))}
SEEN_AT_ONCE = partial(FakeDevicePool, is_late=False)


def region(numbers: np.ndarray, kind: str) -> Region:
    return Region.of(numbers) if kind == "host" else SEEN_AT_ONCE(numbers).region


class TestMemoryLinkOnDevices(LinkContract):
    @pytest.fixture(params=[("device", "device"), ("host", "device"), ("device", "host")], ids="-".join)
    def sides(self, request):
        fabric, mine, theirs = MemoryFabric(), pool(1), pool(2)
        reader, source = fabric.link("reader"), fabric.link("source")
        reader.register(region(mine, request.param[0]))
        source.register(region(theirs, request.param[1]))
        return reader, mine, source, theirs


def on_device(sizes: str, **arguments) -> Reader:
    return Reader(*SIZES[sizes], alone=True, pool=FakeDevicePool, **arguments)


def fenced(reader: Reader) -> None:
    """A read is over when its bytes are seen, and not before."""
    reader.worker.start(reader.order())
    assert reader.drive() is DONE
    reader.arrived()
    rank = reader.d.ranks[0]
    assert rank.pool.stream.num_waiting == 0 and rank.pool.stream.done[-1] == "event"


@pytest.mark.parametrize("sizes", SIZES)
def test_what_has_arrived_is_seen_when_the_read_is_done(sizes):
    fenced(on_device(sizes))


@pytest.mark.parametrize("sizes", SIZES)
def test_without_a_fence_it_is_not(sizes):
    reader = on_device(sizes)
    reader.worker._new_fence = PoolMemory(np.zeros((1, 1), np.uint8)).fence
    with pytest.raises(AssertionError):
        fenced(reader)


RANKS = {"equal": ((2, 16), (2, 16)), "heads": ((1, 16), (2, 16)), "blocks": ((1, 64), (2, 16))}


def fenced_on_all_ranks(reader: Reader) -> None:
    """Each rank has a device of its own; a read is over when its bytes are seen on all of them."""
    reader.worker.start(reader.order())
    assert reader.drive() is DONE
    reader.arrived()
    for rank in reader.d.ranks:
        assert rank.pool.stream.num_waiting == 0 and rank.pool.stream.done[-1] == "event"


@pytest.mark.parametrize("sizes", RANKS)
@pytest.mark.parametrize("slow", [0, 1])
def test_what_has_arrived_is_seen_on_every_rank_when_the_read_is_done(sizes, slow):
    reader = Reader(*RANKS[sizes], alone=False, pool=FakeDevicePool)
    reader.d.ranks[slow].pool.stream.PATIENCE = 50
    fenced_on_all_ranks(reader)


@pytest.mark.parametrize("sizes", RANKS)
@pytest.mark.parametrize("careless", [0, 1])
def test_a_rank_without_a_fence_is_found(sizes, careless):
    reader = Reader(*RANKS[sizes], alone=False, pool=FakeDevicePool)
    reader.d.ranks[careless].worker._new_fence = PoolMemory(np.zeros((1, 1), np.uint8)).fence
    with pytest.raises(AssertionError):
        fenced_on_all_ranks(reader)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_fence_that_is_made_before_the_last_byte_is_none(sizes):
    reader = on_device(sizes, descriptors_per_poll=1)
    early = reader.d.ranks[0].pool.fence()
    reader.worker._new_fence = lambda: early
    with pytest.raises(AssertionError):
        fenced(reader)


@pytest.mark.parametrize("sizes", SIZES)
def test_pages_of_a_read_that_is_given_up_are_nobodys_while_the_device_may_write_to_them(sizes):
    reader = on_device(sizes)
    rank = reader.d.ranks[0]
    reader.worker.start(reader.order())
    while not rank.pool.stream.num_waiting:
        assert polled(reader.worker, PullId(1)) is READING
    reader.worker.cancel(PullId(1))
    assert reader.drive() is CANCELLED
    assert rank.pool.stream.num_waiting == 0
    rank.memory[:] = CANARY
    rank.pool.fence()
    for _ in range(rank.pool.stream.num_waiting):
        rank.pool.stream.step()
    assert (rank.memory == CANARY).all()


@pytest.mark.parametrize(("p", "d"), [("host", "device"), ("device", "host"), ("device", "device")])
@pytest.mark.parametrize("sizes", [((1, 16), (1, 16)), ((1, 64), (2, 16)), ((2, 64), (2, 16))], ids=str)
def test_a_whole_transfer_between_gpus_and_cpus(sizes, p, d):
    kinds = {"host": PoolMemory, "device": FakeDevicePool}
    world = World(*sizes, kv_heads=2, sides={"num_pages": 96}, pools=(kinds[p], kinds[d]))
    content, prompt, count, k = world.content(300), keys(300), world.p.pages_of(300), world.p.pages_per_file
    offer = offer_of(world.p, content, prompt, range(count), {300: range(count, count + k)})
    local, file = range(5, 5 + world.d.pages_of(300)), range(60, 60 + world.d.pages_per_file)
    reference = world.p.door.offer(offer)
    pull = world.d.door.pull(leased_spec_of(reference, world.p, prompt, local, checkpoint=file))
    assert world.run(300, until=2)["d"] == [PullEnded(pull, None, 300, 300), PagesFree(pull)]
    for rank in world.d.ranks:
        rank.check_tokens(content, 0, 300, local, only_these=False)
        rank.check_file(content, 300, file)


def test_a_peer_that_is_refused_at_the_start_leaves_nothing_behind():
    reader = on_device("blocks")
    rank = reader.d.ranks[0]
    assert isinstance(reader.worker, LinkWorker)
    with pytest.raises(Exception, match="nobody"):
        reader.worker.start(reader.order(ranks=(b"nobody",)))
    assert len(reader.worker._reads) == rank.pool.stream.num_waiting == 0
