"""Random requests against the naive model, with the audit after every step."""

import os
from collections.abc import Sequence

import pytest
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
from simulation import Request, Simulation

from cairn.cache.checkpoint import Kind
from cairn.cache.eviction import LeastRecentlyUsed, ValuePerByte
from cairn.cache.layout import AttentionGroup
from cairn.cache.placement import placement_for
from cairn.cache.reasons import Reason
from cairn.cache.sequence_blocks import Namespace
from cairn.types import Boundary

SEGMENTS = tuple(tuple(range(10 * i, 10 * i + length)) for i, length in enumerate((1, 3, 4, 17, 60, 64, 70)))
SPACES = (Namespace(), Namespace(cache_salt="a"))
LENGTHS = st.lists(st.integers(0, len(SEGMENTS) - 1), min_size=1, max_size=4)
PICK = st.integers(0, 1 << 16)
Ends = Sequence[tuple[int, str, int]]
WINDOW, WIDE = AttentionGroup("window", 4, 20), AttentionGroup("wide", 3, 70)
CHUNKED, LAST = AttentionGroup("chunked", 5, 16, chunked=True), AttentionGroup("last", 4, 1)
LIMITED = ((), (), (), (WINDOW,), (CHUNKED,), (WINDOW, WIDE), (LAST, CHUNKED))
ENDS = st.lists(
    st.tuples(
        PICK,
        st.sampled_from(["system_end", "message_end", "message_end", "image_end", "breakpoint"]),
        st.sampled_from([0, 0, 300, 3600]),
    ),
    max_size=5,
)


def boundaries(length: int, ends: Ends) -> tuple[Boundary, ...]:
    """Ascending and distinct, at most four of them to be held."""
    found = {place % length + 1: (kind, seconds) for place, kind, seconds in ends}
    held = [place for place in sorted(found) if found[place][1]][:4]
    return tuple(Boundary(p, found[p][0], found[p][1] if p in held else 0) for p in sorted(found))


