"""What a connection between two servers promises; `test_side_channel` has what strangers can do to it."""

import asyncio
import threading
import time
import weakref

import pytest

from cairn.engine.transfers.side_channel import ChannelLimits
from cairn.errors import ConfigError
from cairn.transfer.credentials import derive_credentials
from cairn.transfer.stream import READ_BYTES
from cairn.transfer.wire import MAX_FRAME_BYTES
from cairn.types import ManualClock, SystemClock
from doubles.turned_channel import TurnedChannel

HOST = "127.0.0.1"
DEADLINE = 20.0
CREDENTIALS = derive_credentials(b"a secret of twenty b")


def side_channel(host=HOST, port=0, limits=None, clock=None):
    return TurnedChannel(host, port, CREDENTIALS, clock or SystemClock(), limits)


@pytest.fixture
def channels():
    """Three servers: (address, channel) each."""
    made = [side_channel() for _ in range(3)]
    yield [((HOST, channel.port), channel) for channel in made]
    for channel in made:
        channel.close()


def await_frames(channel, count=1, others=()):
    """What comes to `channel`, while the others get on with their handshakes; what comes to them is kept for later."""
    found, until = EARLY.pop(channel, []), time.monotonic() + DEADLINE
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} frames came"
        found += channel.receive(0.002)
        for other in others:
            EARLY.setdefault(other, []).extend(other.receive(0.0))
    assert len(found) == count
    return found


EARLY = weakref.WeakKeyDictionary()


def test_a_frame_and_its_reply(channels):
    (address, p), (_, d), _ = channels
    d.send(address, b"hello")
    (heard,) = await_frames(p, others=[d])
    assert heard.frame == b"hello" and heard.sender is not None and heard.address is None and heard.lost is None
    p.reply(heard.sender, b"welcome")
    (answer,) = await_frames(d, others=[p])
    assert (answer.frame, answer.sender, answer.address) == (b"welcome", None, address)


def test_consumers_are_told_apart(channels):
    (address, p), (_, one), (_, two) = channels
    one.send(address, b"1")
    two.send(address, b"2")
    senders = {incoming.frame: incoming.sender for incoming in await_frames(p, 2, [one, two])}
    assert senders[b"1"] != senders[b"2"]
    p.reply(senders[b"2"], b"two")
    assert await_frames(two)[0].frame == b"two"
    assert one.receive(0.0) == []


def test_producers_are_told_apart(channels):
    (one, p1), (two, p2), (_, d) = channels
    d.send(one, b"a")
    d.send(two, b"b")
    p1.reply(await_frames(p1, others=[d])[0].sender, b"from one")
    p2.reply(await_frames(p2, others=[p1, d])[0].sender, b"from two")
    assert {incoming.address: incoming.frame for incoming in await_frames(d, 2, [p1, p2])} == {
        one: b"from one",
        two: b"from two",
    }


def test_frames_keep_their_order_and_their_length(channels):
    (address, p), (_, d), _ = channels
    sizes = [1, 3, 0, 4096, 1 << 20, 5, 16384, 16383, 16385, 2]
    for number, size in enumerate(sizes * 6):
        d.send(address, b"%03d" % number + bytes(size))
    frames = [incoming.frame for incoming in await_frames(p, 60, [d])]
    assert [(int(frame[:3]), len(frame) - 3) for frame in frames] == [*enumerate(sizes * 6)]


def test_the_largest_frame_goes_both_ways(channels):
    (address, p), (_, d), _ = channels
    d.send(address, bytes(MAX_FRAME_BYTES))
    (heard,) = await_frames(p, others=[d])
    assert len(heard.frame) == MAX_FRAME_BYTES
    p.reply(heard.sender, b"x" * MAX_FRAME_BYTES)
    assert await_frames(d, others=[p])[0].frame == b"x" * MAX_FRAME_BYTES


def test_sending_to_nobody_does_no_harm(channels):
    (address, p), (_, d), _ = channels
    p.reply(b"nobody", b"lost")
    d.send((HOST, 9), b"lost")
    d.send(address, b"there")
    found = []
    while not any(incoming.frame == b"there" for incoming in found):
        found += p.receive(0.002)
        assert all(incoming.address == (HOST, 9) and incoming.lost for incoming in d.receive(0.0))


