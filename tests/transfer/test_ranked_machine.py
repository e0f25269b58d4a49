"""Random lives of two engines of several ranks and of any block sizes: whatever is cut, late, aborted, frozen or
stands still, never a wrong byte is accepted, no page that may still be written to is used again, nothing leaks, and
every transfer ends. Leases and content claims, through the scheduler's door.
"""

import dataclasses
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from cairn.transfer.contract import LeaseDemand, LeaseEnded, LookupRequest, PagesFree, PullEnded
from cairn.transfer.digest import ContentDigest
from cairn.transfer.memory import PoolMemory
from doubles.device_pool import FakeDevicePool
from doubles.memory_link import Fault
from tiers import first
from transfer.ranked_world import CANARY, LAYOUT, PLAIN, World, content_spec_of, leased_spec_of, offer_of
from transfer.world import keys

SIZES = (
    ((1, 16), (1, 16)),
    ((1, 64), (1, 16)),
    ((2, 16), (2, 16)),
    ((2, 32), (2, 16)),
    ((1, 16), (2, 64)),
    ((2, 64), (1, 32)),
)
LIVES, LONG_LIVES, STEPS = 48, 600, 90
NUM_PAGES, MAX_PULLS = 64, 5
EVERY_TROUBLE_FIRST = first(3, range(0, LIVES, 6))


@dataclass
class Held:
    """What P has leased: its pages hold `content` until the lease ends."""

    content: object
    prompt: np.ndarray
    pages: list
    file: list


@dataclass
class Pulled:
    """What D waits for: [start, end) of a content in `pages`, and a state in `file`."""

    content: object
    start: int
    end: int
    pages: list
    file: list
    asked: bool
    ended: bool = False


