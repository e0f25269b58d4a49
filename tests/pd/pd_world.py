"""Whole servers without HTTP, sockets and tensors, joined in memory and turned by hand: scheduler, cache, port,
handshake, leases, pulls and links are the real ones."""

import json
import random
from collections import Counter

import numpy as np
from pooled_runner import PooledRunner, layout, units

from cairn.cache.audit import audit
from cairn.cache.eviction import ValuePerByte
from cairn.cache.placement import placement_for
from cairn.cache.prefix_cache import CachePolicy, PrefixCache
from cairn.engine.specs import answers_to
from cairn.engine.step_pipeline import StepPipeline
from cairn.engine.transfers.kv_transfer import KvTransfer, parse_role
from cairn.engine.transfers.loop import EventQueue, TransferLoop
from cairn.scheduler.request import Spec
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.state import SchedulerConfig
from cairn.scheduler.transfers import LeaseQuota, Transfers
from cairn.transfer.consumer import Consumer
from cairn.transfer.contract import Peer
from cairn.transfer.digest import SequenceIndex
from cairn.transfer.geometry import PairedPages
from cairn.transfer.leases import LeaseLimits
from cairn.transfer.memory import PoolMemory
from cairn.transfer.peers import PeerPolicy
from cairn.transfer.producer import Producer
from cairn.transfer.ranks import RankedWorker
from cairn.transfer.session import ConsumerTools
from cairn.transfer.worker import LinkWorker
from cairn.types import ManualClock, RequestId, SamplingParams
from doubles.memory_channel import MemoryNetwork
from doubles.memory_link import MemoryFabric
from transfer.parts import num_active
from turned_loop import TurnedLoop

LAYOUT_HASH = b"L" * 32
HOST = "127.0.0.1"


class World:
    """`network` and `fabric` join the servers of one test; `clock` moves only by `pass_time`. `limited`: whether their
    model has attention of limited reach beside the other."""

    def __init__(self, seed: int = 0, *, limited: bool = False, **fabric) -> None:
        self.limited = limited
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.network = MemoryNetwork()
        self.fabric = MemoryFabric(**fabric)
        self.servers: list[Server] = []

    def alone(self, prompt, max_tokens=4, seed=0) -> list[int]:
        """As `alone`, of this world's model."""
        return alone(prompt, max_tokens, seed, limited=self.limited)

    def server(self, port: int, **arguments) -> "Server":
        """A new one at `port`; one that was there is gone."""
        made = Server(self, f"engine-{len(self.servers)}", port, **arguments)
        self.servers.append(made)
        return made

    def run(self, *servers, turns: int = 400) -> None:
        """Turn these servers until nothing moves any more without time passing."""
        quiet = 0
        for _ in range(turns):
            moved = [server.turn() for server in servers or self.servers if server.alive]
            quiet = 0 if any(moved) else quiet + 1
            if quiet > 6:
                return
        raise AssertionError("no end in sight")

    def pass_time(self, seconds: float, *servers) -> None:
        """In small steps, as a waiting server would see it."""
        for _ in range(int(seconds / 0.5)):
            self.clock.advance(0.5)
            self.run(*servers)

    def close(self) -> None:
        """What its servers did is there to be read. Else a loop's files wait for the collector of garbage."""
        for server in self.servers:
            server.event_loop.close()