def test_nothing_comes_of_nothing(channels):
    assert channels[0][1].receive(0.0) == []


# -- the channel of sockets ------------------------------------------------------------------------------------------


def test_a_port_in_use_names_the_variables():
    taken = side_channel()
    with pytest.raises(ConfigError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        side_channel(port=taken.port)
    taken.close()


@pytest.mark.parametrize("host", ["localhost", "::1", "LOCALHOST"])
def test_names_and_ipv6_are_bound_and_connected_to(host):
    channel, other = side_channel(host), side_channel()
    other.send((host, channel.port), b"hello")
    assert await_frames(channel, others=[other])[0].frame == b"hello"
    channel.close()
    other.close()


def test_names_are_looked_up_beside_the_thread(monkeypatch):
    """Frames wait for the name; one that is not known ends what waits for it."""
    asked = threading.Event()

    def look_up(host, *args, **kwargs):
        asked.wait(DEADLINE)
        if host == "unknown.example":
            raise OSError("Name or service not known")
        return [(None, None, None, None, (HOST, 0))]

    p, d = side_channel(), side_channel()
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    for number in range(3):
        d.send(("prefill.example", p.port), b"%d" % number)
    d.send(("unknown.example", p.port), b"lost")
    assert d.receive(0.0) == [] and d.num_connections == 0
    asked.set()
    lost = []
    while not lost:
        lost = d.receive(0.01)
    assert [(each.address, "Name or service" in each.lost) for each in lost] == [(("unknown.example", p.port), True)]
    assert [incoming.frame for incoming in await_frames(p, 3, [d])] == [b"0", b"1", b"2"]
    p.close()
    d.close()


def test_more_producers_than_connections():
    d = side_channel(limits=ChannelLimits(max_producers=2))
    producers = [side_channel() for _ in range(3)]
    for number, producer in enumerate(producers):
        d.send((HOST, producer.port), b"%d" % number)
        found = []
        while not found:
            d.receive(0.0)
            found = [incoming for incoming in producer.receive(0.002) if incoming.lost is None]
        assert found[0].frame == b"%d" % number
    assert d.num_connections == 2
    for channel in (d, *producers):
        channel.close()


def test_more_consumers_than_connections():
    p = side_channel(limits=ChannelLimits(max_consumers=2))
    consumers = [side_channel() for _ in range(3)]
    heard = []
    for number, consumer in enumerate(consumers):
        consumer.send((HOST, p.port), b"%d" % number)
        heard += await_frames(p, 1 if number < 2 else 2, [consumer])
    assert [incoming.frame for incoming in heard if incoming.lost is None] == [b"0", b"1", b"2"]
    assert [incoming.sender for incoming in heard if incoming.lost] == [heard[0].sender] and p.num_connections == 2
    for channel in (p, *consumers):
        channel.close()


def test_both_ends_hear_of_a_connection_that_has_ended():
    p, d = side_channel(), side_channel()
    d.send((HOST, p.port), b"hello")
    sender = await_frames(p, others=[d])[0].sender
    d.close()
    (lost,) = await_frames(p)
    assert lost.sender == sender and lost.frame == b"" and "closed" in lost.lost and p.num_connections == 0
    d = side_channel()
    d.send((HOST, p.port), b"hello")
    await_frames(p, others=[d])
    address = (HOST, p.port)
    p.close()
    (lost,) = await_frames(d)
    assert lost.address == address and "closed" in lost.lost and d.num_connections == 0
    d.send(address, b"is anybody there?")
    (lost,) = await_frames(d)
    assert lost.address == address and "refused" in lost.lost and d.num_connections == 0
    d.close()


def test_nothing_is_sent_by_a_connection_that_is_closed_here(channels):
    (address, p), (_, d), _ = channels
    d.send(address, b"hello")
    await_frames(p, others=[d])
    (stream,) = d.streams.values()
    stream.close("over")
    sent = d.event_loop.create_task(stream.send(b"too late"))
    d.event_loop.spin()
    assert str(sent.exception()) == "over" and d.num_connections == 0


def test_what_has_come_when_a_connection_is_closed_does_not_count_it_again(channels):
    """Whoever waits for a frame gets it after the end, if the last of it has come before."""
    (address, p), (_, d), _ = channels
    d.send(address, b"hello")
    await_frames(p, others=[d])
    (stream,) = d.streams.values()
    stream._reader.feed_data((4).to_bytes(4, "big"))
    d.event_loop.spin()
    stream._reader.feed_data(b"last")
    stream.close("over")
    assert [each.frame for each in d.receive(0.0) if not each.lost] == [b"last"]
    assert d.num_connections == 0


def test_a_connection_on_which_nothing_comes_is_closed_after_a_while():
    clock = ManualClock()
    p, d = side_channel(clock=clock), side_channel(clock=clock)
    d.send((HOST, p.port), b"hello")
    sender = await_frames(p, others=[d])[0].sender
    for _ in range(3):
        clock.advance(59.0)
        d.send((HOST, p.port), b"heartbeat")
        assert await_frames(p, others=[d])[0].frame == b"heartbeat"
        p.reply(sender, b"alive")
        assert await_frames(d, others=[p])[0].frame == b"alive"
    d.send((HOST, p.port), b"what is sent does not count")
    await_frames(p)
    clock.advance(61.0)
    (lost,) = d.receive(0.0)
    assert lost.address == (HOST, p.port) and "too long" in lost.lost and d.num_connections == 0
    assert await_frames(p)[0].lost and p.num_connections == 0
    p.close()
    d.close()


def test_the_end_that_connects_closes_first():
    """The other one would close a connection that something is just being sent on."""
    clocks = ManualClock(), ManualClock()
    p, d = (side_channel(clock=clock) for clock in clocks)
    idle = ChannelLimits().idle_seconds
    for channel, clock, seconds in ((p, clocks[0], 2 * idle), (d, clocks[1], idle)):
        d.send((HOST, p.port), b"hello")
        p.reply(await_frames(p, others=[d])[0].sender, b"welcome")
        assert await_frames(d, others=[p])[0].frame == b"welcome"
        clock.advance(seconds - 0.1)
        assert channel.receive(0.0) == [] and channel.num_connections == 1
        clock.advance(0.1)
        (lost,) = channel.receive(0.0)
        assert "too long" in lost.lost and channel.num_connections == 0
        assert await_frames(d if channel is p else p)[0].lost
    p.close()
    d.close()


def test_a_peer_that_does_not_read_is_waited_for_and_gets_all_in_the_end():
    """Nothing is dropped: what finds no room waits at its sender, beyond two frames of the largest kind and what the
    sockets take."""
    p, d = side_channel(), side_channel()
    d.send((HOST, p.port), b"hello")
    sender = await_frames(p, others=[d])[0].sender
    for number in range(20):
        p.reply(sender, bytes([number]) * MAX_FRAME_BYTES)
    assert 10 <= p._outgoing[sender].qsize() <= 18 and p.dropped == 0
    frames = [incoming.frame for incoming in await_frames(d, 20, [p])]
    assert [(frame[0], len(frame)) for frame in frames] == [(number, MAX_FRAME_BYTES) for number in range(20)]
    p.close()
    d.close()


def test_what_nobody_takes_is_not_read():
    """A server that is slow to take questions reads no more of them than it has room for."""
    p, d = side_channel(), side_channel()
    d.send((HOST, p.port), b"hello")
    sender = await_frames(p, others=[d])[0].sender
    stream = p.streams[sender]
    receive, gate = stream.receive, asyncio.Event()

    async def receive_late():
        await gate.wait()
        return await receive()

    stream.receive = receive_late
    for number in range(8000):
        d.send((HOST, p.port), b"%05d" % number + bytes(4096))
    early = []
    for _ in range(50):
        early += p.receive(0.0)
        d.receive(0.0)
    # one was asked for before; one read of asyncio's TLS brings a quarter of a mebibyte
    assert 2 * READ_BYTES <= len(stream._reader._buffer) <= 2 * READ_BYTES + (1 << 18)
    assert d._outgoing[HOST, p.port].qsize() > 0
    gate.set()
    frames = [incoming.frame[:5] for incoming in early + await_frames(p, 8000 - len(early), [d])]
    assert frames == [b"%05d" % number for number in range(8000)]
    p.close()
    d.close()
