"""The audit: every page reference, lock, ghost and queue entry is recounted from scratch."""

import numpy as np
from numpy.typing import NDArray

from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.tree import NARROW, WIDE, Node
from cairn.errors import AuditError

__all__ = ["audit"]


def audit(cache: PrefixCache) -> None:
    """Recount every page, lock, ghost and queue entry of `cache`. Raises AuditError naming the first that is wrong.

    Cost: O(pages + nodes x depth of a sequence); meant for tests and for idle moments.
    """
    _audit_pages(cache)
    _audit_tree(cache)
    _audit_locks(cache)
    _audit_retained(cache)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AuditError(message)


def _audit_pages(cache: PrefixCache) -> None:
    counts: NDArray[np.int32] = np.zeros(cache.pool.num_pages, np.int32)
    for node in cache.tree.nodes():
        for part in node.pages or ():
            np.add.at(counts, part.pages, 1)
        if node.checkpoint is not None:
            np.add.at(counts, node.checkpoint.pages, 1)
    for sequence in cache.pinned.sequences.values():
        _check(not sequence.closed, f"closed sequence still listed: {sequence.request_id}")
        for pages in [table.owned_pages for table in sequence.tables] + sequence.transient:
            np.add.at(counts, pages, 1)
        for pending in sequence.pending_states.values():
            np.add.at(counts, pending.pages, 1)
    for held in cache.pinned.steps.values():
        for pages in held:
            np.add.at(counts, pages, 1)
    for pin in cache.pinned.pins.values():
        np.add.at(counts, pin.pages, 1)
    wrong = np.flatnonzero(counts != cache.pool.counts)
    if wrong.size:
        page = int(wrong[0])
        raise AuditError(f"page {page} counts {cache.pool.counts[page]} references, {counts[page]} found")
    free = np.sort(cache.pool.free_pages())
    _check(np.array_equal(free, np.flatnonzero(counts == 0)), "the free pages are not those that nobody refers to")


def _audit_tree(cache: PrefixCache) -> None:
    tree, checkpoints = cache.tree, cache.checkpoints
    ghosts, num_checkpoints, unreachable = set(), 0, set()
    for node in tree.nodes():
        _audit_node(cache, node)
        if node.pages is None:
            ghosts.add(node)
        num_checkpoints += node.checkpoint is not None
        if tree.is_unreachable(node):
            unreachable.add(node)
    _check(ghosts == set(tree.ghosts), "the list of ghosts is not that of the tree")
    _check(sum(ghost.num_tokens for ghost in ghosts) == tree.num_ghost_tokens, "ghost tokens miscounted")
    _check(unreachable == set(tree.unreachable), "the list of unreachable nodes is not that of the tree")
    residents = {node for node in tree.nodes() if node.pages is not None}
    _check(set(tree.trimmable) <= residents, "a node without pages is held to be trimmable")
    _check(num_checkpoints == len(checkpoints.queue), "the eviction queue has not one entry for each checkpoint")
    _audit_records(cache)
    _check(set(cache.answer_ends) <= ghosts | residents, "the end of an answer is in no tree")
    for root in tree.roots.values():
        _check(bool(root.children) or root.locks > 0, "an empty root was not forgotten")


def _audit_records(cache: PrefixCache) -> None:
    """A policy that keeps records has one for each checkpoint, and those of checkpoints that have gone are ghosts."""
    records = list(cache.policy.eviction.records())
    ghosts = dict(records)
    _check(len(ghosts) == len(records), "a node has two records")
    for node in cache.tree.nodes() if records else ():
        where, is_ghost = f"node [{node.start}, {node.end})", ghosts.pop(node, None)
        _check(node.checkpoint is None or is_ghost is not None, f"the checkpoint of {where} has no record")
        _check(is_ghost in (None, node.checkpoint is None), f"the record of {where} is wrong about its checkpoint")
    _check(not ghosts, "there are records of nodes that are in no tree")


