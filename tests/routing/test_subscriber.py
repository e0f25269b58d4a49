"""KV events of real publishers into an index: order, losses, replays, restarts."""

import asyncio
import contextlib
import dataclasses
import socket
import time

import msgspec
import pytest
import zmq

from cairn.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from cairn.engine.contract import KvEventsConfig
from cairn.engine.event_publisher import EventPublisher
from cairn.errors import ConfigError
from cairn.routing.index import PrefixIndex, places_below
from cairn.routing.subscriber import KvEventSubscriber
from cairn.types import ManualClock
from routing.index_audit import audit

SECONDS = 20
BLOCKS = list(range(1000))


def stored(first, last):
    """Blocks `first` to `last` - 1 of one path."""
    parent = BLOCKS[first - 1] if first else None
    return BlockStored(tuple(BLOCKS[first:last]), parent, (7,) * (last - first), 1, "")


class Wire:
    """A publisher, a subscriber to it and the index; time stands still unless told."""

    def __init__(self, folder, endpoint, replay, encoding="map", buffer_steps=10_000):
        self.clock = ManualClock()
        self.index = PrefixIndex(10_000)
        self.context = zmq.Context()
        self.addresses = [None if name is None else f"ipc://{folder}/{name}" for name in (endpoint, replay)]
        self.config = KvEventsConfig(
            endpoint=self.addresses[0],
            replay_endpoint=self.addresses[1],
            topic="kv",
            encoding=encoding,
            buffer_steps=buffer_steps,
        )
        self.publisher = None
        self.subscriber = None

    def start(self):
        self.publisher = EventPublisher(self.config, wall=lambda: 1.0)

    def stop(self):
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def subscribe(self, **options):
        self.subscriber = KvEventSubscriber(
            "a", self.index, *self.addresses, "kv", self.clock, context=self.context, **options
        )
        return self.subscriber

    def publish(self, *events):
        """One batch each."""
        for event in events:
            self.publisher.publish(event)
            self.publisher.flush()

    def lose(self, *events):
        """Published, but on the way to nobody; they can be replayed."""
        self.publisher._config = self.config.model_copy(update={"topic": "elsewhere"})
        self.publish(*events)
        self.wait_until_sent()
        self.publisher._config = self.config

    def wait_until_sent(self):
        """The publisher's thread has sent all that it was given: an answer of its own comes after them."""
        until(self.publisher._batches.empty)
        if self.config.replay_endpoint is None:
            time.sleep(1)
            return
        with self.context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(self.config.replay_endpoint)
            replay.send_multipart([b"", (1 << 60).to_bytes(8, "big")])
            assert replay.poll(SECONDS * 1000)

    def until(self, condition):
        def received():
            self.subscriber.receive()
            audit(self.index)
            return condition()

        until(received)

    def until_matched(self, num_blocks):
        self.until(lambda: self.index.matched_by("a", BLOCKS) == num_blocks)

    def until_synced(self):
        self.until(lambda: self.subscriber.connected and not self.subscriber.is_replaying)

        def heard():
            """A subscription may go through after the handshake: then only the next batch shows that one is missing."""
            self.publish(BlockRemoved((5000,)))
            deadline = time.monotonic() + 0.2
            while self.subscriber.sequence.next_number != self.publisher._number and time.monotonic() < deadline:
                self.subscriber.receive()
                time.sleep(0.005)
            return self.subscriber.sequence.next_number == self.publisher._number

        until(heard)

    def close(self):
        if self.subscriber is not None:
            self.subscriber.close()
        self.stop()
        self.context.destroy(linger=0)


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {SECONDS} s"
        time.sleep(0.005)


@pytest.fixture
def wire(tmp_path_factory, request):
    options = {"endpoint": "e", "replay": "r"} | getattr(request, "param", {})
    made = Wire(tmp_path_factory.mktemp("z"), **options)
    yield made
    made.close()


@pytest.mark.parametrize("wire", [{"encoding": "map"}, {"encoding": "array"}, {"replay": None}], indirect=True)
def test_events_reach_the_index_in_order(wire):
    wire.start()
    subscriber = wire.subscribe()
    wire.until(lambda: subscriber.connected)
    # without replays, what was published before the subscription went through is not seen
    until(lambda: wire.publish(AllBlocksCleared()) or (subscriber.receive() and subscriber.sequence.num_batches))
    wire.publish(stored(0, 3), stored(3, 9), BlockRemoved((8, 7)), stored(7, 8), BlockRemoved((7,)))
    number = wire.publisher._number
    wire.until(lambda: subscriber.sequence.next_number == number)
    assert wire.index.matched_by("a", BLOCKS) == 7
    wire.publish(AllBlocksCleared())
    wire.until_matched(0)
    assert subscriber.error is None and subscriber.num_malformed == 0 and subscriber.sequence.num_resets == 1


