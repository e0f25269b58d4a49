"""Two engines on a memory link, a side channel that delivers when it is told to, and a clock that stands still.

The producer's page number p of epoch e is filled with bytes that no other (p, e) has, so a test can tell whose bytes
arrived and when they were read.
"""

import dataclasses
import random

import numpy as np

from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.transfer.consumer import Consumer
from cairn.transfer.contract import (
    ContentName,
    KvSource,
    Offer,
    OfferedCheckpoint,
    Peer,
    PullSpec,
    num_range_pages,
)
from cairn.transfer.geometry import AttentionUnits, ModelUnits, PairedPages
from cairn.transfer.leases import LeaseLimits
from cairn.transfer.links.contract import Region
from cairn.transfer.memory import PoolMemory
from cairn.transfer.params import parse_kv_transfer_params
from cairn.transfer.peers import PeerPolicy
from cairn.transfer.producer import Producer
from cairn.transfer.session import ConsumerTools
from cairn.transfer.worker import LinkWorker
from cairn.types import ManualClock
from doubles.memory_channel import MemoryNetwork
from doubles.memory_link import MemoryFabric
from transfer.parts import parts
from transfer.turned_port import EventQueue, TurnedPort
from turned_loop import TurnedLoop

BLOCK = 16
PAGE_BYTES = 64
NUM_PAGES = 64
STATE_PAGES = 2
LAYOUT = b"L" * 32
HOST, PORT = "127.0.0.1", 5600
PLAIN = ContentName()
FULL = AttentionGroup("full", BLOCK)
GEOMETRY = CacheLayout(BLOCK, PAGE_BYTES, 1, (FULL,), 8, 100, 1)
LIMITED = (FULL, AttentionGroup("window", BLOCK, 40), AttentionGroup("chunk", BLOCK, 64, True))
"""The groups of a model with a window and a chunk beside attention of unlimited reach."""


def geometry_with(groups) -> CacheLayout:
    """Pages of these attention groups."""
    return dataclasses.replace(GEOMETRY, groups=groups)


def whole_pages(groups=(FULL,)) -> PairedPages:
    """What reads from servers of these sizes."""
    return PairedPages(ModelUnits((AttentionUnits(1, 1, 2),) * len(groups), 1), geometry_with(groups), 0)


def keys(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens)


class ProducerSide:
    """One incarnation of the prefill server, and its pool."""

    def __init__(self, world, name, *, layout=LAYOUT, max_pages=NUM_PAGES):
        fabric, clock, rng = world.fabric, world.clock, world.rng
        self.name = name
        self.channel = world.network.channel(HOST, PORT, world.event_loop)
        self.events = EventQueue()
        self.memory = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
        self.link = fabric.link(name)
        self.link.register(Region.of(self.memory))
        identity = Peer(name, geometry_with(world.groups), (self.link.describe(),), layout)
        limits = LeaseLimits(max_pages=max_pages)
        self.producer = Producer(identity, limits, clock, rng.randbytes, self.events.put)
        self.channel.listen(self.producer.serve)

    def fill(self, pages, rng) -> None:
        """New content: other bytes than these pages ever had."""
        for page in pages:
            self.memory[page] = np.frombuffer(rng.randbytes(PAGE_BYTES), np.uint8)