def _audit_node(cache: PrefixCache, node: Node) -> None:
    where = f"node [{node.start}, {node.end})"
    assert node.parent is not None
    _check(node.start == node.parent.end, f"{where} does not start where its parent ends")
    _check(node.num_tokens > 0, f"{where} has no tokens")
    _check(len(node.raw) / node.num_tokens in (NARROW, WIDE), f"{where} has {len(node.raw)} key bytes")
    _check(node.parent.child(node.key()) is node, f"{where} is not listed under its first key")
    resident = sum(child.pages is not None for child in node.children)
    _check(resident == node.resident_children, f"{where} counts {node.resident_children} children, has {resident}")
    if node.pages is None:
        _check(resident == 0 and node.checkpoint is None and node.locks == 0, f"{where} is a ghost that holds things")
        return
    _check(tuple(part.group for part in node.pages) == cache.layout.groups, f"{where} has pages of other groups")
    for part in node.pages:
        need = part.group.pages_for(node.end) - part.first_page if part.first_token < node.end else 0
        trimmed = part.group.reach is not None and node.start <= part.first_token <= node.end
        _check(part.first_token == node.start or trimmed, f"{where} lists pages from token {part.first_token} on")
        _check(
            len(part.pages) == need, f"{where} lists {len(part.pages)} pages of group {part.group.name}, needs {need}"
        )
        _check(len(np.unique(part.pages)) == len(part.pages), f"{where} lists a page twice")
    if node.checkpoint is not None:
        _check(node.checkpoint.node is node, f"the checkpoint of {where} points elsewhere")
        _check(node.checkpoint in cache.checkpoints.queue, f"the checkpoint of {where} is not in the eviction queue")
        size = cache.layout.pages_per_checkpoint
        _check(len(node.checkpoint.pages) == size, f"the checkpoint of {where} has not {size} pages")
        _audit_reach(node)


def _audit_reach(node: Node) -> None:
    """Whoever resumes at a checkpoint has the keys and values within reach there."""
    for index, part in enumerate(node.pages or ()):
        needed, step = part.group.needed_at(node.end), node
        while step.parent is not None and needed < step.end:
            assert step.pages is not None
            first = max(needed, step.start)
            _check(
                step.pages[index].first_token <= first,
                f"the checkpoint at {node.end} needs token {first} of group {part.group.name}, which is gone",
            )
            step = step.parent


def _audit_retained(cache: PrefixCache) -> None:
    tree, checkpoints = cache.tree, cache.checkpoints
    retained = {
        node.checkpoint
        for node in tree.nodes()
        if node.checkpoint is not None and node.checkpoint.retained_until is not None
    }
    _check(retained == set(checkpoints.retained), "the list of retained checkpoints is not that of the tree")
    runs = set()
    for checkpoint in retained:
        node: Node | None = checkpoint.node
        while node is not None and node.parent is not None:
            runs.add(node)
            node = node.parent
    pages = len(retained) * cache.layout.pages_per_checkpoint + cache.layout.pages_for(
        sum(run.num_tokens for run in runs)
    )
    _check(
        pages <= checkpoints.retained.quota,
        f"retained checkpoints keep {pages} pages, the quota is {checkpoints.retained.quota}",
    )


def _audit_locks(cache: PrefixCache) -> None:
    locks: dict[Node, int] = {}
    for sequence in cache.pinned.sequences.values():
        node = sequence.node
        while node is not None:
            locks[node] = locks.get(node, 0) + 1
            node = node.parent
        for table in sequence.tables:
            least = table.group.pages_for(sequence.committed) if table.first_token < sequence.committed else 0
            _check(
                table.length >= least, f"{sequence.request_id}: {table.length} pages for {sequence.committed} tokens"
            )
            distinct = len(np.unique(table.pages))
            _check(distinct == len(table.pages), f"{sequence.request_id}: a page is listed twice")
    nodes = list(cache.tree.roots.values()) + list(cache.tree.nodes())
    for node in nodes:
        expected = locks.pop(node, 0)
        _check(node.locks == expected, f"node ending at {node.end} counts {node.locks} locks, {expected} found")
    _check(not locks, "a sequence goes through a node that is not in the tree")
