"""Several ranks read as one: nothing is over before it is over on all, whatever happens to any of them."""

import itertools

import msgspec
import numpy as np
import pytest

from cairn.cache.group_pages import GroupPages
from cairn.transfer.contract import (
    LeaseEnded,
    PagesFree,
    Peer,
    PullEnded,
    PullId,
    ReadEnded,
    ReadOrder,
    Volume,
    WorkerSide,
)
from cairn.transfer.links.contract import LinkError, ReadState
from cairn.transfer.ranks import (
    CancelRead,
    RankedWorker,
    RankServant,
    Serve,
)
from doubles.memory_link import Fault
from doubles.memory_rank_channel import memory_rank_channel
from transfer.frames import from_rank, to_rank
from transfer.parts import num_active, num_quarantined, parts, polled
from transfer.rank_channel_contract import RankChannelContract
from transfer.ranked_world import CANARY, World, leased_spec_of, offer_of
from transfer.world import GEOMETRY, keys

ONE = PullId(1)
READING, DONE, FAILED, CANCELLED = ReadState.READING, ReadState.DONE, ReadState.FAILED, ReadState.CANCELLED


class TestMemoryChannel(RankChannelContract):
    @pytest.fixture
    def ends(self):
        return memory_rank_channel()


def is_idle(servant):
    """Whether nothing has to be done until the next frame."""
    return not servant._open and not servant._serving


def order(pull=1, *, checkpoint=True, ranks=(b"r0", b"r1")):
    pages = np.arange(3, dtype=np.int32)
    file = (pages + 10, pages + 20) if checkpoint else (None, None)
    return ReadOrder(PullId(pull), Peer("p", GEOMETRY, ranks), 40, parts(pages, 5), parts(pages + 5, 5), *file)


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_order_comes_back_as_it_was(checkpoint):
    sent = order(checkpoint=checkpoint)
    frames = to_rank()
    got = frames.decode(frames.encode(sent))
    for field in ReadOrder.__struct_fields__:
        assert comparable(getattr(sent, field)) == comparable(getattr(got, field))


def comparable(value):
    match value:
        case np.ndarray():
            return value.tolist()
        case (GroupPages(), *_):
            return [(part.group, part.first_token, part.pages.tolist()) for part in value]
    return value


TO = (order(), CancelRead(7), Serve(True))
FROM = (ReadEnded(7, DONE), ReadEnded(7, FAILED, "why"), ReadEnded(7, DONE, volume=Volume(5, 2)))


@pytest.mark.parametrize(("record", "frames"), [*((r, to_rank) for r in TO), *((r, from_rank) for r in FROM)])
def test_records_come_back_and_every_truncation_is_dropped(record, frames):
    frames = frames()
    whole = frames.encode(record)
    assert frames.encode(frames.decode(whole)) == whole and frames.dropped == 0
    assert {frames.decode(whole[:end]) for end in range(len(whole))} == {None} and frames.dropped == len(whole)


@pytest.mark.parametrize(
    "changed",
    [
        {"pull": -1},
        {"pull": "1"},
        {"end": 2**40},
        {"remote": None},
        {"remote": [{"group": {"name": "full", "tokens_per_page": 16}, "first_token": 0, "pages": b"\xff" * 4}]},
        {"remote": [{"group": {"name": "full", "tokens_per_page": 0}, "first_token": 0, "pages": b""}]},
        {"local": [{"group": {"name": "full", "tokens_per_page": 16}, "first_token": 0}]},
        {"local_checkpoint": b"123"},
        {"peer": {"engine_id": "p", "ranks": [1]}},
    ],
)
def test_a_field_out_of_its_bounds_drops_the_record(changed):
    raw = msgspec.msgpack.decode(to_rank().encode(TO[0]))
    frames = to_rank()
    assert frames.decode(msgspec.msgpack.encode(raw)) is not None
    assert frames.decode(msgspec.msgpack.encode(raw | changed)) is None


# -- by hand -----------------------------------------------------------------------------------------------------------


