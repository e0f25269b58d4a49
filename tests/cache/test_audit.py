"""Every check of the audit, each with a state in which all else is right."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from simulation import Simulation

from cairn.cache.audit import audit
from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.eviction import LeastRecentlyUsed
from cairn.cache.placement import Auto
from cairn.cache.sequence_blocks import Namespace
from cairn.cache.tree import Checkpoint, Node
from cairn.errors import AuditError
from cairn.types import Boundary, Pages

PROMPT = tuple(range(1000, 1100))


class World:
    """A cache in which everything that the audit looks at is there: runs below one another, a second branch, a
    held checkpoint, an ordinary one, a ghost with a record, a unreachable run, and a request that runs."""

    def __init__(self) -> None:
        sim = self.sim = Simulation.build(200, Auto(), LeastRecentlyUsed())
        self.cache = sim.cache
        self.checkpoints, self.tree, self.pool = sim.cache.checkpoints, sim.cache.tree, sim.cache.pool
        self.policy = sim.cache.policy.eviction
        self._run(tuple(range(5000, 5030)))
        self.cache.clear()
        self._run(PROMPT, Boundary(40, retain_seconds=300), Boundary(80))
        self._run((*PROMPT[:80], *range(2000, 2030)))
        unreachable = sim.start("unreachable", tuple(range(3000, 3030)))
        assert sim.prefill(unreachable, 10)
        sim.end(unreachable)
        self.running = sim.start("running", (*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8, 9))
        assert sim.prefill(self.running, 109)
        self.lease = self.running.lease
        sim.apply()
        sim.check()

        self.upper = self._node(PROMPT[:40])
        self.middle = self._node(PROMPT[:80])
        self.lower = self._node(PROMPT)
        self.other = self._node((*PROMPT[:80], *range(2000, 2030)))
        self.unreachable = self._node(tuple(range(3000, 3010)))
        self.ghost = self._node(tuple(range(5000, 5030)))
        self.root = self.tree.roots[Namespace()]
        assert self.upper.parent is self.root and self.middle.locks == 0
        assert self.lower.parent is self.other.parent is self.middle
        assert list(self.tree.unreachable) == [self.unreachable]
        assert set(self.tree.ghosts) == {self.ghost} and self.ghost in self.policy._ghosts
        self.held, self.ordinary = self.upper.checkpoint, self.other.checkpoint
        assert self.ordinary is not None and list(self.checkpoints.retained) == [self.held]
        assert self.lease.tables[0].num_shared < self.lease.tables[0].length

    def _run(self, prompt: tuple[int, ...], *boundaries: Boundary) -> None:
        request = self.sim.start("r", prompt, boundaries=boundaries)
        assert self.sim.prefill(request, len(prompt))
        self.sim.end(request)
        self.sim.apply()

    def _node(self, prompt: tuple[int, ...]) -> Node:
        node = self.cache.tree.roots[Namespace()]
        while node.end < len(prompt):
            node = node.child(prompt[node.end])
        assert node.end == len(prompt)
        return node

    def stray(self) -> Checkpoint:
        """A checkpoint at a node that is in no tree."""
        return Checkpoint(Node(None, b"", 0, 0), np.empty(0, np.int32), Kind.GRID, Origin.GRID, "nobody")


def pages_of(node: Node) -> Pages:
    """The page numbers of its one attention group."""
    assert node.pages is not None
    (part,) = node.pages
    return part.pages


def give(node: Node, pages: Pages) -> None:
    """Have it list other pages."""
    assert node.pages is not None
    node.pages = (replace(node.pages[0], pages=pages),)


def closed_lease(w: World) -> None:
    w.lease.closed = True


def count(w: World) -> None:
    w.pool.counts[pages_of(w.other)[0]] += 1


def free_page_twice(w: World) -> None:
    w.pool._free[0] = w.pool._free[1]


def free_page_in_use(w: World) -> None:
    w.pool._free[0] = pages_of(w.other)[0]


def page_never_free_again(w: World) -> None:
    w.pool.num_free -= 1


def start(w: World) -> None:
    w.root.end = 1


def no_tokens(w: World) -> None:
    w.other._below = Node(w.other, b"", w.other.end, w.other.end)


def key_bytes(w: World) -> None:
    w.other.raw += b"\0"


def first_key(w: World) -> None:
    below = w.middle._below
    w.middle._below = dict(zip(below, reversed(below.values()), strict=True))


def resident_children(w: World) -> None:
    w.middle.resident_children += 1


def ghost_above_a_resident(w: World) -> None:
    w.pool.release(pages_of(w.middle))
    drop_checkpoint(w, w.middle)
    w.middle.pages = None
    w.middle.parent.resident_children -= 1
    w.tree.ghosts[w.middle] = None
    w.tree.num_ghost_tokens += w.middle.num_tokens
    w.sim.end(w.running)


def ghost_with_a_checkpoint(w: World) -> None:
    w.checkpoints.attach(Checkpoint(w.ghost, w.pool.allocate(2), Kind.GRID, Origin.GRID, "nobody"), Lineage())


def ghost_in_a_lease(w: World) -> None:
    lease = w.cache.lookup(Namespace(), np.arange(10), "r")
    lease.node = w.ghost
    w.tree.lock(w.ghost)


def pages_of_no_group(w: World) -> None:
    w.pool.release(pages_of(w.other))
    w.other.pages = ()


def pages_from_another_token_on(w: World) -> None:
    assert w.other.pages is not None and w.other.start % 4 == 0
    w.other.pages = (replace(w.other.pages[0], first_token=w.other.start + 1),)


def page_too_many(w: World) -> None:
    give(w.other, np.append(pages_of(w.other), w.pool.allocate(1)))


def page_too_few(w: World) -> None:
    w.pool.release(pages_of(w.other)[-1:])
    give(w.other, pages_of(w.other)[:-1])


def page_twice_in_a_node(w: World) -> None:
    w.pool.release(pages_of(w.other)[-1:])
    pages_of(w.other)[-1] = pages_of(w.other)[-2]
    w.pool.acquire(pages_of(w.other)[-1:])


def node_of_a_checkpoint(w: World) -> None:
    w.ordinary.node = w.lower


def checkpoint_not_in_the_queue(w: World) -> None:
    w.checkpoints.queue.remove(w.ordinary)
    w.checkpoints.queue.push(w.stray())


def file_too_long(w: World) -> None:
    w.ordinary.pages = np.append(w.ordinary.pages, w.pool.allocate(1))


def file_too_short(w: World) -> None:
    w.pool.release(w.ordinary.pages[-1:])
    w.ordinary.pages = w.ordinary.pages[:-1]


def ghost_not_listed(w: World) -> None:
    del w.tree.ghosts[w.ghost]


def ghost_listed_in_no_tree(w: World) -> None:
    w.tree.ghosts[Node(None, b"", 0, 0)] = None


def ghost_tokens(w: World) -> None:
    w.tree.num_ghost_tokens += 1


def barren_not_listed(w: World) -> None:
    w.tree.unreachable.clear()


def barren_listed_that_is_not(w: World) -> None:
    w.tree.unreachable[w.other] = None


def queue_entry_too_many(w: World) -> None:
    w.checkpoints.queue.push(w.stray())


def node_of_a_record(w: World) -> None:
    w.policy._records[w.other].node = w.lower


def checkpoint_without_a_record(w: World) -> None:
    w.policy.node_forgotten(w.other)


def record_in_no_tree(w: World) -> None:
    stray = w.stray()
    w.policy._records[stray.node] = replace(w.policy._records[w.other], node=stray.node)


def ghost_record_not_counted(w: World) -> None:
    del w.policy._ghosts[w.ghost]


def ghost_record_of_a_checkpoint(w: World) -> None:
    w.policy._ghosts[w.other] = w.policy._records[w.other]


def ghost_without_a_record(w: World) -> None:
    w.policy._ghosts[w.stray().node] = w.policy._records[w.other]


def answer_in_no_tree(w: World) -> None:
    w.cache.answer_ends.add("r", w.stray().node, Lineage())


def empty_root(w: World) -> None:
    w.tree.root(Namespace(cache_salt="gone"))


def held_not_listed(w: World) -> None:
    del w.checkpoints.retained._checkpoints[w.held]


def listed_not_held(w: World) -> None:
    w.checkpoints.retained._checkpoints[w.ordinary] = None


def more_held_than_may_be(w: World) -> None:
    w.checkpoints.retained.quota = w.checkpoints.retained.num_pages() - 1


def tokens_without_a_page(w: World) -> None:
    table = w.lease.tables[0]
    w.pool.release(table.pages[-1:])
    table.length -= 1


def page_twice_in_a_lease(w: World) -> None:
    pages = w.lease.tables[0].pages
    w.pool.release(pages[-1:])
    pages[-1] = pages[-2]
    w.pool.acquire(pages[-1:])


def lock(w: World) -> None:
    w.other.locks += 1


def lock_of_a_root(w: World) -> None:
    w.root.locks -= 1


def other_pages_joined(w: World) -> None:
    (_, (part,)) = next(w.cache.lookups.joined())
    part.pages[0] += 1


def lease_in_no_tree(w: World) -> None:
    lease = w.cache.lookup(Namespace(), np.arange(10), "r")
    lease.node = Node(None, b"", 0, 0)


def drop_checkpoint(w: World, node: Node) -> None:
    if node.checkpoint is not None:
        w.checkpoints.queue.remove(node.checkpoint)
        w.checkpoints._drop(node.checkpoint)


FAULTS: list[tuple[Callable[[World], None], str]] = [
    (closed_lease, "closed sequence still listed: running"),
    (count, "counts 2 references, 1 found|counts 3 references, 2 found"),
    (free_page_twice, "the free pages are not those that nobody refers to"),
    (free_page_in_use, "the free pages are not those that nobody refers to"),
    (page_never_free_again, "the free pages are not those that nobody refers to"),
    (start, "does not start where its parent ends"),
    (no_tokens, "has no tokens"),
    (key_bytes, "has 121 key bytes|has 241 key bytes"),
    (first_key, "is not listed under its first key"),
    (resident_children, "counts 3 children, has 2"),
    (ghost_above_a_resident, "is a ghost that holds things"),
    (ghost_with_a_checkpoint, "is a ghost that holds things"),
    (ghost_in_a_lease, "is a ghost that holds things"),
    (pages_of_no_group, "has pages of other groups"),
    (pages_from_another_token_on, "lists pages from token 81 on"),
    (page_too_many, "lists 9 pages of group full, needs 8"),
    (page_too_few, "lists 7 pages of group full, needs 8"),
    (page_twice_in_a_node, "lists a page twice"),
    (node_of_a_checkpoint, "the checkpoint of .* points elsewhere"),
    (checkpoint_not_in_the_queue, "is not in the eviction queue"),
    (file_too_long, "has not 2 pages"),
    (file_too_short, "has not 2 pages"),
    (ghost_not_listed, "the list of ghosts is not that of the tree"),
    (ghost_listed_in_no_tree, "the list of ghosts is not that of the tree"),
    (ghost_tokens, "ghost tokens miscounted"),
    (barren_not_listed, "the list of unreachable nodes is not that of the tree"),
    (barren_listed_that_is_not, "the list of unreachable nodes is not that of the tree"),
    (queue_entry_too_many, "the eviction queue has not one entry for each checkpoint"),
    (node_of_a_record, "a node has two records"),
    (checkpoint_without_a_record, "the checkpoint of .* has no record"),
    (record_in_no_tree, "there are records of nodes that are in no tree"),
    (ghost_record_not_counted, "the record of .* is wrong about its checkpoint"),
    (ghost_record_of_a_checkpoint, "the record of .* is wrong about its checkpoint"),
    (ghost_without_a_record, "there are records of nodes that are in no tree"),
    (answer_in_no_tree, "the end of an answer is in no tree"),
    (empty_root, "an empty root was not forgotten"),
    (held_not_listed, "the list of retained checkpoints is not that of the tree"),
    (listed_not_held, "the list of retained checkpoints is not that of the tree"),
    (more_held_than_may_be, "retained checkpoints keep 12 pages, the quota is 11"),
    (tokens_without_a_page, "running: 27 pages for 109 tokens"),
    (page_twice_in_a_lease, "running: a page is listed twice"),
    (lock, "counts 1 locks, 0 found"),
    (other_pages_joined, "other pages were joined up to node"),
    (lock_of_a_root, "node ending at 0 counts -1 locks, 0 found"),
    (lease_in_no_tree, "a sequence goes through a node that is not in the tree"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_the_audit_says_what_is_wrong(fault: Callable[[World], None], message: str):
    world = World()
    fault(world)
    with pytest.raises(AuditError, match=message):
        audit(world.cache)
