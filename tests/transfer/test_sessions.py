"""The handshake between servers that hold the same secret: both learn of each other, or why they do not fit."""

import random
from dataclasses import replace

import msgspec
import pytest

from cairn.transfer.contract import Identity, Peer
from cairn.transfer.session import HANDSHAKE_SECONDS, TRANSITIONS, ConsumerSessions, ProducerSession, SessionState
from cairn.transfer.wire import VERSION, Alive, Denied, Heartbeat, Hello, Welcome, replies, requests
from cairn.types import ManualClock
from transfer.world import GEOMETRY, LAYOUT

RANKS = (b"rank 0", b"rank 1")
BEAT = Heartbeat(b"c" * 16, "cmpl-1", b"n" * 16)


def identity(name, layout=LAYOUT):
    return Identity(Peer(name, GEOMETRY, RANKS), layout)


class Wire:
    """A consumer's session and a producer's side of it, with everything that was said."""

    def __init__(self, d=None, p=None):
        self.clock = ManualClock()
        self.said: list[bytes] = []
        self.served = []
        self.producer = ConsumerSessions(p or identity("p"))
        own = d or identity("d")
        self.session = ProducerSession("p", own, self.clock, random.Random(1).randbytes, self.said.append)

    def serve(self, sender, request):
        self.served.append((sender, request))
        return Alive(request.claim)

    def ask(self, frame, sender=b"d"):
        answer = self.producer.receive(sender, frame, self.serve)
        return None if answer is None else replies().decode(answer)

    def pump(self):
        found, self.said[:] = list(self.said), []
        answers = [self.producer.receive(b"d", frame, self.serve) for frame in found]
        return [reply for reply in map(self.session.receive, filter(None, answers)) if reply is not None]

    def opened(self):
        self.session.open()
        self.pump()
        assert self.session.state is SessionState.OPEN
        return self


def test_both_learn_of_each_other():
    wire = Wire().opened()
    assert wire.session.peer == Peer("p", GEOMETRY, RANKS) and wire.producer.num_open == 1
    wire.session.request(BEAT)
    assert wire.pump() == [Alive(BEAT.claim)] and wire.served == [(b"d", BEAT)]
    assert wire.producer.dropped == wire.session.dropped == 0


def test_a_record_before_hello_is_denied_and_not_served():
    wire = Wire()
    answer = wire.ask(requests().encode(BEAT))
    assert isinstance(answer, Denied) and answer.answers == BEAT.claim and "no such session" in answer.text
    assert wire.served == [] and wire.producer.num_open == 0


def test_nothing_is_sent_before_the_session_is_open():
    wire = Wire()
    wire.session.request(BEAT)
    wire.session.open()
    wire.session.request(BEAT)
    assert [type(requests().decode(frame)) for frame in wire.said] == [Hello]


def test_another_layout_is_refused_by_whoever_sees_it_first():
    wire = Wire(d=identity("d", b"M" * 32))
    wire.session.open()
    wire.pump()
    assert wire.session.state is SessionState.CLOSED and "layouts differ" in wire.session.failure
    assert wire.producer.num_open == 0
    wire = Wire()
    wire.session.open()
    welcome = wire.ask(wire.said[0])
    wire.session.receive(replies().encode(msgspec.structs.replace(welcome, layout=b"M" * 32)))
    assert wire.session.state is SessionState.CLOSED and "layouts differ" in wire.session.failure


def test_checkpoints_in_two_forms_are_refused_by_name():
    """Whoever sees it first: the sentence is about the peer of whoever reads it."""
    smaller = Identity(Peer("d", replace(GEOMETRY, checkpoint_dtype="int8"), RANKS), b"M" * 32)
    wire = Wire(d=smaller)
    wire.session.open()
    wire.pump()
    assert "checkpoint_dtype: float32 at the peer, int8 here" in wire.session.failure
    wire = Wire()
    wire.session.open()
    welcome = wire.ask(wire.said[0])
    other = msgspec.structs.replace(welcome, layout=b"M" * 32, geometry=smaller.me.geometry)
    wire.session.receive(replies().encode(other))
    assert "checkpoint_dtype: int8 at the peer, float32 here" in wire.session.failure


