"""The handshake between servers that hold the same secret: both learn of each other, or why they do not fit; and what
becomes of questions."""

import asyncio
import gc
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cairn.transfer.contract import Peer
from cairn.transfer.leases import Lease, LeaseLimits
from cairn.transfer.producer import ROOM_SECONDS, Producer
from cairn.transfer.session import HANDSHAKE_SECONDS, ConsumerTools, PeerFailed, ProducerSession
from cairn.transfer.stream import ConnectionLost
from cairn.transfer.wire import (
    VERSION,
    Answer,
    Claim,
    Confirm,
    Denied,
    Done,
    Heartbeat,
    Question,
    RefusalReason,
    Refused,
    Release,
    Welcome,
)
from cairn.types import ManualClock
from doubles.memory_channel import MemoryNetwork
from transfer.frames import answers, greeting_answers, greetings, questions
from transfer.parts import num_active
from transfer.world import GEOMETRY, LAYOUT, World, keys
from turned_loop import TurnedLoop

RANKS = (b"rank 0", b"rank 1")
AT = ("127.0.0.1", 1)


def identity(name, layout=LAYOUT):
    return Peer(name, GEOMETRY, RANKS, layout)


class Wire:
    """A consumer's session and a producer that serves it. `said`: what the consumer has said; `ended`: how its session
    has ended."""

    def __init__(self, d=None, p=None):
        self.clock = ManualClock()
        self.event_loop = TurnedLoop(self.clock)
        self.network = MemoryNetwork()
        self.d = self.network.channel("d", 0, self.event_loop)
        self.p = self.network.channel(*AT, self.event_loop)
        self.producer = Producer(p or identity("p"), LeaseLimits(max_pages=9), self.clock, random.randbytes, print)
        self.p.listen(self.producer.serve)
        self.heard, self.ended = [], []
        self.tools = ConsumerTools(d or identity("d"), None, self.connect, random.Random(1).randbytes, self.event_loop)
        self.session = ProducerSession(
            AT,
            "p",
            self.tools,
            heard=lambda: self.heard.append(self.clock.now()),
            ended=lambda session, failure: self.ended.append(failure),
        )
        self.event_loop.spin()

    async def connect(self, address):
        return await self.d.connect(address)

    @property
    def said(self):
        return self.d.sent

    def pump(self):
        self.event_loop.spin()
        while self.d.look() | self.p.look():
            self.event_loop.spin()

    def opened(self):
        self.pump()
        assert self.session.peer is not None and self.session.failure is None
        return self

    def ask(self, request, seconds=5.0):
        """A task: its answer, or what it raises."""
        return self.event_loop.create_task(self.session.ask(request, seconds))

    def answer(self, record):
        """Something that P says instead of what it would."""
        (near,) = self.d.streams
        near.far._under_way.clear()
        near.arrive(greeting_answers().encode(record))
        self.pump()

    @property
    def hello(self):
        return greetings().decode(self.said[0])

    def said_by_p(self):
        self.pump()
        return greeting_answers().decode(self.p.sent[0])


def test_both_learn_of_each_other():
    wire = Wire().opened()
    assert wire.session.peer == Peer("p", GEOMETRY, RANKS, LAYOUT)
    asked = wire.ask(Release(7))
    wire.pump()
    assert asked.result() == Done() and wire.heard == [0.0, 0.0]
    assert wire.producer.frames.dropped == wire.tools.frames.dropped == 0 and wire.ended == []


def test_a_question_before_hello_is_dropped():
    wire = Wire()
    (near,) = wire.d.streams
    near.far._under_way.clear()
    near.far.arrive(questions().encode(Question(1, Release(7))))
    wire.pump()
    assert wire.producer.frames.dropped == 1 and wire.p.sent == []


def test_nothing_is_asked_before_the_session_is_open():
    wire = Wire()
    asked = wire.ask(Release(7))
    wire.event_loop.spin()
    assert isinstance(asked.exception(), PeerFailed) and len(wire.said) == 1


def test_another_layout_is_refused_by_whoever_sees_it_first():
    wire = Wire(d=identity("d", b"M" * 32))
    wire.pump()
    assert "layouts differ" in str(wire.session.failure) and not wire.p.streams
    assert isinstance(wire.said_by_p(), Denied), "what its links say of themselves is for those that fit"
    wire, other = Wire(), Wire()
    theirs = replace(other.said_by_p().peer, layout=b"M" * 32)
    wire.answer(Welcome(wire.hello.nonce, theirs))
    assert "layouts differ" in str(wire.session.failure) and not wire.session.failure.is_silent


