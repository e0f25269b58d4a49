"""The audit: every page reference, lock, ghost and queue entry is recounted from scratch."""

from collections.abc import Sequence

import numpy as np

from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.tree import NARROW, WIDE, Node, path_pages
from cairn.errors import AuditError
from cairn.types import Pages

__all__ = ["audit"]


def audit(cache: PrefixCache) -> None:
    """Recount every page, lock, ghost and queue entry of `cache`. Raises AuditError naming the first that is wrong.

    Cost: O(pages + nodes x depth of a sequence); meant for tests and for idle moments.
    """
    nodes = list(cache.tree.nodes())
    _audit_pages(cache, nodes)
    _audit_tree(cache, nodes)
    _audit_locks(cache, nodes)
    _audit_retained(cache, nodes)
    _audit_lookups(cache)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AuditError(message)


def _check_node(node: Node, holds: bool, message: str, *numbers: object) -> None:
    """`message`: what is wrong, with braces for the node and the numbers. It is made into text only where it is: nodes
    are many."""
    if not holds:
        raise AuditError(message.format(*numbers, node=f"node [{node.start}, {node.end})"))


def _is_set(pages: Pages) -> bool:
    """Whether no page is listed twice."""
    listed = pages.tolist()
    return len(set(listed)) == len(listed)


def _audit_pages(cache: PrefixCache, nodes: Sequence[Node]) -> None:
    listed: list[Pages] = [np.empty(0, np.int32)]
    for node in nodes:
        listed += [part.pages for part in node.pages or ()]
        if node.checkpoint is not None:
            listed.append(node.checkpoint.pages)
    for sequence in cache.pinned.sequences.values():
        _check(not sequence.closed, f"closed sequence still listed: {sequence.request_id}")
        listed += [table.owned_pages for table in sequence.tables]
        listed += sequence.transient
        listed += [pending.pages for pending in sequence.pending_states.values()]
    for held in cache.pinned.steps.values():
        listed += held
    listed += [pin.pages for pin in cache.pinned.pins.values()]
    counts = np.bincount(np.concatenate(listed), minlength=cache.pool.num_pages)
    _check(len(counts) == cache.pool.num_pages, f"page {len(counts) - 1} is referred to, and the pool has none such")
    wrong = np.flatnonzero(counts != cache.pool.counts)
    if wrong.size:
        page = int(wrong[0])
        raise AuditError(f"page {page} counts {cache.pool.counts[page]} references, {counts[page]} found")
    free = np.sort(cache.pool.free_pages())
    _check(np.array_equal(free, np.flatnonzero(counts == 0)), "the free pages are not those that nobody refers to")


def _audit_tree(cache: PrefixCache, nodes: Sequence[Node]) -> None:
    tree, checkpoints = cache.tree, cache.checkpoints
    for node in nodes:
        _audit_node(cache, node)
    residents = {node for node in nodes if node.pages is not None}
    ghosts = {node for node in nodes if node.pages is None}
    unreachable = {node for node in nodes if tree.is_unreachable(node)}
    num_checkpoints = sum(node.checkpoint is not None for node in nodes)
    _check(ghosts == set(tree.ghosts), "the list of ghosts is not that of the tree")
    _check(sum(ghost.num_tokens for ghost in ghosts) == tree.num_ghost_tokens, "ghost tokens miscounted")
    _check(unreachable == set(tree.unreachable), "the list of unreachable nodes is not that of the tree")
    _check(set(tree.trimmable) <= residents, "a node without pages is held to be trimmable")
    _check(num_checkpoints == len(checkpoints.queue), "the eviction queue has not one entry for each checkpoint")
    _audit_records(cache, nodes)
    _check(set(cache.answer_ends) <= ghosts | residents, "the end of an answer is in no tree")
    for root in tree.roots.values():
        _check(bool(root.children), "an empty root was not forgotten")


def _audit_records(cache: PrefixCache, nodes: Sequence[Node]) -> None:
    """A policy that keeps records has one for each checkpoint, and those of checkpoints that have gone are ghosts."""
    records = list(cache.policy.eviction.records())
    ghosts = dict(records)
    _check(len(ghosts) == len(records), "a node has two records")
    for node in nodes if records else ():
        is_ghost, is_kept = ghosts.pop(node, None), node.checkpoint is not None
        _check_node(node, not is_kept or is_ghost is not None, "the checkpoint of {node} has no record")
        _check_node(node, is_ghost in (None, not is_kept), "the record of {node} is wrong about its checkpoint")
    _check(not ghosts, "there are records of nodes that are in no tree")


