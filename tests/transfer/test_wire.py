"""Whatever arrives on the side channel is a record of the schema, or ignored and counted."""

import pickle
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.transfer.contract import PagesFree, Peer, PullEnded
from cairn.transfer.wire import (
    MAX_FRAME_BYTES,
    MAX_MARK_BYTES,
    VERSION,
    Answer,
    Claim,
    Confirm,
    Decline,
    Denied,
    Done,
    Granted,
    Heartbeat,
    Hello,
    Question,
    RefusalReason,
    Refused,
    Release,
    Welcome,
    encode_array,
)
from transfer.frames import answers, geometries, greeting_answers, greetings, questions
from transfer.parts import granted_numbers, numbers
from transfer.world import GEOMETRY, World

N16, N32 = bytes(range(16)), bytes(range(32))
CLAIM = Claim("", b"", 48, True, N32, 400, "cmpl-1", N32[:16])
RECORDS = (
    CLAIM,
    Claim("", N32 * 3, 128, False, N32, 200),
    Heartbeat(7),
    Confirm(7),
    Release(7),
    Decline("cmpl-1", N16),
)
REPLIES = (
    Granted(400, (0, 400), (numbers(range(5)), numbers([])), 384, numbers(range(2))),
    Granted(400, (), (), None, numbers([])),
    Refused(RefusalReason.NOT_CACHED),
    Refused(RefusalReason.USED),
    Done(),
)
QUESTIONS = tuple(Question(3, record) for record in RECORDS)
ANSWERS = tuple(Answer(3, record) for record in REPLIES)
HELLO = Hello(VERSION, "engine", N16, N32, msgspec.Raw(msgspec.msgpack.encode(GEOMETRY)))
WELCOME = Welcome(N16, Peer("engine", GEOMETRY, (b"rank 0", b"rank 1"), N32))
KINDS = (greetings, greeting_answers, questions, answers)


def listed(answer):
    """An answer whose arrays are lists."""
    fields = {name: getattr(answer.record, name) for name in answer.record.__struct_fields__}
    if isinstance(answer.record, Granted):
        fields |= {"pages": granted_numbers(answer.record), "checkpoint": answer.record.checkpoint.tolist()}
    return answer.number, type(answer.record), fields


@pytest.mark.parametrize("record", QUESTIONS)
def test_questions_come_back_as_they_were(record):
    frames = questions()
    assert frames.decode(frames.encode(record)) == record and frames.dropped == 0


@pytest.mark.parametrize("record", ANSWERS)
def test_answers_come_back_as_they_were(record):
    frames = answers()
    assert listed(frames.decode(frames.encode(record))) == listed(record) and frames.dropped == 0


@pytest.mark.parametrize("number", [0, -1, 1 << 62, "1", None])
def test_a_number_out_of_its_bounds_drops_the_record(number):
    frames = questions()
    raw = [number, msgspec.to_builtins(CLAIM, builtin_types=(bytes,))]
    assert frames.decode(msgspec.msgpack.encode(raw)) is None and frames.dropped == 1


def numbered(raw):
    """A record, with a number before it."""
    return msgspec.msgpack.encode([3, raw])