class Hand:
    """A WorkerSide that is where it was put."""

    def __init__(self):
        self.states: dict[PullId, ReadState] = {}
        self.cancelled: list[PullId] = []
        self.refuses = False

    def start(self, order):
        if self.refuses:
            raise LinkError("no such memory")
        self.states[order.pull] = READING

    def poll(self, pull):
        state = self.states[pull]
        if state is READING:
            return None
        del self.states[pull]
        return ReadEnded(pull, state, volume=Volume(1000 + pull, 3))

    def cancel(self, pull):
        self.cancelled.append(pull)


class StillLink:
    """Only what a rank's link is asked for besides reads."""

    def __init__(self, name):
        self.name = name
        self.progressed = 0

    def describe(self):
        return self.name

    def progress(self):
        self.progressed += 1


class Ranks:
    """Three ranks whose reads end when a test says so."""

    def __init__(self, size=3):
        self.hands = [Hand() for _ in range(size)]
        self.links = [StillLink(b"link %d" % rank) for rank in range(size)]
        self.channels = [memory_rank_channel() for _ in range(size - 1)]
        self.servants = [
            RankServant(link, hand, far)
            for link, hand, (_, far) in zip(self.links[1:], self.hands[1:], self.channels, strict=True)
        ]
        self.worker: WorkerSide = RankedWorker(self.links[0], self.hands[0], [near for near, _ in self.channels])

    def turn(self, *but):
        for rank, servant in enumerate(self.servants, 1):
            if rank not in but:
                servant.turn()

    def put(self, rank, state, pull=ONE):
        self.hands[rank].states[pull] = state


@pytest.mark.parametrize("turn", [*itertools.permutations(range(3))])
def test_done_when_the_last_rank_is_done_whichever_it_is(turn):
    ranks = Ranks()
    ranks.worker.start(order())
    ranks.turn()
    for rank in turn:
        assert polled(ranks.worker, ONE) is READING
        ranks.put(rank, DONE)
        ranks.turn()
    assert polled(ranks.worker, ONE) is DONE and len(ranks.worker._reads) == 0
    assert all(map(is_idle, ranks.servants)) and not any(hand.cancelled for hand in ranks.hands)
    with pytest.raises(AssertionError, match="no read"):
        polled(ranks.worker, ONE)


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("state", [FAILED, CANCELLED])
def test_the_first_failure_cancels_the_others_and_all_must_have_ended(first, state):
    ranks = Ranks()
    ranks.worker.start(order())
    ranks.turn()
    ranks.put(first, state)
    ranks.turn()
    others = [rank for rank in range(3) if rank != first]
    assert polled(ranks.worker, ONE) is READING
    ranks.turn()
    assert [hand.cancelled for hand in ranks.hands] == [[] if rank == first else [ONE] for rank in range(3)]
    for rank, end in zip(others, (CANCELLED, DONE), strict=True):
        assert polled(ranks.worker, ONE) is READING
        ranks.put(rank, end)
        ranks.turn()
    assert polled(ranks.worker, ONE) is FAILED and len(ranks.worker._reads) == 0


def test_a_cancel_reaches_every_rank_and_is_over_when_all_say_so():
    ranks = Ranks()
    ranks.worker.start(order())
    ranks.turn()
    ranks.worker.cancel(ONE)
    ranks.worker.cancel(ONE)
    ranks.worker.cancel(PullId(9))
    ranks.turn()
    assert [hand.cancelled for hand in ranks.hands] == [[ONE]] * 3
    for rank in (2, 0):
        ranks.put(rank, CANCELLED)
        ranks.turn()
        assert polled(ranks.worker, ONE) is READING
    ranks.put(1, DONE)
    ranks.turn()
    assert polled(ranks.worker, ONE) is CANCELLED


def test_a_rank_that_cannot_begin_fails_the_read_and_says_why():
    ranks = Ranks()
    ranks.hands[2].refuses = True
    ranks.worker.start(order())
    ranks.turn()
    assert ranks.worker.poll(ONE) is None
    ranks.turn()
    for rank in (0, 1):
        assert ranks.hands[rank].cancelled == [ONE]
        ranks.put(rank, CANCELLED)
    ranks.turn()
    ended = ranks.worker.poll(ONE)
    assert (ended.state, ended.failure) == (FAILED, "rank 2: no such memory") and is_idle(ranks.servants[1])