def test_checkpoints_in_two_forms_are_refused_by_name():
    """Whoever sees it first: the sentence is about the peer of whoever reads it."""
    smaller = Peer("d", replace(GEOMETRY, checkpoint_dtype="int8"), RANKS, b"M" * 32)
    wire = Wire(d=smaller)
    wire.pump()
    assert "checkpoint_dtype: float32 at the peer, int8 here" in str(wire.session.failure)
    wire, welcome = Wire(), Wire().said_by_p()
    wire.answer(Welcome(wire.hello.nonce, replace(welcome.peer, layout=b"M" * 32, geometry=smaller.geometry)))
    assert "checkpoint_dtype: int8 at the peer, float32 here" in str(wire.session.failure)


@pytest.mark.parametrize("version", [4, 5, 99])
def test_another_version_is_refused_with_a_sentence_and_nothing_is_served(version):
    wire = Wire()
    (near,) = wire.d.streams
    near.far._under_way.clear()
    near.far.arrive(greetings().encode(msgspec.structs.replace(wire.hello, version=version)))
    near.far.arrive(questions().encode(Question(1, Release(7))))
    answer = wire.said_by_p()
    assert isinstance(answer, Denied) and f"version {version} here, {VERSION} there" in answer.text
    assert not wire.p.streams and len(wire.p.sent) == 1
    assert f"version {version} here" in str(wire.session.failure) and not wire.p.streams


def test_a_producer_of_another_version_closes_the_session_with_its_own_sentence():
    wire = Wire()
    wire.answer(Denied(wire.hello.nonce, "protocol version 5 here"))
    assert "protocol version 5 here" in str(wire.session.failure) and len(wire.ended) == 1


def test_silence_is_given_up():
    wire = Wire()
    for _ in range(20):
        wire.clock.advance(0.5)
        wire.event_loop.spin()
    (failure,) = wire.ended
    assert "no answer" in str(failure) and failure.is_silent and len(wire.said) == 1
    wire.session.close("it was given up before")
    assert wire.ended == [failure]


def test_an_answer_to_another_hello_does_not_open_a_session():
    wire = Wire()
    other = Wire()
    wire.answer(msgspec.structs.replace(other.said_by_p(), answers=b"x" * 16))
    assert wire.session.peer is None and wire.session.failure is None
    (near,) = wire.d.streams
    near.arrive(greeting_answers().encode(Denied(b"x" * 16, "no")))
    wire.pump()
    assert wire.session.peer is None and wire.session.failure is None


@pytest.mark.parametrize(("seconds", "silent"), [(0.0, False), (0.9, False), (1.0, True), (4.9, True)])
def test_what_is_lost_at_once_was_refused_and_what_takes_long_was_silent(seconds, silent):
    wire = Wire()
    wire.clock.advance(seconds)
    (near,) = wire.d.streams
    near.arrive(ConnectionLost("why"))
    wire.d.look()
    wire.event_loop.spin()
    (failure,) = wire.ended
    assert (str(failure), failure.is_silent) == ("why", silent)
    wire.clock.advance(HANDSHAKE_SECONDS)
    wire.event_loop.spin()
    assert wire.ended == [failure]


def test_a_loss_of_an_open_session_is_no_silence_and_fails_whoever_waits():
    wire = Wire().opened()
    wire.clock.advance(HANDSHAKE_SECONDS)
    asked = [wire.ask(Heartbeat(7)) for _ in range(3)]
    wire.event_loop.spin()
    wire.network.cut(wire.d, wire.p)
    wire.d.look()
    wire.event_loop.spin()
    assert [str(each.exception()) for each in asked] == ["cut"] * 3
    (failure,) = wire.ended
    assert not failure.is_silent and wire.session.closed.done()
    late = wire.ask(Heartbeat(7))
    wire.event_loop.spin()
    assert str(late.exception()) == "cut"


def test_a_question_without_an_answer_has_a_deadline_and_its_late_answer_is_ignored():
    wire = Wire().opened()
    asked = wire.ask(Release(7), seconds=3.0)
    wire.event_loop.spin()
    wire.clock.advance(2.9)
    wire.event_loop.spin()
    assert not asked.done()
    wire.clock.advance(0.1)
    wire.event_loop.spin()
    assert isinstance(asked.exception(), TimeoutError) and wire.session.failure is None
    wire.pump()
    assert wire.tools.frames.dropped == 1
    again = wire.ask(Release(7))
    wire.pump()
    assert again.result() == Done()


def test_answers_go_to_whoever_has_asked_in_any_order():
    wire = Wire().opened()
    asked = [wire.ask(Confirm(number)) for number in (1, 2)]
    wire.event_loop.spin()
    (near,) = wire.d.streams
    near.far._under_way.clear()
    for number, record in ((2, Refused(RefusalReason.USED)), (9, Done()), (1, Done()), (1, Done())):
        near.arrive(answers().encode(Answer(number, record)))
    wire.pump()
    assert [each.result() for each in asked] == [Done(), Refused(RefusalReason.USED)] and wire.tools.frames.dropped == 2


