"""The cache's only door: look a prompt up, extend it, commit what was computed, release it.

    lookup    prompt -> Lease: hit c, match m, the shared pages, the checkpoint to restore, the reason for no more
    branch    another lease of the same prompt, once it is computed: for several answers to it
    extend    pages for more tokens, and the page copy that writing into a shared page needs
    want      a file for a checkpoint that the plan is going to keep
    received  tokens and a state that another server has computed: the lease goes on as after a hit of its own
    commit    computed tokens and kept checkpoints enter the tree, for everybody
    release   the request's own references end
    hold      pages that outlive their lease, because somebody outside reads or writes them
    hold_breakpoints   checkpoints that go after all others, because a client asked for it

Pages that an unapplied step still names are kept by `hold_until(step)` until `step_applied(step)`. Nothing here knows
of tensors: pages are numbers, and what is in them is the runner's affair.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from cairn.cache.branches import BranchDistances
from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.events import TreeObserver
from cairn.cache.eviction import Eviction
from cairn.cache.journal import Journal
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Hold, Lease, Namespace, PageTable, PendingFile
from cairn.cache.lookup import Acceptance, missed
from cairn.cache.pages import PagePool
from cairn.cache.placement import Placement, PromptFacts, Wanted, hold_positions
from cairn.cache.reasons import Reason
from cairn.cache.residents import Residents
from cairn.cache.reuse import Lineage
from cairn.cache.tree import KEY_BYTES, Node, Walk, common_prefix, path_pages, walk
from cairn.errors import ConfigError
from cairn.step import GRID, PageCopy
from cairn.types import Boundary, Clock, Keys, Pages, SystemClock

__all__ = ["CacheCounters", "CachePolicy", "PrefixCache"]

FIRST_WAYS = MappingProxyType({Kind.ANSWER_END: (0,), Kind.PROMPT_END: (0, 1)})
"""How many ways on there may be from a new checkpoint; from others one."""

MAX_FORETOLD = 4
"""Positions kept because prompts like this one were left there, while memory is idle; else one."""

GHOST_FACTOR = 4
"""Key tokens remembered of dropped runs, as a multiple of the tokens that fit the pool."""


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How the cache behaves. `placement` None switches it off: every prompt is computed, nothing is kept."""

    placement: Placement | None
    eviction: Eviction
    exact: bool = False


@dataclass(slots=True)
class CacheCounters:
    """In prompt tokens (`queries`, `hits`, `lost`) and in requests (`reasons`) or checkpoints (`used`)."""

    queries: int = 0
    hits: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    lost: Counter[Reason] = field(default_factory=Counter)
    used: Counter[Kind] = field(default_factory=Counter)


