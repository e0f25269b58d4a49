"""Random lives of leases and transfers against a model that knows only what was offered: whatever is cut, full, late,
repeated, aborted, frozen, restarted or forged, never a wrong byte is accepted, no page that may still be written to is
used again, nothing leaks, and every transfer ends.
"""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import event as note_event
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cairn.transfer.contract import ContentName, LeaseDemand, PagesFree, PullEnded
from cairn.transfer.params import split_reference
from doubles.memory_link import Fault
from transfer.world import BLOCK, FULL, LIMITED, NUM_PAGES, STATE_PAGES, World, keys

CANARY = 0xEE
LIES = ["prompt", "salt", "nonce", "request", "longer", "release"]
LONGEST_LIFE = 60.0
"""Seconds: more than handshake, claim, read and confirmation may take together."""


@dataclass
class Offered:
    """What the model knows of an offer: the bytes as they were then."""

    ref: object
    prompt: np.ndarray
    name: ContentName
    pages: list
    file: list
    snapshot: np.ndarray
    accepted: int = 0


@dataclass
class Pulled:
    """What the model knows of a transfer. `honest`: nothing of its reference was changed. `places`: of the offer's
    pages, those that are wanted."""

    offer: Offered
    honest: bool
    places: list
    local: list
    wants_state: bool
    ended: bool = False