class CacheMachine(RuleBasedStateMachine):
    """Up to four requests at once, in a pool that holds a few hundred tokens."""

    @initialize(
        mode=st.sampled_from(["auto", "auto", "align", "all", "granular", "junction"]),
        lru=st.booleans(),
        exact=st.booleans(),
        num_pages=st.sampled_from([8, 40, 90, 400]),
        block_size=st.sampled_from([1, 4, 16]),
        state_bytes=st.sampled_from([0, 100, 300]),
        limited=st.sampled_from(LIMITED),
        unlimited=st.sampled_from([True, True, False]),
    )
    def build(
        self,
        mode: str,
        lru: bool,
        exact: bool,
        num_pages: int,
        block_size: int,
        state_bytes: int,
        limited: tuple[AttentionGroup, ...] = (),
        unlimited: bool = True,
    ) -> None:
        self.sim = Simulation.build(
            num_pages,
            placement_for(mode, block_size, exact),
            LeastRecentlyUsed() if lru else ValuePerByte(),
            exact,
            block_size=block_size,
            state_bytes=state_bytes,
            limited=limited,
            unlimited=unlimited or not limited,
        )
        self.count = 0
        self.preempted: list[Request] = []
        self.history: list[tuple[Namespace, tuple[int, ...]]] = []

    def pick(self, index: int) -> Request:
        return self.sim.requests[index % len(self.sim.requests)]

    running = precondition(lambda self: bool(self.sim.requests))

    @precondition(lambda self: len(self.sim.requests) < 4)
    @rule(parts=LENGTHS, cut=st.integers(0, 3), space=st.sampled_from(SPACES), ends=ENDS)
    def start(self, parts: list[int], cut: int, space: Namespace, ends: Ends) -> None:
        prompt = tuple(token for part in parts for token in SEGMENTS[part])
        prompt = prompt[: max(1, len(prompt) - cut)]
        self.count += 1
        self.sim.start(f"r{self.count}", prompt, space, boundaries(len(prompt), ends))

    @precondition(lambda self: len(self.sim.requests) < 4 and bool(self.history))
    @rule(index=PICK, part=st.integers(0, len(SEGMENTS) - 1), cut=st.sampled_from([0, 0, 1, 2, 30]), ends=ENDS)
    def follow_up(self, index: int, part: int, cut: int, ends: Ends = ()) -> None:
        space, keys = self.history[index % len(self.history)]
        prompt = (keys[: max(1, len(keys) - cut)] + SEGMENTS[part])[:260]
        self.count += 1
        self.sim.start(f"r{self.count}", prompt, space, boundaries(len(prompt), ends))

    @precondition(lambda self: not self.sim.cache.layout.is_limited)
    @precondition(lambda self: len(self.sim.requests) < 4 and len(self.sim.quarantine) < 3)
    @rule(parts=LENGTHS, index=PICK, space=st.sampled_from(SPACES), come=PICK, state=PICK, whole=st.booleans())
    def fetch(self, parts: list[int], index: int, space: Namespace, come: int, state: int, whole: bool) -> None:
        """The prompt, or a beginning of it on the 64-token grid, comes from another server; or it does not."""
        prompt = tuple(token for part in parts for token in SEGMENTS[part])
        if self.history and index % 2:
            space, keys = self.history[index // 2 % len(self.history)]
            prompt = (keys + prompt)[:260]
        self.count += 1
        if whole:
            position = state_at = len(prompt) + come % 2
        else:
            position = come % (len(prompt) // 64 + 1) * 64
            state_at = state % (position // 64 + 1) * 64
        self.sim.fetch(f"r{self.count}", prompt, space, position, state_at)

    @running
    @precondition(lambda self: len(self.sim.offered) < 3)
    @rule(index=PICK)
    def offer(self, index: int) -> None:
        self.sim.offer(self.pick(index))

    @precondition(lambda self: bool(self.sim.offered or self.sim.quarantine))
    @rule(index=PICK)
    def let_go(self, index: int) -> None:
        self.sim.let_go(index % (len(self.sim.offered) + len(self.sim.quarantine)))

    @precondition(lambda self: len(self.sim.requests) < 4 and bool(self.history))
    @rule(index=PICK, part=st.integers(0, len(SEGMENTS) - 1), tokens=st.sampled_from([0, 1, 5, 64]))
    def whole_turn(self, index: int, part: int, tokens: int) -> None:
        self.follow_up(index, part, 0)
        self.generate(len(self.sim.requests) - 1, tokens)
        self.finish(len(self.sim.requests) - 1)

    @running
    @rule(index=PICK, chunks=st.integers(1, 3))
    def compute(self, index: int, chunks: int) -> None:
        request = self.pick(index)
        if request.computed < len(request.prompt):
            end = min(len(request.prompt), (request.computed // 64 + chunks) * 64)
            self.sim.prefill(request, end)
        else:
            self.sim.decode(request, index % 3)

    @running
    @rule(index=PICK, tokens=st.sampled_from([1, 2, 3, 30, 64, 65]))
    def generate(self, index: int, tokens: int) -> None:
        request = self.pick(index)
        while request.computed < len(request.prompt):
            end = min(len(request.prompt), (request.computed // 64 + 1) * 64)
            if not self.sim.prefill(request, end):
                return
        for token in range(tokens):
            if not self.sim.decode(request, token % 3):
                return

    @running
    @rule(index=PICK)
    def finish(self, index: int) -> None:
        request = self.pick(index)
        self.sim.finish(request)
        self.history = [*self.history[-7:], (request.namespace, request.keys)]

    @running
    @rule(index=PICK, save=st.booleans())
    def preempt(self, index: int, save: bool) -> None:
        request = self.pick(index)
        self.sim.finish(request, None if save else Reason.PREEMPTED, Kind.PREEMPTION)
        self.preempted.append(request)

    @precondition(lambda self: bool(self.preempted) and len(self.sim.requests) < 4)
    @rule(index=PICK)
    def resume(self, index: int) -> None:
        self.sim.resume(self.preempted.pop(index % len(self.preempted)))

    @running
    @rule(index=PICK)
    def abort(self, index: int) -> None:
        self.sim.end(self.pick(index))

    @precondition(lambda self: self.count > 0)
    @rule(index=PICK)
    def await_tools(self, index: int) -> None:
        """Word of any request that ever was, at any time: those that are open are always known."""
        name = f"r{index % self.count + 1}"
        known = self.sim.cache.await_tools(name)
        assert known or name not in {request.name for request in self.sim.requests}

    @rule(num_pages=st.integers(1, 400))
    def evict(self, num_pages: int) -> None:
        self.sim.cache.checkpoints.make_room(min(num_pages, self.sim.cache.pool.num_pages))

    @precondition(lambda self: len(self.sim.cache.checkpoints.retained) > 0)
    @rule(seconds=st.sampled_from([1, 100, 299, 300, 3600]))
    def wait(self, seconds: int) -> None:
        self.sim.clock.advance(seconds)

    @precondition(lambda self: len(self.sim.cache.checkpoints.retained) > 0)
    @rule(num_pages=st.integers(1, 400))
    def evict_beside_what_is_held(self, num_pages: int) -> None:
        """What is held goes only when all others have gone, and never while they have not."""
        held = self.sim.held_now()
        residents = self.sim.cache.checkpoints
        residents.make_room(min(num_pages, self.sim.cache.pool.num_pages))
        if not held <= set(residents.retained):
            counts = self.sim.cache.pool.counts
            others = [c for c in residents.queue if c not in residents.retained and counts[c.pages[0]] == 1]
            assert not others, "a held checkpoint went before one that is not"

    @rule()
    def apply(self) -> None:
        self.sim.apply()

    @invariant()
    def accounts_add_up(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        for request in list(self.sim.requests):
            self.sim.end(request)
        while self.sim.offered or self.sim.quarantine:
            self.sim.let_go(0)
        self.sim.apply()
        cache = self.sim.cache
        assert cache.checkpoints.make_room(cache.pool.num_pages), "a page leaked"
        self.sim.check()


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=50, **COMMON)


@pytest.mark.more
def test_more_steps() -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(TestCacheMachine.settings, max_examples=120))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_steps() -> None:
    examples = int(os.environ.get("CAIRN_LONG_EXAMPLES", "5000"))
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=examples, stateful_step_count=80, **COMMON))
