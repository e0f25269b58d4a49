"""Tiers below a simulated runner: a memory whose pages hold what the runner wrote, and lanes that work when told to."""

from collections import deque
from concurrent.futures import Future

import numpy as np
from driver import Driver

from cairn.cache.events import (
    AllBlocksCleared,
    BlockEvents,
    BlockRemoved,
    BlockStored,
    Event,
    block_hash,
    next_digest,
    root_digest,
)
from cairn.cache.layout import CacheLayout
from cairn.cache.sequence_blocks import Namespace
from cairn.tiers.announcements import TierEvents
from cairn.tiers.context import TierContext
from cairn.tiers.demotion import Demoter
from cairn.tiers.digests import EntryNames
from cairn.tiers.disk import DiskFolder, DiskStore
from cairn.tiers.files import Files
from cairn.tiers.host import HostStore
from cairn.tiers.index import PathShape
from cairn.tiers.lanes import TierLanes
from cairn.tiers.promotion import TierSource
from doubles.simulated_runner import SimulatedRunner

IDENTITY = bytes(range(32))


class ManualLane:
    """A lane whose tasks are carried out by `run`. `immediate`: as soon as they come."""

    rests = 0.0

    def __init__(self, immediate: bool = False) -> None:
        self.immediate = immediate
        self.tasks: deque = deque()

    def submit(self, task):
        future: Future = Future()
        self.tasks.append((task, future))
        if self.immediate:
            self.run()
        return future

    def run(self, most: int = 1 << 30) -> int:
        """Carry out the oldest tasks. How many."""
        number = 0
        while self.tasks and number < most:
            task, future = self.tasks.popleft()
            number += 1
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)
        return number

    def pace(self, rests: float) -> None:
        self.rests = rests

    def close(self) -> None:
        self.tasks.clear()