@dataclass
class Lives:
    seed: int
    trouble: float
    accepted: int = 0
    failed: int = 0
    held: dict = field(default_factory=dict)
    pulls: dict = field(default_factory=dict)

    def __post_init__(self):
        rng = self.rng = random.Random(self.seed)
        p, d = SIZES[self.seed % len(SIZES)]
        self.world = World(
            p,
            d,
            kv_heads=2,
            state_units=2,
            seed=self.seed,
            sides={"num_pages": NUM_PAGES, "max_pages": NUM_PAGES // 2},
            descriptors_per_poll=rng.choice([1, 4, 1000]),
            delay=rng.randrange(3),
            late_writes=rng.random() < 0.5,
            pools=random.Random(~self.seed).choices((PoolMemory, FakeDevicePool), k=2),
        )
        self.p, self.d = self.world.p, self.world.d
        self.theirs, self.mine = set(range(NUM_PAGES)), set(range(NUM_PAGES))

    # -- P -------------------------------------------------------------------------------------------------------------

    def lease(self, content, prompt, request_id):
        """An offer of fresh bytes, or None when there is no room."""
        k = self.p.pages_per_file
        need = self.p.pages_of(len(prompt)) + k
        if need > len(self.theirs) or not self.p.door.fits(LeaseDemand(num_new=need)):
            return None
        taken = self.rng.sample(sorted(self.theirs), need)
        self.theirs -= set(taken)
        held = Held(content, prompt, taken[k:], taken[:k])
        return held, offer_of(self.p, content, prompt, held.pages, {len(prompt): held.file}, request_id=request_id)

    def at_p(self, event):
        match event:
            case LeaseEnded(remote_request_id=reference):
                held = self.held.pop(reference)
                for rank in self.p.ranks:
                    rank.memory[held.pages + held.file] = self.rng.randrange(256)
                self.theirs |= set(held.pages + held.file)
            case LookupRequest():
                self.answer(event)

    def answer(self, asked):
        self.asks.append(asked.lookup)
        # A scheduler that is busy, holds nothing, or holds some of it.
        if self.rng.random() < 0.1 * self.trouble:
            return
        number = next(number for number, marks in self.known.items() if asked.marks.startswith(marks[:32]))
        content, prompt = self.known_content[number]
        positions = [*range(0, len(asked.marks) * 2 + 1, 64)]
        if asked.end is not None:
            positions += [self.ends[number]] * 3
        position = self.rng.choice(positions)
        leased = self.lease(content, prompt[:position], f"answer-{asked.lookup}") if position else None
        if leased is None:
            assert self.p.door.answer_lookup(asked.lookup, None) is None
            return
        held, offer = leased
        self.held[self.p.door.answer_lookup(asked.lookup, offer)] = held

    # -- D -------------------------------------------------------------------------------------------------------------

    def pull(self):
        rng, number = self.rng, len(self.known)
        if len(self.pulls) >= MAX_PULLS:
            return
        by_content = rng.random() < 0.4
        num_tokens = rng.randrange(64, 300) if by_content else rng.randrange(1, 300)
        content, prompt = self.world.content(num_tokens, number), keys(num_tokens, number)
        block = self.d.geometry.block_size
        start = rng.choice([0, 0, num_tokens // 2 // block * block, num_tokens])
        if by_content:
            start = start // 2 // block * block
        wants_state = rng.random() < 0.7
        lacking = self.d.pages_of(num_tokens) - start // block if start < num_tokens else 0
        k = self.d.pages_per_file if wants_state else 0
        if lacking + k > len(self.mine):
            return
        local = rng.sample(sorted(self.mine), lacking + k)
        pages, file = local[k:], local[:k]
        if by_content:
            digest = ContentDigest(LAYOUT, PLAIN)
            digest.append(prompt)
            spec = content_spec_of(self.p, prompt, pages, start=start, checkpoint=file or None)
            if rng.random() < 0.6:
                self.ends[number] = rng.randrange(1, num_tokens + 1)
                spec = dataclasses.replace(spec, source=dataclasses.replace(spec.source, end=self.ends[number]))
        else:
            leased = self.lease(content, prompt, f"cmpl-{number}")
            if leased is None:
                return
            reference = self.p.door.offer(leased[1])
            self.held[reference] = leased[0]
            spec = leased_spec_of(reference, self.p, prompt, pages, start=start, checkpoint=file or None)
        self.known[number] = digest.marks if by_content else b"?"
        self.known_content[number] = content, prompt
        self.mine -= set(local)
        self.pulls[self.d.door.pull(spec)] = Pulled(content, start, num_tokens, pages, file, by_content)

    def at_d(self, event):
        match event:
            case PullEnded(pull=pull, failure=failure):
                pulled = self.pulls[pull]
                assert not pulled.ended
                pulled.ended = True
                if failure is None:
                    self.accept(pulled, event)
                else:
                    self.failed += 1
            case PagesFree(pull=pull):
                pulled = self.pulls.pop(pull)
                assert pulled.ended, "the pages cannot be free before the outcome is known"
                for rank in self.d.ranks:
                    rank.memory[pulled.pages + pulled.file] = CANARY
                self.mine |= set(pulled.pages + pulled.file)

    def accept(self, pulled, event):
        self.accepted += 1
        end = event.position
        assert pulled.start < end <= pulled.end if pulled.asked else end == pulled.end
        assert bool(pulled.file) == (event.checkpoint_position is not None)
        for rank in self.d.ranks:
            if pulled.pages:
                rank.check_tokens(pulled.content, pulled.start, end, pulled.pages, only_these=False)
            if pulled.file:
                assert event.checkpoint_position == end
                rank.check_file(pulled.content, end, pulled.file)

    # -- the way between, and time -------------------------------------------------------------------------------------

    def turn(self):
        for engine, happened in ((self.p, self.at_p), (self.d, self.at_d)):
            for event in engine.turn():
                happened(event)

    def deliver(self):
        if self.rng.random() < 0.2 * self.trouble:
            match self.rng.randrange(5):
                case 0:
                    self.world.network.cut(self.p.channel, self.d.channel)
                case 1 | 2:
                    self.rng.choice([self.p, self.d]).channel.look()
                    self.world.event_loop.spin()
                    return
                case _:
                    return
        self.world.deliver()

    def make_trouble(self):
        rng = self.rng
        match rng.randrange(7):
            case 0 if self.pulls:
                self.d.door.abort(rng.choice([*self.pulls]))
            case 1:
                self.world.clock.advance(rng.choice([2.0, 6.0, 31.0]))
            case 2:
                rank = rng.randrange(len(self.p.ranks))
                self.world.fabric.inject(f"p-{rank}", rng.choice([Fault.FROZEN, Fault.DROP]))
            case 3 | 4:
                self.all_go_on()
            case 5 if len(self.d.ranks) > 1:
                self.d.running ^= {1}
            case 6 if self.held:
                self.p.door.withdraw(rng.choice([*self.held]))

    def all_go_on(self):
        self.d.running |= set(range(len(self.d.ranks)))
        for rank in range(len(self.p.ranks)):
            self.world.fabric.inject(f"p-{rank}", Fault.NONE)

    def live(self):
        self.known, self.known_content, self.ends, self.asks = {}, {}, {}, []
        for _ in range(STEPS):
            if self.rng.random() < 0.25:
                self.pull()
            if self.rng.random() < 0.2 * self.trouble:
                self.make_trouble()
            self.turn()
            self.deliver()
            self.world.clock.advance(self.rng.choice([0.0, 0.1, 0.6]))
            self.nothing_is_written_outside_a_transfer()

    def nothing_is_written_outside_a_transfer(self):
        free = sorted(self.mine)
        for rank in self.d.ranks:
            assert (rank.memory[free] == CANARY).all()

    def end(self):
        """The way is cut and time passes: all end. Then those who stood still go on: all pages are free."""
        for _ in range(60):
            self.turn()
            self.world.clock.advance(1.0)
        assert all(pulled.ended for pulled in self.pulls.values()), "a transfer without an end"
        self.all_go_on()
        for _ in range(800):
            self.turn()
            self.nothing_is_written_outside_a_transfer()
        assert not self.pulls and not self.held
        assert self.mine == self.theirs == set(range(NUM_PAGES))
        assert self.p.door.is_idle and self.d.door.is_idle and len(self.d.worker._reads) == 0
        for rank in self.d.ranks:
            assert rank.link.num_open == len(rank.worker._reads) == 0


def lives(seed):
    life = Lives(seed, trouble=(0.0, 0.5, 1.0)[seed // len(SIZES) % 3])
    life.live()
    life.end()
    return life


@pytest.mark.parametrize("first", EVERY_TROUBLE_FIRST)
def test_lives_of_every_pair_of_sizes(first):
    several = [lives(seed) for seed in range(first, first + 6)]
    assert sum(life.accepted for life in several) > 10
    if several[0].trouble:
        assert sum(life.failed for life in several) > 0


@pytest.mark.long
@pytest.mark.parametrize("first", range(LIVES, LONG_LIVES, 6))
def test_many_lives_of_every_pair_of_sizes(first):
    assert sum(lives(seed).accepted for seed in range(first, first + 6)) > 10