class PrefixCache:
    """Pages, tree and leases of one model on one rank. Not thread-safe: it belongs to the scheduler's thread."""

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        policy: CachePolicy,
        observer: TreeObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`observer` is told of what enters and leaves the tree; `clock` measures how long clients hold checkpoints.

        Raises ConfigError for a layout of limited reach.
        """
        if any(group.reach is not None for group in layout.groups):
            raise ConfigError("attention layers with a limited reach (sliding window, chunked) are not supported yet")
        self.layout = layout
        self.policy = policy
        self.pool = PagePool(num_pages)
        tokens_per_page = max((group.tokens_per_page for group in layout.groups), default=layout.block_size)
        ghost_tokens = GHOST_FACTOR * num_pages * tokens_per_page
        self.residents = Residents(layout, self.pool, policy.eviction, ghost_tokens, observer, clock)
        self.leases: dict[int, Lease] = {}
        self.holds: dict[int, Hold] = {}
        self.held: dict[int, list[Pages]] = {}
        self.counters = CacheCounters()
        self.journal = Journal(clock or SystemClock())
        self.branches = BranchDistances()

    @property
    def enabled(self) -> bool:
        return self.policy.placement is not None

    # -- lookup --------------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace: Namespace,
        keys: Keys,
        request_id: str,
        resumed_from: int | None = None,
        passed_by: bool = False,
    ) -> Lease:
        """Find the longest usable prefix of `keys` (shape [n], n >= 1) and lease it.

        `resumed_from`: the prompt length of a request that was preempted; `keys` then goes on with what it had
        generated. `passed_by`: find nothing, because all of the prompt has to be computed. Nothing is counted before
        `admitted`.
        """
        length = len(keys)
        num_prompt_tokens = length if resumed_from is None else resumed_from
        may = Acceptance(self.policy.exact, request_id, num_prompt_tokens, resumed_from is not None)
        root = self.residents.roots.get(namespace) if self.enabled and not passed_by else None
        found = walk(root, keys.data, may.run_end()) if root is not None else Walk()
        checkpoint = may.deepest(found)
        hit = checkpoint.position if checkpoint is not None else 0
        if self.layout.state_bytes == 0 and hit < min(found.matched, length - 1):
            # nothing to restore: keys and values alone resume anywhere, and the last token gives the logits
            hit, checkpoint = min(found.matched, length - 1), None
        lease = Lease(
            purpose=f"running {request_id}" if resumed_from is None else f"resuming {request_id}",
            request_id=request_id,
            namespace=namespace,
            num_prompt_tokens=num_prompt_tokens,
            hit=hit,
            matched=found.matched,
            seen=found.seen,
            reason=Reason.DISABLED,
            checkpoint=checkpoint,
            groups=self.layout.groups,
            tables=tuple(
                PageTable(shared := path_pages(found.path, index, group, found.matched), len(shared))
                for index, group in enumerate(self.layout.groups)
            ),
            node=found.path[-1] if found.path else None,
            decode_from=num_prompt_tokens if self.policy.exact else length,
            _keys=keys,
            num_tokens=length,
            committed=found.matched,
            restore=checkpoint.pages if checkpoint is not None else None,
            known=may.deepest_known(found),
            left=found.left_before_end(),
            ways=found.ways_on(),
        )
        if self.policy.placement is not None and not passed_by:
            running, roots = self.leases.values(), self.residents.roots
            lease.explain(missed(self.policy.placement, lease, found, running, roots))
        self._open(lease)
        return lease

    def admitted(self, lease: Lease, resumed: bool = False) -> None:
        """The request goes on from this lookup: count it (a resumed request's prompt was counted before)."""
        if not resumed:
            self._learn(lease)
        if lease.checkpoint is not None and not lease.closed:
            self.counters.used[lease.checkpoint.kind] += 1
            if lease.checkpoint in self.residents.queue:
                self.residents.use(lease.checkpoint, hit=True)
        self.residents.renew(lease.node, lease.hit)
        if not resumed:
            self.counters.queries += lease.num_prompt_tokens
            self.counters.hits += lease.hit - lease.received
            self.counters.reasons[lease.reason] += 1
            self.counters.lost.update(lease.lost)
            self.journal.admitted(lease)

    def hold_breakpoints(self, lease: Lease, boundaries: Iterable[Boundary]) -> None:
        """Hold what is there already of the checkpoints that the client of `lease` asks to be held: those within its
        hit. Later ones are held as they are made."""
        wanted = {p: seconds for p, seconds in hold_positions(boundaries, self.policy.exact).items() if p <= lease.hit}
        node = lease.node if wanted else None
        while node is not None:
            seconds, checkpoint = wanted.get(node.end, 0), node.checkpoint
            if seconds and checkpoint is not None and self.residents.hold(checkpoint, seconds):
                lease.held.add(node.end)
            node = node.parent

    def branch(self, lease: Lease, state: Pages, request_id: str) -> Lease:
        """Another lease of the prompt of `lease`, all of which is computed, with the state at its end in the file
        `state`: it goes on from there as after a hit, whatever the tree has. Full pages are shared."""
        branch = lease.branch(state, request_id)
        self._open(branch)
        self.pool.acquire(state)
        branch.transient.append(state)
        return branch

    def facts(self, lease: Lease, num_tokens: int, boundaries: tuple[Boundary, ...] = ()) -> PromptFacts:
        """What the placement policy may know of `lease`, which is going to prefill up to `num_tokens`, and whose
        messages and images end at `boundaries`."""
        idle_files = self.idle_files()
        most = MAX_FORETOLD if idle_files >= 2 * MAX_FORETOLD else 1
        return PromptFacts(
            num_tokens=num_tokens,
            hit=lease.hit,
            matched=lease.matched,
            seen=lease.seen,
            boundaries=boundaries,
            exact=self.policy.exact,
            idle_files=idle_files,
            foretold=tuple(self.branches.positions(num_tokens, lease.hit, most)),
        )

    def _learn(self, lease: Lease) -> None:
        """What this prompt teaches of the reuse of those before it."""
        if lease.left:
            self.branches.left(lease.left)
        known = lease.known
        on = known is not None and not known.branches
        turn = min(2, known.turn + 1) if known is not None and on else 0
        lease.lineage = Lineage(turn, lease.num_prompt_tokens - lease.seen)
        self.residents.admitted(known, lease.checkpoint)

    def _open(self, lease: Lease) -> None:
        self.leases[id(lease)] = lease
        for table in lease.tables:
            self.pool.acquire(table.own)
        if lease.node is not None:
            self.residents.lock(lease.node)
        if lease.checkpoint is not None:
            self.pool.acquire(lease.checkpoint.pages)
            lease.transient.append(lease.checkpoint.pages)

    # -- growing -------------------------------------------------------------------------------------------------

    def extend(self, lease: Lease, num_tokens: int) -> list[PageCopy] | None:
        """Hold pages for the first `num_tokens` tokens, dropping cached ones if need be.

        Returns the page copies that have to be made first, or None when there is no room; then nothing has changed
        but that cached pages may have gone.
        """
        groups = self.layout.groups
        need, shared = lease.missing_pages(num_tokens), self._to_copy(lease, num_tokens)
        if need == 0 and lease.copied:
            return []
        if not self.residents.make_room(need + len(shared)):
            return None
        copies = [self._copy_on_write(lease, table, index) for table, index in shared]
        lease.copied = lease.copied or num_tokens > lease.matched
        for group, table in zip(groups, lease.tables, strict=True):
            missing = group.pages_for(num_tokens) - table.length
            if missing > 0:
                table.append(self.pool.allocate(missing))
        return copies

    def could_extend(self, lease: Lease, num_tokens: int, num_files: int = 0) -> bool:
        """False if neither `extend` nor dropping all that nobody holds makes room for so many tokens and files. Drops
        nothing: whoever only waits must not cost others what is cached. True is no promise."""
        need = lease.missing_pages(num_tokens) + len(self._to_copy(lease, num_tokens))
        need += num_files * self.layout.pages_per_checkpoint
        return need <= self.pool.num_free or need <= self.pool.num_pages - self.num_held_pages()

    def _to_copy(self, lease: Lease, num_tokens: int) -> list[tuple[PageTable, int]]:
        """The tables whose page that holds token `matched` has to be copied before so many tokens are written."""
        if lease.copied or num_tokens <= lease.matched:
            return []
        return [
            (table, lease.matched // group.tokens_per_page)
            for group, table in zip(self.layout.groups, lease.tables, strict=True)
            if lease.matched % group.tokens_per_page
        ]

    def _copy_on_write(self, lease: Lease, table: PageTable, index: int) -> PageCopy:
        # page `index` holds tokens of the tree up to `matched`; its other tokens may be somebody's already
        assert index == table.length - 1
        source = table.pages[index : index + 1].copy()
        target = self.pool.allocate(1)
        if table.num_shared == table.length:
            self.pool.acquire(source)
        table.replace_last(int(target[0]))
        lease.transient.append(source)
        return PageCopy(int(source[0]), int(target[0]))

    def want(self, lease: Lease, wanted: Wanted) -> Pages | None:
        """A file for the checkpoint of `lease` at `wanted.position`, to be named in a plan; None if there is no
        room for it, or it has one. Those on probation take free pages only, and only while a quarter of the
        pool is free; a bet that is worth far less than what would go for it is refused, and only
        remembered."""
        size = self.layout.pages_per_checkpoint
        if wanted.position in lease.files:
            pending = lease.files[wanted.position]
            pending.hold_seconds = max(pending.hold_seconds, wanted.hold_seconds)
            return None
        if not self.enabled:
            return None
        if self.layout.state_bytes == 0 and wanted.position != lease.num_prompt_tokens and not wanted.hold_seconds:
            return None
        if wanted.kind.is_bet and not wanted.hold_seconds:
            if not self.residents.drop_barren(size) and not self._worth(lease, wanted):
                lease.refused[wanted.position] = wanted.kind
                return None
        if wanted.kind.on_probation:
            if 4 * self.pool.num_free < self.pool.num_pages or self.pool.num_free < size:
                return None
        elif not self.residents.make_room(size):
            return None
        pages = self.pool.allocate(size)
        lease.files[wanted.position] = PendingFile(pages, wanted.kind, wanted.hold_seconds)
        lease.kept.append(wanted.position)
        return pages

    def _worth(self, lease: Lease, wanted: Wanted) -> bool:
        """Whether what has to go for a checkpoint is not worth far more than it."""
        position = wanted.position
        above = max((kept for kept in lease.kept if kept < position), default=min(lease.hit, position))
        pages = self.layout.pages_per_checkpoint
        if wanted.kind in (Kind.PROMPT_END, Kind.ANSWER_END):
            # without it nobody could use what is computed from the match on
            pages += self.layout.pages_for(position) - self.layout.pages_for(max(above, min(lease.matched, position)))
        known = lease.known if lease.known is not None and lease.known.position == position else None
        ways = (lease.ways + 1,) if wanted.kind is Kind.JUNCTION else FIRST_WAYS.get(wanted.kind, (1,))
        chance = self.residents.reuse.first_chance(wanted.kind, ways, lease.lineage, known)
        return self.residents.worth(wanted.kind, position - above, pages, chance)

    def want_always(self, lease: Lease, position: int) -> Pages | None:
        """A file for the state at `position` that another server is going to read: whatever the policy says, also with
        the cache off. None if there is no room."""
        if position in lease.files:
            return lease.files[position].pages
        size = self.layout.pages_per_checkpoint
        if not self.residents.make_room(size):
            return None
        pages = self.pool.allocate(size)
        lease.files[position] = PendingFile(pages, Kind.PROMPT_END)
        return pages

    def settle_file(self, lease: Lease, position: int) -> None:
        """The state at `position` is filled and somebody else holds its file. With the cache off nothing will take it
        from the lease, so it lets go of it."""
        if not self.enabled and position in lease.files:
            self.pool.release(lease.files.pop(position).pages)

    def received(self, lease: Lease, num_tokens: int, wanted: int, position: int) -> None:
        """The first `num_tokens` tokens lie in the lease's pages, and the state at `position` in the file that was
        wanted for `wanted`: another server has computed them and confirmed it. They serve everybody from now on, and
        the lease goes on from there."""
        assert lease.hit < position <= num_tokens <= lease.num_tokens, f"{lease.purpose}: nothing new was received"
        file = lease.files.pop(wanted)
        lease.files[position] = file
        self.pool.acquire(file.pages)
        lease.transient.append(file.pages)
        self.commit(lease, num_tokens, [position])
        lease.restore, lease.checkpoint = file.pages, None
        lease.received, lease.hit = position - lease.hit, position
        lease.matched, lease.seen = max(lease.matched, num_tokens), max(lease.seen, num_tokens)
        if lease.hit == lease.num_tokens or lease.missed:
            lease.explain(lease.missed)

    def idle_files(self) -> int:
        """How many checkpoint files fit into the free pages beyond a quarter of the pool."""
        return max(0, self.pool.num_free - self.pool.num_pages // 4) // self.layout.pages_per_checkpoint

    # -- commit and release --------------------------------------------------------------------------------------

    def commit(self, lease: Lease, num_tokens: int, kept: Iterable[int] = ()) -> None:
        """The first `num_tokens` tokens have been computed, and the wanted files at positions `kept` are filled:
        from now on every lookup may find them."""
        if not self.enabled:
            return
        if num_tokens > lease.committed:
            node = self._insert(lease, num_tokens)
            old, before, lease.node, lease.committed = lease.node, lease.committed, node, num_tokens
            if old is not None and old.end == before:
                self.residents.lock(node, below=old)
            else:
                self.residents.lock(node)
                if old is not None:
                    self.residents.unlock(old)
        at, refused = lease.node, [position for position in lease.refused if position <= num_tokens]
        for position in sorted({*kept, *refused}, reverse=True):
            at = self._node_at(lease, position, at)
            if position in lease.files:
                self._attach(lease, position, at)
            else:
                self.residents.remember(at, lease.refused[position], self._origin(lease, position), lease.lineage)
        for position in refused:
            del lease.refused[position]

    def _insert(self, lease: Lease, upto: int) -> Node:
        if lease.node is not None and lease.node.end == lease.committed:
            node = lease.node
        else:
            node = self.residents.root(lease.namespace)
        position = base = node.end
        raw = lease.keys[base:upto].tobytes()
        while position < upto:
            decoded = position >= lease.decode_from
            stop = upto if decoded else min(upto, lease.decode_from)
            maker = lease.request_id if decoded else None
            offset = (position - base) * KEY_BYTES
            child = node.children.get(int(lease.keys[position]))
            if child is None:
                run = raw[offset : (stop - base) * KEY_BYTES]
                node = self.residents.add(node, run, lease.span(position, stop), maker, lease.num_prompt_tokens)
                position = stop
                continue
            end = min(stop, position + common_prefix(child, raw, position - base, upto - base))
            if end < child.end:
                child = self.residents.cut(child, end)
            # while somebody has locked a run, its pages are what that lease reads
            better = self.policy.exact and child.decode_by is not None and not decoded and not child.locks
            if child.pages is None or better:
                self.residents.fill(child, lease.span(position, end), maker)
            node, position = child, end
        return node

    def _node_at(self, lease: Lease, position: int, node: Node | None) -> Node:
        """The node of the committed path that ends at `position`, cut if need be; it is `node` or above it."""
        while node is not None and node.start >= position:
            node = node.parent
        assert node is not None and node.start < position <= node.end, f"{position} is not on the committed path"
        return self.residents.cut(node, position) if position < node.end else node

    @staticmethod
    def _origin(lease: Lease, position: int) -> Origin:
        if position > lease.decode_from:
            return Origin.DECODE
        return Origin.TAIL if position % GRID else Origin.GRID

    def _attach(self, lease: Lease, position: int, node: Node) -> None:
        """Hang the file wanted for `position` at the end of `node`."""
        file = lease.files.pop(position)
        origin = self._origin(lease, position)
        if not self.residents.attach(node, file.pages, file.kind, origin, lease.request_id, lease.lineage):
            self.pool.release(file.pages)
        assert node.checkpoint is not None
        if file.hold_seconds and self.residents.hold(node.checkpoint, file.hold_seconds):
            lease.held.add(position)

    def release(self, lease: Lease, loss: Reason | None = None) -> None:
        """End a lease. No unapplied step may name its pages. `loss`: why no checkpoint was kept at its end."""
        assert not lease.closed, f"released twice: {lease.purpose}"
        lease.closed = True
        del self.leases[id(lease)]
        for table in lease.tables:
            self.pool.release(table.own)
        for pages in [file.pages for file in lease.files.values()] + lease.transient:
            self.pool.release(pages)
        lease.files.clear()
        lease.transient.clear()
        if lease.node is not None:
            if loss is not None and lease.node.checkpoint is None and lease.node.end == lease.committed:
                lease.node.loss = loss
            self.residents.unlock(lease.node)

    def hold(self, purpose: str, pages: Pages) -> Hold:
        """Keep `pages`, which are distinct and in use, until `let_go`."""
        hold = Hold(purpose, pages.copy())
        self.pool.acquire(hold.pages)
        self.holds[id(hold)] = hold
        return hold

    def let_go(self, hold: Hold) -> None:
        """End a hold."""
        del self.holds[id(hold)]
        self.pool.release(hold.pages)

    def hold_until(self, step: int, lease: Lease) -> None:
        """Pages that `lease` needs only for step `step` (the hit's file, the source of a page copy) are kept until
        that step has been applied, whatever becomes of the lease."""
        if lease.transient:
            self.held.setdefault(step, []).extend(lease.transient)
            lease.transient = []

    def num_held_pages(self) -> int:
        """Distinct pages that leases, holds or unapplied steps refer to."""
        held = [table.pages for lease in self.leases.values() for table in lease.tables]
        held += [hold.pages for hold in self.holds.values()]
        for lease in self.leases.values():
            held += [file.pages for file in lease.files.values()] + lease.transient
        for pages in self.held.values():
            held += pages
        named = np.zeros(self.pool.num_pages, bool)
        for numbers in held:
            named[numbers] = True
        return int(named.sum())

    def clear(self) -> bool:
        """Drop everything that no lease holds. True if the whole pool is free then."""
        return self.make_room(self.pool.num_pages)

    def make_room(self, num_pages: int) -> bool:
        """Drop cached pages until `num_pages` are free; False if there are not so many that nobody holds."""
        return self.residents.make_room(num_pages)

    def step_applied(self, step: int) -> None:
        """Let go of what step `step` named."""
        for pages in self.held.pop(step, ()):
            self.pool.release(pages)