class SimulatedMemory:
    """The pages of a simulated runner as bytes: each content that was ever copied out has a number, with its name."""

    def __init__(self, runner: SimulatedRunner, layout: CacheLayout) -> None:
        self.runner = runner
        self.layout = layout

    def copy_out(self, pages):
        rows = np.zeros((len(pages), self.layout.page_bytes), np.uint8)
        for row, page in zip(rows, pages.tolist(), strict=True):
            tags = self.runner._tags.get(page)
            content = (None if tags is None else list(tags), self.runner._files.get(page))
            text = repr(content).encode()
            CONTENTS.setdefault(text, content)
            number = NUMBERS.setdefault(text, len(NUMBERS) + 1)
            row[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
            row[8:16] = row[:8]
        return rows

    def copy_in(self, pages, fill):
        rows = np.full((len(pages), self.layout.page_bytes), 255, np.uint8)
        if not fill(list(rows)):
            for page in pages.tolist():
                self.runner.write_tokens(page, [-1] * self.layout.block_size)
            return False
        by_number = {number: text for text, number in NUMBERS.items()}
        for row, page in zip(rows, pages.tolist(), strict=True):
            assert bytes(row[:8]) == bytes(row[8:16])
            tags, state = CONTENTS[by_number[int.from_bytes(bytes(row[:8]), "little")]]
            self.runner.write_tokens(page, tags if tags is not None else [None] * self.layout.block_size)
            if state is not None:
                self.runner._forget(page)
                self.runner._files[page] = state
        return True


CONTENTS: dict = {}
NUMBERS: dict = {}


class TierWorld:
    """A `Driver` with tiers. `host_pages`: of the host tier, 0 for none; `folder`: of the disk tier. `events`: what KV
    events say of the pool and the tiers, in order."""

    def __init__(self, host_pages=0, folder=None, disk_bytes=1 << 22, immediate=True, files=None, **driver) -> None:
        self.driver = Driver(**driver)
        cache, layout = self.driver.cache, self.driver.layout
        shape = PathShape.of(layout)
        stores = []
        if host_pages:
            stores.append(HostStore(np.zeros((host_pages, layout.page_bytes), np.uint8), shape))
        if folder is not None:
            disk = DiskFolder(str(folder), IDENTITY, layout.page_bytes, disk_bytes)
            stores.append(DiskStore(disk, shape, files or Files()))
        self.stores = tuple(stores)
        self.lanes = TierLanes(*(ManualLane(immediate) for _ in range(4)))
        state = self.driver.scheduler.state
        # a second a token: whatever can be fetched is
        state.transfers.prefill_speed.seconds_per_token = 1.0
        self.memory = SimulatedMemory(self.driver.runner, layout)
        self.context = TierContext(
            layout,
            self.stores,
            EntryNames.of(layout, IDENTITY, b"secret"),
            self.memory,
            self.lanes,
            self.driver.clock,
            state.transfers.prefill_speed,
            self.driver.config.exact,
        )
        self.events: list[Event] = []
        blocks = BlockEvents(
            layout.block_size, self.events.append, self.context.exact, resumes_anywhere=not layout.needs_checkpoints
        )
        cache.observe(blocks)
        announced = TierEvents(self.stores, layout.block_size, blocks, self.events.append)
        self.demoter = Demoter(cache, self.context, events=announced)
        self.source = TierSource(self.context)
        cache.observe(self.demoter)
        state.transfers.sources = (self.source,)
        state.transfers.sink = self.demoter

    def settle(self) -> None:
        """Everything that waits to be written is written."""
        for _ in range(1000):
            if self.demoter.is_idle:
                return
            self.driver.scheduler.poll()
            self.run_lanes()
        raise AssertionError("no end in sight")

    def run_lanes(self) -> None:
        for lane in (self.lanes.names, self.lanes.copies, self.lanes.reads, self.lanes.writes):
            lane.run()

    def answer(self, prompt, **fields) -> tuple:
        """The answer to a prompt, alone; then everything that waits is written."""
        name = self.driver.submit(prompt, **fields)
        for _ in range(1000):
            self.driver.scheduler.poll()
            self.run_lanes()
            if self.driver.scheduler.has_work:
                self.driver.step()
            elif name not in self.driver.scheduler.state.requests:
                break
        else:
            raise AssertionError("no end in sight")
        self.settle()
        return self.driver.output(name)

    def first(self, name):
        """What a request's first lookup has found."""
        return self.driver.requests[name].stats.first_sequence


def blocks_of(prompt, block_size: int) -> list[bytes]:
    """The bytes of a prompt's whole blocks."""
    raw, size = np.array(prompt, "<i8").tobytes(), 8 * block_size
    return [raw[at : at + size] for at in range(0, len(raw) // size * size, size)]


class Router:
    """Follows events: `tokens`, those of each block by its hash; `has`: the blocks of each medium."""

    def __init__(self) -> None:
        self.num_heard = 0
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.has: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "DISK": set()}

    def follow(self, world: TierWorld) -> "Router":
        for event in world.events[self.num_heard :]:
            match event:
                case BlockStored():
                    here = self.has[event.medium]
                    assert here.isdisjoint(event.block_hashes), "announced twice"
                    assert event.parent_block_hash is None or event.parent_block_hash in here
                    parent = event.parent_block_hash
                    for number, name in enumerate(event.block_hashes):
                        tokens = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
                        assert self.tokens.setdefault(name, (parent, tokens)) == (parent, tokens)
                        parent = name
                    here.update(event.block_hashes)
                case BlockRemoved():
                    assert self.has[event.medium].issuperset(event.block_hashes), "removed, and never announced"
                    self.has[event.medium].difference_update(event.block_hashes)
                case AllBlocksCleared():
                    assert not any(self.has.values()), "something is still there"
        self.num_heard = len(world.events)
        return self

    def blocks(self, medium: str, prompt) -> int:
        """How many leading blocks of a prompt are in a medium."""
        digest, number = root_digest(Namespace()), 0
        for raw in blocks_of(prompt, 16):
            digest = next_digest(digest, raw)
            if block_hash(digest) not in self.has[medium]:
                return number
            number += 1
        return number