def test_when_rank_0_cannot_begin_nobody_does():
    ranks = Ranks()
    ranks.hands[0].refuses = True
    with pytest.raises(LinkError, match="no such memory"):
        ranks.worker.start(order())
    with pytest.raises(LinkError, match="more than 1048576 bytes"):
        ranks.worker.start(order(ranks=(b"x" * (1 << 19), b"x" * ((1 << 19) + 1))))
    ranks.turn()
    assert not ranks.hands[1].states and len(ranks.worker._reads) == 0


def test_a_rank_that_does_not_answer_keeps_its_read_open_for_ever():
    ranks = Ranks()
    ranks.worker.start(order())
    ranks.put(0, DONE)
    ranks.turn(2)
    ranks.put(1, DONE)
    ranks.turn(2)
    ranks.worker.cancel(ONE)
    assert {polled(ranks.worker, ONE) for _ in range(1000)} == {READING}
    ranks.turn()
    ranks.put(2, CANCELLED)
    ranks.turn()
    assert polled(ranks.worker, ONE) is CANCELLED


def test_ranks_make_progress_while_a_lease_is_open_and_are_idle_otherwise():
    ranks = Ranks()
    ranks.worker.serve(False)
    ranks.turn()
    assert [link.progressed for link in ranks.links] == [0, 0, 0] and all(map(is_idle, ranks.servants))
    ranks.worker.serve(True)
    ranks.turn()
    for _ in range(2):
        ranks.worker.serve(True)
        assert ranks.channels[0][1].receive() == (), "it is said once"
        ranks.turn()
    assert [link.progressed for link in ranks.links] == [3, 3, 3] and not is_idle(ranks.servants[0])
    ranks.worker.serve(False)
    ranks.turn()
    ranks.turn()
    assert [link.progressed for link in ranks.links] == [3, 3, 3] and is_idle(ranks.servants[0])


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x91" * 9999, b"\x80\x04K\x01.", from_rank().encode(ReadEnded(7, DONE))]
)
def test_what_is_no_record_is_dropped_at_both_ends_and_counted(frame):
    ranks = Ranks(2)
    near, far = ranks.channels[0]
    near.send(frame)
    far.send(frame if frame[:1] != b"\x85" else to_rank().encode(CancelRead(1)))
    ranks.turn()
    ranks.worker.start(order())
    ranks.turn()
    assert polled(ranks.worker, ONE) is READING
    assert ranks.servants[0].frames.dropped == ranks.worker.frames.dropped == 1 and ONE in ranks.hands[1].states


def test_a_broken_order_and_a_repeated_one_are_dropped():
    ranks = Ranks(2)
    ranks.worker.start(order())
    near, _ = ranks.channels[0]
    near.send(to_rank().encode(order()))
    near.send(to_rank().encode(msgspec.structs.replace(order(2), local=parts([-1]))))
    near.send(to_rank().encode(CancelRead(77)))
    ranks.turn()
    assert ranks.servants[0].frames.dropped == 2 and not ranks.hands[1].cancelled
    assert (
        polled(ranks.worker, ONE) is READING
        and ranks.worker.frames.dropped == 0
        and list(ranks.hands[1].states) == [ONE]
    )


def test_what_a_rank_says_of_reads_that_are_over_is_ignored():
    ranks = Ranks(2)
    ranks.worker.start(order())
    ranks.put(0, DONE)
    ranks.turn()
    ranks.put(1, DONE)
    ranks.turn()
    far = ranks.channels[0][1]
    far.send(from_rank().encode(ReadEnded(1, FAILED)))
    assert polled(ranks.worker, ONE) is DONE and ranks.worker.frames.dropped == 1


# -- with links --------------------------------------------------------------------------------------------------------


