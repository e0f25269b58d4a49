"""Random requests with sources of pages that are slow, fail, bring parts and are late: every answer is that of a server
that computes it, no page leaks, and what a source may still write to is nobody's."""

import os
from functools import cache

import numpy as np
import pytest
from driver import Driver, alone
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

from cairn.cache.audit import audit
from cairn.cache.group_pages import page_numbers
from cairn.scheduler.request import Phase
from doubles.page_source import Behaviour, ScriptedSource

PARTS = tuple(tuple(range(100 * i, 100 * i + length)) for i, length in enumerate((1, 16, 40, 64, 70, 130)))
PROMPT = st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=4)
BEHAVIOUR = st.builds(
    Behaviour,
    looks=st.sampled_from([0, 0, 1, 4, 30]),
    late=st.sampled_from([0, 1, 10]),
    position=st.sampled_from([None, None, 0, 64, 128, 192]),
    failure=st.sampled_from([None, None, None, "gone"]),
    ignores_abort=st.booleans(),
)
PICK = st.integers(0, 1 << 16)


def tokens(parts) -> tuple[int, ...]:
    return tuple(token for part in parts for token in PARTS[part])


@cache
def reference(prompt, max_tokens):
    return alone(list(prompt), False, max_tokens=max_tokens)


class SourceMachine(RuleBasedStateMachine):
    @initialize(
        num_sources=st.sampled_from([1, 2, 3]),
        num_pages=st.sampled_from([40, 60, 200]),
        block_size=st.sampled_from([8, 16, 48]),
        ahead=st.sampled_from([1, 2]),
        mode=st.sampled_from(["auto", "auto", "align", None]),
    )
    def build(self, num_sources, num_pages, block_size, ahead, mode):
        self.driver = Driver(mode, num_pages, block_size, max_in_flight=ahead)
        layout, runner = self.driver.layout, self.driver.runner
        self.sources = [ScriptedSource(runner, layout, seconds=0.01 * i) for i in range(num_sources)]
        self.driver.scheduler.state.transfers.sources = tuple(self.sources)
        self.expected = {}

    @rule(index=PICK, parts=PROMPT)
    def has(self, index, parts):
        self.sources[index % len(self.sources)].add(tokens(parts))

    @rule(index=PICK, behaviour=BEHAVIOUR)
    def is_going_to(self, index, behaviour):
        self.sources[index % len(self.sources)].script.append(behaviour)

    @precondition(lambda self: len(self.driver.scheduler.state.requests) < 6)
    @rule(
        parts=PROMPT,
        index=PICK,
        shared=st.booleans(),
        max_tokens=st.sampled_from([1, 3, 20]),
        n=st.sampled_from([1, 1, 2]),
    )
    def ask(self, parts, index, shared, max_tokens, n):
        known = [keys for source in self.sources for _, keys in source._known]
        prompt = tokens(parts)
        if shared and known:
            prompt = (*known[index % len(known)].tolist(), *prompt)
        prompt = prompt[:220]
        name = self.driver.submit(prompt, max_tokens, n=n)
        self.expected[name] = prompt, max_tokens

    @rule(times=st.sampled_from([1, 1, 5]))
    def look(self, times):
        for _ in range(times):
            self.driver.scheduler.poll()

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

    @rule(seconds=st.sampled_from([0.001, 0.3, 2.0]))
    def wait(self, seconds):
        self.driver.clock.advance(seconds)

    @invariant()
    def the_books_add_up(self):
        if hasattr(self, "driver"):
            audit(self.driver.cache)

    @invariant()
    def what_a_source_may_write_to_is_nobodys(self):
        if not hasattr(self, "driver"):
            return
        state, pinned = self.driver.scheduler.state, self.driver.cache.pinned
        fetching = {fetch.request.sequence for fetch in state.transfers.fetching.values()}
        used = [table.pages for each in pinned.sequences.values() if each not in fetching for table in each.tables]
        used += [
            each.pages
            for sequence in pinned.sequences.values()
            for each in sequence.pending_states.values()
            if sequence not in fetching
        ]
        for node in self.driver.cache.tree.nodes():
            used += [part.pages for part in node.pages or ()]
            used += [] if node.checkpoint is None else [node.checkpoint.pages]
        used += pinned.by_steps()
        used = set(np.concatenate([np.zeros(0, np.int32), *used]).tolist())
        for source in self.sources:
            for own in source.fetches.values():
                for pages in (page_numbers(own.target.pages), own.target.state_pages):
                    assert not used & set(pages.tolist())
                    assert (self.driver.cache.pool.counts[pages] == 1).all()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver, state = self.driver, self.driver.scheduler.state
        for _ in range(2000):
            driver.scheduler.poll()
            if driver.scheduler.has_work:
                driver.step()
            elif not state.requests and not state.transfers.is_open:
                break
            driver.clock.advance(0.01)
        assert not state.requests and not state.transfers.is_open, "no end in sight"
        assert not driver.cache.pinned.pins and not driver.cache.pinned.sequences and not driver.cache.pinned.steps
        assert sorted(state.slots.free) == list(range(driver.config.max_num_seqs))
        assert driver.cache.clear(), "a page leaked"
        for name, (prompt, max_tokens) in self.expected.items():
            assert driver.requests[name].phase is Phase.FINISHED
            assert driver.output(name) == reference(prompt, max_tokens), name


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}

TestSourceMachine = SourceMachine.TestCase
TestSourceMachine.settings = settings(max_examples=30, stateful_step_count=40, **COMMON)


@pytest.mark.more
def test_more_steps():
    run_state_machine_as_test(SourceMachine, settings=settings(TestSourceMachine.settings, max_examples=150))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_steps():
    examples = int(os.environ.get("CAIRN_LONG_EXAMPLES", "3000"))
    run_state_machine_as_test(SourceMachine, settings=settings(max_examples=examples, stateful_step_count=60, **COMMON))