@pytest.mark.parametrize("version", [4, 99])
def test_another_version_is_refused_with_a_sentence_and_its_claims_are_not_served(version):
    wire = Wire()
    wire.session.open()
    hello = msgspec.structs.replace(requests().decode(wire.said[0]), version=version)
    answer = wire.ask(requests().encode(hello))
    assert isinstance(answer, Denied) and f"version {version} here, {VERSION} there" in answer.text
    assert wire.producer.num_open == 0
    assert isinstance(wire.ask(requests().encode(BEAT)), Denied) and wire.served == []


def test_a_producer_of_another_version_closes_the_session_with_its_own_sentence():
    wire = Wire()
    wire.session.open()
    wire.session.receive(replies().encode(Denied(requests().decode(wire.said[0]).nonce, "protocol version 5 here")))
    assert wire.session.state is SessionState.CLOSED and "protocol version 5 here" in wire.session.failure


def test_silence_is_repeated_into_and_then_given_up():
    wire = Wire()
    wire.session.open()
    given_up = []
    for _ in range(20):
        wire.clock.advance(0.5)
        given_up.append(wire.session.tick())
    assert wire.session.state is SessionState.CLOSED and "no answer" in wire.session.failure
    assert wire.said == [wire.said[0]] * 10 and given_up.count(True) == 1
    assert not wire.session.lose("closed"), "it was given up before"


def test_a_repeated_hello_is_answered_again_and_its_second_answer_changes_nothing():
    wire = Wire()
    wire.session.open()
    wire.clock.advance(0.5)
    wire.session.tick()
    assert len(wire.said) == 2 and wire.pump() == []
    assert wire.session.state is SessionState.OPEN and wire.session.dropped == 0 and wire.producer.num_open == 1


def test_an_answer_to_another_hello_does_not_open_a_session():
    wire = Wire()
    wire.session.open()
    welcome = wire.ask(wire.said[0])
    wire.session.receive(replies().encode(msgspec.structs.replace(welcome, answers=b"x" * 16)))
    wire.session.receive(replies().encode(Denied(b"x" * 16, "no")))
    assert wire.session.state is SessionState.GREETING


@pytest.mark.parametrize(("seconds", "silent"), [(0.0, False), (0.9, False), (1.0, True), (4.9, True)])
def test_what_is_lost_at_once_was_refused_and_what_takes_long_was_silent(seconds, silent):
    wire = Wire()
    wire.session.open()
    wire.clock.advance(seconds)
    assert wire.session.lose("why") is silent
    assert (wire.session.state, wire.session.failure) == (SessionState.CLOSED, "why")
    wire.clock.advance(HANDSHAKE_SECONDS)
    assert not wire.session.lose("again")
    assert wire.session.failure == "why"


def test_a_loss_of_an_open_session_is_no_silence():
    wire = Wire().opened()
    wire.clock.advance(HANDSHAKE_SECONDS)
    assert not wire.session.lose("closed")
    assert wire.session.state is SessionState.CLOSED


def test_a_connection_that_has_ended_is_forgotten():
    wire = Wire().opened()
    wire.producer.forget(b"d")
    wire.producer.forget(b"never there")
    wire.session.request(BEAT)
    (denied,) = wire.pump()
    assert isinstance(denied, Denied) and denied.answers == BEAT.claim and wire.served == []


def test_sessions_are_bounded_in_number_and_the_longest_unused_goes():
    producer = ConsumerSessions(identity("p"))
    first = Wire()
    first.producer = producer
    first.opened()
    for number in range(1023):
        wire = Wire()
        wire.session.open()
        producer.receive(b"%d" % number, wire.said[0], wire.serve)
    first.session.request(BEAT)
    assert first.pump() == [Alive(BEAT.claim)]
    for number in range(1023, 1100):
        wire = Wire()
        wire.session.open()
        producer.receive(b"%d" % number, wire.said[0], wire.serve)
    first.session.request(BEAT)
    assert first.pump() == [Alive(BEAT.claim)] and producer.num_open == 1024


def test_every_state_is_in_the_table():
    assert set(TRANSITIONS) == set(SessionState)


def test_a_welcome_says_what_every_rank_says():
    wire = Wire()
    wire.session.open()
    welcome = wire.ask(wire.said[0])
    assert isinstance(welcome, Welcome) and tuple(welcome.ranks) == RANKS and welcome.engine_id == "p"
