"""The cache's only door: look a prompt up, extend it, commit what was computed, release it.

    lookup    prompt -> Lease: hit c, match m, the shared pages, the checkpoint to restore, the reason for no more
    branch    another lease of the same prompt, once it is computed: for several answers to it
    extend    pages for more tokens, and the page copy that writing into a shared page needs
    want      a file for a checkpoint that the plan is going to keep
    received  tokens and a state that another server has computed: the lease goes on as after a hit of its own
    commit    computed tokens and kept checkpoints enter the tree, for everybody
    release   the request's own references end
    hold      pages that outlive their lease, because somebody outside, or a request to come, needs them
    hold_breakpoints   checkpoints that go after all others, because a client asked for it

Pages that an unapplied step still names are kept by `hold_until(step)` until `step_applied(step)`. Nothing here knows
of tensors: pages are numbers, and what is in them is the runner's affair.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cairn.cache.admission import Admission
from cairn.cache.branches import BranchDistances
from cairn.cache.checkpoint import Kind
from cairn.cache.commit import TreeWriter
from cairn.cache.events import TreeObserver
from cairn.cache.eviction import Eviction
from cairn.cache.growth import Growth
from cairn.cache.hazard import ALL_PARTS, LearnedParts
from cairn.cache.holders import Holders
from cairn.cache.journal import Journal
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Hold, Lease, Namespace
from cairn.cache.lookup import Finder, missed
from cairn.cache.pages import PagePool
from cairn.cache.placement import Placement, PromptFacts, Wanted, hold_positions
from cairn.cache.reasons import Reason
from cairn.cache.residents import Residents
from cairn.cache.reuse import Lineage
from cairn.cache.tree import Node
from cairn.errors import ConfigError
from cairn.step import PageCopy
from cairn.types import Boundary, Clock, Keys, Pages, SystemClock

__all__ = ["CacheCounters", "CachePolicy", "PrefixCache"]

GHOST_FACTOR = 4
"""Key tokens remembered of dropped runs, as a multiple of the tokens that fit the pool."""


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How the cache behaves. `placement` None switches it off: every prompt is computed, nothing is kept. `parts`: of
    what eviction learns, for benchmarks."""

    placement: Placement | None
    eviction: Eviction
    exact: bool = False
    parts: LearnedParts = ALL_PARTS


