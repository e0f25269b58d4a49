"""What one who waits is told again and again is what he would be told anew: of the trees, and of the room there is."""

import numpy as np
import pytest
from simulation import PLAIN, Simulation

from cairn.cache import lookup
from cairn.cache.audit import audit
from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.eviction import LeastRecentlyUsed
from cairn.cache.placement import Auto, CheckpointPoint, Junction
from cairn.cache.sequence_blocks import Namespace
from cairn.cache.tree import Checkpoint

A, B = tuple(range(1000, 1200)), tuple(range(2000, 2200))
PROBE = (*A[:150], 7, 8, 9)


def simulation(num_pages=400, placement=None, **layout) -> Simulation:
    return Simulation.build(num_pages, placement or Junction(64, False), LeastRecentlyUsed(), **layout)


def run(sim, prompt):
    request = sim.start("r", prompt)
    if request.computed < len(prompt):
        sim.prefill(request, len(prompt))
    sim.finish(request)
    sim.apply()


def probe(sim, prompt=PROBE, name="probe", namespace=PLAIN):
    """What a lookup says, and how many walks it took."""
    cache, walks = sim.cache, []
    walk = lookup.walk
    lookup.walk = lambda *arguments: walks.append(1) or walk(*arguments)
    try:
        lease = cache.lookup(namespace, np.array(prompt, np.int64), name, probe=True)
    finally:
        lookup.walk = walk
    facts = (
        lease.hit,
        lease.matched,
        lease.ever_matched,
        lease.checkpoint,
        lease.match.last_checkpoint_node,
        lease.match.left,
        lease.node,
    )
    told = (
        facts,
        [table.pages.tolist() for table in lease.tables],
        lease.match.walk.path,
        lease.match.walk.evicted_tail,
    )
    cache.discard(lease)
    return told, len(walks)


def test_a_lookup_is_kept_while_the_trees_stay_as_they_are():
    sim = simulation()
    run(sim, A)
    told, walks = probe(sim)
    assert walks == 1 and told[0][1] == 150
    assert [probe(sim) for _ in range(3)] == [(told, 0)] * 3
    # somebody who runs, and ends, changes nothing of them
    sim.end(sim.start("s", A[:100]))
    assert probe(sim) == (told, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": PROBE[:-1]},
        {"prompt": (*PROBE[:-1], 1)},
        {"name": "other"},
        {"namespace": Namespace(cache_salt="s")},
    ],
)
def test_another_prompt_is_looked_up_by_itself(other):
    """Also under the same id: an aborted request's may come again."""
    sim = simulation()
    run(sim, A)
    probe(sim)
    told, walks = probe(sim, **other)
    assert walks == (0 if "namespace" in other else 1)
    sim.cache.lookups._memo.clear()
    assert probe(sim, **other) == (told, walks)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(lookup, "_MAX_MEMOIZED", 5)
    sim = simulation()
    run(sim, A)
    for number in range(20):
        probe(sim, name=f"p{number}")
        assert len(sim.cache.lookups._memo) <= 5


def longer(sim):
    run(sim, (*PROBE, *B))


def shorter(sim):
    run(sim, A[:100])


def dropped(sim):
    sim.cache.make_room(sim.cache.pool.num_pages)


def checkpoint(sim):
    request = sim.start("s", A[:128])
    request.computed = 128
    sim.finish(request)


def recorded(sim):
    """The eviction policy has a record more, and nothing else changes."""
    tree, policy = sim.cache.tree, sim.cache.policy.eviction
    upper = tree.split(next(node for node in tree.nodes() if node.start < 70 < node.end), 70)
    probe(sim)
    version = tree.version
    policy.add(Checkpoint(upper, np.empty(0, np.int32), Kind.GRID, Origin.TAIL, "nobody"), Lineage())
    assert tree.version == version


def split(sim):
    tree = sim.cache.tree
    tree.split(next(node for node in tree.nodes() if node.start < 70 < node.end), 70)


def a_way_on(sim):
    run(sim, (*A[:150], *B))


@pytest.mark.parametrize("change", [longer, shorter, dropped, checkpoint, recorded, split, a_way_on])
def test_whatever_changes_in_the_trees_is_seen(change):
    sim = simulation()
    run(sim, A)
    told, _ = probe(sim)
    change(sim)
    after, _ = probe(sim)
    sim.cache.lookups._memo.clear()
    assert probe(sim) == (after, 1)
    assert after != told, "nothing has changed: this tests nothing"


# -- room ------------------------------------------------------------------------------------------------------------


