"""KV events on the wire, as a router reads them."""

import socket
import time

import msgspec
import numpy as np
import pytest
import zmq
from test_core import LAYOUT, VOCAB, request, run
from test_core import core as plain_core

from cairn.cache.events import AllBlocksCleared, BlockEvents, BlockRemoved, BlockStored
from cairn.cache.eviction import LeastRecentlyUsed
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.contract import KvEventsConfig
from cairn.engine.core import Core
from cairn.engine.event_publisher import EventPublisher, check_endpoints, encode_event
from cairn.errors import ConfigError
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.types import ManualClock
from doubles.byte_tokenizer import ByteTokenizer
from doubles.simulated_runner import SimulatedRunner

STORED = BlockStored((11, 12), None, (1, 2, 3, 4), 2, "")


def free_endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


class Router:
    """A subscriber, and a client of the replay socket."""

    def __init__(self, config: KvEventsConfig) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.subscribe(config.topic.encode())
        self.events.connect(config.endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        if config.replay_endpoint is not None:
            self.replay.connect(config.replay_endpoint)
        for link in (self.events, self.replay):
            link.setsockopt(zmq.RCVTIMEO, 5000)
            link.setsockopt(zmq.LINGER, 0)

    def batch(self) -> tuple[bytes, int, list]:
        topic, number, payload = self.events.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def replayed(self, start: int) -> list[tuple[int, list]]:
        self.replay.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while True:
            _, number, payload = self.replay.recv_multipart()
            if not payload:
                assert number == (-1).to_bytes(8, "big", signed=True)
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def pair(request):
    config = KvEventsConfig(
        endpoint=free_endpoint(), replay_endpoint=free_endpoint(), **getattr(request, "param", {"topic": "kv"})
    )
    publisher = EventPublisher(config, wall=lambda: 1234.5)
    router = Router(config)
    yield publisher, router
    router.close()
    publisher.close()


def connected(publisher: EventPublisher, router: Router) -> int:
    """Publishes until the subscription has gone through; returns the next number."""
    number = 0
    router.events.setsockopt(zmq.RCVTIMEO, 100)
    for _ in range(100):
        publisher.publish(AllBlocksCleared())
        publisher.flush()
        number += 1
        try:
            router.batch()
        except zmq.Again:
            continue
        break
    router.events.setsockopt(zmq.RCVTIMEO, 300)
    while True:
        try:
            router.batch()
        except zmq.Again:
            break
    router.events.setsockopt(zmq.RCVTIMEO, 5000)
    return number


def test_a_batch_has_topic_number_time_and_rank(pair):
    publisher, router = pair
    number = connected(publisher, router)
    publisher.publish(STORED)
    publisher.publish(BlockRemoved((12,)))
    publisher.flush()
    publisher.flush()
    topic, found, (timestamp, events, rank) = router.batch()
    assert (topic, found, timestamp, rank) == (b"kv", number, 1234.5, 0)
    assert events == [encode_event(STORED, "map"), encode_event(BlockRemoved((12,)), "map")]
    publisher.publish(STORED)
    publisher.flush()
    assert router.batch()[1] == number + 1


def test_events_are_maps_or_arrays():
    as_map = encode_event(STORED, "map")
    assert as_map["type"] == "BlockStored" and as_map["token_ids"] == [1, 2, 3, 4] and as_map["block_size"] == 2
    assert encode_event(STORED, "array") == ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU"]
    assert encode_event(BlockRemoved((3,)), "array") == ["BlockRemoved", [3], "GPU"]
    assert encode_event(AllBlocksCleared(), "map") == {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("pair", [{"buffer_steps": 3}], indirect=True)
def test_replays_give_what_is_kept_and_an_end(pair):
    publisher, router = pair
    for _ in range(5):
        publisher.publish(STORED)
        publisher.flush()
    # They are handed to the thread that publishes, which may have none of them yet.
    deadline = time.monotonic() + 30
    while [number for number, _ in router.replayed(0)][-1:] != [4]:
        assert time.monotonic() < deadline
    assert [number for number, _ in router.replayed(0)] == [2, 3, 4]
    assert [number for number, _ in router.replayed(4)] == [4]
    assert router.replayed(5) == []


def test_garbage_on_the_replay_socket_is_ignored(pair):
    publisher, router = pair
    publisher.publish(STORED)
    publisher.flush()
    for garbage in ([b""], [b"", b"123"], [b"", b"12345678", b"more"], [b"x" * 60]):
        router.replay.send_multipart(garbage)
    assert [number for number, _ in router.replayed(0)] in ([0], [])
    assert publisher._thread.is_alive()


def test_an_address_in_use_names_the_flag():
    endpoint = free_endpoint()
    publisher = EventPublisher(KvEventsConfig(endpoint=endpoint))
    with pytest.raises(ConfigError, match="--kv-events-config"):
        EventPublisher(KvEventsConfig(endpoint=endpoint))
    publisher.close()


def test_a_core_publishes_the_blocks_that_can_be_hit(pair):
    publisher, router = pair
    events = BlockEvents(LAYOUT.block_size, publisher.publish)
    cache = PrefixCache(LAYOUT, 60, CachePolicy(Auto(), LeastRecentlyUsed()))
    cache.observe(events)
    scheduler = Scheduler(SchedulerConfig(max_model_len=2000), cache, ManualClock())
    runner = SimulatedRunner(LAYOUT, 60, 8, VOCAB, numerics=False)
    core = Core(plain_core().info, scheduler, runner, ByteTokenizer(), (), 0, events=publisher)
    run(core, request(max_tokens=1))
    while not (batches := router.replayed(0)):
        pass
    stored = [event for _, (_, found, _) in batches for event in found]
    tokens = [token for event in stored for token in event["token_ids"]]
    # 100 tokens end inside the seventh block of 16
    assert tokens == list(np.arange(96)) and {event["type"] for event in stored} == {"BlockStored"}
    cache.clear()
    core.submit(request(prompt=[5], name="next", max_tokens=1))
    while core.has_work:
        core.step()
    while len(batches := router.replayed(1)) < 1:
        pass
    removed = [event for _, (_, found, _) in batches for event in found if event["type"] == "BlockRemoved"]
    assert sum(len(event["block_hashes"]) for event in removed) == 6


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_address_in_brackets_is_listened_on():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        endpoint = f"tcp://[::1]:{free.getsockname()[1]}"
    EventPublisher(KvEventsConfig(endpoint=endpoint)).close()


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_addresses_are_tried_before_anything_is_loaded(name):
    config = KvEventsConfig(endpoint=free_endpoint(), replay_endpoint=free_endpoint())
    for _ in range(2):  # the first time has let go of both
        check_endpoints(config)
    for wrong in ("tcp://nowhere", "ipc:///no/such/folder/x", "carrier-pigeon://a"):
        with pytest.raises(ConfigError, match=r"^--kv-events-config: cannot bind"):
            check_endpoints(config.model_copy(update={name: wrong}))
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind(getattr(config, name))
        with pytest.raises(ConfigError, match=r"^--kv-events-config: cannot bind"):
            check_endpoints(config)
