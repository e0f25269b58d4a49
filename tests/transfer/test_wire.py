"""Whatever arrives on the side channel is a record of the schema, or ignored and counted."""

import pickle
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.transfer.wire import (
    MAX_FRAME_BYTES,
    MAX_MARK_BYTES,
    VERSION,
    Alive,
    Claim,
    Confirm,
    Confirmed,
    Denied,
    Granted,
    Heartbeat,
    Hello,
    RefusalReason,
    Refused,
    Release,
    Released,
    Welcome,
    pack_pages,
    refusal,
    replies,
    requests,
    unpack_pages,
)
from transfer.world import GEOMETRY, World

N16, N32 = bytes(range(16)), bytes(range(32))
CLAIM = Claim(N16, "", b"", 48, True, N32, 400, "cmpl-1", N32[:16])
REQUESTS = (
    CLAIM,
    Claim(N16, "", N32 * 3, 128, False, N32, 200),
    Heartbeat(N16, "cmpl-1", N16),
    Confirm(N16, "cmpl-1", N16, 7),
    Release(N16, "cmpl-1", N16),
    Release(N16, None, None),
)
REPLIES = (
    Granted(N16, "cmpl-1", N16, 7, 400, pack_pages(np.arange(5)), 384, pack_pages(np.arange(2))),
    Granted(N16, "cmpl-1", N16, 7, 400, b"", None, b""),
    Refused(N16, "claim", RefusalReason.NOT_CACHED),
    Refused(N16, "claim", RefusalReason.USED),
    Alive(N16),
    Confirmed(N16, 7),
    Released(N16),
)
HELLO = Hello(VERSION, "engine", N16, N32, GEOMETRY)
WELCOME = Welcome(N16, "engine", N32, GEOMETRY, [b"rank 0", b"rank 1"])


@pytest.mark.parametrize("record", REQUESTS)
def test_requests_come_back_as_they_were(record):
    frames = requests()
    assert frames.decode(frames.encode(record)) == record and frames.dropped == 0
    assert refusal(record, RefusalReason.USED).request == type(record).__struct_config__.tag


@pytest.mark.parametrize("record", REPLIES)
def test_replies_come_back_as_they_were(record):
    frames = replies()
    assert frames.decode(frames.encode(record)) == record and frames.dropped == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"claim": N16[:15]},
        {"claim": "x" * 16},
        {"nonce": b""},
        {"end": N32 + b"x"},
        {"request_id": ""},
        {"request_id": "x" * 513},
        {"position": -1},
        {"position": 10**9},
        {"position": 2**70},
        {"position": 1.5},
        {"position": True},
        {"start": None},
        {"checkpoint": 1},
        {"type": "claims"},
        {"type": "granted"},
    ],
)
def test_a_field_out_of_its_bounds_drops_the_record(changed):
    frames = requests()
    raw = msgspec.to_builtins(CLAIM, builtin_types=(bytes,)) | changed
    assert (
        frames.decode(msgspec.msgpack.encode(raw) if 2**70 not in changed.values() else b"\xcf" + b"\xff" * 8) is None
    )
    assert frames.dropped == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"claim": N16[:15]},
        {"adapter": "x" * 1025},
        {"adapter": None},
        {"marks": None},
        {"marks": b"x" * (MAX_MARK_BYTES + 1)},
        {"marks": [N32]},
        {"start": -1},
        {"start": 10**9},
        {"end": N16},
        {"end": 100},
        {"checkpoint": None},
        {"type": "granted"},
    ],
)
def test_a_field_of_a_content_claim_out_of_its_bounds_drops_it(changed):
    frames = requests()
    raw = msgspec.to_builtins(REQUESTS[1], builtin_types=(bytes,)) | changed
    assert frames.decode(msgspec.msgpack.encode(raw)) is None and frames.dropped == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"request_id": ""},
        {"request_id": None},
        {"nonce": N32},
        {"generation": 0},
        {"position": -1},
        {"pages": "x"},
        {"checkpoint_position": -1},
        {"checkpoint": None},
        {"type": "grant"},
    ],
)
def test_a_field_of_a_grant_out_of_its_bounds_drops_it(changed):
    frames = replies()
    raw = msgspec.to_builtins(REPLIES[0], builtin_types=(bytes,))
    assert frames.decode(msgspec.msgpack.encode(raw)) == REPLIES[0]
    assert frames.decode(msgspec.msgpack.encode(raw | changed)) is None and frames.dropped == 1