def _audit_node(cache: PrefixCache, node: Node) -> None:
    parent, width = node.parent, len(node.raw)
    assert parent is not None
    _check_node(node, node.start == parent.end, "{node} does not start where its parent ends")
    _check_node(node, node.num_tokens > 0, "{node} has no tokens")
    _check_node(node, width / node.num_tokens in (NARROW, WIDE), "{node} has {} key bytes", width)
    _check_node(node, parent.child(node.key()) is node, "{node} is not listed under its first key")
    resident = sum(child.pages is not None for child in node.children)
    counted = node.resident_children
    _check_node(node, resident == counted, "{node} counts {} children, has {}", counted, resident)
    if node.pages is None:
        holds_nothing = resident == 0 and node.checkpoint is None and node.locks == 0
        _check_node(node, holds_nothing, "{node} is a ghost that holds things")
        return
    groups = tuple(part.group for part in node.pages)
    _check_node(node, groups == cache.layout.groups, "{node} has pages of other groups")
    for part in node.pages:
        need = part.group.pages_for(node.end) - part.first_page if part.first_token < node.end else 0
        trimmed = part.group.reach is not None and node.start <= part.first_token <= node.end
        begins = part.first_token == node.start or trimmed
        _check_node(node, begins, "{node} lists pages from token {} on", part.first_token)
        listed = len(part.pages)
        _check_node(node, listed == need, "{node} lists {} pages of group {}, needs {}", listed, part.group.name, need)
        _check_node(node, _is_set(part.pages), "{node} lists a page twice")
    if node.checkpoint is not None:
        _check_node(node, node.checkpoint.node is node, "the checkpoint of {node} points elsewhere")
        queued = node.checkpoint in cache.checkpoints.queue
        _check_node(node, queued, "the checkpoint of {node} is not in the eviction queue")
        size = cache.layout.pages_per_checkpoint
        _check_node(node, len(node.checkpoint.pages) == size, "the checkpoint of {node} has not {} pages", size)
        _audit_reach(node)


def _audit_reach(node: Node) -> None:
    """Whoever resumes at a checkpoint has the keys and values within reach there."""
    for index, part in enumerate(node.pages or ()):
        needed, step = part.group.needed_at(node.end), node
        while step.parent is not None and needed < step.end:
            assert step.pages is not None
            first = max(needed, step.start)
            if step.pages[index].first_token > first:
                raise AuditError(
                    f"the checkpoint at {node.end} needs token {first} of group {part.group.name}, which is gone"
                )
            step = step.parent


def _audit_retained(cache: PrefixCache, nodes: Sequence[Node]) -> None:
    checkpoints = cache.checkpoints
    retained = {
        node.checkpoint for node in nodes if node.checkpoint is not None and node.checkpoint.retained_until is not None
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


def _audit_lookups(cache: PrefixCache) -> None:
    """What lookups have joined is what the nodes have."""
    for last, parts in cache.lookups.joined():
        path = [last]
        while path[0].parent is not None:
            path.insert(0, path[0].parent)
        for index, part in enumerate(parts):
            pages = path_pages(path[1:], last.end, index, part.group).pages
            _check_node(last, np.array_equal(pages, part.pages), "other pages were joined up to {node}")


def _audit_locks(cache: PrefixCache, nodes: Sequence[Node]) -> None:
    locks: dict[Node, int] = {}
    for sequence in cache.pinned.sequences.values():
        if sequence.node is not None:
            locks[sequence.node] = locks.get(sequence.node, 0) + 1
        for table in sequence.tables:
            least = table.group.pages_for(sequence.committed) if table.first_token < sequence.committed else 0
            if table.length < least:
                raise AuditError(f"{sequence.request_id}: {table.length} pages for {sequence.committed} tokens")
            if not _is_set(table.pages):
                raise AuditError(f"{sequence.request_id}: a page is listed twice")
    for node in (*cache.tree.roots.values(), *nodes):
        expected = locks.pop(node, 0)
        if node.locks != expected:
            raise AuditError(f"node ending at {node.end} counts {node.locks} locks, {expected} found")
    _check(not locks, "a sequence goes through a node that is not in the tree")
