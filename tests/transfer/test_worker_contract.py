"""What everything that carries out reads must do: one rank or several, of equal sizes or of others."""

import pytest

from cairn.transfer.contract import Peer, PullId, ReadOrder, WorkerSide
from cairn.transfer.links.contract import LinkError, ReadState
from cairn.transfer.memory import PoolMemory
from doubles.device_pool import FakeDevicePool
from doubles.memory_link import Fault
from transfer.parts import parts, polled
from transfer.ranked_world import CANARY, World

READING, DONE, FAILED, CANCELLED = ReadState.READING, ReadState.DONE, ReadState.FAILED, ReadState.CANCELLED
TOKENS = 200


class Reader:
    """A worker of engine `d`, and orders that read from engine `p`."""

    def __init__(self, p, d, *, alone, pool=PoolMemory, **fabric):
        self.world = World(p, d, kv_heads=2, pools=(pool, pool), **fabric)
        self.p, self.d = self.world.p, self.world.d
        self.content = self.world.content(TOKENS)
        self.p.store(self.content, TOKENS, range(self.p.pages_of(TOKENS)), {})
        self.worker: WorkerSide = self.d.ranks[0].worker if alone else self.d.worker

    def order(self, pull=1, *, first_page=0, remote=None, ranks=None):
        descriptions = tuple(rank.link.describe() for rank in self.p.ranks) if ranks is None else ranks
        remote = range(self.p.pages_of(TOKENS)) if remote is None else remote
        self.pages = range(first_page, first_page + self.d.pages_of(TOKENS))
        lists = parts(remote, block=self.p.geometry.block_size), parts(self.pages, block=self.d.geometry.block_size)
        return ReadOrder(PullId(pull), Peer("p", self.p.geometry, descriptions), TOKENS, *lists, None, None)

    def drive(self, pull=1, polls=2000):
        for _ in range(polls):
            if (ended := self.worker.poll(PullId(pull))) is not None:
                self.volume = ended.volume
                return ended.state
            for servant in self.d.servants:
                servant.turn()
        return READING

    def arrived(self):
        for rank in self.d.ranks:
            rank.check_tokens(self.content, 0, TOKENS, self.pages, only_these=False)

    def forgotten(self, pull=1):
        with pytest.raises(AssertionError, match="no read"):
            polled(self.worker, PullId(pull))
        for rank in self.d.ranks:
            assert rank.link.num_open == len(rank.worker._reads) == 0


KINDS = {
    "one rank, equal sizes": ((1, 16), (1, 16), True),
    "one rank on a device": ((1, 16), (1, 16), True),
    "one rank, fewer than the peer has": ((2, 16), (1, 16), True),
    "one rank, other blocks": ((1, 64), (1, 16), True),
    "one rank on a device, other blocks": ((1, 64), (1, 16), True),
    "all ranks of one": ((1, 16), (1, 16), False),
    "two ranks, equal sizes": ((2, 16), (2, 16), False),
    "two ranks, other blocks": ((1, 16), (2, 64), False),
}


@pytest.fixture(params=KINDS)
def reader(request):
    def make(**fabric):
        p, d, alone = KINDS[request.param]
        pool = FakeDevicePool if "device" in request.param else PoolMemory
        return Reader(p, d, alone=alone, pool=pool, **({"descriptors_per_poll": 1} | fabric))

    return make


def test_it_is_done_when_all_bytes_are_there_and_then_forgotten(reader):
    case = reader(delay=1)
    case.worker.start(case.order())
    assert polled(case.worker, PullId(1)) is READING
    assert case.drive() is DONE
    case.arrived()
    case.forgotten()
    moved = [move for rank in case.d.ranks for move in rank.link.moved]
    volume = case.volume
    assert volume.num_bytes == sum(move.num_bytes for move in moved) > 0
    assert volume.num_descriptors == len(moved)


def test_several_reads_end_each_for_itself(reader):
    case = reader()
    for pull, first_page in ((1, 0), (2, 20)):
        case.worker.start(case.order(pull, first_page=first_page))
    case.worker.cancel(PullId(1))
    assert case.drive(1) is CANCELLED and case.drive(2) is DONE
    case.arrived()
    case.forgotten(1)


@pytest.mark.parametrize("wrong", [{"ranks": (b"nobody",)}, {"ranks": ()}, {"remote": range(3)}])
def test_a_peer_that_cannot_be_read_is_refused_before_a_byte_moves(reader, wrong):
    case = reader()
    with pytest.raises(LinkError):
        case.worker.start(case.order(**wrong))
    for servant in case.d.servants:
        servant.turn()
    assert not any(rank.link.moved for rank in case.d.ranks)
    case.forgotten()


def test_a_cancel_is_over_when_no_byte_can_come(reader):
    case = reader(late_writes=True)
    case.worker.start(case.order())
    assert case.drive(polls=1) is READING
    for rank in range(len(case.p.ranks)):
        case.world.fabric.inject(f"p-{rank}", Fault.FROZEN)
    case.worker.cancel(PullId(1))
    case.worker.cancel(PullId(99))
    assert case.drive(polls=50) is READING
    for rank in range(len(case.p.ranks)):
        case.world.fabric.inject(f"p-{rank}", Fault.NONE)
    assert case.drive() is CANCELLED
    case.forgotten()
    for rank in case.d.ranks:
        rank.memory[:] = CANARY
        moved = len(rank.link.moved)
        for servant in case.d.servants:
            servant.turn()
        assert (rank.memory == CANARY).all() and len(rank.link.moved) == moved


def test_a_peer_that_dies_fails_the_read(reader):
    case = reader()
    case.worker.start(case.order())
    assert case.drive(polls=1) is READING
    for rank in range(len(case.p.ranks)):
        case.world.fabric.inject(f"p-{rank}", Fault.DEAD)
    assert case.drive() is FAILED
    case.forgotten()
