"""Who does not hold the secret gets nothing, whatever was recorded before."""

import random

import msgspec
import pytest

from cairn.transfer.contract import Peer
from cairn.transfer.dial import TRANSITIONS, Dial, DialState
from cairn.transfer.frames import outer_frames
from cairn.transfer.proof import Role, Seal, check_secret
from cairn.transfer.sessions import HANDSHAKE_SECONDS, Identity, Sessions
from cairn.transfer.wire import Alive, Challenge, Denied, Heartbeat, Prove, Sealed, Welcome
from cairn.types import ManualClock
from transfer.world import GEOMETRY, LAYOUT, SECRET

BEAT = Heartbeat(b"c" * 16, "cmpl-1", b"n" * 16)
RANKS = (b"rank 0", b"rank 1")


def identity(name, *, secret=SECRET, layout=LAYOUT):
    return Identity(Peer(name, GEOMETRY, RANKS), layout, secret)


class Wire:
    """A dial and a producer's sessions, with everything that was said."""

    def __init__(self, d=None, p=None):
        self.clock = ManualClock()
        rng = random.Random(1)
        self.said: list[bytes] = []
        self.served = []
        self.sessions = Sessions(p or identity("p"), self.clock, rng.randbytes)
        self.dial = Dial(d or identity("d"), self.clock, rng.randbytes, self.said.append)

    def serve(self, session, request):
        self.served.append(request)
        return Alive(request.claim)

    def ask(self, frame, sender=b"d"):
        answer = self.sessions.receive(sender, frame, self.serve)
        return None if answer is None else outer_frames().decode(answer)

    def pump(self):
        replies, at = [], 0
        while at < len(self.said):
            answer = self.sessions.receive(b"d", self.said[at], self.serve)
            at += 1
            if answer is not None:
                replies.append(self.dial.receive(answer))
        return [reply for reply in replies if reply is not None]

    def opened(self):
        self.dial.open()
        self.pump()
        assert self.dial.state is DialState.OPEN
        return self


def test_both_prove_themselves_and_learn_of_each_other():
    wire = Wire().opened()
    assert wire.dial.peer == Peer("p", GEOMETRY, RANKS)
    wire.said.clear()
    wire.dial.request(BEAT)
    assert wire.pump() == [Alive(BEAT.claim)] and wire.served == [BEAT]
    assert wire.sessions.dropped == wire.dial.dropped == 0


def test_without_any_secret_the_same_handshake_runs():
    Wire(identity("d", secret=b""), identity("p", secret=b"")).opened()


def test_a_consumer_without_the_secret_learns_nothing_of_the_memory():
    wire = Wire(d=identity("d", secret=b""))
    wire.dial.open()
    challenge = wire.ask(wire.said[0])
    assert isinstance(challenge, Challenge) and b"rank" not in msgspec.msgpack.encode(challenge)
    answer = wire.ask(outer_frames().encode(Prove(challenge.nonce, b"\0" * 32)))
    assert isinstance(answer, Denied) and wire.sessions.num_open == 0


def test_a_challenge_takes_one_guess():
    wire = Wire()
    wire.dial.open()
    wire.dial.receive(outer_frames().encode(wire.ask(wire.said[0])))
    right = outer_frames().decode(wire.said[1])
    assert isinstance(wire.ask(outer_frames().encode(Prove(right.session, b"\0" * 32))), Denied)
    assert isinstance(wire.ask(wire.said[1]), Denied) and wire.sessions.num_open == 0


def test_a_stranger_cannot_spend_the_guess_of_another():
    wire = Wire()
    wire.dial.open()
    wire.dial.receive(outer_frames().encode(wire.ask(wire.said[0])))
    right = outer_frames().decode(wire.said[1])
    for frame in (wire.said[1], outer_frames().encode(Prove(right.session, b"\0" * 32))):
        assert isinstance(wire.ask(frame, sender=b"stranger"), Denied) and wire.sessions.num_open == 0
    assert isinstance(wire.ask(wire.said[1]), Welcome)


def test_the_producers_proof_cannot_be_sent_back_to_it():
    wire = Wire()
    wire.dial.open()
    challenge = wire.ask(wire.said[0])
    assert isinstance(wire.ask(outer_frames().encode(Prove(challenge.nonce, challenge.proof))), Denied)


def test_a_producer_without_the_secret_is_found_out_before_anything_is_proved_to_it():
    wire = Wire(p=identity("p", secret=b"some other secret"))
    wire.dial.open()
    wire.pump()
    assert wire.dial.state is DialState.CLOSED and "proof is wrong" in wire.dial.failure and len(wire.said) == 1


def test_a_recorded_proof_is_worth_nothing_to_a_stranger_or_after_a_restart():
    wire = Wire().opened()
    hello, prove = wire.said
    assert wire.ask(prove, sender=b"stranger") is None and wire.sessions.dropped == 1
    assert isinstance(wire.ask(prove), Welcome), "a repetition by the same connection"
    later = Sessions(identity("p"), wire.clock, random.Random(2).randbytes)
    answer = later.receive(b"d", hello, wire.serve)
    assert isinstance(outer_frames().decode(answer), Challenge)
    assert isinstance(outer_frames().decode(later.receive(b"d", prove, wire.serve)), Denied)
    assert later.num_open == 0 and wire.served == []