@pytest.mark.parametrize(
    "changed",
    [
        {"nonce": N16[:15]},
        {"nonce": "x" * 16},
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
    frames = questions()
    raw = msgspec.to_builtins(CLAIM, builtin_types=(bytes,)) | changed
    assert frames.decode(numbered(raw) if 2**70 not in changed.values() else b"\x92\x03\xcf" + b"\xff" * 8) is None
    assert frames.dropped == 1


@pytest.mark.parametrize(
    "changed",
    [
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
    frames = questions()
    raw = msgspec.to_builtins(RECORDS[1], builtin_types=(bytes,)) | changed
    assert frames.decode(numbered(raw)) is None and frames.dropped == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"position": -1},
        {"position": None},
        {"pages": "x"},
        {"pages": [1]},
        {"first_tokens": [-1]},
        {"checkpoint_position": -1},
        {"checkpoint": None},
        {"checkpoint": b"\0" * 5},
        {"pages": [b"\0"]},
        {"pages": [b"\xff" * 4]},
        {"pages": [b"\0\0\0\x80"]},
        {"type": "grant"},
    ],
)
def test_a_field_of_a_grant_out_of_its_bounds_drops_it(changed):
    frames = answers()
    raw = msgspec.to_builtins(REPLIES[0], builtin_types=(bytes,), enc_hook=encode_array)
    assert listed(frames.decode(numbered(raw))) == listed(ANSWERS[0])
    assert frames.decode(numbered(raw | changed)) is None and frames.dropped == 1


def test_a_missing_field_drops_the_record_and_an_unknown_one_does_not():
    frames = questions()
    raw = msgspec.to_builtins(CLAIM, builtin_types=(bytes,))
    assert frames.decode(numbered(raw | {"future": 1})) == QUESTIONS[0]
    del raw["start"]
    assert frames.decode(numbered(raw)) is None


TOO_LONG = Welcome(N16, Peer("engine", GEOMETRY, (bytes(1 << 20),) * 4, N32))


def test_an_oversized_frame_is_not_even_parsed():
    frames = greeting_answers()
    huge = msgspec.msgpack.encode(msgspec.to_builtins(TOO_LONG, builtin_types=(bytes,)))
    assert len(huge) > MAX_FRAME_BYTES and frames.decode(huge) is None and frames.dropped == 1


def test_our_own_oversized_record_is_our_own_bug():
    with pytest.raises(AssertionError, match="at most"):
        greeting_answers().encode(TOO_LONG)


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
    for kind in KINDS:
        frames = kind()
        assert frames.decode(frame) is None and frames.dropped == 1


@pytest.mark.parametrize("frame", HOSTILE)
def test_hostile_frames_from_a_peer_are_counted_and_change_nothing(frame):
    """Before the handshake and after it, to the producer and to the consumer."""
    world = World()
    prompt = np.arange(40)
    world.pull(world.pull_spec(world.offer(prompt, (1, 2, 3)), prompt, (4, 5, 6)))
    world.tick()
    (near,) = world.channel.streams
    for count in (1, 2):
        near.far.arrive(frame)
        world.deliver()
        near.arrive(frame)
        world.deliver()
        assert (world.p.producer.frames.dropped, world.consumer.frames.dropped) == (count, count)
    world.pull(world.pull_spec(world.offer(prompt, (7, 8, 9)), prompt, (10, 11, 12)))
    assert [event.failure for event in world.run() if isinstance(event, PullEnded)] == [None, None]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_no_records(frame):
    for kind in KINDS:
        frames = kind()
        assert frames.decode(frame) is None and frames.dropped == 1


@pytest.mark.parametrize("record", [*QUESTIONS, *ANSWERS])
def test_every_truncation_is_dropped(record):
    frames = questions() if isinstance(record, Question) else answers()
    whole = frames.encode(record)
    assert {frames.decode(whole[:end]) for end in range(len(whole))} == {None}
    assert frames.decode(whole + b"\x00") is None
    assert frames.dropped == len(whole) + 1


def test_flipped_bits_end_nobody():
    """Every frame of a whole transfer, each byte of it changed, comes before the true one. TLS rules that out; without
    it, it ends no more than the transfer."""
    rng = random.Random(4)
    world = World()
    prompt = np.arange(40)
    world.pull(world.pull_spec(world.offer(prompt, (1, 2, 3)), prompt, (4, 5, 6)))
    events, num_changed = [], 0
    for _ in range(40):
        events += world.tick()
        world.clock.advance(0.5)
        for stream in [*world.channel.streams, *world.p.channel.streams]:
            under_way = [frame for _, frame in stream._under_way]
            stream._under_way.clear()
            for frame in under_way:
                for at in range(len(frame) if isinstance(frame, bytes) else 0):
                    stream.arrive(changed_at(frame, at, rng))
                    num_changed += 1
                stream.arrive(frame)
        world.channel.look()
        world.p.channel.look()
    assert num_changed > 300 and [type(event) for event in events] == [PullEnded, PagesFree]
    assert world.consumer.num_open == 0


def changed_at(frame, at, rng):
    broken = bytearray(frame)
    broken[at] ^= rng.randrange(1, 256)
    return bytes(broken)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_pages_come_back_as_they_were(pages):
    frames = answers()
    sent = Answer(3, Granted(400, (0,), (numbers(pages),), None, numbers([])))
    assert frames.decode(frames.encode(sent)).record.pages[0].tolist() == pages


def test_the_records_of_a_handshake_are_read():
    welcomes = greeting_answers()
    assert welcomes.decode(welcomes.encode(Denied(N16, "why"))) == Denied(N16, "why")
    assert welcomes.decode(welcomes.encode(WELCOME)) == WELCOME
    assert greetings().decode(greetings().encode(HELLO)) == HELLO
    assert greetings().decode(welcomes.encode(WELCOME)) is None and welcomes.decode(greetings().encode(HELLO)) is None


MANY_GROUPS = 65 * [{"name": "", "tokens_per_page": 16}]


@pytest.mark.parametrize(
    ("field", "lie"),
    [
        ("state_dtype", 65 * "x"),
        ("tp_size", 0),
        ("tp_size", 1025),
        ("page_bytes", (1 << 40) + 1),
        ("state_units", (1 << 20) + 1),
        ("groups", MANY_GROUPS),
    ],
    ids=["state_dtype", "no ranks", "too many ranks", "page_bytes", "state_units", "groups"],
)
def test_sizes_of_a_peer_that_are_out_of_range_are_not_read(field, lie):
    sizes = geometries()
    told = msgspec.msgpack.decode(sizes.encode(GEOMETRY))
    assert sizes.decode(msgspec.msgpack.encode(told)) == GEOMETRY
    assert sizes.decode(msgspec.msgpack.encode(told | {field: lie})) is None and sizes.dropped == 1


def test_a_greeting_is_what_older_versions_say_and_read():
    """So that servers of different versions can tell each other why they have nothing to say."""
    geometry = msgspec.msgpack.decode(msgspec.msgpack.encode(GEOMETRY))
    fields = {"engine_id": "engine", "nonce": N16, "layout": N32, "geometry": geometry}
    older = fields | {"geometry": {name: value for name, value in geometry.items() if name != "groups"}}
    assert greetings().decode(msgspec.msgpack.encode({"type": "hello", "version": 5} | older)).version == 5
    older["geometry"]["groups"] = [{"tokens_per_page": 16, "reach": 40, "chunked": False}]
    assert greetings().decode(msgspec.msgpack.encode({"type": "hello", "version": 8} | older)).version == 8
    assert msgspec.msgpack.decode(greetings().encode(HELLO)) == {"type": "hello", "version": VERSION} | fields
    denied = {"type": "denied", "answers": N16, "text": "why"}
    assert msgspec.msgpack.decode(greeting_answers().encode(Denied(N16, "why"))) == denied
    assert greeting_answers().decode(msgspec.msgpack.encode(denied)) == Denied(N16, "why")