@pytest.mark.parametrize("wire", [{"encoding": "map"}, {"encoding": "array"}], indirect=True)
def test_media_are_told_apart(wire):
    wire.start()
    wire.subscribe()
    below = dataclasses.replace(stored(0, 9), medium="CPU")
    wire.publish(stored(0, 3), below, BlockRemoved((8, 7), "CPU"))
    wire.until_matched(3)
    cpu, other = places_below("a")
    wire.until(lambda: wire.index.matched_by(cpu, BLOCKS) == 7)
    assert wire.index.matched_by(other, BLOCKS) == 0


def test_what_was_published_before_is_replayed(wire):
    wire.start()
    wire.publish(stored(0, 3), stored(3, 9))
    wire.wait_until_sent()
    subscriber = wire.subscribe()
    wire.until_matched(9)
    wire.until_synced()
    wire.publish(stored(9, 12))
    wire.until_matched(12)
    assert subscriber.sequence.num_resets == 1 and subscriber.error is None


def test_lost_batches_are_asked_for(wire):
    wire.start()
    subscriber = wire.subscribe()
    wire.until_synced()
    wire.publish(stored(0, 3))
    wire.until_matched(3)
    wire.lose(stored(3, 6), BlockRemoved((5,)), stored(5, 8))
    wire.publish(stored(8, 10))
    wire.until_matched(10)
    number = wire.publisher._number
    assert subscriber.sequence.next_number == number and subscriber.sequence.num_batches == number
    assert subscriber.sequence.num_resets == 1 and subscriber.error is None


def test_the_last_batch_may_be_lost_too(wire):
    wire.start()
    wire.subscribe(check_seconds=30.0)
    wire.until_synced()
    wire.lose(stored(0, 6))
    for _ in range(20):
        wire.subscriber.receive()
    assert wire.index.matched_by("a", BLOCKS) == 0
    wire.clock.advance(31)
    wire.until_matched(6)


@pytest.mark.parametrize("wire", [{"buffer_steps": 2}, {"replay": None}], indirect=True)
def test_what_cannot_be_replayed_is_lost_and_the_replica_starts_anew(wire):
    wire.start()
    subscriber = wire.subscribe()
    wire.until(lambda: subscriber.connected)
    until(lambda: wire.publish(stored(0, 5)) or (subscriber.receive() and subscriber.sequence.num_batches))
    number = wire.publisher._number
    wire.until(lambda: subscriber.sequence.next_number == number)
    num_resets = subscriber.sequence.num_resets
    assert wire.index.matched_by("a", BLOCKS) == 5
    wire.lose(BlockRemoved((4,)), BlockRemoved((3,)), stored(500, 501))
    wire.publish(stored(0, 2), stored(2, 3))
    wire.until(lambda: subscriber.sequence.next_number == number + 5)
    assert wire.index.matched_by("a", BLOCKS) == 3
    assert subscriber.sequence.num_resets == num_resets + 1


@pytest.mark.parametrize("wire", [{}, {"replay": None}], indirect=True)
def test_a_publisher_that_comes_back_is_another_one(wire):
    wire.start()
    subscriber = wire.subscribe()
    wire.until(lambda: subscriber.connected)
    until(lambda: wire.publish(stored(0, 5)) or (subscriber.receive() and subscriber.sequence.num_batches))
    wire.index.apply("b", stored(0, 2))
    wire.stop()
    wire.until(lambda: not subscriber.connected)
    assert "the publisher is gone" in subscriber.error and wire.addresses[0] in subscriber.error
    assert wire.index.matched_by("a", BLOCKS) == 5, "it may come back"
    wire.start()
    # its numbers begin again
    wire.until(lambda: wire.publish(stored(0, 2)) or wire.index.matched_by("a", BLOCKS) == 2)
    assert subscriber.error is None and wire.index.matched_by("b", BLOCKS) == 2


def test_a_publisher_that_is_not_there_is_named_and_waited_for(wire):
    subscriber = wire.subscribe(silence_seconds=5.0)
    assert subscriber.receive() == 0 and subscriber.error is None
    wire.clock.advance(5)
    assert subscriber.receive() == 0 and subscriber.error == f"{wire.addresses[0]}: no connection within 5 s"
    wire.start()
    wire.until(lambda: wire.publish(stored(0, 4)) or wire.index.matched_by("a", BLOCKS) == 4)
    wire.until(lambda: subscriber.error is None)