class World:
    """`port` is the scheduler's door to D's pulls and P's leases; what is sent is under way until `deliver`. `groups`:
    the model's attention groups."""

    def __init__(
        self, seed=0, *, policy=None, layout=LAYOUT, max_pages=NUM_PAGES, links=None, groups=(FULL,), **fabric
    ):
        self.groups = groups
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.event_loop = TurnedLoop(self.clock)
        self.network = MemoryNetwork()
        self.fabric = links or MemoryFabric(**fabric)
        self.max_pages = max_pages
        self.num_producers = 0
        self.policy = policy or PeerPolicy()
        self.channel = self.network.channel("decode", 0, self.event_loop)
        self.addresses = set()
        self.memory = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
        self.link = self.fabric.link("decode")
        pool = PoolMemory(self.memory)
        self.link.register(pool.region)
        self.worker = LinkWorker(self.link, whole_pages(groups), pool.fence, chunk_bytes=3 * PAGE_BYTES)
        identity = Peer("decode", geometry_with(groups), (self.link.describe(),), layout)
        self.events = EventQueue()
        tools = ConsumerTools(identity, self.worker, self._connect, self.rng.randbytes, self.event_loop)
        self.consumer = Consumer(tools, self.policy, self.clock, self.events.put)
        self.restart()
        self.port = TurnedPort(self.event_loop, self.p.producer, self.consumer, self.events, self.p.channel)

    @property
    def leases(self):
        return self.p.producer.leases

    @property
    def sent(self) -> int:
        """Frames that D has sent."""
        return len(self.channel.sent)

    def restart(self) -> None:
        """The producer's process is another one from now on."""
        if self.num_producers:
            self.cut()
            self.p.channel.close()
        self.num_producers += 1
        self.p = ProducerSide(self, f"prefill-{self.num_producers}", max_pages=self.max_pages)

    def cut(self) -> None:
        """End the connections between the two; they hear of it when they look next."""
        self.network.cut(self.channel, self.p.channel)

    async def _connect(self, address):
        self.addresses.add(address)
        return await self.channel.connect(address)

    def pull(self, spec):
        return self.port.pull(spec)

    def tick(self):
        """What the transfer thread of D does once; the events since the last time."""
        self.event_loop.spin()
        self.consumer.look()
        self.event_loop.spin()
        return self.events.take()

    def deliver(self) -> None:
        """Everything that is under way, and what it gives rise to."""
        self.event_loop.spin()
        while self.channel.look() | self.p.channel.look():
            self.event_loop.spin()

    def step(self):
        """Tick, and let what is under way go one way."""
        events = self.tick()
        self.channel.look()
        self.p.channel.look()
        return events

    def run(self, rounds=50):
        """Tick and deliver; returns the events."""
        events = []
        for _ in range(rounds):
            events += self.tick()
            self.deliver()
        return events

    def spans(self, end, start=0):
        """Of each group the first token that going on at `end` needs, none before `start`, and the number of pages."""
        firsts = [min(end, max(start, group.needed_at(end))) for group in self.groups]
        return [(first, num_range_pages(first, end, BLOCK)) for first in firsts]

    def num_pages(self, end, start=0) -> int:
        """Pages that going on at `end` takes, of the tokens from `start` on."""
        return sum(count for _, count in self.spans(end, start))

    def cut_pages(self, pages, end, start=0):
        """Pages, of one group after the other, as records have them; of one group as many as there are."""
        if self.groups == (FULL,):
            return parts(list(pages), start)
        numbers, made = np.asarray(list(pages), np.int32), []
        for group, (first, count) in zip(self.groups, self.spans(end, start), strict=True):
            made.append(GroupPages(group, first, numbers[:count]))
            numbers = numbers[count:]
        assert not len(numbers), "more pages than it takes"
        return tuple(made) if any(len(part.pages) for part in made) else ()

    def places(self, end, start=0) -> list[int]:
        """Where the pages of the tokens from `start` on stand among all of an offer that ends at `end`."""
        places, offset = [], 0
        for (offered, total), (first, count) in zip(self.spans(end), self.spans(end, start), strict=True):
            skipped = first // BLOCK - offered // BLOCK if count else 0
            places += range(offset + skipped, offset + skipped + count)
            offset += total
        return places

    def offer(self, prompt, pages, checkpoints=(), *, request_id="cmpl-1", name=PLAIN, num_shared=0) -> KvSource:
        """Lease pages of fresh content, but for the first `num_shared`, which are leased already; returns what a decode
        server parses of the reference."""
        held = tuple(OfferedCheckpoint(position, np.array(file, np.int32)) for position, file in checkpoints)
        self.p.fill([*pages[num_shared:], *(page for _, file in checkpoints for page in file)], self.rng)
        offer = Offer(request_id, name, prompt, self.cut_pages(pages, len(prompt)), held)
        return KvSource(self.p.name, HOST, PORT, request_id, self.leases.offer(offer).nonce)

    def pull_spec(
        self,
        ref,
        prompt,
        pages,
        *,
        start=0,
        checkpoint=None,
        name=PLAIN,
        host=None,
        release_only=False,
    ) -> PullSpec:
        return PullSpec(
            "cmpl-2",
            ref if host is None else dataclasses.replace(ref, host=host),
            name,
            prompt,
            start,
            self.cut_pages(pages, len(prompt), start),
            None if checkpoint is None else np.array(checkpoint, np.int32),
            release_only,
        )


def parsed(reference: str, engine_id: str, **others):
    """What D makes of a reference that went through a proxy."""
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": engine_id,
        "remote_request_id": reference,
        "remote_host": HOST,
        "remote_port": PORT,
        "remote_block_ids": [[0]],
    }
    return parse_kv_transfer_params(params | others, PeerPolicy()).source
