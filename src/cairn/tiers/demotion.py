"""Pages to below: what is worth it is copied to the tiers beside the steps, long before the pool has to drop it.

    a checkpoint is taken, or hit   its node waits, in O(1)
    naming                          the path's tokens become names, and the stores say what they lack; another thread
    copying                         some pages are pinned, and copied out of the pool; another thread, then unpinned
    writing                         to the stores; another thread

At most `SLICE_ENTRIES` of `SLICE_BYTES` together, and an eighth of the pool, are pinned at a time, and only while they
are copied: a disk that stands still holds no page of the pool.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import monotonic

import numpy as np

from cairn.cache.checkpoint import Origin
from cairn.cache.events import KeyNames
from cairn.cache.group_pages import GroupPages, join
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.sequence_blocks import Namespace, PagePin
from cairn.cache.tree import Checkpoint, Node, to_int64
from cairn.cache.tree_store import TreeObserver
from cairn.tiers.announcements import ChunkBlocks, TierEvents
from cairn.tiers.context import ORIGINS, TierContext
from cairn.tiers.digests import PathNames, named_images
from cairn.tiers.lanes import busy_time
from cairn.tiers.store import EntryFacts, NewEntry, PageBytes, TierStore
from cairn.tiers.worth import KEPT_BELOW, choose_states, is_kept_below
from cairn.transfer.contract import ContentName, NamedImage
from cairn.types import Keys, Pages

WEIGHT = 1000.0
"""Requests in which the uses of an entry are expected."""

MAX_WAITING = 4096
SLICE_BYTES = 16 << 20
SLICE_ENTRIES = 64
"""The pages of so many are looked up between two steps, at most: some 0.1 ms."""

POOL_SHARE = 8
"""Pinned at a time is at most one part in so many of the pool, but at least one entry."""

MAX_WRITES = 2
"""Slices that wait to be written, beside the one that is copied."""

WRITE_SECONDS = 30.0
"""A slice that has not been written by then is not written."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A state on a path, and the node that it hangs at. `weight`: see `EntryFacts`. `is_sure`: see `is_kept_below`."""

    node: Node
    kind: int
    origin: int
    position: int
    weight: float
    is_sure: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """What the naming thread gets: `runs`, the key tokens of the nodes from the root on, each with their number.
    `images`: None where they are still to be looked for among the keys, which only the core's thread may. `digests`: of
    the blocks that are announced for it."""

    namespace: Namespace
    runs: Sequence[tuple[bytes, int]]
    images: tuple[NamedImage, ...]
    wanted: Sequence[_Wanted]
    digests: bytes = b""

    def keys(self) -> Keys:
        """All key tokens, shape [n]."""
        return np.concatenate([np.zeros(0, np.int64), *(to_int64(raw, length) for raw, length in self.runs)])


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """An entry to be written: of `node` the state, or keys and values on the path to it, of tokens [start, end).
    `blocks`: of a chunk those that are to be announced."""

    facts: EntryFacts
    node: Node
    start: int
    end: int
    blocks: ChunkBlocks | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """What comes of naming a path: the entries that the stores lack, and the blocks that may be announced."""

    parts: list[_Part]
    blocks: Sequence[ChunkBlocks]


@dataclass(slots=True, eq=False)
class _Job:
    """A path that is being written. `parts`: those that are left, once the names are known, `kind` whose account pays.
    `copy`: the slice that is being copied, with what holds its pages."""

    naming: "Future[_Named]"
    kind: int
    parts: list[_Part] | None = None
    copy: "tuple[list[_Part], PagePin, Future[PageBytes]] | None" = None