def test_a_missing_field_drops_the_record_and_an_unknown_one_does_not():
    frames = requests()
    raw = msgspec.to_builtins(CLAIM, builtin_types=(bytes,))
    assert frames.decode(msgspec.msgpack.encode(raw | {"future": 1})) == CLAIM
    del raw["start"]
    assert frames.decode(msgspec.msgpack.encode(raw)) is None


TOO_LONG = Welcome(N16, "engine", N32, GEOMETRY, [bytes(1 << 20)] * 4)


def test_an_oversized_frame_is_not_even_parsed():
    frames = replies()
    huge = msgspec.msgpack.encode(msgspec.to_builtins(TOO_LONG, builtin_types=(bytes,)))
    assert len(huge) > MAX_FRAME_BYTES and frames.decode(huge) is None and frames.dropped == 1


def test_our_own_oversized_record_is_our_own_bug():
    with pytest.raises(AssertionError, match="at most"):
        replies().encode(TOO_LONG)


class Bomb:
    """Runs something when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


HOSTILE = (
    b"",
    b"\x00",
    b"\xc1",
    b"\xff" * 100,
    b"\x91" * 100_000,
    b"\xdb\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\x81\xa4type\xa5\xff\xfe\xfd\xfc\xfb",
    *(pickle.dumps(Bomb(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
    msgspec.json.encode(msgspec.to_builtins(CLAIM)),
)


@pytest.mark.parametrize("frame", HOSTILE)
def test_hostile_frames_are_counted_and_nothing_else(frame):
    for frames in (requests(), replies()):
        assert frames.decode(frame) is None and frames.dropped == 1
    world = World()
    assert world.p.producer.receive(b"stranger", frame) is None and world.p.producer.sessions.dropped == 1
    world.consumer.receive(("127.0.0.1", 5600), frame)
    assert world.consumer.dropped == 1


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_no_records(frame):
    for frames in (requests(), replies()):
        assert frames.decode(frame) is None and frames.dropped == 1


@pytest.mark.parametrize("record", [*REQUESTS, *REPLIES])
def test_every_truncation_is_dropped(record):
    frames = requests() if record in REQUESTS else replies()
    whole = frames.encode(record)
    assert {frames.decode(whole[:end]) for end in range(len(whole))} == {None}
    assert frames.decode(whole + b"\x00") is None
    assert frames.dropped == len(whole) + 1


def test_flipped_bits_end_nobody():
    """Every frame of a whole transfer, each byte of it changed. On a connection without a session it changes nothing;
    from the peer itself, which TLS rules out, it ends no more than the transfer."""
    rng = random.Random(4)
    for from_the_peer in (False, True):
        world = World()
        prompt = np.arange(40)
        ref = world.offer(prompt, (1, 2, 3))
        world.consumer.pull(world.pull_spec(ref, prompt, (4, 5, 6)))
        events = []
        for _ in range(40):
            events += world.consumer.tick()
            world.clock.advance(0.5 if from_the_peer else 0.0)
            for frame in [*world.to_producer]:
                for at in range(len(frame)):
                    sender = b"decode" if from_the_peer else rng.randbytes(8)
                    world.p.producer.receive(sender, changed_at(frame, at, rng))
            for frame in [*world.to_consumer] if from_the_peer else ():
                for at in range(len(frame)):
                    world.at_consumer(changed_at(frame, at, rng))
            world.deliver()
        failure, _ = [getattr(event, "failure", None) for event in events]
        assert world.consumer.num_open == 0 and (from_the_peer or failure is None)


def changed_at(frame, at, rng):
    broken = bytearray(frame)
    broken[at] ^= rng.randrange(1, 256)
    return bytes(broken)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_pages_come_back_as_they_were(pages):
    assert unpack_pages(pack_pages(np.array(pages, np.int32))).tolist() == pages


@pytest.mark.parametrize("packed", [b"\0", b"\0" * 5, b"\xff" * 4, b"\0\0\0\x80"])
def test_broken_page_lists_are_none(packed):
    assert unpack_pages(packed) is None


def test_the_records_of_a_handshake_are_read():
    assert replies().decode(replies().encode(Denied(N16, "why"))) == Denied(N16, "why")
    assert replies().decode(replies().encode(WELCOME)) == WELCOME
    assert requests().decode(requests().encode(HELLO)) == HELLO
    assert requests().decode(replies().encode(WELCOME)) is None and replies().decode(requests().encode(HELLO)) is None