class Transfer:
    """P hands 400 tokens to a server of two ranks, whose memory moves a descriptor a poll."""

    def __init__(self, p=(2, 16), d=(2, 16), **fabric):
        self.world = World(p, d, kv_heads=2, sides={"num_pages": 96}, **{"descriptors_per_poll": 1} | fabric)
        self.content, self.prompt = self.world.content(400), keys(400)
        p, d = self.world.p, self.world.d
        count, k = p.pages_of(400), p.pages_per_file
        files = {400: range(count, count + k)}
        self.reference = p.door.offer(offer_of(p, self.content, self.prompt, range(count), files))
        self.own = range(d.pages_of(400) + d.pages_per_file)
        self.pages, self.file = self.own[: d.pages_of(400)], self.own[d.pages_of(400) :]
        self.pull = d.door.pull(leased_spec_of(self.reference, p, self.prompt, self.pages, checkpoint=self.file))
        self.events = {"p": [], "d": []}

    def run(self, rounds=40):
        events = self.world.run(rounds)
        for name in events:
            self.events[name] += events[name]
        return events["d"]

    def until_reading(self):
        while not all(rank.link.moved for rank in self.world.d.ranks):
            self.run(1)

    def untouched(self):
        for rank in self.world.d.ranks:
            rank.memory[: rank.num_pages] = CANARY
        return lambda: all((rank.memory[: rank.num_pages] == CANARY).all() for rank in self.world.d.ranks)


SIZES = pytest.mark.parametrize(("p", "d"), [((2, 16), (2, 16)), ((4, 64), (2, 16)), ((1, 16), (2, 64))])


@SIZES
def test_a_link_of_rank_1_that_dies_in_mid_read_fails_the_pull_on_all(p, d):
    transfer = Transfer(p, d)
    transfer.until_reading()
    last = len(transfer.world.p.ranks) - 1
    transfer.world.fabric.inject(f"p-{last}", Fault.DEAD)
    assert transfer.run() == [
        PullEnded(transfer.pull, "the link failed while reading", 400, 400),
        PagesFree(transfer.pull),
    ]
    assert transfer.events["p"] == [LeaseEnded(transfer.reference, "released")]
    for rank in transfer.world.d.ranks:
        assert rank.link.num_open == len(rank.worker._reads) == 0


@SIZES
def test_a_rank_that_stands_still_leaves_the_pages_in_quarantine(p, d):
    transfer = Transfer(p, d)
    transfer.until_reading()
    transfer.world.d.running.discard(1)
    assert transfer.run(100) == []
    transfer.world.clock.advance(30.0)
    ended = transfer.run(100)
    assert len(ended) == 1 and "longer than 30 s" in ended[0].failure
    assert num_quarantined(transfer.world.d.consumer) == 1
    transfer.world.clock.advance(10_000.0)
    assert transfer.run(100) == [] and transfer.events["p"][-1].state in ("released", "expired")
    transfer.world.d.running.add(1)
    assert transfer.run(200) == [PagesFree(transfer.pull)]
    assert len(transfer.world.d.worker._reads) == 0


@SIZES
def test_late_writes_on_any_rank_keep_the_pages_until_they_have_come(p, d):
    transfer = Transfer(p, d, late_writes=True)
    transfer.until_reading()
    transfer.world.d.door.abort(transfer.pull)
    for rank in transfer.world.p.ranks:
        transfer.world.fabric.inject(f"p-{rank.rank}", Fault.FROZEN)
    assert [type(event) for event in transfer.run()] == [PullEnded]
    transfer.world.fabric.inject("p-0", Fault.NONE)
    frozen = len(transfer.world.p.ranks) > 1
    assert (transfer.run(200) == []) is frozen
    for rank in transfer.world.p.ranks:
        transfer.world.fabric.inject(f"p-{rank.rank}", Fault.NONE)
    transfer.run(200)
    assert transfer.events["d"][-1] == PagesFree(transfer.pull)
    assert transfer.untouched()()
    clean = transfer.untouched()
    transfer.run(50)
    assert clean(), "a page was written after it had been given back"


def test_the_confirmation_is_asked_for_after_the_last_rank():
    transfer = Transfer()
    transfer.until_reading()
    transfer.world.d.running.discard(1)
    transfer.run(100)
    rank_0, rank_1 = transfer.world.d.ranks
    assert len(rank_0.worker._reads) == 0 and len(rank_1.worker._reads) == 1
    assert num_active(transfer.world.p.producer.leases) == 1 and transfer.events["d"] == []
    transfer.world.d.running.add(1)
    assert transfer.run(200)[0] == PullEnded(transfer.pull, None, 400, 400)
    for rank in transfer.world.d.ranks:
        rank.check_tokens(transfer.content, 0, 400, transfer.pages, only_these=False)
        rank.check_file(transfer.content, 400, transfer.file)