class Demoter(TreeObserver):
    """Observes a cache, and is its `PageSink`. `contents`: the images behind key tokens below 0, None without images.

    `dropped`: paths that were given up, by why.
    """

    def __init__(
        self,
        cache: PrefixCache,
        context: TierContext,
        contents: KeyNames | None = None,
        events: TierEvents | None = None,
    ) -> None:
        self._cache = cache
        self._context = context
        self._contents = contents
        self._events = events
        self._names: dict[Node, Namespace] = {}
        self._waiting: OrderedDict[Node, None] = OrderedDict()
        self._job: _Job | None = None
        self._writes: list[Future[Sequence[ChunkBlocks]]] = []
        self.dropped = {"queue_full": 0, "gone": 0, "failed": 0}

    # -- what the tree says --------------------------------------------------------------------------------------

    def root_added(self, root: Node, namespace: Namespace) -> None:
        self._names[root] = namespace

    def root_forgotten(self, root: Node) -> None:
        self._names.pop(root, None)

    def node_changed(self, node: Node) -> None:
        checkpoint = node.checkpoint
        if checkpoint is not None and checkpoint.kind in KEPT_BELOW:
            self._put(node)

    def checkpoint_used(self, checkpoint: Checkpoint) -> None:
        # now and then: below it may have been dropped, because up here is where it is hit
        if checkpoint.hits & (checkpoint.hits - 1) == 0:
            self._put(checkpoint.node)

    def node_forgotten(self, node: Node) -> None:
        self._waiting.pop(node, None)

    def _put(self, node: Node) -> None:
        self._waiting[node] = None
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
            self.dropped["queue_full"] += 1

    def give_up_all(self) -> None:
        """Begin no further copy of what is in the pool now."""
        self._waiting.clear()
        if self._job is not None and self._job.copy is None:
            self._job = None
        elif self._job is not None:
            self._job.parts = []

    # -- between steps -------------------------------------------------------------------------------------------

    @property
    def num_pins(self) -> int:
        return self._job is not None and self._job.copy is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and nothing is under way."""
        return self._job is None and not self._waiting and not self._writes

    def poll(self) -> bool:
        released, written = False, [write for write in self._writes if write.done()]
        self._writes = [write for write in self._writes if write not in written]
        if self._events is not None:
            for write in written:
                if not write.cancelled() and write.exception() is None:
                    self._events.announce(write.result())
            self._events.announce_drops()
        if self._job is not None:
            released = self._go_on(self._job)
        while self._job is None and self._waiting and len(self._writes) < MAX_WRITES:
            node = self._waiting.popitem(last=False)[0]
            path = self._path(node)
            if path is not None and path.wanted:
                deepest = path.wanted[-1]
                naming = self._context.lanes.names.submit(partial(self._name, path))
                self._job = _Job(naming, deepest.kind)
        return released

    def _go_on(self, job: _Job) -> bool:
        """Whether pages were released."""
        released = False
        if job.parts is None:
            if not job.naming.done():
                return False
            if job.naming.cancelled() or job.naming.exception() is not None:
                self._give_up("failed")
                return False
            named = job.naming.result()
            job.parts = named.parts
            if self._events is not None:
                self._events.announce(named.blocks)
        if job.copy is not None:
            parts, pin, copied = job.copy
            if not copied.done():
                return False
            job.copy, released = None, True
            self._cache.unpin(pin)
            if copied.cancelled() or copied.exception() is not None:
                self._give_up("failed")
                return True
            write = partial(self._write, parts, copied.result(), job.kind)
            self._writes.append(self._context.lanes.writes.submit(write))
        if not job.parts:
            self._job = None
        elif len(self._writes) < MAX_WRITES:
            self._copy_slice(job)
        return released

    def _give_up(self, reason: str) -> None:
        self.dropped[reason] += 1
        self._job = None

    # -- naming --------------------------------------------------------------------------------------------------

    def _path(self, node: Node) -> _Path | None:
        """The path to `node` as far as it may be written, with the states on it; None if it has gone."""
        nodes, step = list[Node](), node
        while step.parent is not None:
            nodes.append(step)
            step = step.parent
        namespace = self._names.get(step)
        if namespace is None:
            return None
        runs, states, digests = list[tuple[bytes, int]](), list[Node](), b""
        exact = self._context.exact
        for each in reversed(nodes):
            if each.pages is None or (exact and each.decode_by is not None):
                break
            runs.append((each.raw, each.num_tokens))
            if each.checkpoint is not None and not (exact and each.checkpoint.origin is Origin.DECODE):
                states.append(each)
        wanted = [self._wanted(each) for each in choose_states(states, node.end)]
        images: tuple[NamedImage, ...] | None = ()
        if self._contents is not None and wanted:
            path = _Path(namespace, runs, (), wanted)
            images = named_images(path.keys(), self._contents)
        if self._events is not None and wanted:
            digests = self._events.path_digests(nodes[::-1][: len(runs)])
        return None if images is None else _Path(namespace, runs, images, wanted, digests)

    def _wanted(self, node: Node) -> _Wanted:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        weight = WEIGHT * self._cache.policy.eviction.chance(node)
        is_sure = is_kept_below(checkpoint)
        return _Wanted(node, checkpoint.kind.number, ORIGINS[checkpoint.origin], node.end, weight, is_sure)

    def _name(self, path: _Path) -> _Named:
        """What the stores lack of a path, chunks before what is filed under them. For the names' thread."""
        context, keys = self._context, path.keys()
        name = ContentName(path.namespace.adapter, path.namespace.cache_salt, path.images)
        names = context.names.path(name, keys)
        stores = [store for store in context.stores if store.writable]
        blocks = [] if self._events is None else self._events.blocks_of(names, path.digests)
        parts, last, num_chunks = list[_Part](), path.wanted[-1], 0
        lacking = _lacking(stores, names.chunks) if context.pages_per_chunk else [False] * len(names.chunks)
        above, whole = 0, lacking.index(True) if True in lacking else len(lacking)
        for state in path.wanted:
            number, tail = divmod(state.position, names.stride)
            facts = self._state_facts(names, state, number, tail)
            lacks = number > whole or _lacking(stores, [facts.key])[0]
            if not lacks:
                for store in stores:
                    store.touch(facts.key, state.weight)
            if lacks and self._pays(stores, state, above):
                for at in range(num_chunks, number):
                    if lacking[at]:
                        parts.append(self._chunk(names, at, last.node, blocks[at] if at < len(blocks) else None))
                num_chunks = max(num_chunks, number)
                parts.append(_Part(facts, state.node, number * names.stride, state.position))
            if state.is_sure:
                # what may be of no use makes nothing else less worth its writing
                above = state.position
        return _Named(parts, blocks)

    def _state_facts(self, names: PathNames, state: _Wanted, number: int, tail: int) -> EntryFacts:
        return EntryFacts(
            names.state_of(number, tail),
            names.mark(number),
            state.position,
            self._context.pages_of_state(state.position),
            tail,
            state.origin,
            state.kind,
            state.weight,
        )

    def _chunk(self, names: PathNames, number: int, node: Node, blocks: ChunkBlocks | None) -> _Part:
        stride = names.stride
        end = (number + 1) * stride
        facts = EntryFacts(names.chunks[number], names.before(number), end, self._context.pages_per_chunk)
        return _Part(facts, node, number * stride, end, blocks)

    def _pays(self, stores: Sequence[TierStore], state: _Wanted, above: int) -> bool:
        """Whether a state, `above` the next shallower one, is to be written with what belongs to it."""
        context, layout = self._context, self._context.layout
        whole = (layout.retained_pages(0, state.position) + layout.pages_per_checkpoint) * layout.page_bytes
        if all(whole > store.capacity for store in stores):
            return False
        num_tokens = state.position - above
        num_pages = layout.unlimited_pages_for(num_tokens) + layout.window_pages(0, state.position)
        num_bytes = (num_pages + layout.pages_per_checkpoint) * layout.page_bytes
        seconds = num_tokens * context.speed.seconds_per_token
        write_seconds = sum(store.counters.seconds_per_written_byte for store in stores) * num_bytes
        read_seconds = min(store.counters.seconds_per_read_byte for store in stores) * num_bytes
        return context.worth.pays(seconds, write_seconds, read_seconds) and context.worth.allows(state.kind)

    # -- copying and writing -------------------------------------------------------------------------------------

    def _copy_slice(self, job: _Job) -> None:
        """Pin and copy the next entries of a path, if they are still there."""
        assert job.parts is not None
        page_bytes = self._context.layout.page_bytes
        most = min(SLICE_BYTES // page_bytes, self._cache.pool.num_pages // POOL_SHARE)
        parts, lists, num_pages = list[_Part](), list[Pages](), 0
        runs: dict[tuple[Node, int], GroupPages | None] = {}
        while job.parts and len(parts) < SLICE_ENTRIES:
            if parts and num_pages + job.parts[0].facts.num_pages > most:
                break
            pages = self._pages(job.parts[0], runs)
            if pages is None:
                # what comes after it cannot be used without it
                self.dropped["gone"] += 1
                job.parts = []
                break
            parts.append(job.parts.pop(0))
            lists += pages
            num_pages += parts[-1].facts.num_pages
        if not parts:
            self._job = None
            return
        named = np.concatenate(lists)
        # an entry's last page may be another one's first
        pin = self._cache.pin(np.unique(named))
        job.copy = parts, pin, self._context.lanes.copies.submit(partial(self._context.memory.copy_out, named))

    def _pages(self, part: _Part, runs: dict[tuple[Node, int], GroupPages | None]) -> list[Pages] | None:
        """The pages of an entry as the tree has them now, of the state first and then group by group; None if it has
        not. `runs`: by group those of the paths to nodes, from the first entry of a slice on: a path is followed once a
        slice."""
        node, pages, is_state = part.node, list[Pages](), part.facts.tail is not None
        if is_state:
            if node.checkpoint is None:
                return None
            pages.append(node.checkpoint.pages)
        for index, group in enumerate(self._context.layout.groups):
            start = part.start if group.reach is None else group.needed_at(part.end) if is_state else part.end
            if start >= part.end:
                continue
            if (node, index) not in runs:
                runs[node, index] = _pages_from(node, index, start)
            run = runs[node, index]
            if run is None:
                return None
            pages.append(run.span(start, part.end).pages)
        return pages

    def _write(self, parts: Sequence[_Part], pages: PageBytes, kind: int) -> Sequence[ChunkBlocks]:
        """Returns the blocks of the chunks among `parts`, whose pages lie one after the other in `pages`. For the
        writers' thread."""
        began, deadline = busy_time(), monotonic() + WRITE_SECONDS
        batch, at = list[NewEntry](), 0
        for part in parts:
            batch.append(NewEntry(part.facts, pages[at : at + part.facts.num_pages]))
            at += part.facts.num_pages
        for store in self._context.stores:
            if store.writable:
                store.write(batch, deadline)
        self._context.worth.spend(kind, busy_time() - began)
        return [part.blocks for part in parts if part.blocks is not None]


def _pages_from(node: Node, index: int, start: int) -> GroupPages | None:
    """The pages of group `index` of the path to `node`, from the one on that holds token `start`; None if some of them
    are gone."""
    runs, step = list[GroupPages](), node
    while step.parent is not None and step.end > start:
        if step.pages is None:
            return None
        runs.append(step.pages[index])
        if runs[-1].first_token > max(start, step.start):
            return None
        step = step.parent
    return join(runs[::-1]).drop_before(start)


def _lacking(stores: Sequence[TierStore], keys: Sequence[bytes]) -> list[bool]:
    """Which of these entries one of the stores does not have."""
    lacking = [False] * len(keys)
    for store in stores:
        for at, here in enumerate(store.contains(keys)):
            lacking[at] = lacking[at] or not here
    return lacking
