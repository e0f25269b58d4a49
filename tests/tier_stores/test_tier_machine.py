"""Random requests over tiers whose threads, disk and clock do as they like: every answer is that of a server that
computes it, no page leaks, both sides' books add up, and the disk never has a wrong byte after a restart."""

import errno
import os
import random
import shutil
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from driver import alone
from faulty_files import FaultyFiles
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tier_world import IDENTITY, Router, TierWorld

from cairn.cache.audit import audit
from cairn.cache.group_pages import page_numbers
from cairn.cache.layout import AttentionGroup
from cairn.cache.sequence_blocks import Namespace
from cairn.scheduler.request import Phase
from cairn.tiers.announcements import MEDIA
from cairn.tiers.disk import DiskFolder, DiskStore
from cairn.tiers.host import HostStore
from cairn.tiers.index import PathShape
from tiers import more

PARTS = tuple(tuple((17 * i + 5 * j) % 50 for j in range(length)) for i, length in enumerate((1, 16, 40, 64, 70, 130)))
PROMPT = st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=4)
PICK = st.integers(0, 1 << 16)
LIMITED = (AttentionGroup("window", 16, 40), AttentionGroup("chunk", 4, 24, True))
LANES = ("names", "copies", "reads", "writes")


def tokens(parts) -> tuple[int, ...]:
    return tuple(token for part in parts for token in PARTS[part])


@cache
def reference(prompt, max_tokens, exact, limited):
    return alone(list(prompt), exact, limited, max_tokens=max_tokens)


def check_store(store) -> None:
    """The index has each entry once, in its place, and what is counted is there."""
    index = store._index
    for key, entry in index.entries.items():
        assert entry.facts.key == key and entry.readers >= 0
    states = Counter((e.facts.parent, e.facts.tail) for e in index if e.facts.tail is not None)
    assert states == {(mark, tail): count for mark, tails in index._tails.items() for tail, count in tails.items()}
    assert store.counters.num_entries == len(index)
    if isinstance(store, HostStore):
        used = [entry.place for entry in index]
        pages = np.concatenate([np.zeros(0, np.int32), *used])
        assert len(np.unique(pages)) == len(pages) == store._pool.num_pages - store._pool.num_free
        return
    live = {}
    for entry in index:
        segment = entry.place.segment
        assert store._table.segments[segment.name] is segment and entry.facts.key in segment.keys
        live[segment.name] = live.get(segment.name, 0) + max(1, entry.facts.num_pages) * 64
    for segment in store._table.segments.values():
        assert segment.live == live.get(segment.name, 0) and segment.live <= segment.size
        assert all(index.get(key) is not None for key in segment.keys)
    files = {file.name: file.stat().st_size for file in Path(store._folder.path).glob("*.seg")}
    assert files == {segment.name: segment.size for segment in store._table.segments.values()}
    assert store.counters.num_bytes == sum(files.values()) <= store._folder.max_bytes


class TierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()

    @initialize(
        num_pages=st.sampled_from([40, 60, 200]),
        host_pages=st.sampled_from([0, 20, 60, 1000]),
        disk_bytes=st.sampled_from([None, 60_000, 1 << 20]),
        block_size=st.sampled_from([8, 16, 48]),
        ahead=st.sampled_from([1, 2]),
        exact=st.booleans(),
        mode=st.sampled_from(["auto", "auto", "align"]),
        limited=st.sampled_from([(), LIMITED]),
    )
    def build(self, num_pages, host_pages, disk_bytes, block_size, ahead, exact, mode, limited):
        self.files = FaultyFiles()
        self.arguments = {
            "num_pages": num_pages * (1 + len(limited)),
            "host_pages": host_pages if disk_bytes is not None else max(20, host_pages),
            "folder": None if disk_bytes is None else self.folder,
            "disk_bytes": disk_bytes or 0,
            "block_size": block_size,
            "max_in_flight": ahead,
            "exact": exact,
            "mode": mode,
            "limited": limited,
        }
        self.start()

    def start(self):
        self.world = TierWorld(immediate=False, files=self.files, **self.arguments)
        self.driver = self.world.driver
        self.router = Router()
        self.expected = {}
        self.history = getattr(self, "history", [])

    @precondition(lambda self: len(self.driver.scheduler.state.requests) < 6)
    @rule(
        parts=PROMPT,
        index=PICK,
        shared=st.booleans(),
        cut=st.sampled_from([0, 0, 1, 30]),
        max_tokens=st.sampled_from([1, 3, 20]),
        salt=st.sampled_from([None, None, "a"]),
        end=PICK,
    )
    def ask(self, parts, index, shared, cut, max_tokens, salt, end):
        prompt = tokens(parts)
        if shared and self.history:
            before = self.history[index % len(self.history)]
            prompt = before[: max(1, len(before) - cut)] + prompt
        prompt = prompt[:220]
        namespace = Namespace(cache_salt=salt)
        name = self.driver.submit(prompt, max_tokens, namespace=namespace, boundaries=[1 + end % len(prompt)])
        self.expected[name] = prompt, max_tokens
        self.history = [*self.history[-7:], prompt]

    @precondition(lambda self: bool(self.history) and len(self.driver.scheduler.state.requests) < 6)
    @rule(index=PICK)
    def ask_again(self, index):
        prompt = self.history[index % len(self.history)]
        self.expected[self.driver.submit(prompt, 3)] = prompt, 3

    @rule(lane=st.sampled_from(LANES), most=st.sampled_from([1, 1, 5]))
    def work(self, lane, most):
        getattr(self.world.lanes, lane).run(most)

    @rule(times=st.sampled_from([1, 3]))
    def work_all(self, times):
        for _ in range(times):
            self.driver.scheduler.poll()
            self.world.run_lanes()

    @rule(times=st.sampled_from([1, 3, 20]))
    def step(self, times):
        for _ in range(times):
            self.driver.scheduler.poll()
            if self.driver.scheduler.has_work:
                self.driver.step()

    @precondition(lambda self: bool(self.driver.scheduler.state.requests))
    @rule(index=PICK)
    def abort(self, index):
        names = list(self.driver.scheduler.state.requests)
        name = names[index % len(names)]
        self.driver.scheduler.abort(name)
        self.expected.pop(name, None)

    @rule()
    def clear(self):
        self.driver.cache.clear()

    @rule(seconds=st.sampled_from([0.001, 0.6, 300.0]))
    def wait(self, seconds):
        self.driver.clock.advance(seconds)

    @rule(call=st.sampled_from([None, None, "create", "write_all", "sync", "rename", "remove", "open", "read_into"]))
    def disk_breaks(self, call):
        self.files.fail = {} if call is None else {call: errno.EIO}
        for store in self.world.stores:
            if isinstance(store, DiskStore):
                store._paused_until = 0.0

    @precondition(lambda self: self.arguments["folder"] is not None)
    @rule(index=PICK, bit=st.integers(0, 7))
    def a_bit_flips(self, index, bit):
        files = sorted(Path(self.folder).glob("*.seg"))
        if files:
            file = files[index % len(files)]
            damaged = bytearray(file.read_bytes())
            damaged[-1 - index % 2000] ^= 1 << bit
            file.write_bytes(damaged)

    @precondition(lambda self: self.arguments["folder"] is not None)
    @rule(speed=st.sampled_from([1.0, 1.0, 1e-4]))
    def restart(self, speed):
        """The process is killed, whatever it was doing."""
        self.files.fail = {}
        self.start()
        self.world.context.speed.seconds_per_token = speed

    @invariant()
    def the_books_add_up(self):
        if hasattr(self, "driver"):
            audit(self.driver.cache)
            for store in self.world.stores:
                check_store(store)

    @invariant()
    def a_router_hears_each_thing_once(self):
        if hasattr(self, "driver"):
            self.router.follow(self.world)

    @invariant()
    def what_a_tier_may_write_to_is_nobodys(self):
        if not hasattr(self, "driver"):
            return
        state, pool = self.driver.scheduler.state, self.driver.cache.pool
        for fetch in state.transfers.fetching.values():
            for pages in (page_numbers(fetch.target.pages), fetch.target.state_pages):
                assert (pool.counts[pages] == 1).all()

    def teardown(self):
        try:
            if hasattr(self, "driver"):
                self.finish()
        finally:
            shutil.rmtree(self.folder)

    def finish(self):
        driver, state = self.driver, self.driver.scheduler.state
        for _ in range(3000):
            driver.scheduler.poll()
            self.world.run_lanes()
            if driver.scheduler.has_work:
                driver.step()
            elif not state.requests and not state.transfers.is_open and self.world.demoter.is_idle:
                break
            driver.clock.advance(0.01)
        assert not state.requests and not state.transfers.is_open, "no end in sight"
        assert not driver.cache.pinned.pins and not driver.cache.pinned.sequences and not driver.cache.pinned.steps
        assert not self.world.source._known and not self.world.source._fetches
        assert driver.cache.clear(), "a page leaked"
        exact, limited = self.arguments["exact"], self.arguments["limited"]
        for name, (prompt, max_tokens) in self.expected.items():
            assert driver.requests[name].phase is Phase.FINISHED
            assert driver.output(name) == reference(prompt, max_tokens, exact, limited), name
        self.the_books_add_up()
        self.world.demoter.poll()
        self.router.follow(self.world)
        for store in self.world.stores:
            announced = self.world.demoter._events._announced[store.name]
            assert all(store.contains(list(announced))), "announced, and not there"
            assert self.router.has[MEDIA[store.name]] == {name for names in announced.values() for name in names}
        if self.arguments["folder"] is not None:
            folder = DiskFolder(self.folder, IDENTITY, 64, 1 << 22)
            again = DiskStore(folder, PathShape(), FaultyFiles())
            assert again.counters.drops["damaged"] == 0