@dataclass(slots=True)
class CacheCounters:
    """In prompt tokens (`queries`, `hits`, `received` from other servers, `lost`) and in requests (`reasons`) or
    checkpoints (`used`)."""

    queries: int = 0
    hits: int = 0
    received: int = 0
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
        self.residents = Residents(layout, self.pool, policy.eviction, ghost_tokens, observer, clock, policy.parts)
        self.holders = Holders(self.pool)
        self.leases, self.holds, self.held = self.holders.leases, self.holders.holds, self.holders.steps
        self._finder = Finder(layout, policy.exact)
        self._growth = Growth(layout, self.pool, self.residents)
        self._admission = Admission(layout, self.pool, self.residents, self.enabled)
        self._writer = TreeWriter(self.residents, policy.exact)
        self.counters = CacheCounters()
        self.journal = Journal(clock or SystemClock())
        # how often something that was held has been let go of, and who has lacked pages since
        self._num_releases = self._counted_at = 0
        self._lacking: set[tuple[Node | None, int, int, int]] = set()
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
        probe: bool = False,
    ) -> Lease:
        """Find the longest usable prefix of `keys` (shape [n], n >= 1) and lease it.

        `resumed_from`: the prompt length of a request that was preempted; `keys` then goes on with what it had
        generated. `passed_by`: find nothing, because all of the prompt has to be computed. `probe`: the reasons are
        left to `explain`, since it is not certain that anybody goes on from here. Nothing is counted before `admitted`.
        """
        looks = self.enabled and not passed_by
        root = self.residents.roots.get(namespace) if looks else None
        lease = self._finder.find(self.residents.version, root, namespace, keys, request_id, resumed_from)
        if not looks:
            lease.walk = None
        self._open(lease)
        if not probe:
            self.explain(lease)
        return lease

    def explain(self, lease: Lease) -> None:
        """Say why the prompt's tokens behind the hit were not hit, as things stand: before anything else is done with a
        lease that was only a probe."""
        placement, walk, lease.walk = self.policy.placement, lease.walk, None
        if placement is not None and walk is not None:
            lease.explain(missed(placement, lease, walk, self.leases.values(), self.residents.roots))

    def discard(self, lease: Lease) -> None:
        """End a lease that nothing has come of: a probe."""
        self.holders.close(lease)
        if lease.node is not None:
            self.residents.runs.unlock(lease.node)

    def admitted(self, lease: Lease, resumed: bool = False) -> None:
        """The request goes on from this lookup: count it. `resumed`: its prompt was counted before."""
        if not resumed:
            self._learn(lease)
        if lease.checkpoint is not None and not lease.closed:
            self.counters.used[lease.checkpoint.kind] += 1
            if lease.checkpoint in self.residents.queue:
                self.residents.ranking.use(lease.checkpoint, hit=True)
        self.residents.ranking.renew(lease.node, lease.hit)
        if not resumed:
            self.counters.queries += lease.num_prompt_tokens
            self.counters.hits += lease.hit - lease.received
            self.counters.received += lease.received
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
            if seconds and checkpoint is not None and self.residents.ranking.hold(checkpoint, seconds):
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
        most = self._admission.most_foretold(idle_files)
        return PromptFacts(
            num_tokens=num_tokens,
            hit=lease.hit,
            matched=lease.matched,
            seen=lease.seen,
            boundaries=boundaries,
            exact=self.policy.exact,
            idle_files=idle_files,
            foretold=tuple(self.branches.positions(num_tokens, lease.hit, most)) if self.policy.parts.offsets else (),
        )

    def _learn(self, lease: Lease) -> None:
        """What this prompt teaches of the reuse of those before it."""
        if lease.left:
            self.branches.left(lease.left)
        known = lease.known
        on = known is not None and not known.branches
        turn = min(2, known.turn + 1) if known is not None and on else 0
        lease.lineage = Lineage(turn, lease.num_prompt_tokens - lease.seen)
        self.residents.ranking.admitted(known, lease.checkpoint)

    def _open(self, lease: Lease) -> None:
        self.holders.open(lease)
        if lease.node is not None:
            self.residents.runs.lock(lease.node)

    # -- growing -------------------------------------------------------------------------------------------------

    def extend(self, lease: Lease, num_tokens: int) -> list[PageCopy] | None:
        """Hold pages for the first `num_tokens` tokens, dropping cached ones if need be.

        Returns the page copies that have to be made first, or None when there is no room; then nothing has changed
        but that cached pages may have gone.
        """
        return self._growth.extend(lease, num_tokens)

    def could_extend(self, lease: Lease, num_tokens: int, num_files: int = 0, besides: int = 0) -> bool:
        """False if neither `extend` nor dropping all that nobody holds makes room for so many tokens and files, and for
        `besides` pages that others are going to need. Drops nothing: whoever only waits must not cost others what is
        cached. True is no promise."""
        need = besides + self._growth.missing_pages(lease, num_tokens) + num_files * self.layout.pages_per_checkpoint
        return self.could_free(lease, need)

    def could_free(self, lease: Lease, num_pages: int) -> bool:
        """Whether `num_pages` pages are free, or would be with all that nobody holds dropped. What is held is counted
        anew for one who lacks pages only when something has been let go of."""
        if num_pages <= self.pool.num_free:
            return True
        if self._counted_at != self._num_releases:
            self._lacking.clear()
            self._counted_at = self._num_releases
        asked = (lease.node, lease.hit, lease.matched, num_pages)
        if asked in self._lacking:
            return False
        if num_pages <= self.pool.num_pages - self.num_held_pages():
            return True
        self._lacking.add(asked)
        return False

    def want(self, lease: Lease, wanted: Wanted) -> Pages | None:
        """A file for the checkpoint of `lease` at `wanted.position`, to be named in a plan; None if there is no room
        for it, it has one, or it is refused and only remembered: see `Admission.want`."""
        pages = self._admission.want(lease, wanted)
        if wanted.position in lease.refused and wanted.position <= lease.committed:
            self._writer.commit(lease, lease.committed, ())  # no other commit may follow that would remember it
        return pages

    def want_always(self, lease: Lease, position: int) -> Pages | None:
        """A file for the state at `position` that another server is going to read: whatever the policy says, also with
        the cache off. None if there is no room."""
        return self._admission.want_always(lease, position)

    def settle_file(self, lease: Lease, position: int) -> None:
        """The state at `position` is filled and somebody else holds its file. With the cache off nothing will take it
        from the lease, so it lets go of it."""
        self._admission.settle(lease, position)

    def received(self, lease: Lease, num_tokens: int, wanted: int, position: int) -> None:
        """The first `num_tokens` tokens lie in the lease's pages, and the state at `position` in the file that was
        wanted for `wanted`, the prompt's end: another server has computed them and confirmed it. They serve everybody
        from now on, and the lease goes on from there. Where no state is needed before the end, none need have come."""
        assert lease.hit < position <= num_tokens <= lease.num_tokens, f"{lease.purpose}: nothing new was received"
        file, kept = lease.files.pop(wanted), [position] if self.layout.state_bytes or position == wanted else []
        if kept:
            lease.give(position, file)
            self.pool.acquire(file.pages)
            lease.transient.append(file.pages)
        else:
            self._num_releases += 1
            self.pool.release(file.pages)
        self.commit(lease, num_tokens, kept)
        lease.receive(num_tokens, position, file.pages if kept else None)

    def idle_files(self) -> int:
        """How many checkpoint files fit into the free pages beyond a quarter of the pool."""
        return self._admission.idle_files()

    # -- commit and release --------------------------------------------------------------------------------------

    def commit(self, lease: Lease, num_tokens: int, kept: Iterable[int] = ()) -> None:
        """The first `num_tokens` tokens have been computed, and the wanted files at positions `kept` are filled:
        from now on every lookup may find them."""
        if self.enabled:
            # files become the tree's, and its path may be another than that of the pages it has had
            self._num_releases += bool(lease.files) or lease.node is None or lease.node.end != lease.committed
            self._writer.commit(lease, num_tokens, kept)

    def release(self, lease: Lease, loss: Reason | None = None) -> None:
        """End a lease. No unapplied step may name its pages. `loss`: why no checkpoint was kept at its end."""
        self._num_releases += 1
        self.holders.close(lease)
        if lease.node is not None:
            if loss is not None and lease.node.checkpoint is None and lease.node.end == lease.committed:
                lease.node.loss = loss
            self.residents.runs.unlock(lease.node)

    def hold(self, purpose: str, pages: Pages, for_requests: bool = False) -> Hold:
        """Keep `pages`, which are distinct and in use, until `let_go`: for somebody outside, or for requests that are
        going to start from them."""
        return self.holders.hold(purpose, pages, for_requests)

    def let_go(self, hold: Hold) -> None:
        """End a hold."""
        self._num_releases += 1
        self.holders.let_go(hold)

    def hold_until(self, step: int, lease: Lease) -> None:
        """Pages that `lease` needs only for step `step` (the hit's file, the source of a page copy) are kept until
        that step has been applied, whatever becomes of the lease."""
        self.holders.hold_until(step, lease)

    def num_held_pages(self) -> int:
        """Distinct pages that leases, the runs they have locked, holds or unapplied steps refer to."""
        holders = self.holders
        return holders.num_distinct(holders.of_requests() + holders.of_others() + holders.of_steps())

    def clear(self) -> bool:
        """Drop everything that no lease holds. True if the whole pool is free then."""
        return self.make_room(self.pool.num_pages)

    def make_room(self, num_pages: int) -> bool:
        """Drop cached pages until `num_pages` are free; False if there are not so many that nobody holds."""
        return self.residents.make_room(num_pages)

    def step_applied(self, step: int) -> None:
        """Let go of what step `step` named."""
        self._num_releases += step in self.held
        self.holders.step_applied(step)
