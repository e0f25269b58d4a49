"""Two whole engines of any sizes on memory links, each with both roles, and a model's bytes that both can name.

What a token is and where a rank of some size keeps it comes from `test_geometry`'s naive side, address by address.
"""

import random

import numpy as np

from cairn.transfer.consumer import Consumer
from cairn.transfer.contract import ContentName, KvSource, Offer, OfferedCheckpoint, Peer, PullSpec
from cairn.transfer.geometry import PairedPages
from cairn.transfer.leases import LeaseLimits
from cairn.transfer.memory import PoolMemory
from cairn.transfer.peers import PeerPolicy
from cairn.transfer.producer import Producer
from cairn.transfer.ranks import RankedWorker, RankServant
from cairn.transfer.session import ConsumerTools
from cairn.transfer.worker import LinkWorker
from cairn.types import ManualClock
from doubles.memory_channel import MemoryNetwork
from doubles.memory_link import MemoryFabric
from doubles.memory_rank_channel import memory_rank_channel
from transfer import test_geometry as naive
from transfer.parts import parts
from transfer.turned_port import EventQueue, TurnedPort
from turned_loop import TurnedLoop

LAYOUT = b"L" * 32
PLAIN = ContentName()
CANARY = 0xEE
HEADER, UNIT_BYTES = 7, 333


class Content:
    """Random keys and values of the whole model, [head][run][token][byte], and states of checkpoints by position."""

    def __init__(self, num_tokens: int, kv_heads: int, state_units: int, seed: int = 0):
        self.kv_heads, self.state_units = kv_heads, state_units
        self.values = naive.key_values(kv_heads, num_tokens, seed)
        self.seed = seed

    def file(self, side, rank: int, position: int) -> np.ndarray:
        """One rank's bytes of the checkpoint at `position`."""
        noise = np.random.default_rng((self.seed, position))
        header = noise.integers(0, 254, HEADER, np.uint8)
        states = noise.integers(0, 254, (self.state_units, UNIT_BYTES), np.uint8)
        return naive.store_file(side, rank, header, states)


