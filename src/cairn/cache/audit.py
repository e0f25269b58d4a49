"""The proof that the accounting adds up: everything recounted from scratch, nothing taken on trust."""

import numpy as np
from numpy.typing import NDArray

from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.tree import NARROW, WIDE, Node
from cairn.errors import AuditError

__all__ = ["audit"]


def audit(cache: PrefixCache) -> None:
    """Recount every page, lock, ghost and queue entry of `cache`. Raises AuditError naming the first that is wrong.

    Cost: O(pages + nodes x depth of a lease); meant for tests and for idle moments.
    """
    _audit_pages(cache)
    _audit_tree(cache)
    _audit_locks(cache)
    _audit_held(cache)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AuditError(message)


def _audit_pages(cache: PrefixCache) -> None:
    counts: NDArray[np.int32] = np.zeros(cache.pool.num_pages, np.int32)
    for node in cache.residents.nodes():
        for pages in node.pages or ():
            np.add.at(counts, pages, 1)
        if node.checkpoint is not None:
            np.add.at(counts, node.checkpoint.pages, 1)
    for lease in cache.leases.values():
        _check(not lease.closed, f"closed lease still listed: {lease.purpose}")
        for pages in [table.own for table in lease.tables] + lease.transient:
            np.add.at(counts, pages, 1)
        for file in lease.files.values():
            np.add.at(counts, file.pages, 1)
    for held in cache.held.values():
        for pages in held:
            np.add.at(counts, pages, 1)
    for hold in cache.holds.values():
        np.add.at(counts, hold.pages, 1)
    wrong = np.flatnonzero(counts != cache.pool.counts)
    if wrong.size:
        page = int(wrong[0])
        raise AuditError(f"page {page} counts {cache.pool.counts[page]} references, {counts[page]} found")
    free = np.sort(cache.pool.free_pages())
    _check(np.array_equal(free, np.flatnonzero(counts == 0)), "the free pages are not those that nobody refers to")


def _audit_tree(cache: PrefixCache) -> None:
    residents = cache.residents
    ghosts, checkpoints, barren = set(), 0, set()
    for node in residents.nodes():
        _audit_node(cache, node)
        if node.pages is None:
            ghosts.add(node)
        checkpoints += node.checkpoint is not None
        if residents.runs.is_barren(node):
            barren.add(node)
    _check(ghosts == set(residents.runs.ghosts), "the list of ghosts is not that of the tree")
    _check(sum(ghost.num_tokens for ghost in ghosts) == residents.num_ghost_tokens, "ghost tokens miscounted")
    _check(barren == set(residents.runs.barren), "the list of barren runs is not that of the tree")
    _check(checkpoints == len(residents.queue), "the eviction queue has not one entry for each checkpoint")
    _audit_reuse(cache)
    for root in residents.roots.values():
        _check(bool(root.children) or root.locks > 0, "an empty root was not forgotten")


def _audit_reuse(cache: PrefixCache) -> None:
    records, checkpoints = set(), 0
    for node in cache.residents.nodes():
        where = f"node [{node.start}, {node.end})"
        if node.reuse is not None:
            _check(node.reuse.node is node, f"the record of {where} points elsewhere")
            records.add(node.reuse)
        if node.checkpoint is not None:
            checkpoints += 1
            _check(node.reuse is not None, f"the checkpoint of {where} has no record")
    book = cache.residents.reuse
    _check(records == set(book.records()), "the records are not those of the tree")
    _check(book.num_ghosts == len(records) - checkpoints, "the ghosts are not the records without a checkpoint")


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
    for group, pages in zip(cache.layout.groups, node.pages, strict=True):
        need = group.pages_for(node.end) - node.start // group.tokens_per_page
        _check(len(pages) == need, f"{where} lists {len(pages)} pages of group {group.name}, needs {need}")
        _check(len(np.unique(pages)) == len(pages), f"{where} lists a page twice")
    if node.checkpoint is not None:
        _check(node.checkpoint.node is node, f"the checkpoint of {where} points elsewhere")
        _check(node.checkpoint in cache.residents.queue, f"the checkpoint of {where} is not in the eviction queue")
        size = cache.layout.pages_per_checkpoint
        _check(len(node.checkpoint.pages) == size, f"the checkpoint of {where} has not {size} pages")


def _audit_held(cache: PrefixCache) -> None:
    residents = cache.residents
    held = {
        node.checkpoint
        for node in residents.nodes()
        if node.checkpoint is not None and node.checkpoint.held_until is not None
    }
    _check(held == set(residents.held), "the list of held checkpoints is not that of the tree")
    runs = set()
    for checkpoint in held:
        node: Node | None = checkpoint.node
        while node is not None and node.parent is not None:
            runs.add(node)
            node = node.parent
    pages = len(held) * cache.layout.pages_per_checkpoint + cache.layout.pages_for(sum(run.num_tokens for run in runs))
    _check(pages <= residents.held.quota, f"held checkpoints keep {pages} pages, the quota is {residents.held.quota}")


def _audit_locks(cache: PrefixCache) -> None:
    locks: dict[Node, int] = {}
    for lease in cache.leases.values():
        node = lease.node
        while node is not None:
            locks[node] = locks.get(node, 0) + 1
            node = node.parent
        for group, table in zip(cache.layout.groups, lease.tables, strict=True):
            least = group.pages_for(lease.committed)
            _check(table.length >= least, f"{lease.purpose}: {table.length} pages for {lease.committed} tokens")
            _check(len(np.unique(table.pages)) == table.length, f"{lease.purpose}: a page is listed twice")
    nodes = list(cache.residents.roots.values()) + list(cache.residents.nodes())
    for node in nodes:
        expected = locks.pop(node, 0)
        _check(node.locks == expected, f"node ending at {node.end} counts {node.locks} locks, {expected} found")
    _check(not locks, "a lease goes through a node that is not in the tree")