class Transfers(RuleBasedStateMachine):
    groups = (FULL,)

    @initialize(
        seed=st.integers(0, 2**32), per_poll=st.sampled_from([1, 2, 100]), delay=st.integers(0, 2), late=st.booleans()
    )
    def start(self, seed, per_poll, delay, late):
        fabric = {"descriptors_per_poll": per_poll, "delay": delay, "late_writes": late}
        self.world = World(seed, max_pages=NUM_PAGES // 2, groups=self.groups, **fabric)
        self.world.memory[:] = CANARY
        self.mine = set(range(NUM_PAGES))
        self.theirs = set(range(NUM_PAGES))
        self.offers: dict[bytes, Offered] = {}
        self.leased: dict[bytes, Offered] = {}
        self.latest: list[Offered] = []
        self.pulls: dict[int, Pulled] = {}
        self.recorded: list[bytes] = []
        self.num_recorded = 0

    # -- the producer ------------------------------------------------------------------------------------------------

    @rule(num_tokens=st.integers(1, 120), salted=st.booleans(), seed=st.integers(0, 3))
    def offer(self, num_tokens, salted, seed):
        self.collect_leases()
        num_pages = self.world.num_pages(num_tokens)
        prompt, name = keys(num_tokens, seed), ContentName("", "salt" if salted else None)
        shared = self.leased_pages_of(prompt, name)
        num_new = num_pages + STATE_PAGES - len(shared)
        if not self.world.leases.fits(LeaseDemand(np.array(shared, np.int32), num_new)):
            return
        taken = sorted(self.theirs, key=lambda page: (page * 37 + seed) % NUM_PAGES)[:num_new]
        assert len(taken) == num_new, "the leases hold more than half of the pool"
        self.theirs -= set(taken)
        taken = shared + taken
        pages, file = taken[:num_pages], taken[num_pages:]
        if shared:
            note_event("an offer of pages that another lease has")
        ref = self.world.offer(prompt, pages, [(num_tokens, file)], name=name, num_shared=len(shared))
        offered = Offered(ref, prompt, name, pages, file, self.world.p.memory[taken].copy())
        self.offers[ref.nonce] = self.leased[ref.nonce] = offered
        self.latest = [*self.latest[-5:], offered]

    def leased_pages_of(self, prompt, name):
        """Full pages of another lease that begins like `prompt`."""
        found = []
        if self.groups != (FULL,):
            return found  # the groups of others have pages of their own
        for offered in self.leased.values():
            most = min(len(prompt), len(offered.prompt)) // BLOCK
            if offered.name == name and np.array_equal(prompt[: most * BLOCK], offered.prompt[: most * BLOCK]):
                found = max(found, offered.pages[:most], key=len)
        return found

    @precondition(lambda self: self.latest)
    @rule(which=st.integers(0, 5))
    def withdraw(self, which):
        lease = self.world.leases._active.get(self.latest[which % len(self.latest)].ref.nonce)
        if lease is not None:
            self.world.leases.release(lease)

    @rule()
    def collect_leases(self):
        """Pages of ended leases are used again at once, for something else."""
        for lease in self.world.leases.take_ended():
            offered = self.leased.pop(split_reference(lease.remote_request_id)[1])
            assert not self.theirs & set(offered.pages + offered.file)
            free = set(offered.pages + offered.file) - self.named()
            self.theirs |= free
            self.world.p.fill(sorted(free), self.world.rng)
        assert self.world.leases.num_pages == len(self.named())

    def named(self):
        """Pages of leases that have not ended."""
        return {page for offered in self.leased.values() for page in offered.pages + offered.file}

    @rule(gone=st.booleans())
    def restart_the_producer(self, gone):
        if gone:
            self.world.fabric.inject(self.world.p.name, Fault.DEAD)
        self.world.restart()
        self.leased.clear()
        self.theirs = set(range(NUM_PAGES))

    @rule(fault=st.sampled_from([Fault.NONE, Fault.NONE, Fault.FROZEN, Fault.DROP]))
    def inject(self, fault):
        self.world.fabric.inject(self.world.p.name, fault)

    # -- the consumer ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.latest)
    @rule(
        which=st.integers(0, 5),
        have=st.integers(0, 8),
        wants_state=st.booleans(),
        lie=st.sampled_from([None] * 6 + LIES),
    )
    def pull(self, which, have, wants_state, lie):
        offered = self.latest[-1 - which % len(self.latest)]
        ref, prompt, name, num_open = offered.ref, offered.prompt, offered.name, self.world.consumer.num_open
        start = min(have * BLOCK, len(prompt))
        places = self.world.places(len(prompt), start)
        match lie:
            case "prompt":
                prompt = prompt.copy()
                prompt[-1] += 1
            case "salt":
                name = ContentName("", "another")
            case "longer":
                prompt = np.append(prompt, prompt[:1]) if len(prompt) % BLOCK else prompt + 1
            case "nonce":
                ref = replace(ref, nonce=b"?" * 16)
            case "request":
                ref = replace(ref, request_id="cmpl-9")
        num_pages = self.world.num_pages(len(prompt), start)
        num_local = num_pages + (STATE_PAGES if wants_state else 0)
        if num_local > len(self.mine) or num_open >= 6:
            return
        local = sorted(self.mine)[:num_local]
        self.mine -= set(local)
        spec = self.world.pull_spec(
            ref,
            prompt,
            local[:num_pages],
            start=start if num_pages else len(prompt),
            checkpoint=local[num_pages:] if wants_state else None,
            name=name,
            release_only=lie == "release",
        )
        pull = self.world.pull(spec)
        self.world.event_loop.spin()
        places = [] if lie == "release" else places
        self.pulls[pull] = Pulled(offered, lie in (None, "release"), places, local, wants_state and lie is None)

    @precondition(lambda self: self.pulls)
    @rule(which=st.integers(0, 5))
    def abort(self, which):
        pulls = list(self.pulls)
        self.world.port.abort(pulls[which % len(pulls)])

    @rule(times=st.integers(1, 3))
    def tick(self, times):
        for _ in range(times):
            for event in self.world.tick():
                self.happened(event)
            self.recorded += self.world.channel.sent[self.num_recorded :]
            self.num_recorded, self.recorded = len(self.world.channel.sent), self.recorded[-20:]

    def happened(self, event):
        pulled = self.pulls[event.pull]
        match event:
            case PullEnded(failure=failure):
                assert not pulled.ended
                pulled.ended = True
                if failure is None:
                    self.accept(pulled, event)
            case PagesFree():
                assert pulled.ended, "the pages cannot be free before the outcome is known"
                self.world.memory[pulled.local] = CANARY
                self.mine |= set(pulled.local)
                del self.pulls[event.pull]

    def accept(self, pulled, event):
        offered = pulled.offer
        assert pulled.honest
        wanted = pulled.places.copy()
        if pulled.wants_state:
            assert event.checkpoint_position == len(offered.prompt)
            wanted += range(len(offered.pages), len(offered.pages) + STATE_PAGES)
        got = self.world.memory[pulled.local[: len(wanted)]]
        assert np.array_equal(got, offered.snapshot[wanted]), "bytes that P did not offer were accepted"
        if wanted:
            offered.accepted += 1
            assert offered.accepted == 1, "a reference was used twice"

    # -- the way between -------------------------------------------------------------------------------------------

    @rule(times=st.integers(1, 4))
    def everything_arrives(self, times):
        for _ in range(times):
            self.world.deliver()
            self.tick(1)

    @rule(to_producer=st.booleans())
    def one_way(self, to_producer):
        """The other end stands still."""
        (self.world.p if to_producer else self.world).channel.look()
        self.world.event_loop.spin()

    @rule()
    def cut(self):
        note_event("a connection is cut")
        self.world.cut()

    @rule(room=st.sampled_from([1, 2, 64]), to_producer=st.booleans())
    def make_full(self, room, to_producer):
        """A connection takes so few frames from now on."""
        for stream in (self.world.p if to_producer else self.world).channel.streams:
            stream.room = room

    @precondition(lambda self: self.recorded)
    @rule(which=st.integers(0, 20))
    def an_old_frame_again(self, which):
        """Only the peer itself could do that: whatever P makes of it is the peer's loss."""
        for stream in self.world.p.channel.streams:
            stream.arrive(self.recorded[which % len(self.recorded)])

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 5.0, 19.0, 31.0]))
    def time_passes(self, seconds):
        self.world.clock.advance(seconds)

    # -- many things at once -----------------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**32), troubles=st.integers(0, 3))
    def a_busy_while(self, seed, troubles):
        """Left alone, rules are chosen evenly, and hardly a transfer gets as far as reading."""
        rng = random.Random(seed)
        ordinary = (self.ordinary_transfer, self.move_on, self.move_on, self.move_on)
        trouble = (self.abort_any, self.trouble_between, self.lapse, self.trouble_at_the_producer, self.pull_again)
        for _ in range(25):
            rng.choice(trouble if rng.random() < 0.1 * troubles else ordinary)(rng)
            self.nothing_is_written_outside_a_transfer()

    def ordinary_transfer(self, rng):
        self.offer(rng.randint(1, 120), rng.random() < 0.5, rng.randrange(4))
        self.pull_again(rng)

    def pull_again(self, rng):
        lie = rng.choice([None] * 8 + LIES)
        if self.latest:
            self.pull(rng.choice([0, 0, 0, 1, 2]), rng.choice([0, 0, 1, 3, 8]), rng.random() < 0.8, lie)

    def move_on(self, rng):
        self.world.deliver()
        self.tick(rng.randint(1, 2))
        self.collect_leases()
        self.world.clock.advance(rng.choice([0.0, 0.1, 0.6]))

    def abort_any(self, rng):
        if self.pulls:
            self.abort(rng.randrange(6))

    def trouble_between(self, rng):
        for _ in range(3):
            self.one_way(rng.random() < 0.5)
        match rng.randrange(4):
            case 0:
                self.cut()
            case 1:
                self.make_full(rng.choice([1, 2, 64]), rng.random() < 0.5)
            case 2 if self.recorded:
                self.an_old_frame_again(rng.randrange(20))

    def lapse(self, rng):
        self.world.clock.advance(rng.choice([5.0, 19.0, 21.0, 31.0]))
        self.collect_leases()

    def trouble_at_the_producer(self, rng):
        match rng.randrange(6):
            case 0:
                self.restart_the_producer(rng.random() < 0.5)
            case 1 | 2:
                self.inject(rng.choice([Fault.FROZEN, Fault.DROP]))
            case _:
                self.inject(Fault.NONE)
        if self.latest and rng.random() < 0.2:
            self.withdraw(rng.randrange(6))

    # -- what holds at every moment ----------------------------------------------------------------------------------

    @invariant()
    def nothing_is_written_outside_a_transfer(self):
        if hasattr(self, "world"):
            assert (self.world.memory[sorted(self.mine)] == CANARY).all()

    @invariant()
    def leases_are_counted(self):
        if hasattr(self, "world"):
            assert self.world.leases.num_pages <= NUM_PAGES // 2

    def teardown(self):
        """The way is cut, then time passes: all end. Then the frozen go on: all pages are free."""
        if not hasattr(self, "world"):
            return
        for _ in range(int(LONGEST_LIFE)):
            self.tick(1)
            self.world.clock.advance(1.0)
        assert all(pulled.ended for pulled in self.pulls.values()), "a transfer without an end"
        for number in range(1, self.world.num_producers + 1):
            self.world.fabric.inject(f"prefill-{number}", Fault.NONE)
        for _ in range(60):
            self.tick(1)
            self.nothing_is_written_outside_a_transfer()
        assert not self.pulls and self.mine == set(range(NUM_PAGES))
        assert self.world.consumer.num_open == self.world.link.num_open == len(self.world.worker._reads) == 0
        self.world.clock.advance(31.0)
        self.collect_leases()
        assert self.world.leases.num_pages == 0 and self.theirs == set(range(NUM_PAGES))
        self.world.event_loop.close()


class TransfersOfWindows(Transfers):
    """Of a model with a window and a chunk beside attention of unlimited reach, and a recurrent state."""

    groups = LIMITED


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=100, stateful_step_count=15, deadline=None)

TestTransfersOfWindows = TransfersOfWindows.TestCase
TestTransfersOfWindows.settings = settings(TestTransfers.settings, max_examples=40)


@pytest.mark.more
@pytest.mark.parametrize("machine", [Transfers, TransfersOfWindows])
def test_more_transfers(machine) -> None:
    run_state_machine_as_test(machine, settings=settings(TestTransfers.settings, max_examples=250))
