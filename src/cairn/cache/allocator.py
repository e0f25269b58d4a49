"""Pages for running sequences and their states, the tree nodes of the tokens that they computed, and the references
to pages besides the tree's."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.checkpoint_store import CheckpointStore
from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import CacheLayout
from cairn.cache.pages import PagePool
from cairn.cache.placement import CheckpointPoint
from cairn.cache.sequence_blocks import PagePin, PageTable, PendingState, SequenceBlocks
from cairn.cache.tree import Checkpoint, Node, common_prefix, narrow
from cairn.step import GRID, PageCopy
from cairn.types import Pages


@dataclass(frozen=True, slots=True)
class BlockAllocator:
    """Allocates pages of the pool for sequences and their states, and drops cached ones to make room. `enabled`
    False: the cache is off, and only checkpoints for another server get pages."""

    layout: CacheLayout
    pool: PagePool
    checkpoints: CheckpointStore
    enabled: bool

    def allocate(self, sequence: SequenceBlocks, num_tokens: int, step_end: int) -> list[PageCopy] | None:
        """Allocate pages up to `num_tokens` tokens, of groups of limited reach up to `step_end`.

        Returns the page copies that have to be made before tokens are written, or None when there is no room; then only
        cached pages may have been dropped.
        """
        blocks = sequence.blocks
        need = blocks.missing_pages(num_tokens, step_end)
        if need == 0 and blocks.copied:
            return []
        shared = self._to_copy(sequence, num_tokens)
        if not self.checkpoints.make_room(need + len(shared)):
            return None
        copies = [self._copy_on_write(sequence, table, index) for table, index in shared]
        blocks.copied = blocks.copied or num_tokens > sequence.matched
        for table in blocks.tables:
            end = num_tokens if table.group.reach is None else step_end
            missing = table.group.pages_for(end) - table.length
            if missing > 0:
                table.append(self.pool.allocate(missing))
        return copies

    def missing_pages(self, sequence: SequenceBlocks, num_tokens: int, step_end: int) -> int:
        """How many pages `allocate` would take."""
        return sequence.blocks.missing_pages(num_tokens, step_end) + len(self._to_copy(sequence, num_tokens))

    def _to_copy(self, sequence: SequenceBlocks, num_tokens: int) -> list[tuple[PageTable, int]]:
        """The tables whose page that holds token `matched` has to be copied before so many tokens are written."""
        if sequence.blocks.copied or num_tokens <= sequence.matched:
            return []
        return [
            (table, sequence.matched // table.group.tokens_per_page)
            for table in sequence.tables
            if sequence.matched % table.group.tokens_per_page and table.length > table.first_page
        ]

    def _copy_on_write(self, sequence: SequenceBlocks, table: PageTable, index: int) -> PageCopy:
        # page `index` holds tokens of the tree up to `matched`; its other tokens may be somebody's already
        assert index == table.length - 1
        source = table.pages[-1:].copy()
        target = self.pool.allocate(1)
        if table.num_shared == table.length:
            self.pool.acquire(source)
        table.replace_last(int(target[0]))
        sequence.transient.append(source)
        return PageCopy(int(source[0]), int(target[0]))

    # -- states --------------------------------------------------------------------------------------------------

    def reserve_checkpoint(self, sequence: SequenceBlocks, wanted: CheckpointPoint) -> Pages | None:
        """Allocate the pages of the checkpoint at `wanted.position`. Returns them, or None if there is no room or
        the position has them already.

        One on probation takes free pages, or the place of what is worth less.
        """
        if wanted.position in sequence.pending_states:
            pending = sequence.pending_states[wanted.position]
            pending.retain_seconds = max(pending.retain_seconds, wanted.retain_seconds)
            return None
        if not self.enabled:
            return None
        is_end = wanted.position == sequence.num_prompt_tokens
        if not (self.layout.needs_checkpoints or is_end or wanted.retain_seconds):
            return None
        size = self.layout.pages_per_checkpoint
        if wanted.kind.on_probation and not self.checkpoints.is_worth(size, wanted.worth):
            return None
        if not self.checkpoints.make_room(size):
            return None
        pages = self.pool.allocate(size)
        sequence.pending_states[wanted.position] = PendingState(pages, wanted.kind, wanted.retain_seconds)
        return pages

    def force_checkpoint(self, sequence: SequenceBlocks, position: int) -> Pages | None:
        """Allocate pages for the state at `position`, whatever the policy says. Returns them, those that it has
        already included, or None if there is no room."""
        if position in sequence.pending_states:
            return sequence.pending_states[position].pages
        size = self.layout.pages_per_checkpoint
        if not self.checkpoints.make_room(size):
            return None
        pages = self.pool.allocate(size)
        sequence.pending_states[position] = PendingState(pages, Kind.PROMPT_END, forced=True)
        return pages

    def transfer_checkpoint(self, sequence: SequenceBlocks, position: int) -> None:
        """Give up the pages of the state at `position`, which are filled and which somebody else holds, if the cache is
        off: no commit will take it from the sequence then."""
        if not self.enabled and position in sequence.pending_states:
            self.pool.release(sequence.pending_states.pop(position).pages)


@dataclass(frozen=True, slots=True)
class TreeWriter:
    """Enters what sequences have computed into the trees. `exact`: keys and values that prefill has computed replace
    those of decode steps."""

    checkpoints: CheckpointStore
    pinned: "PinnedPages"
    exact: bool

    def commit(self, sequence: SequenceBlocks, num_tokens: int, positions: Iterable[int]) -> None:
        """Enter the first `num_tokens` tokens of `sequence` and its filled states at `positions`: every lookup may
        find them from now on."""
        tree = self.checkpoints.tree
        if num_tokens > sequence.committed:
            node = self._insert(sequence, num_tokens)
            old, sequence.node, sequence.committed = sequence.node, node, num_tokens
            tree.lock(node)
            if old is not None:
                tree.unlock(old)
        at, descending, attached = sequence.node, sorted(positions, reverse=True), list[Node]()
        for position in descending:
            at = self._node_at(sequence, position, at)
            if self._attach(sequence, position, at):
                attached.append(at)
        self.checkpoints.rank_attached(attached)
        if descending and sequence.match.last_checkpoint_node is not None:
            self.checkpoints.eviction.demote(sequence.match.last_checkpoint_node)

    def _insert(self, sequence: SequenceBlocks, upto: int) -> Node:
        tree, start = self.checkpoints.tree, sequence.node
        # of one that it has matched in part, the one above
        while start is not None and start.end > sequence.committed:
            start = start.parent
        node = tree.root(sequence.namespace) if start is None else start
        position = base = node.end
        new = narrow(sequence.tokens.slice(base, upto))
        while position < upto:
            decoded = position >= sequence.decode_from
            stop = upto if decoded else min(upto, sequence.decode_from)
            maker = sequence.request_id if decoded else None
            child = node.child(int(new[position - base]))
            if child is None:
                run = new[position - base : stop - base].tobytes()
                node = tree.add(node, run, stop, sequence.blocks.span(position, stop), maker, sequence.match.lineage)
                position = stop
                continue
            end = min(stop, position + common_prefix(child.raw, child.num_tokens, new, position - base))
            if end < child.end:
                child = tree.split(child, end)
            better = self.exact and child.decode_by is not None and not decoded
            if child.pages is None or (better and not self.pinned.is_locked(child)):
                span = sequence.blocks.span(position, end)
                if child.pages is None or all(map(_reaches_as_far, span, child.pages)):
                    tree.fill(child, span, maker)
            node, position = child, end
        return node

    def _node_at(self, sequence: SequenceBlocks, position: int, node: Node | None) -> Node:
        """The node of the committed path that ends at `position`, cut if need be; it is `node` or above it."""
        while node is not None and node.start >= position:
            node = node.parent
        assert node is not None and node.start < position <= node.end, f"{position} is not on the committed path"
        return self.checkpoints.tree.split(node, position) if position < node.end else node

    def _attach(self, sequence: SequenceBlocks, position: int, node: Node) -> bool:
        """Attach the state wanted for `position` to the end of `node`. False if there is one already."""
        pending = sequence.pending_states.pop(position)
        origin = _origin(sequence, position)
        self.checkpoints.tree.provide(node, sequence.blocks)
        checkpoint = Checkpoint(node, pending.pages, pending.kind, origin, sequence.request_id)
        attached = self.checkpoints.attach(checkpoint, sequence.match.lineage)
        if not attached:
            self.checkpoints.pool.release(pending.pages)
        assert node.checkpoint is not None
        if pending.retain_seconds and self.checkpoints.retain(node.checkpoint, pending.retain_seconds):
            sequence.retained_breakpoints.add(position)
        return attached


def _reaches_as_far(part: GroupPages, before: GroupPages) -> bool:
    """Whether `part` has the pages of all tokens that `before` has: of a limited reach a checkpoint may need them."""
    return part.first_token <= before.first_token


def _origin(sequence: SequenceBlocks, position: int) -> Origin:
    if position > sequence.decode_from:
        return Origin.DECODE
    return Origin.TAIL if position % GRID else Origin.GRID


class PinnedPages:
    """References to pages besides the tree's. `sequences`: open sequences, by identity. `pins`: by identity. `steps`:
    pages that steps which are not applied yet name, by step."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.sequences: dict[int, SequenceBlocks] = {}
        self.pins: dict[int, PagePin] = {}
        self.steps: dict[int, list[Pages]] = {}
        self._shortages: set[tuple[Node | None, int, int, int]] = set()  # lookups that lack so many pages
        self._places = np.empty(pool.num_pages, np.int32)  # of `num_distinct`

    def open(self, sequence: SequenceBlocks) -> None:
        """Acquire what a new sequence needs: the pages of its own, and those of its hit's state."""
        self.sequences[id(sequence)] = sequence
        for table in sequence.tables:
            if table.num_shared < table.length:
                self.pool.acquire(table.owned_pages)
        if sequence.checkpoint is not None:
            self.pool.acquire(sequence.checkpoint.pages)
            sequence.transient.append(sequence.checkpoint.pages)

    def close(self, sequence: SequenceBlocks) -> None:
        """Release everything that a sequence refers to."""
        assert not sequence.closed, f"released twice: {sequence.request_id}"
        sequence.closed = True
        del self.sequences[id(sequence)]
        for table in sequence.tables:
            self.pool.release(table.owned_pages)
        for pages in [pending.pages for pending in sequence.pending_states.values()] + sequence.transient:
            self.pool.release(pages)
        sequence.pending_states.clear()
        sequence.transient.clear()

    def pin(self, pages: Pages, for_requests: bool = False) -> PagePin:
        """Keep `pages`, which are distinct and in use, until `unpin`."""
        pin = PagePin(pages.copy(), for_requests)
        self.pool.acquire(pin.pages)
        self.pins[id(pin)] = pin
        return pin

    def unpin(self, pin: PagePin) -> None:
        """Release pinned pages."""
        self.note_release()
        del self.pins[id(pin)]
        self.pool.release(pin.pages)

    def pin_until(self, step: int, sequence: SequenceBlocks) -> None:
        """Keep the pages that `sequence` needs only for step `step` until that step has been applied."""
        if sequence.transient:
            self.steps.setdefault(step, []).extend(sequence.transient)
            sequence.transient = []

    def release_step(self, step: int) -> None:
        """Release the pages that step `step` named: it has been applied."""
        if step in self.steps:
            self.note_release()
            for pages in self.steps.pop(step):
                self.pool.release(pages)

    def note_release(self) -> None:
        """References of running requests end: `could_free` may have another answer."""
        self._shortages.clear()

    def could_free(self, sequence: SequenceBlocks, num_pages: int) -> bool:
        """Whether `num_pages` pages are free, or would be if every page without a reference here were dropped. For a
        lookup that lacks pages they are counted again only after a release."""
        if num_pages <= self.pool.num_free:
            return True
        need = (sequence.node, sequence.hit, sequence.matched, num_pages)
        if need in self._shortages:
            return False
        lists, evictable = self._lists(), self.pool.num_pages - num_pages
        # those in several lists need not be told apart if there is room all the same
        if sum(map(len, lists)) <= evictable or self.num_distinct(lists) <= evictable:
            return True
        self._shortages.add(need)
        return False

    def is_locked(self, node: Node) -> bool:
        """Whether an open sequence goes through `node`, and reads its pages. O(nodes of their paths below it)."""
        for sequence in self.sequences.values():
            step = sequence.node
            while step is not None and step.end > node.end:
                step = step.parent
            if step is node:
                return True
        return False

    def num_pages(self) -> int:
        """Distinct pages that sequences, the nodes they have locked, pins or unapplied steps refer to."""
        return self.num_distinct(self._lists())

    def _lists(self) -> list[Pages]:
        return self.by_requests() + self.by_transfers() + self.by_steps()

    def by_requests(self) -> list[Pages]:
        """The page lists of sequences, of the nodes that they have locked and of pins for requests, some pages perhaps
        in several.

        A locked node may keep pages that its sequence does not read: the copy that a deeper node has taken the place
        of, or what somebody else has computed as well.
        """
        held = [table.pages for sequence in self.sequences.values() for table in sequence.tables]
        locked: set[Node] = set()
        for sequence in self.sequences.values():
            held += [pending.pages for pending in sequence.pending_states.values()] + sequence.transient
            node = sequence.node
            while node is not None and node not in locked:
                locked.add(node)
                # those of limited reach are trimmed all the same
                held += [part.pages for part in node.pages or () if part.group.reach is None]
                node = node.parent
        return held + [pin.pages for pin in self.pins.values() if pin.for_requests]

    def by_transfers(self) -> list[Pages]:
        """The page lists of all other pins."""
        return [pin.pages for pin in self.pins.values() if not pin.for_requests]

    def by_steps(self) -> list[Pages]:
        """The page lists of steps that have not been applied."""
        return [pages for held in self.steps.values() for pages in held]

    def num_distinct(self, lists: Iterable[Pages]) -> int:
        """How many distinct pages are in `lists`: O(pages in them), however large the pool is."""
        numbers = np.concatenate([np.zeros(0, np.int32), *lists])
        places = np.arange(len(numbers), dtype=np.int32)
        # each page keeps one of the places at which it is named, and what it held before is never read
        self._places[numbers] = places
        return int(np.count_nonzero(self._places[numbers] == places))