def could(sim, num_pages):
    """Whether so many pages can be had for one of whom nothing is known, and whether that was counted anew."""
    cache, counted = sim.cache, []
    count = type(cache.pinned).by_requests
    cache.pinned.by_requests = lambda: counted.append(1) or count(cache.pinned)
    lease = cache.lookup(PLAIN, np.array([5] * 9, np.int64), "w", probe=True)
    try:
        return cache.could_free(lease, num_pages), len(counted)
    finally:
        del cache.pinned.by_requests
        cache.discard(lease)


def ended(sim, request):
    sim.end(request)


def let_go(sim, request):
    sim.offer(request)
    sim.end(request)
    assert could(sim, 60) == (False, 1)
    sim.let_go(0)


def applied(sim, request):
    """A file that a hit has restored, and the source of a copy, are the step's."""
    sim.finish(request)
    sim.apply()
    sim.end(sim.start("hit", A))
    assert could(sim, 99) == (False, 1)
    sim.apply()


def filed(sim, request):
    """A checkpoint's file is the tree's once it is filled, and may be dropped."""
    for position in range(10, 190, 9):
        assert sim._fill(request, CheckpointPoint(position, Kind.PROMPT_END))
    assert could(sim, 40) == (False, 1)
    sim._commit(request, 200, list(request.lease.pending_states))


def another_path(sim, request):
    """Who leaves a run within holds all of it until there is a run of its own."""
    sim.finish(request)
    sim.apply()
    leaves = sim.start("leaves", (*A[:20], 1, 2))
    assert could(sim, 90) == (False, 1)
    sim.prefill(leaves, 22)


@pytest.mark.parametrize(
    ("change", "num_pages"), [(ended, 60), (let_go, 60), (applied, 99), (filed, 40), (another_path, 90)]
)
def test_room_is_counted_anew_when_anything_is_let_go_of(change, num_pages):
    sim = simulation(100, Auto())
    request = sim.start("r", A)
    sim.prefill(request, 200)
    assert could(sim, 60) == (False, 1)
    assert could(sim, 60) == (False, 0) and could(sim, 61) == (False, 1)
    change(sim, request)
    assert could(sim, num_pages) == (True, 1)


def tables(sim, prompt):
    """The pages that a lookup of a prompt shares, and of how many nodes it has joined them."""
    joined, path_pages = [], lookup.path_pages
    lookup.path_pages = lambda path, *arguments: joined.append(len(path)) or path_pages(path, *arguments)
    try:
        sequence = sim.cache.lookup(PLAIN, np.array(prompt, np.int64), "probe", probe=True)
    finally:
        lookup.path_pages = path_pages
    path, matched = sequence.match.walk.path, sequence.matched
    expected = [path_pages(path, matched, *each).pages.tolist() for each in enumerate(sim.cache.layout.groups)]
    pages = [table.pages.tolist() for table in sequence.tables]
    sim.cache.discard(sequence)
    assert pages == expected and all(map(len, pages))
    audit(sim.cache)
    return pages, sum(joined)


def test_the_pages_of_a_path_are_joined_once():
    sim = simulation()
    for end in (70, 134, 200):
        run(sim, A[:end])
    pages, joined = tables(sim, A)
    assert joined > 1 and tables(sim, (*A, 1)) == (pages, 0)
    run(sim, (*A, 5, 6, 7))
    assert tables(sim, (*A, 5, 6, 7, 8))[1] == 1
    assert tables(sim, (*A[:150], 1))[1] > 0, "what was joined further down is of no use above it"
    run(sim, (*A[:150], *B))  # splits the node that was joined
    tables(sim, A)


def test_pages_that_were_joined_are_forgotten_with_their_nodes():
    sim = simulation()
    run(sim, A)
    before, _ = tables(sim, A)
    assert tables(sim, A)[1] == 0
    assert sim.cache.clear()
    run(sim, B)
    run(sim, A)
    after, joined = tables(sim, A)
    assert joined > 0 and after != before


def test_the_page_of_a_node_matched_in_part_is_not_kept_for_those_above_it():
    sim = simulation()
    run(sim, A[:70])
    run(sim, A)  # has a copy of its own of the page with token 69, which may be dropped before the other one
    assert 70 % sim.cache.layout.groups[0].tokens_per_page
    part, _ = tables(sim, (*A[:100], 1))
    above, _ = tables(sim, A[:70])
    assert part[0][: len(above[0])] != above[0] and part[0][: len(above[0]) - 1] == above[0][:-1]