def test_what_nobody_waits_for_is_sent_all_the_same():
    wire = Wire().opened()
    wire.session.tell(Release(7), 5.0)
    wire.pump()
    assert questions().decode(wire.said[-1]) == Question(1, Release(7)) and wire.tools.frames.dropped == 0
    wire.session.close("over")
    wire.session.tell(Release(7), 5.0)
    wire.pump()
    assert len(wire.said) == 2


def test_a_claim_is_its_connections_alone():
    """Whoever knows the number of a claim, but has another connection, can neither extend, confirm nor release it."""
    world = World(descriptors_per_poll=1)
    prompt = keys(160)
    world.pull(world.pull_spec(world.offer(prompt, range(10, 20)), prompt, range(10)))
    for _ in range(4):
        world.step()
    assert num_active(world.leases) == 1
    claims = [questions().decode(frame) for frame in world.channel.sent[1:]]
    thief = ProducerSession(
        ("127.0.0.1", 5600),
        world.p.name,
        ConsumerTools(identity("thief"), None, world.channel.connect, random.randbytes, world.event_loop),
        heard=lambda: None,
        ended=lambda session, failure: None,
    )
    world.deliver()
    number = claims[0].number
    asked = [world.event_loop.create_task(thief.ask(each(number), 5.0)) for each in (Heartbeat, Confirm, Release)]
    world.deliver()
    assert [each.result() for each in asked] == [Refused(RefusalReason.UNKNOWN)] * 2 + [Done()]
    assert num_active(world.leases) == 1
    assert [getattr(event, "failure", None) for event in world.run()] == [None, None]
    assert np.array_equal(world.memory[:10], world.p.memory[10:20])


def test_a_question_with_a_number_that_is_taken_is_refused():
    world = World(descriptors_per_poll=1)
    prompt = keys(160)
    world.pull(world.pull_spec(world.offer(prompt, range(10, 20)), prompt, range(10)))
    other = world.offer(prompt, range(30, 40), request_id="cmpl-2")
    for _ in range(4):
        world.step()
    (near,) = world.channel.streams
    claim = questions().decode(world.channel.sent[1])
    again = msgspec.structs.replace(claim.record, request_id=other.request_id, nonce=other.nonce)
    near.far.arrive(questions().encode(Question(claim.number, again)))
    world.deliver()
    assert answers().decode(world.p.channel.sent[-1]) == Answer(claim.number, Refused(RefusalReason.USED))
    assert len(world.leases._active) == 2 and world.consumer.frames.dropped == 1


def test_a_connection_keeps_nothing_of_claims_that_have_ended():
    """It stays for all that follow."""
    world = World()
    world.leases._limits = LeaseLimits(max_pages=64, max_remembered=1)
    prompt = keys(160)
    for number in range(4):
        ref = world.offer(prompt, range(10, 20), request_id=f"ended-{number}")
        world.pull(world.pull_spec(ref, prompt, range(10)))
        assert [getattr(event, "failure", None) for event in world.run()] == [None, None]
        assert [ended.state for ended in world.leases.take_ended()] == ["confirmed"]
    gc.collect()
    left = [each.request_id for each in gc.get_objects() if isinstance(each, Lease)]
    assert [name for name in left if name.startswith("ended-")] == ["ended-3"]
    assert len(world.channel.streams) == 1


def test_a_consumer_that_asks_without_end_and_takes_no_answers_is_not_read_any_more():
    """Claims of content wait each by itself, so many at a time."""
    wire = Wire().opened()
    (near,) = wire.d.streams
    near.room, before = 1, len(asyncio.all_tasks(wire.event_loop))
    claim = Claim("", bytes(32), 0, False)
    for number in range(1, 1001):
        near.far.arrive(questions().encode(Question(number, claim)))
    for _ in range(3):
        wire.p.look()
        wire.event_loop.spin()
    assert len(asyncio.all_tasks(wire.event_loop)) - before <= 64 and near.far.num_waiting > 900
    wire.clock.advance(ROOM_SECONDS + 2.0)
    wire.event_loop.spin()
    assert not wire.p.streams and not wire.producer._lookups


def test_a_session_that_is_closed_while_it_connects_connects_no_more():
    event_loop, ended = TurnedLoop(ManualClock()), []

    async def connect(address):
        await event_loop.create_future()

    tools = ConsumerTools(identity("d"), None, connect, random.randbytes, event_loop)
    session = ProducerSession(AT, "p", tools, heard=lambda: None, ended=lambda session, failure: ended.append(failure))
    event_loop.spin()
    assert not session.closed.done()
    session.close("others needed its place")
    event_loop.spin()
    assert session.closed.done() and [str(failure) for failure in ended] == ["others needed its place"]


def test_a_welcome_says_what_every_rank_says():
    welcome = Wire().said_by_p()
    assert isinstance(welcome, Welcome) and welcome.peer.ranks == RANKS and welcome.peer.engine_id == "p"