def live(seed) -> int:
    """A long life of a cache with windows, of which the machine's short ones hit little: hits in tiers."""
    rng, life = random.Random(seed), TierMachine()
    sizes = rng.choice([40, 60, 200]), rng.choice([20, 60, 1000]), rng.choice([None, 60_000, 1 << 20])
    cuts = rng.choice([8, 16, 48]), rng.choice([1, 2]), rng.random() < 0.5, rng.choice(["auto", "align"])
    life.build(*sizes, *cuts, LIMITED)
    for _ in range(150):
        kind, requests = rng.random(), life.driver.scheduler.state.requests
        if kind < 0.12 and len(requests) < 6:
            parts = [rng.randrange(len(PARTS)) for _ in range(rng.randint(1, 4))]
            cut, most = rng.choice([0, 0, 1, 30]), rng.choice([1, 3, 20])
            life.ask(parts, rng.randrange(99), rng.random() < 0.5, cut, most, None, rng.randrange(999))
        elif kind < 0.2 and life.history and len(requests) < 6:
            life.ask_again(rng.randrange(99))
        elif kind < 0.6:
            life.work_all(1)
        elif kind < 0.9:
            life.step(rng.choice([1, 3, 20]))
        elif kind < 0.95:
            life.clear()
        elif kind < 0.96 and requests:
            life.abort(rng.randrange(99))
        elif kind < 0.97 and life.arguments["folder"] is not None:
            life.restart(1.0)
        life.the_books_add_up()
        life.what_a_tier_may_write_to_is_nobodys()
    hits = sum(store.counters.hits for store in life.world.stores)
    life.teardown()
    return hits


@pytest.mark.parametrize("seeds", [range(6), more(range(100))], ids=lambda seeds: f"{len(seeds)} lives")
def test_windows_come_back_in_long_lives(seeds):
    assert sum(live(seed) for seed in seeds) >= len(seeds)


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}

TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=15, stateful_step_count=40, **COMMON)


@pytest.mark.more
def test_more_steps():
    run_state_machine_as_test(TierMachine, settings=settings(TestTierMachine.settings, max_examples=150))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_steps():
    examples = int(os.environ.get("CAIRN_LONG_EXAMPLES", "2000"))
    run_state_machine_as_test(TierMachine, settings=settings(max_examples=examples, stateful_step_count=60, **COMMON))