class Rank:
    """One rank's memory and link. `pool`: the kind of its memory."""

    def __init__(self, fabric, name, units, geometry, rank, num_pages, pool=PoolMemory, **worker):
        self.num_pages, self.geometry, self.rank = num_pages, geometry, rank
        self.memory = np.full((num_pages, geometry.page_bytes), CANARY, np.uint8)
        self.link = fabric.link(name)
        self.pool = pool(self.memory)
        self.link.register(self.pool.region)
        self.worker = LinkWorker(self.link, PairedPages(units, geometry, rank), self.pool.fence, **worker)

    def store(self, content: Content, num_tokens: int, pages, files) -> None:
        """Put the first tokens into `pages` and checkpoints into {position: pages}."""
        values = content.values[:, :, :num_tokens]
        if len(pages):
            pool = naive.store_pages(self.geometry, self.rank, values, 0, pages, self.num_pages)
            self.memory[pages] = pool[pages]
        for position, file in files.items():
            pool = naive.pooled(
                content.file(self.geometry, self.rank, position), file, self.num_pages, pool_width(self)
            )
            self.memory[file] = pool[file]

    def check_tokens(self, content: Content, start: int, end: int, pages, *, only_these=True) -> None:
        """`pages`, which cover [start, end), hold those tokens, byte by byte; `only_these`: and no byte of others."""
        block = self.geometry.block_size
        heads = naive.units_of(content.kv_heads, self.geometry.tp_size, self.rank)
        expected = np.full((self.num_pages, self.geometry.page_bytes), CANARY, np.uint8)
        known = np.zeros_like(expected, bool)
        for token in range(start, end):
            for at, offset, (head, run) in naive.token_addresses(self.geometry, heads, token):
                page = pages[at - start // block]
                expected[page, offset : offset + naive.ROW] = content.values[head, run, token]
                known[page, offset : offset + naive.ROW] = True
        pages = np.asarray(pages, np.int64)
        if only_these:
            np.testing.assert_array_equal(self.memory[pages], expected[pages])
        else:
            inside = known[pages]
            np.testing.assert_array_equal(self.memory[pages][inside], expected[pages][inside])

    def check_file(self, content: Content, position: int, file) -> None:
        expected = content.file(self.geometry, self.rank, position)
        got = self.memory[np.asarray(file)].reshape(-1)[: len(expected)]
        np.testing.assert_array_equal(got, expected)


def pool_width(rank: Rank) -> int:
    return rank.geometry.page_bytes


class Engine:
    """A server: ranks, the first of which owns the port, producer and consumer."""

    def __init__(
        self,
        world,
        name,
        port,
        tp_size,
        block_size,
        *,
        num_pages=48,
        max_pages=4096,
        pool=PoolMemory,
    ):
        self.world, self.name, self.port = world, name, port
        units = naive.model(world.kv_heads, world.state_units)
        self.geometry = naive.geometry(tp_size, block_size, world.kv_heads, world.state_units, HEADER, UNIT_BYTES)
        self.num_pages = num_pages
        self.ranks = [
            Rank(world.fabric, f"{name}-{rank}", units, self.geometry, rank, num_pages, pool) for rank in range(tp_size)
        ]
        self.channels = [memory_rank_channel() for _ in range(tp_size - 1)]
        self.servants = [
            RankServant(rank.link, rank.worker, far)
            for rank, (_, far) in zip(self.ranks[1:], self.channels, strict=True)
        ]
        self.running = set(range(tp_size))
        first = self.ranks[0]
        self.worker = RankedWorker(first.link, first.worker, [near for near, _ in self.channels])
        identity = Peer(name, self.geometry, tuple(rank.link.describe() for rank in self.ranks), LAYOUT)
        clock, randbytes, event_loop = world.clock, world.rng.randbytes, world.event_loop
        limits, events = LeaseLimits(max_pages=max_pages), EventQueue()
        self.channel = world.network.channel("127.0.0.1", port, event_loop)
        self.producer = Producer(identity, limits, clock, randbytes, events.put)
        tools = ConsumerTools(identity, self.worker, self.channel.connect, randbytes, event_loop)
        self.consumer = Consumer(tools, PeerPolicy(), clock, events.put)
        self.door = TurnedPort(event_loop, self.producer, self.consumer, events, self.channel)

    def turn(self):
        """What the owner thread and the other ranks do once; returns the events."""
        self.worker.serve(self.door.is_serving)
        events = self.door.events()
        for rank, servant in enumerate(self.servants, 1):
            if rank in self.running:
                servant.turn()
        return events

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.geometry.block_size)

    @property
    def pages_per_file(self) -> int:
        return -(-(HEADER + self.geometry.state_bytes) // self.geometry.page_bytes)

    def store(self, content, num_tokens, pages, files) -> None:
        for rank in self.ranks:
            rank.store(content, num_tokens, np.asarray(pages, np.int32), files)


class World:
    """Engine `p` listens at port 1, `d` at port 2. `kv_heads` and `state_units` count the whole model; `sides` go to
    both engines, `pools` are the kinds of memory of either, the rest goes to the memory fabric, unless `links` makes
    others."""

    def __init__(
        self,
        p=(1, 16),
        d=(1, 16),
        *,
        kv_heads=4,
        state_units=4,
        seed=0,
        sides=None,
        links=None,
        pools=(PoolMemory, PoolMemory),
        **fabric,
    ):
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.event_loop = TurnedLoop(self.clock)
        self.network = MemoryNetwork()
        self.fabric = links or MemoryFabric(**fabric)
        self.kv_heads, self.state_units = kv_heads, state_units
        self.p = Engine(self, "p", 1, *p, pool=pools[0], **(sides or {}))
        self.d = Engine(self, "d", 2, *d, pool=pools[1], **(sides or {}))
        self.engines = {1: self.p, 2: self.d}
        self.p.other, self.d.other = self.d, self.p

    def deliver(self) -> None:
        """All frames that are under way, and what they give rise to."""
        self.event_loop.spin()
        while self.p.channel.look() | self.d.channel.look():
            self.event_loop.spin()

    def run(self, rounds=60, *, until=None):
        """Events of both engines by name, until there are `until` of d or the rounds are over."""
        events = {"p": [], "d": []}
        for _ in range(rounds):
            for engine in self.engines.values():
                events[engine.name] += engine.turn()
            self.deliver()
            if until is not None and len(events["d"]) >= until:
                break
        return events

    def content(self, num_tokens, seed=0) -> Content:
        return Content(num_tokens, self.kv_heads, self.state_units, seed)

    def some_pages(self, engine: Engine, count: int) -> np.ndarray:
        return np.array(self.rng.sample(range(engine.num_pages), count), np.int32)


def offer_of(engine, content, keys, pages, files, *, request_id="cmpl-1", name=PLAIN) -> Offer:
    """Store the bytes and say what there is. `files`: {position: pages}."""
    files = {position: np.asarray(file, np.int32) for position, file in files.items()}
    engine.store(content, len(keys), pages, files)
    held = tuple(OfferedCheckpoint(position, file) for position, file in files.items())
    return Offer(request_id, name, keys, parts(pages, block=engine.geometry.block_size), held)


def leased_spec_of(reference, engine, keys, pages, *, start=0, checkpoint=None, release_only=False) -> PullSpec:
    request_id, _, nonce = reference.rpartition("~")
    return PullSpec(
        "cmpl-2",
        KvSource(engine.name, "127.0.0.1", engine.port, request_id, bytes.fromhex(nonce)),
        PLAIN,
        keys,
        start,
        parts(pages, start, engine.other.geometry.block_size),
        None if checkpoint is None else np.asarray(checkpoint, np.int32),
        release_only,
    )


def content_spec_of(engine, keys, pages, *, start=0, checkpoint=None, name=PLAIN, **source) -> PullSpec:
    file = None if checkpoint is None else np.asarray(checkpoint, np.int32)
    source = KvSource(**{"engine_id": engine.name, "host": "127.0.0.1", "port": engine.port} | source)
    return PullSpec("cmpl-2", source, name, keys, start, parts(pages, start, engine.other.geometry.block_size), file)


def moves(engine):
    """(rank, remote page, remote offset, bytes) of what has landed at an engine."""
    return [
        (rank.rank, move.remote_page, move.remote_offset, move.num_bytes)
        for rank in engine.ranks
        for move in rank.link.moved
    ]