def test_a_record_is_taken_only_as_it_was_sealed_and_from_where_it_came():
    wire = Wire().opened()
    wire.said.clear()
    wire.dial.request(BEAT)
    sealed = outer_frames().decode(wire.said[0])
    other = msgspec.structs.replace(sealed, body=msgspec.msgpack.encode(Heartbeat(b"x" * 16, "cmpl-1", b"n" * 16)))
    assert wire.ask(outer_frames().encode(other)) is None
    assert isinstance(wire.ask(wire.said[0], sender=b"stranger"), Denied)
    assert wire.served == []
    mirrored = msgspec.structs.replace(sealed, mark=b"\0" * 32)
    assert wire.dial.receive(outer_frames().encode(mirrored)) is None and wire.dial.dropped == 1


def test_a_sealed_request_sent_back_is_no_reply():
    wire = Wire().opened()
    wire.said.clear()
    wire.dial.request(BEAT)
    assert wire.dial.receive(wire.said[0]) is None and wire.dial.dropped == 1


def test_a_forged_welcome_is_ignored_and_the_true_one_still_counts():
    wire = Wire()
    wire.dial.open()
    wire.dial.receive(outer_frames().encode(wire.ask(wire.said[0])))
    true = wire.ask(wire.said[1])
    wire.dial.receive(outer_frames().encode(msgspec.structs.replace(true, ranks=[b"elsewhere"])))
    assert wire.dial.state is DialState.PROVING
    wire.dial.receive(outer_frames().encode(true))
    assert wire.dial.peer.ranks == RANKS


@pytest.mark.parametrize(
    ("d", "p", "why"),
    [
        (identity("d", layout=b"M" * 32), identity("p"), "layouts differ"),
        (identity("d", secret=b"x" * 20), identity("p"), "proof is wrong"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(d, p, why):
    wire = Wire(d, p)
    wire.dial.open()
    wire.pump()
    assert wire.dial.state is DialState.CLOSED and why in wire.dial.failure


def test_another_version_is_refused_with_a_sentence():
    wire = Wire()
    wire.dial.open()
    hello = msgspec.structs.replace(outer_frames().decode(wire.said[0]), version=99)
    answer = wire.ask(outer_frames().encode(hello))
    assert isinstance(answer, Denied) and "version 99" in answer.text


def test_silence_is_repeated_into_and_then_given_up():
    wire = Wire()
    wire.dial.open()
    for _ in range(20):
        wire.clock.advance(0.5)
        wire.dial.tick()
    assert wire.dial.state is DialState.CLOSED and "no answer" in wire.dial.failure
    assert wire.said == [wire.said[0]] * 10


def test_challenges_are_forgotten_after_their_time_and_bounded_in_number():
    wire = Wire()
    wire.dial.open()
    hello = outer_frames().decode(wire.said[0])
    for number in range(1000):
        nonce = number.to_bytes(16, "little")
        wire.ask(outer_frames().encode(msgspec.structs.replace(hello, nonce=nonce)))
    assert wire.sessions.num_waiting <= 256
    challenge = wire.ask(wire.said[0])
    wire.clock.advance(HANDSHAKE_SECONDS)
    wire.dial.receive(outer_frames().encode(challenge))
    assert isinstance(wire.ask(wire.said[-1]), Denied)


def test_sessions_are_bounded_in_number():
    clock, rng = ManualClock(), random.Random(3)
    sessions = Sessions(identity("p"), clock, rng.randbytes)
    for number in range(1100):
        wire = Wire()
        wire.sessions = sessions
        wire.dial = Dial(identity(f"d-{number}"), clock, rng.randbytes, wire.said.append)
        wire.opened()
    assert sessions.num_open <= 1025


def test_a_session_of_before_a_restart_is_denied_and_closes_the_dial():
    wire = Wire().opened()
    wire.sessions = Sessions(identity("p"), wire.clock, random.Random(2).randbytes)
    wire.said.clear()
    wire.dial.request(BEAT)
    assert wire.pump() == [] and wire.dial.state is DialState.CLOSED and "restart" in wire.dial.failure
    wire.dial.request(BEAT)
    assert len(wire.said) == 1, "nothing more is sent"


def test_seals_differ_by_role_secret_and_transcript():
    seals = [Seal(SECRET, [b"a", b"b"]), Seal(SECRET, [b"ab", b""]), Seal(b"x" * 16, [b"a", b"b"])]
    marks = {seal.mark(role, b"body") for seal in seals for role in Role}
    assert len(marks | {seal.proof(role) for seal in seals for role in Role}) == 12
    assert seals[0].marks(Role.PRODUCER, b"body", seals[0].mark(Role.PRODUCER, b"body"))
    assert not seals[0].marks(Role.PRODUCER, b"body", b"")


def test_a_short_secret_is_refused():
    assert check_secret(b"") is None and check_secret(b"x" * 16) is None and "at least 16" in check_secret(b"x" * 15)


def test_every_state_is_in_the_table():
    assert set(TRANSITIONS) == set(DialState)
    assert isinstance(outer_frames().decode(outer_frames().encode(Sealed(b"s" * 16, b"m" * 32, b""))), Sealed)


def test_the_secret_is_in_no_text():
    assert SECRET.decode() not in repr(identity("p"))
