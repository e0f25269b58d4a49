"""Both side channels keep the same promises; the ZMQ one besides is a door to the outside."""

import pickle
import threading
import time

import pytest
import zmq

from cairn.engine.memory_channel import MemoryNetwork
from cairn.engine.side_channel import SideChannel
from cairn.errors import ConfigError
from cairn.transfer.wire import MAX_FRAME_BYTES

HOST = "127.0.0.1"
DEADLINE = 20.0


@pytest.fixture(params=["memory", "zmq"])
def channels(request):
    """Three servers: (address, channel) each."""
    network = MemoryNetwork()
    made = [network.channel(HOST, port) if request.param == "memory" else SideChannel(HOST, 0) for port in (1, 2, 3)]
    yield [((HOST, channel.port), channel) for channel in made]
    for channel in made:
        channel.close()


def await_frames(channel, count=1):
    found, until = [], time.monotonic() + DEADLINE
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} frames came"
        found += channel.receive(0.05)
    assert len(found) == count
    return found


def test_a_frame_and_its_reply(channels):
    (address, p), (_, d), _ = channels
    d.send(address, b"hello")
    (heard,) = await_frames(p)
    assert heard.frame == b"hello" and heard.sender is not None and heard.address is None
    p.reply(heard.sender, b"welcome")
    (answer,) = await_frames(d)
    assert (answer.frame, answer.sender, answer.address) == (b"welcome", None, address)


def test_consumers_are_told_apart(channels):
    (address, p), (_, one), (_, two) = channels
    one.send(address, b"1")
    two.send(address, b"2")
    senders = {incoming.frame: incoming.sender for incoming in await_frames(p, 2)}
    assert senders[b"1"] != senders[b"2"]
    p.reply(senders[b"2"], b"two")
    assert await_frames(two)[0].frame == b"two"
    assert one.receive(0.0) == []


def test_producers_are_told_apart(channels):
    (one, p1), (two, p2), (_, d) = channels
    d.send(one, b"a")
    d.send(two, b"b")
    p1.reply(await_frames(p1)[0].sender, b"from one")
    p2.reply(await_frames(p2)[0].sender, b"from two")
    assert {incoming.address: incoming.frame for incoming in await_frames(d, 2)} == {one: b"from one", two: b"from two"}


def test_frames_keep_their_order(channels):
    (address, p), (_, d), _ = channels
    for number in range(100):
        d.send(address, b"%d" % number)
    assert [int(incoming.frame) for incoming in await_frames(p, 100)] == list(range(100))


def test_sending_to_nobody_does_no_harm(channels):
    (address, p), (_, d), _ = channels
    d.send((HOST, 9), b"lost")
    p.reply(b"nobody", b"lost")
    d.send(address, b"there")
    assert await_frames(p)[0].frame == b"there"


def test_nothing_comes_of_nothing(channels):
    assert channels[0][1].receive(0.0) == []


def test_wake_ends_a_wait():
    channel = SideChannel(HOST, 0)
    thread = threading.Thread(target=lambda: [time.sleep(0.05), channel.wake()])
    thread.start()
    began = time.monotonic()
    assert channel.receive(DEADLINE) == []
    assert time.monotonic() - began < DEADLINE / 2
    thread.join(DEADLINE)
    for _ in range(100_000):
        channel.wake()
    channel.close()


@pytest.mark.parametrize("port", [0])
def test_a_port_in_use_names_the_variables(port):
    taken = SideChannel(HOST, port)
    with pytest.raises(ConfigError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        SideChannel(HOST, taken.port)
    taken.close()


def test_names_and_ipv6_are_bound_to():
    for host in ("localhost", "::1"):
        channel = SideChannel(host, 0)
        other = SideChannel(HOST, 0)
        other.send((host, channel.port), b"hello")
        assert await_frames(channel)[0].frame == b"hello"
        channel.close()
        other.close()


def test_what_is_no_single_frame_is_counted():
    channel = SideChannel(HOST, 0)
    with zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{HOST}:{channel.port}")
        stranger.send_multipart([b"a", b"b", b"c"])
        stranger.send(pickle.dumps({"a": 1}))
        (heard,) = await_frames(channel)
        assert heard.frame == pickle.dumps({"a": 1})
        assert channel.dropped == 1
        # larger than any record: ZMQ itself hangs up
        stranger.send(bytes(MAX_FRAME_BYTES + 1))
        stranger.close()
    with zmq.Context() as context:
        polite = context.socket(zmq.DEALER)
        polite.connect(f"tcp://{HOST}:{channel.port}")
        polite.send(b"still there?")
        assert await_frames(channel)[0].frame == b"still there?"
        polite.close(linger=0)
    channel.close()


def test_more_producers_than_sockets(monkeypatch):
    monkeypatch.setattr("cairn.engine.side_channel._MAX_PRODUCERS", 2)
    d = SideChannel(HOST, 0)
    producers = [SideChannel(HOST, 0) for _ in range(3)]
    for number, producer in enumerate(producers):
        d.send((HOST, producer.port), b"%d" % number)
        assert await_frames(producer)[0].frame == b"%d" % number
    for channel in (d, *producers):
        channel.close()