class Server:
    """One incarnation of an engine. `answers`: tokens by request; `ended`: the finished requests by name."""

    def __init__(
        self,
        world,
        engine_id,
        port,
        *,
        mode="auto",
        num_pages=400,
        block_size=16,
        lease_share=0.5,
        lease_seconds=30.0,
        on_failure="recompute",
        layout_hash=LAYOUT_HASH,
        max_num_seqs=4,
        budget=256,
        ahead=1,
        max_leases=1024,
        max_leases_per_client=64,
        wait_seconds=None,
    ) -> None:
        self.world, self.engine_id, self.alive = world, engine_id, True
        self.layout, model = layout(block_size, world.limited), units(world.limited)
        noise = np.random.default_rng(port)
        self.pool = noise.integers(0, 256, (num_pages, self.layout.page_bytes), np.uint8)
        self.runner = PooledRunner(self.layout, self.pool, num_pages, max_num_seqs)
        self.link = world.fabric.link(engine_id)
        memory = PoolMemory(self.pool)
        self.link.register(memory.region)
        identity = Peer(engine_id, self.layout, (self.link.describe(),), layout_hash)
        random_bytes, event_loop, events = world.rng.randbytes, TurnedLoop(world.clock), EventQueue()
        self.event_loop = event_loop
        self.channel = world.network.channel(HOST, port, event_loop)
        self.max_leased_pages = int(num_pages * lease_share)
        limits = _limits(self.max_leased_pages, lease_seconds)
        self.producer = Producer(identity, limits, world.clock, random_bytes, events.put)
        pages = PairedPages(model, self.layout, 0)
        worker = LinkWorker(self.link, pages, memory.fence)
        policy = PeerPolicy()
        ranks = RankedWorker(self.link, worker, ())
        tools = ConsumerTools(identity, ranks, self.channel.connect, random_bytes, event_loop)
        self.consumer = Consumer(tools, policy, world.clock, events.put)
        self.port = TransferLoop(
            event_loop, self.producer, self.consumer, events, self.channel, ranks, memory.enter_thread
        )
        quota = LeaseQuota(
            max_leases=max_leases,
            max_leases_per_client=max_leases_per_client,
            wait_seconds=lease_seconds if wait_seconds is None else wait_seconds,
        )
        transfers = Transfers(self.port, SequenceIndex(layout_hash), quota)
        self.kv = KvTransfer(engine_id, HOST, port, 1, policy, self.port, transfers)
        placement = None if mode is None else placement_for(mode, block_size, False)
        self.cache = PrefixCache(self.layout, num_pages, CachePolicy(placement, ValuePerByte()))
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_in_flight=ahead, on_load_failure=on_failure
        )
        self.scheduler = Scheduler(config, self.cache, world.clock, self.kv.transfers)
        self.pipeline = StepPipeline(self.scheduler, self.runner)
        self.answers: dict[str, list[int]] = {}
        self.ended: dict = {}
        self.count = 0

    def submit(self, prompt, max_tokens=4, params=None, n=1, **fields) -> str:
        """With `n` answers those behind the first are called NAME/1, NAME/2, ..., as in the core."""
        spec = self.spec(prompt, max_tokens, params, **fields)
        answers = answers_to(spec, n)
        self.scheduler.submit(spec, answers[1:])
        self.answers |= {own.request_id: [] for own in answers}
        return spec.request_id

    def spec(self, prompt, max_tokens=4, params=None, namespace=None, name=None, seed=0, images=(), **fields) -> Spec:
        self.count += 1
        name = name or f"{self.engine_id}-r{self.count}"
        named = {} if namespace is None else {"namespace": namespace}
        return Spec(
            request_id=RequestId(name),
            prompt=np.array(prompt, np.int64),
            max_tokens=max_tokens,
            images=images,
            role=parse_role(params, self.kv),
            **named,
            **({"sampling": SamplingParams(seed=seed)} | fields),
        )

    def turn(self) -> bool:
        """One look at everything; whether anything moved."""
        before = self._progress()
        self.turn_transfers()
        updates = self.scheduler.poll()
        while self.pipeline.can_launch:
            self.pipeline.launch()
        if self.pipeline.is_busy:
            updates += self.pipeline.collect()
        for progress in updates:
            self.answers[progress.request.id] += progress.tokens
            if progress.finish is not None:
                self.ended[progress.request.id] = progress.request
        moved = bool(updates) or before != self._progress() or self.scheduler.has_work
        if moved:
            audit(self.cache)
            self.check_leases()
        return moved

    def turn_transfers(self) -> None:
        """What the transfer thread does once."""
        self.channel.look()
        self.event_loop.spin()
        self.kv.loop.turn()
        self.event_loop.spin()

    def _progress(self) -> tuple[int, ...]:
        leases = self.producer.leases
        return num_active(leases), self.consumer.num_open, self.channel.num_waiting, len(self.channel.sent), self.steps

    @property
    def steps(self) -> int:
        return self.runner.steps

    def params(self, name) -> dict | None:
        """`kv_transfer_params` of the answer."""
        said = self.kv.response_params(self.ended[name])
        return None if said is None else json.loads(said)

    def die(self) -> None:
        """The process is gone."""
        self.alive = False
        self.channel.close()

    def check_leases(self) -> None:
        """What is leased keeps within its bounds, and each page is counted once."""
        transfers, requests = self.scheduler.state.transfers, self.scheduler.state.requests.values()
        leased = list(transfers.offers.values())
        pages = {page for each in leased for page in each.pin.pages.tolist()}
        assert self.producer.leases.num_pages == len(pages)
        assert len(pages) <= self.max_leased_pages or len(leased) == 1
        coming = [
            request.spec for request in requests if request.spec.role.kv_export and request.transfer.offered is None
        ]
        assert len(leased) + len(coming) <= transfers.quota.max_leases
        clients = Counter([each.client for each in leased if each.client is not None] + [s.client for s in coming])
        assert max(clients.values(), default=0) <= transfers.quota.max_leases_per_client

    def assert_clean(self) -> None:
        """Nothing is held for anybody any more, and the books add up."""
        audit(self.cache)
        state, transfers = self.scheduler.state, self.scheduler.state.transfers
        assert (
            not state.requests
            and not self.cache.pinned.sequences
            and not self.cache.pinned.steps
            and not self.cache.pinned.pins
        )
        assert not transfers.is_open and not self.producer.leases.num_pages
        assert sorted(state.slots.free) == list(range(state.config.max_num_seqs))
        assert self.cache.clear()


def _limits(max_pages: int, seconds: float) -> LeaseLimits:
    return LeaseLimits(max_pages=max_pages, duration=seconds, extension=min(20.0, seconds))


REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def silent(number: int) -> dict:
    """A reference to a prompt at a server that never answers."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "nobody",
        "remote_block_ids": [[0, 1], [2, 3, 4]],
        "remote_request_id": f"cmpl-{number}~{number:032x}",
        "remote_host": HOST,
        "remote_port": 99,
        "tp_size": 1,
        "remote_num_tokens": 20,
    }


def prefill(server, prompt, hint=None, **arguments) -> dict:
    """Have a server prefill for another one; returns the reference."""
    params = REMOTE_DECODE | ({} if hint is None else {"cairn_decode_hint": hint})
    name = server.submit(prompt, max_tokens=1, params=params, **arguments)
    server.world.run()
    return server.params(name)


def alone(prompt, max_tokens=4, seed=0, *, limited=False) -> list[int]:
    """The answer of a server that does nothing else and caches nothing."""
    world = World(limited=limited)
    server = world.server(9, mode=None, num_pages=2000)
    name = server.submit(prompt, max_tokens, seed=seed)
    world.run()
    return server.answers[name]