def test_a_replay_socket_that_does_not_answer_is_named_and_not_waited_for(wire):
    wire.start()
    wire.publish(stored(0, 1), stored(0, 1))
    wire.wait_until_sent()
    silent = wire.context.socket(zmq.ROUTER)
    silent.bind(f"{wire.addresses[1]}silent")
    wire.addresses[1] += "silent"
    subscriber = wire.subscribe(silence_seconds=5.0)
    wire.until(lambda: subscriber.is_replaying)
    wire.clock.advance(5)
    wire.until(lambda: subscriber.error == f"{wire.addresses[1]}: no answer within 5 s")
    until(lambda: wire.publish(stored(0, 4)) or (subscriber.receive() and subscriber.is_replaying))
    wire.clock.advance(5)
    wire.until_matched(4)
    wire.publish(stored(4, 6))
    wire.until_matched(6)
    assert subscriber.error is not None
    silent.close(linger=0)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"1234567", b""],
        [b"", (0).to_bytes(8, "big"), b"", b"more"],
        [b"", (-7).to_bytes(8, "big", signed=True), msgspec.msgpack.encode([1.0, []])],
    ],
)
def test_messages_that_are_no_batch_are_counted_and_ignored(wire, frames):
    _check_malformed(wire, frames)


@pytest.mark.parametrize(
    "batch",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        *map(
            msgspec.msgpack.encode,
            [
                3,
                [1.0],
                [1.0, {}],
                [1.0, [3]],
                [1.0, [{"type": "BlockStored"}]],
                [1.0, [{"type": "Nonsense", "block_hashes": []}]],
                [1.0, [{"type": "BlockStored", "block_hashes": ["x"]}]],
                [1.0, [{"type": "BlockRemoved", "block_hashes": [1.5]}]],
                [1.0, [["BlockStored"]]],
            ],
        ),
    ],
)
def test_batches_that_cannot_be_read_are_counted_and_ignored(wire, batch):
    _check_malformed(wire, [b"", (0).to_bytes(8, "big"), batch])


def _check_malformed(wire, frames):
    sender = wire.context.socket(zmq.PUB)
    sender.bind(wire.addresses[0])
    wire.addresses[1] = None
    subscriber = wire.subscribe()
    until(lambda: sender.send_multipart([b"kv" + frames[0], *frames[1:]]) or subscriber.receive())
    assert subscriber.num_malformed >= 1 and subscriber.sequence.num_batches == 0
    good = msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [0, 1]}]])
    sender.send_multipart([b"kv", (1).to_bytes(8, "big"), good])
    wire.until_matched(2)
    sender.close(linger=0)


@pytest.mark.parametrize("number", [0, 1])
def test_addresses_that_are_none_are_refused(number, wire):
    wire.addresses[number] = "nowhere"
    with pytest.raises(ConfigError, match="replay_endpoint" if number else "^endpoint"):
        wire.subscribe()


@pytest.mark.parametrize("wire", [{}], indirect=True)
def test_it_runs_beside_other_work_until_it_is_cancelled(wire):
    wire.start()
    subscriber = wire.subscribe()
    wire.until_synced()

    async def main():
        running = asyncio.create_task(subscriber.run())
        for end in (5, 50, 300):
            for first in range(end - 5, end):
                wire.publish(stored(0, end) if first == end - 5 else stored(first, first + 1))
            async with asyncio.timeout(SECONDS):
                while wire.index.matched_by("a", BLOCKS) != end:
                    await asyncio.sleep(0.005)
        wire.publish(*(BlockRemoved((number,)) for number in range(299, 50, -1)))
        async with asyncio.timeout(SECONDS):
            while wire.index.matched_by("a", BLOCKS) != 51:
                await asyncio.sleep(0.005)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_a_publisher_at_an_address_in_brackets():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            endpoint = f"tcp://[::1]:{free.getsockname()[1]}"
    except OSError:
        pytest.skip("this machine has no IPv6")
    publisher = EventPublisher(KvEventsConfig(endpoint=endpoint))
    with zmq.Context() as context:
        subscriber = KvEventSubscriber("a", PrefixIndex(10), endpoint, None, "", ManualClock(), context=context)
        until(lambda: (subscriber.receive(), subscriber.connected)[1])
        subscriber.close()
    publisher.close()
