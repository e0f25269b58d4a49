"""Sessions that wait for their tools: a class of their own, until they are back."""

import numpy as np
import pytest
from simulation import PLAIN, Simulation

from cairn.cache import answer_ends
from cairn.cache.answer_ends import AnswerEnds
from cairn.cache.audit import audit
from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.divergence import DivergenceStats
from cairn.cache.eviction import ValuePerByte
from cairn.cache.hazard import BINS
from cairn.cache.placement import Auto
from cairn.cache.tree import Checkpoint, Node
from cairn.types import Boundary

PROMPT, PLENTY = tuple(range(1000, 1100)), 400


def world(num_pages=PLENTY):
    return Simulation.build(num_pages, Auto(), ValuePerByte())


def ask(sim, name, prompt, answer=(1, 2, 3), ends=()):
    """One request from its prompt to its end; what it has computed, as the next prompt of its session may begin."""
    request = sim.start(name, prompt, boundaries=ends)
    assert sim.prefill(request, len(prompt))
    for token in answer:
        assert sim.decode(request, token)
    sim.finish(request)
    sim.apply()
    return request.keys[: request.computed]


def waits(sim):
    """Where the policy takes sessions to wait for their tools."""
    records = sim.cache.policy.eviction._records.values()
    return sorted(record.node.end for record in records if record.awaits_tools)


def test_an_answer_that_was_a_call_and_its_prompts_end_wait_until_they_are_used():
    sim = world()
    path = ask(sim, "a", PROMPT, ends=[Boundary(40, "system_end"), Boundary(90, "message_end")])
    assert sim.cache.await_tools("a")
    assert waits(sim) == [90, 100, len(path)], "what lies before the last message is gone on from by others"
    audit(sim.cache)
    follower = sim.start("b", (*path, 7, 8, 9))
    assert follower.lease.hit == len(path) and waits(sim) == [90, 100], "its wait is over"
    sim.end(follower)
    other = sim.start("c", (*PROMPT[:90], 5, 6))
    assert other.lease.hit == 90 and waits(sim) == [100]


def test_word_may_come_while_the_last_state_is_being_saved():
    sim = world()
    request = sim.start("a", PROMPT)
    assert sim.prefill(request, 100) and all(sim.decode(request, token) for token in (1, 2, 3))
    assert sim.cache.await_tools("a") and waits(sim) == [100]
    sim.finish(request)
    assert waits(sim) == [100, 102]


def test_of_an_unknown_request_nothing_changes():
    sim = world()
    ask(sim, "a", PROMPT)
    assert not sim.cache.await_tools("b") and waits(sim) == []
    off = Simulation.build(PLENTY, None, ValuePerByte())
    ask(off, "a", PROMPT)
    assert not off.cache.await_tools("a")


def test_an_answer_whose_path_is_forgotten_is_unknown():
    sim = world(40)
    ask(sim, "a", PROMPT)
    for number in range(20):
        ask(sim, f"r{number}", tuple(range(2000 + 100 * number, 2100 + 100 * number)))
    audit(sim.cache)
    assert not sim.cache.await_tools("a") and sim.cache.await_tools("r19")


def test_what_waits_stays_when_room_is_wanted_once_that_was_learned():
    """Of two answers alike in all else the one that was a call comes back, again and again."""
    sim = world()
    for number in range(60):
        at = 2000 + 200 * number
        path = ask(sim, "call", tuple(range(at, at + 100)))
        ask(sim, "last", tuple(range(at + 100, at + 200)))
        sim.cache.await_tools("call")
        ask(sim, "next", (*path, 7, 8, 9))
    policy = sim.cache.policy.eviction
    ends = {}
    for name in ("call", "last"):
        path = ask(sim, name, tuple(range(50, 150)) if name == "call" else tuple(range(200, 300)))
        if name == "call":
            assert sim.cache.await_tools(name)
        lease = sim.cache.lookup(PLAIN, np.array(path), "look", probe=True)
        ends[name] = lease.node
        sim.cache.discard(lease)
    assert policy.chance(ends["call"]) > 2 * policy.chance(ends["last"]) > 0
    order = list(sim.cache.checkpoints.queue.next())
    places = {name: order.index(node.checkpoint) for name, node in ends.items()}
    assert places["last"] < places["call"], "ranked anew as soon as it was told"


def test_without_such_word_classes_are_what_they_were():
    sim = world()
    ask(sim, "a", PROMPT)
    kinds = {len(record.class_key()) for record in sim.cache.policy.eviction._records.values()}
    assert kinds == {4}
    sim.cache.await_tools("a")
    assert {len(r.class_key()) for r in sim.cache.policy.eviction._records.values() if r.awaits_tools} == {5}


def test_a_ghost_waits_as_well_so_that_it_is_learned_what_would_have_been():
    policy = ValuePerByte()
    policy.start(100, DivergenceStats())
    root = Node(None, b"", 0, 0)
    node = Node(root, bytes(800), 0, 100)
    root.adopt(node)
    checkpoint = node.checkpoint = Checkpoint(node, np.empty(0, np.int32), Kind.ANSWER_END, Origin.DECODE, "r")
    policy.add(checkpoint, Lineage(end=90))
    node.checkpoint = None
    policy.drop(checkpoint)
    policy.await_tools(node)
    row = policy._records[node].row
    policy.begin_request(node, Lineage(), None)
    assert policy.table._counts[row, :BINS].sum() == 1 and not policy._records[node].awaits_tools


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(answer_ends, "MAX_ANSWERS", 3)


def test_so_many_ends_are_remembered(three):
    ends, nodes = AnswerEnds(), [Node(None, b"", 0, 0) for _ in range(5)]
    for number, node in enumerate(nodes):
        ends.add(f"r{number}", node, Lineage())
    assert list(ends) == nodes[2:] and ends.get("r1") is None
    ends.node_forgotten(nodes[3])
    ends.node_forgotten(nodes[0])
    assert list(ends) == [nodes[2], nodes[4]] and len(ends) == 2
    lineage = Lineage()
    ends.add("r5", nodes[4], lineage)
    assert ends.get("r4") is None and ends.get("r5") == (nodes[4], lineage)
    ends.add("r5", nodes[1], lineage)
    assert list(ends) == [nodes[2], nodes[1]], "a request that was preempted ends once more"
